"""Pad rows of different lengths into rectangles, and cut rectangles into microbatches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from itertools import accumulate, chain
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from tether.algo.advantages import place_scores
from tether.data.shared_prompts import (
    count_tokens,
    number_prompts,
    packed_groups,
    packed_microbatches,
)
from tether.dist.world import world
from tether.support.transfer import to_device
from tether.types import Rollout, Scores, Sequences

D = TypeVar("D")


def balance(costs: Sequence[int], shares: int) -> list[list[int]]:
    """Return the piece numbers of each share, with about equal costs per share: the costliest piece
    first, each to the share with the least so far."""
    found: list[list[int]] = [[] for _ in range(shares)]
    loads = [0] * shares
    for piece in sorted(range(len(costs)), key=lambda piece: -costs[piece]):
        least = loads.index(min(loads))
        found[least].append(piece)
        loads[least] += costs[piece]
    return [sorted(share) for share in found]


def pad_left(rows: Sequence[Sequence[int]]) -> Int[Tensor, "rows width"]:
    """Return token ids (rows, width), padded on the left with id 0. Masks come from lengths, so the
    id means nothing."""
    width = max(map(len, rows), default=0)
    padded = [[0] * (width - len(row)) + list(row) for row in rows]
    return torch.tensor(padded, dtype=torch.long).view(len(rows), width)


def pad_right(
    rows: Sequence[Sequence[int | float]], dtype: torch.dtype
) -> Shaped[Tensor, "rows width"]:
    """Return ids, flags or numbers per token (rows, width), padded on the right with 0."""
    width = max(map(len, rows), default=0)
    padded = [list(row) + [0] * (width - len(row)) for row in rows]
    return torch.tensor(padded, dtype=dtype).view(len(rows), width)


def length_mask(lengths: Int[Tensor, " rows"], width: int) -> Bool[Tensor, "rows width"]:
    """Return a mask (rows, width) that is True on the first `lengths[row]` columns."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def no_rows(float_type: torch.dtype) -> Rollout:
    """Return the rollout of a process that has no rows."""
    ids, lengths = torch.zeros(0, 1, dtype=torch.long), torch.zeros(0, dtype=torch.long)
    return Rollout(ids, lengths, ids, lengths, ids.bool(), ids.to(float_type), ())


def concat_rollouts(rollouts: Sequence[Rollout]) -> Rollout:
    """Concatenate rollouts along rows, each padded to the widest."""
    if len(rollouts) == 1:
        return rollouts[0]

    def of(name: str, merge: Callable[[list[Tensor]], Tensor]) -> Tensor:
        return merge([getattr(rollout, name) for rollout in rollouts])

    rows = [len(rollout.finish_reasons) for rollout in rollouts]
    calls = [rollout.calls or ((),) * n for rollout, n in zip(rollouts, rows, strict=True)]
    turns = [rollout.turn_rewards or ((),) * n for rollout, n in zip(rollouts, rows, strict=True)]
    states = [rollout.states or (None,) * n for rollout, n in zip(rollouts, rows, strict=True)]
    return Rollout(
        prompt_ids=of("prompt_ids", partial(_widen, left=True)),
        prompt_lengths=of("prompt_lengths", _cat),
        response_ids=of("response_ids", _widen),
        response_lengths=of("response_lengths", _cat),
        response_mask=of("response_mask", _widen),
        rollout_log_probs=of("rollout_log_probs", _widen),
        finish_reasons=tuple(reason for r in rollouts for reason in r.finish_reasons),
        calls=tuple(chain.from_iterable(calls)) if any(r.calls for r in rollouts) else (),
        turn_rewards=tuple(chain.from_iterable(turns)) if any(map(any, turns)) else (),
        states=tuple(chain.from_iterable(states)) if any(r.states for r in rollouts) else (),
    )


def concat_scores(
    scores: Sequence[Scores], masks: Sequence[Bool[Tensor, "rows response"]]
) -> Scores:
    """Concatenate scores along rows, given the rollouts' masks. A part that one of them lacks is 0
    there."""
    starts = [0, *accumulate(len(one.values) for one in scores)]
    names = dict.fromkeys(name for one in scores for name in one.parts)
    placed = None
    if any(one.token_values is not None for one in scores):
        pairs = zip(scores, masks, strict=True)
        placed = _widen([place_scores(s.values, mask, s.token_values) for s, mask in pairs])
    return Scores(
        torch.cat([one.values for one in scores]),
        torch.cat([one.usable for one in scores]),
        torch.cat([one.scored for one in scores]),
        {
            name: torch.cat([one.parts.get(name, torch.zeros_like(one.values)) for one in scores])
            for name in names
        },
        {at + row: x for at, s in zip(starts, scores, strict=False) for row, x in s.extras.items()},
        placed,
    )


def _cat(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts)


def _widen(parts: list[Tensor], left: bool = False) -> Tensor:
    """Concatenate along rows, padding with 0 on one side to the largest width."""
    return torch.cat(_equally_wide(parts, left))


def _equally_wide(parts: list[Tensor], left: bool = False) -> list[Tensor]:
    width = max(part.shape[1] for part in parts)
    blanks = [width - part.shape[1] for part in parts]
    rest = (0, 0) * (parts[0].ndim - 2)
    sides = [(*rest, n, 0) if left else (*rest, 0, n) for n in blanks]
    return [pad(part, side) for part, side in zip(parts, sides, strict=True)]


def concat_rows(parts: Sequence[D]) -> D:
    """Concatenate the tensors of like dataclasses along rows, padded on the right to the widest."""
    first = parts[0]
    if len(parts) == 1:
        return first
    changed: dict[str, Any] = {}
    for field in fields(cast(Any, first)):
        values = [getattr(part, field.name) for part in parts]
        if isinstance(values[0], Tensor):
            changed[field.name] = _widen(values) if values[0].ndim > 1 else _cat(values)
        elif is_dataclass(values[0]):
            changed[field.name] = concat_rows(values)
    return replace(cast(Any, first), **changed)


def join(rollout: Rollout, share_prompts: bool = False) -> Sequences:
    """Join each prompt and its response without a gap, right-padded.

    prompt_ids     . . p p      response_ids   r r .      ->   p p r r . .
                   . p p p                     r r r           p p p r r r
    """
    prompt_width, response_width = rollout.prompt_ids.shape[1], rollout.response_ids.shape[1]
    padded = torch.cat([rollout.prompt_ids, rollout.response_ids], dim=1)
    shift = prompt_width - rollout.prompt_lengths  # padding before the first prompt token
    lengths = rollout.prompt_lengths + rollout.response_lengths
    columns = torch.arange(int(lengths.max()) if len(lengths) else 0)
    source = (columns + shift[:, None]).clamp(max=prompt_width + response_width - 1)
    inside = to_device(columns < lengths[:, None], padded.device)
    ids = torch.where(inside, padded.gather(1, to_device(source, padded.device)), 0)
    joined = Sequences(
        ids, rollout.prompt_lengths, rollout.response_lengths, share_prompts=share_prompts
    )
    return replace(joined, prompt_numbers=number_prompts(joined)) if share_prompts else joined


def join_pairs(pairs: Sequence[tuple[list[int], list[int]]]) -> Sequences:
    """Join prompts and responses of a file, laid out as `join` does with sampled ones."""
    return Sequences(
        pad_right([[*prompt, *response] for prompt, response in pairs], torch.long),
        torch.tensor([len(prompt) for prompt, _ in pairs], dtype=torch.long),
        torch.tensor([len(response) for _, response in pairs], dtype=torch.long),
    )


@dataclass(frozen=True)
class Microbatch:
    """Row numbers of one microbatch, on the CPU.

    An idle one goes through the model and counts nothing.
    """

    rows: Int[Tensor, " some"]
    idle: bool = False


def own_microbatches(
    sequences: Sequences, max_tokens: int, max_cells: int | None = None
) -> list[Microbatch]:
    """Return this process's microbatches of rows that every process has."""
    return shared_microbatches(sequences, max_tokens, max_cells)[world().replica]


def shared_microbatches(
    sequences: Sequences, max_tokens: int, max_cells: int | None = None
) -> list[list[Microbatch]]:
    """Return the microbatches of every process, as many for each. Nothing but lengths, and which
    prompts are equal, decides.

    A process with fewer adds idle ones of the shortest row: sharded weights are gathered by all
    processes together.
    """
    ids = sequences.from_ids()
    parts = [
        [Microbatch(rows[group]) for group in microbatches(ids.select(rows), max_tokens, max_cells)]
        if len(rows)
        else []
        for rows in _shares(sequences)
    ]
    most = max(map(len, parts))
    shortest = (sequences.prompt_lengths + sequences.response_lengths).argmin()[None]
    return [own + [Microbatch(shortest, idle=True)] * (most - len(own)) for own in parts]


def _shares(sequences: Sequences) -> list[Int[Tensor, " some"]]:
    """Return the row numbers of every process: those of a prompt together, if that is less work
    for the process with the most."""
    processes = world().replicas
    lengths = (sequences.prompt_lengths + sequences.response_lengths).tolist()
    found = balance(lengths, processes)
    groups = packed_groups(sequences)
    if groups is not None:
        costs = [count_tokens(sequences, [group]) for group in groups]
        costs = [count.tokens - count.saved for count in costs]
        shares = balance(costs, processes)
        most = max(sum(lengths[row] for row in rows) for rows in found)
        if max(sum(costs[number] for number in share) for share in shares) < most:
            found = [sorted(row for number in share for row in groups[number]) for share in shares]
    return [torch.tensor(x, dtype=torch.long) for x in found]


def microbatches(
    sequences: Sequences, max_tokens: int, max_cells: int | None = None
) -> list[Int[Tensor, " some"]]:
    """Return row numbers in groups of at most `max_tokens` padded tokens and at most `max_cells`
    response tokens, with rows of similar length together.

    A single row longer than that is a group of its own. Where rows share prompts, those of a prompt
    are together, and its tokens count once. Depends on prompts and lengths only.
    """
    packed = packed_groups(sequences)
    if packed is not None:
        parts = packed_microbatches(sequences, packed, max_tokens, max_cells)
        return [torch.tensor(part) for part in parts]
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
    return [torch.tensor(group) for group in groups]
