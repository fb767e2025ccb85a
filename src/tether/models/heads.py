"""Functions over hidden states: log-probs, entropies, full-vocabulary KL.

Logits are made in chunks and, under autograd, made again in the backward pass, so a tensor of
rows x length x vocabulary is never stored. Only cells that the mask asks for are computed.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tether.algo.kl import full_kl

CHUNK_LOGITS = 2**24  # numbers in one chunk of logits: 64 MiB in float32

LOWEST_LOG_PROB = -1e4  # exp() of it is 0 in every float type

Head = Callable[[Float[Tensor, "cells width"]], Float[Tensor, "cells vocabulary"]]


def tempered_logits(
    head: Head, states: Float[Tensor, "cells width"], temperature: float
) -> Float[Tensor, "cells vocabulary"]:
    """Logits over the temperature, in float32 at least; made only here."""
    logits = head(states)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature == 1 else logits / temperature


def token_log_probs_and_entropies(
    head: Head,
    states: Float[Tensor, "rows response width"],
    ids: Int[Tensor, "rows response"],
    mask: Bool[Tensor, "rows response"],
    temperature: float,
    vocabulary: int,
) -> tuple[Float[Tensor, "rows response"], Float[Tensor, "rows response"]]:
    """log pi(id) and the exact entropy -sum p log p of each True cell; 0 elsewhere."""
    weights = [w for w in _weights_of(head) if w.requires_grad]

    def of_cells(states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return ReadTokens.apply(head, temperature, ids, states, *weights)

    log_probs, entropies = _in_chunks(of_cells, (states, ids), mask, vocabulary, checkpointed=False)
    return log_probs, entropies


def _weights_of(head: Head) -> list[nn.Parameter]:
    return list(head.parameters()) if isinstance(head, nn.Module) else []


class ReadTokens(torch.autograd.Function):
    """log p(id) and the entropy of each cell, with the softmax's derivative in closed form.

    Autograd would keep, or make again, half a dozen tensors of cells x vocabulary. Here the logits
    are made once in the forward pass and once in the backward, where they turn in place into their
    own gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        head: Head,
        temperature: float,
        ids: Int[Tensor, " cells"],
        states: Float[Tensor, "cells width"],
        *weights: Tensor,
    ) -> tuple[Float[Tensor, " cells"], Float[Tensor, " cells"]]:
        logits = tempered_logits(head, states, temperature)
        ctx.head, ctx.temperature, ctx.weights = head, temperature, weights
        ctx.save_for_backward(ids, states)
        ctx.set_materialize_grads(False)
        top = logits.amax(dim=-1, keepdim=True)
        shifted = logits.sub_(top)
        chosen = shifted.gather(1, ids[:, None]).squeeze(1)
        odds = shifted.exp()
        total = odds.sum(dim=-1)
        # A token that cannot be sampled has logit -inf and adds 0, not 0 x infinity.
        mean = torch.linalg.vecdot(odds, shifted.clamp_(min=LOWEST_LOG_PROB)) / total
        return chosen - total.log(), total.log() - mean

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, by_log_prob: Tensor | None, by_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ids, states = ctx.saved_tensors
        with torch.enable_grad():
            states = states.detach().requires_grad_()
            logits = tempered_logits(ctx.head, states, ctx.temperature)
        log_probs = torch.log_softmax(logits.detach(), dim=-1)
        probs = log_probs.exp()
        gradient = torch.zeros_like(probs[:, :1])
        if by_log_prob is not None:
            gradient = gradient - by_log_prob[:, None]
        if by_entropy is None:
            gradient = probs.mul_(gradient)
        else:
            finite = log_probs.clamp_(min=LOWEST_LOG_PROB)
            entropy = -torch.linalg.vecdot(probs, finite)[:, None]
            inner = finite.add_(entropy).mul_(-by_entropy[:, None]).add_(gradient)
            gradient = probs.mul_(inner)
        if by_log_prob is not None:
            gradient.scatter_add_(1, ids[:, None], by_log_prob[:, None])
        found = torch.autograd.grad(logits, [states, *ctx.weights], gradient)
        return None, None, None, *found


def token_full_kl(
    p_head: Head,
    p_states: Float[Tensor, "rows response width"],
    q_head: Head,
    q_states: Float[Tensor, "rows response width"],
    mask: Bool[Tensor, "rows response"],
    temperature: float,
    vocabulary: int,
) -> Float[Tensor, "rows response"]:
    """KL(p || q) over the whole vocabulary at each True cell; 0 elsewhere."""

    def of_cells(p_states: Tensor, q_states: Tensor) -> tuple[Tensor]:
        log_p, log_q = (
            torch.log_softmax(tempered_logits(head, states, temperature), dim=-1)
            for head, states in ((p_head, p_states), (q_head, q_states))
        )
        return (full_kl(log_p, log_q),)

    return _in_chunks(of_cells, (p_states, q_states), mask, vocabulary)[0]


def _in_chunks(
    of_cells: Callable[..., tuple[Tensor, ...]],
    inputs: tuple[Tensor, ...],
    mask: Bool[Tensor, "rows response"],
    vocabulary: int,
    checkpointed: bool = True,
) -> list[Float[Tensor, "rows response"]]:
    """Apply a function of cells to the True cells, some at a time; its results in their places."""
    size = max(1, CHUNK_LOGITS // vocabulary)
    chunks = list(zip(*(x[mask].split(size) for x in inputs), strict=True))
    recompute = checkpointed and torch.is_grad_enabled() and len(chunks) > 1
    parts = [
        checkpoint(of_cells, *chunk, use_reentrant=False) if recompute else of_cells(*chunk)
        for chunk in chunks
    ]
    columns = (torch.cat(column) for column in zip(*parts, strict=True))
    return [cells.new_zeros(mask.shape).masked_scatter(mask, cells) for cells in columns]
