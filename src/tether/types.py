"""The stages of one iteration as frozen dataclasses: Prompts → Rollout → Experience → Minibatch.

Shapes
    rows       sampled responses of one iteration: prompts x samples_per_prompt
    prompt     the longest prompt, left-padded
    response   the longest response, right-padded
    length     prompt and response joined without a gap, right-padded

Column t of every rows x response tensor is about `response_ids[:, t]`. Masks are True where a
cell counts and come from lengths, never from comparing ids. Masked cells hold 0.

Of several processes each holds rows of its own, and `rows` knows their numbers among those of all.
What is about all rows says so.

Lengths and row numbers are on the CPU, wherever the other tensors are: shapes follow from them, and
a shape that has to be read from a GPU waits for all of its work.
"""

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from tether.support import html
from tether.support.transfer import to_device

T = TypeVar("T")

# stop: the episode was over before an EOS. length: it reached max_response_tokens. truncated: its
# environment cut it off.
FinishReason = Literal["eos", "stop", "length", "truncated"]
CUT_OFF: tuple[FinishReason, ...] = ("length", "truncated")  # these follow advantage.truncation


@dataclass(frozen=True)
class Prompts:
    """Prompts as text and token ids, with the other columns of their data rows for the reward."""

    texts: list[str]
    ids: list[list[int]]
    columns: list[dict[str, Any]]
    positions: list[int]  # line in the data file (row of a parquet), from 0
    files: list[str]  # the data file of each prompt
    messages: list[list[dict[str, Any]] | None]  # the prompt as messages; None if it is text

    def __len__(self) -> int:
        return len(self.ids)

    def repeat(self, samples: int) -> "Prompts":
        """Repeat each prompt `samples` times, its copies side by side: from prompts to rows."""
        return Prompts(
            **{
                f.name: [x for x in getattr(self, f.name) for _ in range(samples)]
                for f in fields(self)
            }
        )

    def select(self, rows: list[int]) -> "Prompts":
        """Select rows by number."""
        return Prompts(**{f.name: [getattr(self, f.name)[i] for i in rows] for f in fields(self)})

    @classmethod
    def concat(cls, parts: "list[Prompts]") -> "Prompts":
        """Put prompts one after the other."""
        return cls(
            **{f.name: [x for part in parts for x in getattr(part, f.name)] for f in fields(cls)}
        )

    def every(self, samples: int) -> "Prompts":
        """Take the first of each `samples` neighbours: from rows back to prompts."""
        return Prompts(**{f.name: getattr(self, f.name)[::samples] for f in fields(self)})


@dataclass(frozen=True)
class Rows:
    """The rows that are here: all of them. Of several processes each has `dist.rows.SpreadRows`."""

    def number(self, row: int) -> int:
        """Return the number of a row here among the rows of all processes."""
        return row

    def here(self, numbers: Int[Tensor, " some"]) -> Int[Tensor, " found"]:
        """Return where the rows of these numbers are here, in their order; others are left out."""
        return numbers

    def select(self, rows: Int[Tensor, " some"]) -> "Rows":
        """Return those that are left where every process selects some, numbered anew."""
        return self

    def sum(self, x: Tensor) -> Tensor:
        """Add up what each process has."""
        return x

    def everyone(self, x: Shaped[Tensor, "rows ..."]) -> Shaped[Tensor, "all ..."]:
        """Return a number of each row for all rows, in the order of their numbers."""
        return x

    def own(self, x: Shaped[Tensor, "all ..."]) -> Shaped[Tensor, "rows ..."]:
        """Return a number of all rows for the rows here."""
        return x

    def gather(self, items: Sequence[T]) -> list[T]:
        """Return an item of each row for all rows, in the order of their numbers."""
        return list(items)

    def together(self, items: Sequence[T]) -> list[T]:
        """Return what each process has, those of one after those of the other."""
        return list(items)

    def count(self, x: Sized) -> int:
        """Return how many rows there are in all, given something of each row here."""
        return len(x)


ALL_HERE = Rows()


@dataclass(frozen=True)
class Call:
    """One call of a tool or an environment by the policy, and its result."""

    turn: int  # of the policy, from 0
    name: str
    arguments: str
    result: str  # the observation before it was cut to max_observation_tokens
    seconds: float
    cut: bool = False  # the policy saw only the beginning
    error: str | None = None
    fault: Literal["policy", "tool"] | None = None  # which of them caused the error


@dataclass(frozen=True)
class EnvironmentState:
    """What a reward sees of an environment whose episode is over."""

    name: str  # of its class
    values: Mapping[str, Any]  # its public attributes that are plain data


@dataclass(frozen=True)
class Rollout:
    """The sampler's output. Ids are as sampled: never edited, never re-tokenised.

    Lengths are on the CPU.
    """

    prompt_ids: Int[Tensor, "rows prompt"]
    prompt_lengths: Int[Tensor, " rows"]
    response_ids: Int[Tensor, "rows response"]
    response_lengths: Int[Tensor, " rows"]  # sampled tokens and tool output
    response_mask: Bool[Tensor, "rows response"]  # True = sampled by the policy, EOS included
    rollout_log_probs: Float[Tensor, "rows response"]
    finish_reasons: tuple[FinishReason, ...]
    calls: tuple[tuple[Call, ...], ...] = ()  # per row; empty without tools
    # Per row and turn of the policy (a run of True cells in the mask), what the environment gave
    # for it; None: nothing. A row without entries has no reward, as its environment failed.
    # Empty without an environment that gives rewards.
    turn_rewards: tuple[tuple[float | None, ...], ...] = ()
    # Per row, for rewards that read environments; None: it failed. Empty where none is kept.
    states: tuple[EnvironmentState | None, ...] = ()
    rows: Rows = ALL_HERE

    @property
    def truncated(self) -> Bool[Tensor, " rows"]:
        """Mark the rows that were cut off, by max_response_tokens or by their environment."""
        flags = [reason in CUT_OFF for reason in self.finish_reasons]
        return torch.tensor(flags, dtype=torch.bool, device=self.response_ids.device)

    def to(self, device: torch.device) -> "Rollout":
        """Return the rollout on a device; its lengths stay on the CPU."""
        names = ("prompt_ids", "response_ids", "response_mask", "rollout_log_probs")
        return replace(self, **{name: to_device(getattr(self, name), device) for name in names})

    def select(self, rows: Int[Tensor, " some"]) -> "Rollout":
        """Select rows, by numbers on the CPU; their padding stays."""
        numbers = rows.tolist()
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(
            self,
            **{name: _pick(x, rows) for name, x in tensors.items() if isinstance(x, Tensor)},
            finish_reasons=tuple(self.finish_reasons[row] for row in numbers),
            calls=tuple(self.calls[row] for row in numbers) if self.calls else (),
            turn_rewards=tuple(self.turn_rewards[r] for r in numbers) if self.turn_rewards else (),
            states=tuple(self.states[row] for row in numbers) if self.states else (),
        )


def _pick(tensor: Tensor, rows: Int[Tensor, " some"]) -> Tensor:
    return tensor[to_device(rows, tensor.device)]


@dataclass(frozen=True)
class Sequences:
    """Prompt and response joined, right-padded: the input of every training forward pass.

    Padding comes only after the last token, so a causal model cannot see it: no attention mask
    is needed, positions count from 0, and no log-prob changes with the width of the batch. Lengths
    are on the CPU.

    With `lower_states` a pass starts from these in place of the ids: they are the states after the
    first `lower_layers` layers, which are frozen (`model.learn_layers`).
    """

    ids: Int[Tensor, "rows length"]
    prompt_lengths: Int[Tensor, " rows"]
    response_lengths: Int[Tensor, " rows"]
    lower_states: Float[Tensor, "rows length width"] | None = None
    lower_layers: int = 0
    share_prompts: bool = False  # rows may be packed as in data/shared_prompts.py
    prompt_numbers: Int[Tensor, " rows"] | None = None  # equal for equal prompts; on the CPU

    @property
    def width(self) -> int:
        """Return the length of the longest response."""
        return _longest(self.response_lengths)

    @property
    def response_ids(self) -> Int[Tensor, "rows response"]:
        """Gather the response's ids; cells past a row's end hold arbitrary ids."""
        return self.ids.gather(1, self.columns_from(0, self.width))

    def columns_from(self, first: int, count: int) -> Int[Tensor, "rows count"]:
        """Return the numbers of `count` columns of each row from response token `first` on, on the
        device of the ids; those past the last column are the last."""
        columns = torch.arange(first, first + count, device=self.prompt_lengths.device)
        found = (self.prompt_lengths[:, None] + columns).clamp(max=self.ids.shape[1] - 1)
        return to_device(found, self.ids.device)

    def select(self, rows: Int[Tensor, " some"]) -> "Sequences":
        """Select rows, by numbers on the CPU, and cut them to the longest of them."""
        prompt_lengths, response_lengths = self.prompt_lengths[rows], self.response_lengths[rows]
        length = _longest(prompt_lengths + response_lengths)
        here = to_device(rows, self.ids.device)
        lower = None if self.lower_states is None else self.lower_states[here, :length]
        numbers = None if self.prompt_numbers is None else self.prompt_numbers[rows]
        return Sequences(
            ids=self.ids[here, :length],
            prompt_lengths=prompt_lengths,
            response_lengths=response_lengths,
            lower_states=lower,
            lower_layers=self.lower_layers,
            share_prompts=self.share_prompts,
            prompt_numbers=numbers,
        )

    def to(self, device: torch.device) -> "Sequences":
        """Return the rows with their ids on a device."""
        return replace(self, ids=to_device(self.ids, device))

    def from_ids(self) -> "Sequences":
        """Return the same rows without lower states, for a network of other weights."""
        return replace(self, lower_states=None, lower_layers=0)


def _longest(lengths: Int[Tensor, " rows"]) -> int:
    return int(lengths.max()) if len(lengths) else 0


@dataclass(frozen=True)
class Scores:
    """The reward of each response."""

    values: Float[Tensor, " rows"]  # 0 where not scored
    usable: Bool[Tensor, " rows"]  # may be trained on
    scored: Bool[Tensor, " rows"]  # a usable row is unscored where the critic bootstraps it
    parts: dict[str, Float[Tensor, " rows"]] = field(default_factory=dict)  # not yet weighted
    extras: dict[int, dict[str, Any]] = field(default_factory=dict)  # by row: further results
    # The tokens that the scores belong to; each row sums to its value. None: all to the last one.
    token_values: Float[Tensor, "rows response"] | None = None

    def select(self, rows: Int[Tensor, " some"]) -> "Scores":
        """Select rows."""
        extras = {i: self.extras[row] for i, row in enumerate(rows.tolist()) if row in self.extras}
        return Scores(
            self.values[rows],
            self.usable[rows],
            self.scored[rows],
            {name: values[rows] for name, values in self.parts.items()},
            extras,
            None if self.token_values is None else self.token_values[rows],
        )

    def without(self, rows: Bool[Tensor, " rows"]) -> "Scores":
        """Return a copy in which these rows are neither scored nor usable."""
        placed = self.token_values
        return Scores(
            torch.where(rows, 0.0, self.values),
            self.usable & ~rows,
            self.scored & ~rows,
            {name: torch.where(rows, 0.0, values) for name, values in self.parts.items()},
            self.extras,
            None if placed is None else torch.where(rows[:, None], 0.0, placed),
        )


@dataclass(frozen=True)
class Moments:
    """Mean and unbiased variance over the True cells of all rows, as used by whitening."""

    mean: Float[Tensor, ""]
    variance: Float[Tensor, ""]
    count: Int[Tensor, ""]


@dataclass(frozen=True)
class Experience:
    """The rows of one iteration with everything the updates need."""

    sequences: Sequences
    response_mask: Bool[Tensor, "rows response"]  # the rollout's, without unscorable rows
    old_log_probs: Float[Tensor, "rows response"]
    ref_log_probs: Float[Tensor, "rows response"]
    kl: Float[Tensor, "rows response"]  # k1 of old against reference
    values: Float[Tensor, "rows response"]
    final_values: Float[Tensor, " rows"]
    token_level_scores: Float[Tensor, "rows response"]
    token_level_rewards: Float[Tensor, "rows response"]
    advantages: Float[Tensor, "rows response"]
    returns: Float[Tensor, "rows response"]
    policy_advantages: Float[Tensor, "rows response"]
    correction_weights: Float[Tensor, "rows response"]  # of the policy loss; 1 = no correction
    rows: Rows = ALL_HERE

    def __len__(self) -> int:
        return self.response_mask.shape[0]

    def select(self, rows: Int[Tensor, " some"]) -> "Experience":
        """Select rows, by numbers on the CPU, and cut them to the longest of them."""
        sequences = self.sequences.select(rows)
        here = to_device(rows, self.response_mask.device)
        cut = {
            f.name: getattr(self, f.name)[here]
            if f.name == "final_values"
            else getattr(self, f.name)[here, : sequences.width]
            for f in fields(self)
            if f.name not in ("sequences", "rows")
        }
        return Experience(sequences=sequences, rows=self.rows.select(rows), **cut)

    def _repr_html_(self) -> str:
        """Show shape, mean and range of every tensor, over the tokens that count."""
        mask, table = self.response_mask, [["tensor", "shape", "mean", "lowest", "highest"]]
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, x in tensors.items():
            if not isinstance(x, Tensor) or name == "response_mask":
                continue
            cells = x[mask] if x.shape == mask.shape else x
            cells = cells.double()
            numbers = [cells.mean(), cells.min(), cells.max()] if cells.numel() else []
            told = [html.number(float(n)) for n in numbers] or ["–"] * 3
            table.append([name, "×".join(map(str, x.shape)), *told])
        head = f"{len(self)} rows; {int(mask.sum())} tokens count"
        return html.paragraph(head) + html.table(table)


@dataclass(frozen=True)
class Minibatch:
    """The rows of one optimizer step, or of one microbatch of it."""

    rows: Int[Tensor, " rows"]  # places in what they were selected from, on the CPU
    sequences: Sequences
    weights: Float[Tensor, "rows response"]  # of each cell in the minibatch's loss
    response_mask: Bool[Tensor, "rows response"]
    host_mask: Bool[Tensor, "rows response"]  # the same on the CPU, to count cells without waiting
    old_log_probs: Float[Tensor, "rows response"]
    ref_log_probs: Float[Tensor, "rows response"]
    values: Float[Tensor, "rows response"]
    returns: Float[Tensor, "rows response"]
    policy_advantages: Float[Tensor, "rows response"]
    correction_weights: Float[Tensor, "rows response"]

    def __len__(self) -> int:
        return self.response_mask.shape[0]

    def select(self, rows: Int[Tensor, " some"]) -> "Minibatch":
        """Select rows, by numbers on the CPU, and cut them to the longest of them."""
        sequences = self.sequences.select(rows)
        here = to_device(rows, self.response_mask.device)
        cut = {
            f.name: getattr(self, f.name)[here, : sequences.width]
            for f in fields(self)
            if f.name not in ("rows", "sequences", "host_mask")
        }
        host_mask = self.host_mask[rows, : sequences.width]
        return Minibatch(rows=self.rows[rows], sequences=sequences, host_mask=host_mask, **cut)

    def as_idle(self) -> "Minibatch":
        """Return the same tokens with no cell counted, for a process that has run out of rows."""
        return replace(
            self,
            weights=torch.zeros_like(self.weights),
            response_mask=torch.zeros_like(self.response_mask),
            host_mask=torch.zeros_like(self.host_mask),
        )
