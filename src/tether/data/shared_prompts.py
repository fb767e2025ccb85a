"""Rows with the same prompt, packed so that the prompt's tokens are computed once.

A microbatch of a training pass becomes one line of tokens: each prompt once, then the responses to
it. A response sees its prompt and its own past, as it would alone; gradients of the prompt's tokens
add up over its responses. Which rows are packed follows from token ids and lengths alone, so every
process, and every repetition of a run, packs the same.

Liu et al. 2025, "Prefix Grouper", arXiv 2506.05433; for a tree of prefixes: Wang et al. 2025, "Tree
Training", arXiv 2511.00413.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tether.support.transfer import to_device
from tether.types import Sequences

# Packing adds some ten small operations to each layer. It is used where it saves this share of the
# tokens and as many of them, which on the smallest models takes longer than those operations.
MIN_SAVED_SHARE = 0.2
MIN_SAVED_TOKENS = 128


@dataclass(frozen=True)
class TokenCount:
    """The tokens of rows that would be one microbatch, with those of one prompt side by side."""

    rows: int = 0
    longest: int = 0
    tokens: int = 0  # of all rows, without padding
    saved: int = 0  # of these, in prompts that an earlier row has as well
    cells: int = 0  # response tokens
    prompt: int | None = None  # number of the last row's prompt

    def with_row(self, prompt: int, prompt_length: int, response_length: int) -> "TokenCount":
        """Add a row with the prompt of this number."""
        length = prompt_length + response_length
        return TokenCount(
            self.rows + 1,
            max(self.longest, length),
            self.tokens + length,
            self.saved + (prompt_length if prompt == self.prompt else 0),
            self.cells + response_length,
            prompt,
        )

    @property
    def is_packed(self) -> bool:
        """Whether packing saves enough."""
        return self.saved >= max(MIN_SAVED_TOKENS, MIN_SAVED_SHARE * self.tokens)

    @property
    def computed(self) -> int:
        """Tokens that go through the network, padding included."""
        return self.tokens - self.saved if self.is_packed else self.rows * self.longest


def prompt_groups(sequences: Sequences) -> list[list[int]]:
    """Return the numbers of rows with equal prompts, each group and all groups in row order."""
    numbers = sequences.prompt_numbers
    found: dict[int, list[int]] = {}
    for row, number in enumerate(
        (number_prompts(sequences) if numbers is None else numbers).tolist()
    ):
        found.setdefault(number, []).append(row)
    return list(found.values())


def number_prompts(sequences: Sequences) -> Int[Tensor, " rows"]:
    """Return a number per row, on the CPU, that rows with equal prompts share on all processes."""
    lengths = sequences.prompt_lengths.tolist()
    ids = sequences.ids[:, : max(lengths, default=0)].cpu().numpy()
    digests = [blake2b(ids[row, :n].tobytes(), digest_size=8) for row, n in enumerate(lengths)]
    numbers = [int.from_bytes(digest.digest(), "big", signed=True) for digest in digests]
    return torch.tensor(numbers, dtype=torch.int64)


def count_tokens(sequences: Sequences, groups: list[list[int]]) -> TokenCount:
    """Count the tokens of all these rows."""
    prompts, responses = sequences.prompt_lengths.tolist(), sequences.response_lengths.tolist()
    count = TokenCount()
    for number, group in enumerate(groups):
        for row in group:
            count = count.with_row(number, prompts[row], responses[row])
    return count


def packed_groups(sequences: Sequences) -> list[list[int]] | None:
    """Return `prompt_groups` if the rows may share prompts and that saves enough, else None."""
    if not sequences.share_prompts:
        return None
    groups = prompt_groups(sequences)
    return groups if count_tokens(sequences, groups).is_packed else None


def saved_tokens(sequences: Sequences) -> int:
    """Return how many prompt tokens of this microbatch are not computed again."""
    groups = packed_groups(sequences)
    return 0 if groups is None else count_tokens(sequences, groups).saved


def packed_microbatches(
    sequences: Sequences, groups: list[list[int]], max_tokens: int, max_cells: int | None
) -> list[list[int]]:
    """Return row numbers in microbatches of at most `max_tokens` computed tokens and `max_cells`
    response tokens, with the rows of a prompt together where they fit.

    A single row longer than that is a microbatch of its own.
    """
    prompts, responses = sequences.prompt_lengths.tolist(), sequences.response_lengths.tolist()

    def added(count: TokenCount, number: int, rows: Sequence[int]) -> TokenCount:
        for row in rows:
            count = count.with_row(number, prompts[row], responses[row])
        return count

    def fits(count: TokenCount) -> bool:
        few = max_cells is None or count.cells <= max_cells
        return count.computed <= max_tokens and few

    def longest(number: int) -> int:
        return max(prompts[row] + responses[row] for row in groups[number])

    found: list[list[int]] = [[]]
    count = TokenCount()
    for number in sorted(range(len(groups)), key=longest):
        rest = groups[number]
        if found[-1] and not fits(added(count, number, rest)):
            found.append([])
            count = TokenCount()
        while rest:
            # Few rows of a prompt may not be packed where more of them are, so most come first.
            sizes = range(len(rest), 0, -1)
            most = next((n for n in sizes if fits(added(count, number, rest[:n]))), 1)
            found[-1] += rest[:most]
            count = added(count, number, rest[:most])
            rest = rest[most:]
            if rest:
                found.append([])
                count = TokenCount()
    return found


@dataclass(frozen=True)
class PackedLayout:
    """Where the tokens of packed rows lie: in the rows, in the line, and in rectangles.

    Attention needs rectangles: prompts (prompts x prompt) and responses (rows x response), both
    right-padded. Their cells are numbered one after the other, prompts first. A padded cell holds
    the number of a token of its own row, whose value there is not used.
    """

    rows: Int[Tensor, " tokens"]  # row of each token in the sequences
    columns: Int[Tensor, " tokens"]  # its column there, which is its position
    cells: Int[Tensor, " cells"]  # token in each cell
    token_cells: Int[Tensor, " tokens"]  # cell of each token
    last_prompt_tokens: Int[Tensor, " prompts"]
    response_cells: Int[Tensor, "rows response"]  # token in each cell of the responses
    prompt_of_row: Int[Tensor, " rows"]
    prompt_width: int
    # What a response token sees, of the prompt and of the response: for every row, or one for all.
    allowed: Bool[Tensor, "#rows 1 response length"]

    def to(self, device: torch.device | str) -> "PackedLayout":
        """Return the same on another device."""
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **{name: to_device(x, device) for name, x in tensors.items()})


def pack(
    groups: list[list[int]], prompt_lengths: Sequence[int], response_lengths: Sequence[int]
) -> PackedLayout:
    """Lay out rows, given those of each prompt: the prompt, then the responses, then the next.

    rows   p p r . .        line   p p r s s s q q q t
           p p s s s
           q q q t .
    """
    cpu = torch.device("cpu")  # whatever the default is: shapes here depend on numbers
    firsts = [group[0] for group in groups]
    prompt = torch.tensor([prompt_lengths[row] for row in firsts], device=cpu)
    response = torch.tensor(response_lengths, device=cpu)
    prompt_of_row, starts, response_starts = _starts(groups, prompt, response)

    own_prompt = prompt[prompt_of_row]
    columns = torch.arange(int(prompt.max()), device=cpu)
    response_columns = torch.arange(max(1, int(response.max())), device=cpu)
    prompt_cells = starts[:, None] + columns.minimum(prompt[:, None] - 1)
    response_cells = response_starts[:, None] + response_columns.minimum(response[:, None] - 1)
    last = starts + prompt - 1
    response_cells = torch.where(response[:, None] > 0, response_cells, last[prompt_of_row, None])

    cells = torch.cat([prompt_cells.flatten(), response_cells.flatten()])
    used = torch.cat(
        [
            (columns < prompt[:, None]).flatten(),
            (response_columns < response[:, None]).flatten(),
        ]
    )
    rows_of_cells = torch.cat(
        [
            torch.tensor(firsts, device=cpu)[:, None].expand_as(prompt_cells).flatten(),
            torch.arange(len(response), device=cpu)[:, None].expand_as(response_cells).flatten(),
        ]
    )
    columns_of_cells = torch.cat(
        [
            columns.expand_as(prompt_cells).flatten(),
            (own_prompt[:, None] + response_columns).flatten(),
        ]
    )
    token_cells = torch.empty(int(used.sum()), dtype=torch.long, device=cpu)
    token_cells[cells[used]] = used.nonzero().squeeze(1)

    alike = len(prompt.unique()) == 1
    sees_prompt = columns < (own_prompt[:1] if alike else own_prompt)[:, None]
    sees_past = response_columns <= response_columns[:, None]
    shape = (len(sees_prompt), len(response_columns), -1)
    allowed = torch.cat(
        [sees_prompt[:, None].expand(shape), sees_past.expand(len(sees_prompt), -1, -1)], dim=2
    )
    return PackedLayout(
        rows=rows_of_cells[token_cells],
        columns=columns_of_cells[token_cells],
        cells=cells,
        token_cells=token_cells,
        last_prompt_tokens=last,
        response_cells=response_cells,
        prompt_of_row=prompt_of_row,
        prompt_width=len(columns),
        allowed=allowed[:, None],
    )


def _starts(
    groups: list[list[int]], prompt: Int[Tensor, " prompts"], response: Int[Tensor, " rows"]
) -> tuple[Int[Tensor, " rows"], Int[Tensor, " prompts"], Int[Tensor, " rows"]]:
    """Return the prompt's number of each row, and where prompts and responses start in the line."""
    lengths, sizes = prompt.tolist(), response.tolist()
    prompt_of_row, response_starts = [0] * len(sizes), [0] * len(sizes)
    starts, at = [], 0
    for number, group in enumerate(groups):
        starts.append(at)
        at += lengths[number]
        for row in group:
            prompt_of_row[row], response_starts[row] = number, at
            at += sizes[row]
    numbers = (prompt_of_row, starts, response_starts)
    return tuple(torch.tensor(x, device=prompt.device) for x in numbers)  # type: ignore[return-value]


def packed_layout(sequences: Sequences) -> PackedLayout | None:
    """Return the layout of a microbatch whose rows are packed, None where they are not."""
    groups = packed_groups(sequences)
    if groups is None:
        return None
    lengths = sequences.prompt_lengths.tolist(), sequences.response_lengths.tolist()
    return pack(groups, *lengths).to(sequences.ids.device)
