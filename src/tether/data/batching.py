"""Rows of different lengths as rectangles, and rectangles cut into microbatches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from tether.dist.world import world
from tether.types import Rollout, Sequences


def own_rows(rows: int) -> range:
    """This process's rows out of so many, as one block: neighbours stay together."""
    here = world()
    return range(rows * here.rank // here.size, rows * (here.rank + 1) // here.size)


def balance(costs: Sequence[int], shares: int) -> list[list[int]]:
    """Numbers of the pieces in each share, of about equal cost: the dearest piece first, each to
    the share that has least."""
    found: list[list[int]] = [[] for _ in range(shares)]
    loads = [0] * shares
    for piece in sorted(range(len(costs)), key=lambda piece: -costs[piece]):
        least = loads.index(min(loads))
        found[least].append(piece)
        loads[least] += costs[piece]
    return [sorted(share) for share in found]


def pad_left(rows: Sequence[Sequence[int]]) -> Int[Tensor, "rows width"]:
    """Token ids, blanks first. A blank is id 0 and means nothing: masks come from lengths."""
    width = max(map(len, rows))
    return torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])


def pad_right(
    rows: Sequence[Sequence[int | float]], dtype: torch.dtype
) -> Shaped[Tensor, "rows width"]:
    """Ids, flags or numbers a token, zeros last."""
    width = max(map(len, rows))
    return torch.tensor([list(row) + [0] * (width - len(row)) for row in rows], dtype=dtype)


def length_mask(lengths: Int[Tensor, " rows"], width: int) -> Bool[Tensor, "rows width"]:
    """True on the first `lengths[row]` columns."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def concat_rollouts(rollouts: Sequence[Rollout]) -> Rollout:
    """Rollouts one below the other, each padded to the widest."""
    if len(rollouts) == 1:
        return rollouts[0]
    device = rollouts[0].response_ids.device

    def of(name: str, merge: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        return merge([getattr(rollout, name).to(device) for rollout in rollouts])

    rows = [len(rollout.finish_reasons) for rollout in rollouts]
    calls = [rollout.calls or ((),) * n for rollout, n in zip(rollouts, rows, strict=True)]
    return Rollout(
        prompt_ids=of("prompt_ids", partial(_widen, left=True)),
        prompt_lengths=of("prompt_lengths", torch.cat),
        response_ids=of("response_ids", _widen),
        response_lengths=of("response_lengths", torch.cat),
        response_mask=of("response_mask", _widen),
        rollout_log_probs=of("rollout_log_probs", _widen),
        finish_reasons=tuple(chain.from_iterable(r.finish_reasons for r in rollouts)),
        calls=tuple(chain.from_iterable(calls)) if any(r.calls for r in rollouts) else (),
    )


def _widen(parts: Sequence[Tensor], left: bool = False) -> Tensor:
    """Rectangles one below the other, blanks before or after them."""
    width = max(part.shape[1] for part in parts)
    blanks = [width - part.shape[1] for part in parts]
    sides = [(n, 0) if left else (0, n) for n in blanks]
    return torch.cat([pad(part, side) for part, side in zip(parts, sides, strict=True)])


def join(rollout: Rollout) -> Sequences:
    """Prompt and response side by side without a gap, right-padded.

    prompt_ids     . . p p      response_ids   r r .      ->   p p r r . .
                   . p p p                     r r r           p p p r r r
    """
    prompt_width, response_width = rollout.prompt_ids.shape[1], rollout.response_ids.shape[1]
    padded = torch.cat([rollout.prompt_ids, rollout.response_ids], dim=1)
    shift = prompt_width - rollout.prompt_lengths  # blanks before the first prompt token
    lengths = rollout.prompt_lengths + rollout.response_lengths
    columns = torch.arange(int(lengths.max()), device=padded.device)
    source = (columns + shift[:, None]).clamp(max=prompt_width + response_width - 1)
    ids = torch.where(columns < lengths[:, None], padded.gather(1, source), 0)
    return Sequences(ids, rollout.prompt_lengths, rollout.response_lengths)


def join_pairs(pairs: Sequence[tuple[list[int], list[int]]]) -> Sequences:
    """Given prompts and responses side by side, as `join` lays out sampled ones."""
    return Sequences(
        pad_right([[*prompt, *response] for prompt, response in pairs], torch.long),
        torch.tensor([len(prompt) for prompt, _ in pairs]),
        torch.tensor([len(response) for _, response in pairs]),
    )


@dataclass(frozen=True)
class Microbatch:
    """Row numbers of one microbatch. An idle one is read and counts nothing."""

    rows: Int[Tensor, " some"]
    idle: bool = False


def own_microbatches(
    sequences: Sequences, max_tokens: int, max_cells: int | None = None
) -> list[Microbatch]:
    """This process's microbatches, as many as every other has: who is done sooner adds idle ones
    of the shortest row, as sharded weights are gathered by all together."""
    parts = [
        [
            Microbatch(rows[group])
            for group in microbatches(sequences.select(rows), max_tokens, max_cells)
        ]
        if len(rows)
        else []
        for rows in _shares(sequences)
    ]
    own, most = parts[world().replica], max(map(len, parts))
    shortest = (sequences.prompt_lengths + sequences.response_lengths).argmin()[None]
    return own + [Microbatch(shortest, idle=True)] * (most - len(own))


def _shares(sequences: Sequences) -> list[Int[Tensor, " some"]]:
    """Row numbers of every process."""
    costs = (sequences.prompt_lengths + sequences.response_lengths).tolist()
    return [
        torch.tensor(rows, dtype=torch.long, device=sequences.ids.device)
        for rows in balance(costs, world().replicas)
    ]


def microbatches(
    sequences: Sequences, max_tokens: int, max_cells: int | None = None
) -> list[Int[Tensor, " some"]]:
    """Row numbers in groups of at most `max_tokens` padded tokens, rows of like length together,
    and of at most `max_cells` response tokens.

    A single row longer than that is a group of its own. Depends on lengths only.
    """
    responses = sequences.response_lengths.tolist()
    lengths = (sequences.prompt_lengths + sequences.response_lengths).tolist()
    groups: list[list[int]] = []
    cells = 0
    for row in sorted(range(len(lengths)), key=lambda row: lengths[row]):
        cells += responses[row]
        # Lengths ascend, so this row is the group's widest.
        full = not groups or lengths[row] * (len(groups[-1]) + 1) > max_tokens
        if full or (max_cells is not None and cells > max_cells):
            groups.append([])
            cells = responses[row]
        groups[-1].append(row)
    return [torch.tensor(group, device=sequences.ids.device) for group in groups]
