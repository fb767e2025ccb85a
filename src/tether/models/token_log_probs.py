"""Output heads over hidden states: log-probs, entropies, full-vocabulary KL.

Logits are computed in chunks. Probabilities are cached for the backward pass where they are few
enough, and recomputed where they are not: a tensor of rows x length x vocabulary is never stored.
Only cells that the mask selects are computed. A mask on the CPU is best: the number of its cells is
then known without waiting for a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tether.algo.kl import full_kl
from tether.dist.world import gpu_bytes
from tether.models.precision import multiply_by, operand, planned_device
from tether.support.transfer import to_device

LOWEST_LOG_PROB = -1e4  # exp() of it is 0 in every float type


@dataclass(frozen=True)
class LogitLimits:
    """How many logits are computed, and how many probabilities cached, at once."""

    chunk: int  # probabilities cached for the backward pass
    piece: int  # logits of one product
    block: int  # numbers between two operations


# 128 MiB in float32; 32 MiB, which the allocator reuses; what stays in the processor's cache.
CPU_LIMITS = LogitLimits(2**25, 2**23, 2**18)
GPU_SHARE = 32  # of a GPU's memory, one part in so many is for cached probabilities


def logit_limits(device: torch.device) -> LogitLimits:
    """Return the limits for heads on a device.

    On a CPU a block stays in the cache. A GPU has none of that size, and starting an operation
    costs it as much as some ten million numbers: there everything is as large as its memory allows.
    The whole memory counts, not what is free now, so that a run does the same when it is repeated;
    microbatches depend on it, so all processes go by the smallest GPU among them.
    """
    kind = planned_device(device)
    if kind != "cuda":
        return CPU_LIMITS
    chunk = gpu_bytes() // GPU_SHARE // torch.float32.itemsize
    return LogitLimits(chunk, chunk // 4, chunk // 4)


Head = nn.Linear  # transformers' output embeddings


def tempered_logits(
    head: Callable[[Tensor], Tensor], states: Float[Tensor, "cells width"], temperature: float
) -> Float[Tensor, "cells vocabulary"]:
    """Return logits divided by the temperature, in float32 at least."""
    logits = head(states)
    logits = logits.to(_float_type(logits))
    return logits if temperature == 1 else logits / temperature


def token_log_probs_and_entropies(
    head: Head,
    states: Float[Tensor, "rows response width"],
    ids: Int[Tensor, "rows response"],
    mask: Bool[Tensor, "rows response"],
    temperature: float,
) -> tuple[Float[Tensor, "rows response"], Float[Tensor, "rows response"]]:
    """Return log pi(id) and the exact entropy -sum p log p of each True cell; 0 elsewhere."""
    cells = _cells(mask, states.device)
    most = max_cached_cells(head)
    of_cells = operand(head, states.flatten(0, 1)[cells]), ids.flatten()[cells]
    chunks = list(zip(*(x.split(most) for x in of_cells), strict=True))
    cached = len(chunks) == 1
    parts = [
        FusedLogProbs.apply(states, head.weight, head.bias, ids, temperature, cached)
        for states, ids in chunks
    ]
    log_probs, entropies = (torch.cat(column) for column in zip(*parts, strict=True))
    return _scatter(log_probs, cells, mask), _scatter(entropies, cells, mask)


class FusedLogProbs(torch.autograd.Function):
    """log p(id) and the entropy of some cells, with the softmax's derivative in closed form.

    Autograd would store half a dozen tensors of cells x vocabulary. This stores the probabilities
    alone, and the backward pass overwrites them with the logits' gradient. With `cached` they are
    kept in memory until then; without it they are computed a second time. The products are in
    the states' format, the weight's gradient in the weight's, everything between in float32 at
    least.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Float[Tensor, "cells width"],
        weight: Float[Tensor, "vocabulary width"],
        bias: Float[Tensor, " vocabulary"] | None,
        ids: Int[Tensor, " cells"],
        temperature: float,
        cached: bool,
    ) -> tuple[Float[Tensor, " cells"], Float[Tensor, " cells"]]:
        """Return log-probs of the ids, and entropies."""
        ctx.cached = cached and any(ctx.needs_input_grad)
        ctx.probs = BUFFER.take(len(ids), len(weight), states) if ctx.cached else None
        log_probs, entropies = _softmax(states, weight, bias, ids, temperature, ctx.probs)
        ctx.temperature = temperature
        ctx.save_for_backward(states, weight, bias, ids, entropies)
        ctx.set_materialize_grads(False)
        return log_probs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator is untyped)
        ctx: Any, *grad_outputs: Any
    ) -> tuple[Any, ...]:
        """Return the gradients of states, weight and bias."""
        by_log_prob, by_entropy = grad_outputs
        states, weight, bias, ids, entropies = ctx.saved_tensors
        probs, ctx.probs = ctx.probs, None
        if probs is None:
            if ctx.cached:
                raise RuntimeError("the probabilities are used up: backward ran before")
            probs = BUFFER.take(len(ids), len(weight), states)
            _softmax(states, weight, bias, ids, ctx.temperature, probs)
        if by_log_prob is None:
            by_log_prob = torch.zeros_like(entropies)
        gradient = _logit_gradient(probs, ids, entropies, by_log_prob, by_entropy)
        if ctx.temperature != 1:
            gradient /= ctx.temperature
        gradient = gradient.to(states.dtype)
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        found = (
            multiply_by(weight.T, None, states.dtype)(gradient) if needs_states else None,
            _weight_gradient(states, gradient).to(weight.dtype) if needs_weight else None,
            gradient.sum(dim=0, dtype=weight.dtype) if needs_bias else None,
        )
        BUFFER.put_back(probs)
        return *found, *(None,) * 3


def _weight_gradient(
    states: Float[Tensor, "cells width"], gradient: Float[Tensor, "cells vocabulary"]
) -> Float[Tensor, "vocabulary width"]:
    return multiply_by(gradient.T, None, states.dtype)(states.T).T.contiguous()


def _softmax(
    states: Float[Tensor, "cells width"],
    weight: Float[Tensor, "vocabulary width"],
    bias: Float[Tensor, " vocabulary"] | None,
    ids: Int[Tensor, " cells"],
    temperature: float,
    probs: Float[Tensor, "cells vocabulary"] | None,
) -> tuple[Float[Tensor, " cells"], Float[Tensor, " cells"]]:
    """Return log-probs of the ids and entropies; write all probabilities into `probs`, if given.

    What follows the matrix product goes block by block (see `logit_limits`).
    """
    limits = logit_limits(weight.device)
    float_type = _float_type(states)
    log_probs, entropies = states.new_empty(2, len(ids), dtype=float_type)
    block = max(1, limits.block // len(weight))
    piece = max(block, limits.piece // len(weight) // block * block)
    head = multiply_by(weight, bias, states.dtype)
    for start in range(0, len(ids), piece):
        logits = tempered_logits(head, states[start : start + piece], temperature)
        for logit, begin in zip(logits.split(block), range(start, len(ids), block), strict=False):
            cells = slice(begin, begin + len(logit))
            prob = torch.softmax(logit, dim=-1, out=None if probs is None else probs[cells])
            logit -= logit.amax(dim=-1, keepdim=True)
            # The likeliest token's probability is exp(0) / sum(exp), so its log is minus the
            # normaliser's.
            normaliser = -prob.amax(dim=-1).log()
            chosen = logit.gather(1, ids[cells, None]).squeeze(1)
            log_probs[cells] = chosen - normaliser
            # A token that cannot be sampled has logit -inf and adds 0, not 0 x infinity.
            logit.clamp_(min=LOWEST_LOG_PROB).mul_(prob)
            entropies[cells] = normaliser - logit.sum(dim=-1)
    return log_probs, entropies


def _logit_gradient(
    probs: Float[Tensor, "cells vocabulary"],
    ids: Int[Tensor, " cells"],
    entropies: Float[Tensor, " cells"],
    by_log_prob: Float[Tensor, " cells"],
    by_entropy: Float[Tensor, " cells"] | None,
) -> Float[Tensor, "cells vocabulary"]:
    """Overwrite probs with by_log_prob x (1[id] - p) - by_entropy x p (log p + entropy)."""
    if by_entropy is None:
        probs *= -by_log_prob[:, None]
    else:
        columns = probs, entropies[:, None], by_log_prob[:, None], by_entropy[:, None]
        block = max(1, logit_limits(probs.device).block // probs.shape[1])
        for prob, entropy, by_log, by in zip(*(x.split(block) for x in columns), strict=True):
            surprise = prob.log().clamp_(min=LOWEST_LOG_PROB).add_(entropy)
            prob *= surprise.mul_(-by).sub_(by_log)
    return probs.scatter_add_(1, ids[:, None], by_log_prob[:, None])


def token_full_kl(
    p_head: Head,
    p_states: Float[Tensor, "rows response width"],
    q_head: Head,
    q_states: Float[Tensor, "rows response width"],
    mask: Bool[Tensor, "rows response"],
    temperature: float,
) -> Float[Tensor, "rows response"]:
    """Return KL(p || q) over the whole vocabulary at each True cell; 0 elsewhere."""

    def of_cells(p_states: Tensor, q_states: Tensor) -> Tensor:
        log_p, log_q = (
            # Its `forward`, as `run_head` has gathered it for all chunks.
            torch.log_softmax(tempered_logits(head.forward, states, temperature), dim=-1)
            for head, states in ((p_head, p_states), (q_head, q_states))
        )
        return full_kl(log_p, log_q)

    cells = _cells(mask, p_states.device)
    size = max(1, logit_limits(p_head.weight.device).piece // p_head.out_features)
    states = [x.flatten(0, 1)[cells].split(size) for x in (p_states, q_states)]
    chunks = list(zip(*states, strict=True))
    recompute = torch.is_grad_enabled() and len(chunks) > 1
    parts = [
        checkpoint(of_cells, *chunk, use_reentrant=False) if recompute else of_cells(*chunk)
        for chunk in chunks
    ]
    return _scatter(torch.cat(parts), cells, mask)


def max_cached_cells(head: Head) -> int:
    """Return how many cells' probabilities are cached for the backward pass, at most."""
    return max(1, logit_limits(head.weight.device).chunk // head.out_features)


class ProbabilityBuffer:
    """A scratch buffer for probabilities. On a CPU the largest is reused.

    The system clears every page of fresh memory, which takes longer than the arithmetic.
    """

    def __init__(self) -> None:
        self.free: Float[Tensor, " numbers"] | None = None

    def take(
        self, cells: int, vocabulary: int, states: Float[Tensor, "cells width"]
    ) -> Float[Tensor, "cells vocabulary"]:
        """Return an uninitialised tensor in the float type of probabilities over these states."""
        size, float_type, free = cells * vocabulary, _float_type(states), self.free
        fits = free is not None and free.dtype == float_type and free.device == states.device
        if free is not None and fits and len(free) >= size:
            self.free = None
            return free[:size].view(cells, vocabulary)
        return torch.empty(cells, vocabulary, dtype=float_type, device=states.device)

    def put_back(self, probs: Float[Tensor, "cells vocabulary"]) -> None:
        """Keep the tensor for the next `take` if it is larger than the free one.

        A graph that is dropped without a backward pass puts nothing back.
        """
        if probs.device.type != "cpu":
            return
        whole = (probs if probs._base is None else probs._base).view(-1)
        if self.free is None or len(whole) >= len(self.free):
            self.free = whole


BUFFER = ProbabilityBuffer()


def _float_type(states: Tensor) -> torch.dtype:
    return torch.promote_types(states.dtype, torch.float32)


def _cells(mask: Bool[Tensor, "rows response"], device: torch.device) -> Int[Tensor, " cells"]:
    """Return the places of the True cells in the flattened mask."""
    return to_device(mask.flatten().nonzero().squeeze(1), device)


def _scatter(
    numbers: Float[Tensor, " cells"],
    cells: Int[Tensor, " cells"],
    mask: Bool[Tensor, "rows response"],
) -> Float[Tensor, "rows response"]:
    """Put the numbers of the True cells in their places, 0 elsewhere."""
    return numbers.new_zeros(mask.numel()).index_copy(0, cells, numbers).view(mask.shape)
