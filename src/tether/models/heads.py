"""Functions over hidden states: log-probs, entropies, full-vocabulary KL.

Logits are made in chunks and, where there is more than one, made again in the backward pass: a
tensor of rows x length x vocabulary is never stored. Only cells that the mask asks for are
computed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from tether.algo.kl import full_kl

CHUNK_LOGITS = 2**23  # numbers in one chunk of logits: 32 MiB in float32

LOWEST_LOG_PROB = -1e4  # exp() of it is 0 in every float type

BLOCK_LOGITS = 2**18  # numbers that stay in the processor's cache between two operations

Head = nn.Linear  # transformers' output embeddings


def tempered_logits(
    head: Callable[[Tensor], Tensor], states: Float[Tensor, "cells width"], temperature: float
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
) -> tuple[Float[Tensor, "rows response"], Float[Tensor, "rows response"]]:
    """log pi(id) and the exact entropy -sum p log p of each True cell; 0 elsewhere."""
    chunks = list(
        zip(
            states[mask].split(cells_at_once(head)),
            ids[mask].split(cells_at_once(head)),
            strict=True,
        )
    )
    keep = len(chunks) == 1
    parts = [
        ReadTokens.apply(states, head.weight, head.bias, ids, temperature, keep)
        for states, ids in chunks
    ]
    log_probs, entropies = (torch.cat(column) for column in zip(*parts, strict=True))
    return _in_place(log_probs, mask), _in_place(entropies, mask)


class ReadTokens(torch.autograd.Function):
    """log p(id) and the entropy of some cells, with the softmax's derivative in closed form.

    Autograd would keep half a dozen tensors of cells x vocabulary. Here the logits turn in place
    into probabilities, and these in the backward pass into the logits' gradient. With `keep` they
    wait for it in memory; without it they are made a second time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Float[Tensor, "cells width"],
        weight: Float[Tensor, "vocabulary width"],
        bias: Float[Tensor, " vocabulary"] | None,
        ids: Int[Tensor, " cells"],
        temperature: float,
        keep: bool,
    ) -> tuple[Float[Tensor, " cells"], Float[Tensor, " cells"]]:
        probs, log_probs, entropies = _softmax(states, weight, bias, ids, temperature)
        ctx.probs = probs if keep and any(ctx.needs_input_grad) else None
        ctx.kept = ctx.probs is not None
        ctx.temperature = temperature
        ctx.save_for_backward(states, weight, bias, ids, entropies)
        ctx.set_materialize_grads(False)
        return log_probs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, by_log_prob: Tensor | None, by_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        states, weight, bias, ids, entropies = ctx.saved_tensors
        probs, ctx.probs = ctx.probs, None
        if probs is None:
            if ctx.kept:
                raise RuntimeError("the probabilities are used up: backward ran before")
            probs, _, _ = _softmax(states, weight, bias, ids, ctx.temperature)
        if by_log_prob is None:
            by_log_prob = torch.zeros_like(entropies)
        gradient = _logit_gradient(probs, ids, entropies, by_log_prob, by_entropy)
        if ctx.temperature != 1:
            gradient /= ctx.temperature
        gradient = gradient.to(weight.dtype)
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        return (
            gradient @ weight if needs_states else None,
            gradient.T @ states if needs_weight else None,
            gradient.sum(dim=0) if needs_bias else None,
            *(None,) * 3,
        )


def _softmax(
    states: Float[Tensor, "cells width"],
    weight: Float[Tensor, "vocabulary width"],
    bias: Float[Tensor, " vocabulary"] | None,
    ids: Int[Tensor, " cells"],
    temperature: float,
) -> tuple[Float[Tensor, "cells vocabulary"], Float[Tensor, " cells"], Float[Tensor, " cells"]]:
    """Probabilities of every token, log-probs of the ids, entropies.

    After the matrix product, block by block: a block stays in the processor's cache.
    """
    logits = tempered_logits(partial(linear, weight=weight, bias=bias), states, temperature)
    log_probs, entropies = logits.new_empty(len(ids)), logits.new_empty(len(ids))
    cells = max(1, BLOCK_LOGITS // logits.shape[1])
    blocks = zip(*(x.split(cells) for x in (logits, ids, log_probs, entropies)), strict=True)
    for logit, id_, log_prob, entropy in blocks:
        probs = torch.softmax(logit, dim=-1)
        logit -= logit.amax(dim=-1, keepdim=True)
        # The likeliest token's probability is exp(0) / sum(exp): its log is minus the normaliser.
        normaliser = -probs.amax(dim=-1).log()
        log_prob[:] = logit.gather(1, id_[:, None]).squeeze(1) - normaliser
        # A token that cannot be sampled has logit -inf and adds 0, not 0 x infinity.
        entropy[:] = normaliser - (probs * logit.clamp_(min=LOWEST_LOG_PROB)).sum(dim=-1)
        logit.copy_(probs)
    return logits, log_probs, entropies


def _logit_gradient(
    probs: Float[Tensor, "cells vocabulary"],
    ids: Int[Tensor, " cells"],
    entropies: Float[Tensor, " cells"],
    by_log_prob: Float[Tensor, " cells"],
    by_entropy: Float[Tensor, " cells"] | None,
) -> Float[Tensor, "cells vocabulary"]:
    """by_log_prob x (1[id] - p) - by_entropy x p (log p + entropy), written over the probs."""
    if by_entropy is None:
        probs *= -by_log_prob[:, None]
    else:
        surprise = probs.log().clamp_(min=LOWEST_LOG_PROB).add_(entropies[:, None])
        probs *= surprise.mul_(-by_entropy[:, None]).sub_(by_log_prob[:, None])
    return probs.scatter_add_(1, ids[:, None], by_log_prob[:, None])


def token_full_kl(
    p_head: Head,
    p_states: Float[Tensor, "rows response width"],
    q_head: Head,
    q_states: Float[Tensor, "rows response width"],
    mask: Bool[Tensor, "rows response"],
    temperature: float,
) -> Float[Tensor, "rows response"]:
    """KL(p || q) over the whole vocabulary at each True cell; 0 elsewhere."""

    def of_cells(p_states: Tensor, q_states: Tensor) -> Tensor:
        log_p, log_q = (
            torch.log_softmax(tempered_logits(head, states, temperature), dim=-1)
            for head, states in ((p_head, p_states), (q_head, q_states))
        )
        return full_kl(log_p, log_q)

    size = cells_at_once(p_head)
    chunks = list(zip(p_states[mask].split(size), q_states[mask].split(size), strict=True))
    recompute = torch.is_grad_enabled() and len(chunks) > 1
    parts = [
        checkpoint(of_cells, *chunk, use_reentrant=False) if recompute else of_cells(*chunk)
        for chunk in chunks
    ]
    return _in_place(torch.cat(parts), mask)


def cells_at_once(head: Head) -> int:
    """How many cells' logits are made together."""
    return max(1, CHUNK_LOGITS // head.out_features)


def _in_place(
    cells: Float[Tensor, " cells"], mask: Bool[Tensor, "rows response"]
) -> Float[Tensor, "rows response"]:
    """Numbers of the True cells where they belong, 0 elsewhere."""
    return cells.new_zeros(mask.shape).masked_scatter(mask, cells)
