"""Functions over hidden states: log-probs, entropies, full-vocabulary KL.

Logits are made in chunks and, under autograd, made again in the backward pass, so a tensor of
rows x length x vocabulary is never stored. Only cells that the mask asks for are computed.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tether.algo.kl import full_kl

CHUNK_LOGITS = 2**24  # numbers in one chunk of logits: 64 MiB in float32

LOWEST_LOG_PROB = -1e4  # exp() of it is 0 in every float type

Head = Callable[[Float[Tensor, "cells width"]], Float[Tensor, "cells vocabulary"]]


def log_softmax(
    head: Head, states: Float[Tensor, "cells width"], temperature: float
) -> Float[Tensor, "cells vocabulary"]:
    """Tempered log-probs over the vocabulary, in float32 at least; made only here."""
    logits = head(states)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.log_softmax(logits / temperature, dim=-1)


def token_log_probs_and_entropies(
    head: Head,
    states: Float[Tensor, "rows response width"],
    ids: Int[Tensor, "rows response"],
    mask: Bool[Tensor, "rows response"],
    temperature: float,
    vocabulary: int,
) -> tuple[Float[Tensor, "rows response"], Float[Tensor, "rows response"]]:
    """log pi(id) and the exact entropy -sum p log p of each True cell; 0 elsewhere."""

    def of_cells(states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = log_softmax(head, states, temperature)
        # A token that cannot be sampled has log-prob -inf and adds 0, not 0 x infinity.
        entropies = -(log_probs.exp() * log_probs.clamp(min=LOWEST_LOG_PROB)).sum(dim=-1)
        return log_probs.gather(1, ids[:, None]).squeeze(1), entropies

    log_probs, entropies = _in_chunks(of_cells, (states, ids), mask, vocabulary)
    return log_probs, entropies


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
        log_p = log_softmax(p_head, p_states, temperature)
        return (full_kl(log_p, log_softmax(q_head, q_states, temperature)),)

    return _in_chunks(of_cells, (p_states, q_states), mask, vocabulary)[0]


def _in_chunks(
    of_cells: Callable[..., tuple[Tensor, ...]],
    inputs: tuple[Tensor, ...],
    mask: Bool[Tensor, "rows response"],
    vocabulary: int,
) -> list[Float[Tensor, "rows response"]]:
    """Apply a function of cells to the True cells, some at a time; its results in their places."""
    size = max(1, CHUNK_LOGITS // vocabulary)
    chunks = list(zip(*(x[mask].split(size) for x in inputs), strict=True))
    recompute = torch.is_grad_enabled() and len(chunks) > 1
    parts = [
        checkpoint(of_cells, *chunk, use_reentrant=False) if recompute else of_cells(*chunk)
        for chunk in chunks
    ]
    columns = (torch.cat(column) for column in zip(*parts, strict=True))
    return [cells.new_zeros(mask.shape).masked_scatter(mask, cells) for cells in columns]
