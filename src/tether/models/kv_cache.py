"""The sampler's key-value cache: allocated once, one slot per row, nothing concatenated.

Live rows occupy slots 0, 1, …; the tokens of each begin at column 0, and `lengths` says where they
end. So a decoding step attends to a view of the first slots and columns, and a row that ends costs
one copy: the last live row moves into its slot.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache

Keys = Float[Tensor, "rows heads tokens width"]
Store = Float[Tensor, "layers slots heads columns width"]


@dataclass(frozen=True)
class CacheWrite:
    """Where the keys and values of the forward pass under way belong."""

    sources: Int[Tensor, " slots"] | None  # each written slot's row of the batch; None: in order
    slots: Int[Tensor, " slots"]
    columns: Int[Tensor, "slots tokens"]
    # Slots and number of columns attended to. None: the tokens are the first of their rows and
    # attend to each other alone.
    attended: tuple[slice | Int[Tensor, " rows"], int] | None


class SlotCache(Cache):
    """Keys and values of `slots` rows of at most `capacity` tokens, for every layer."""

    def __init__(self, layers: int, slots: int, capacity: int, device: torch.device) -> None:
        super().__init__(layers=[])
        self.shape = layers, slots, capacity + 1  # the last column takes what padding writes
        self.spare = capacity
        self.device = device
        self.lengths = [0] * slots
        self.stores: tuple[Store, Store] | None = None  # keys and values, from the first write on
        self.cells: Int[Tensor, " cells"] | None = None  # of the pass under way, in every layer

    @property
    def float_type(self) -> torch.dtype:
        """Return the format of the keys and values written so far."""
        assert self.stores is not None, "nothing is written yet"
        return self.stores[0].dtype

    def start_rows(
        self, slots: Sequence[Sequence[int]], lengths: Sequence[int], width: int
    ) -> None:
        """Prepare for the first tokens of new rows; batch row i is written to all of slots[i]."""
        sources = [i for i, copies in enumerate(slots) for _ in copies]
        places = [slot for copies in slots for slot in copies]
        for source, slot in zip(sources, places, strict=True):
            self.lengths[slot] = lengths[source]
        columns = torch.arange(width, device=self.device).expand(len(places), -1)
        self._prepare(sources, places, columns, attended=None)

    def extend_rows(
        self, slots: Sequence[Sequence[int]], lengths: Sequence[int], width: int
    ) -> tuple[Int[Tensor, "rows tokens"], Bool[Tensor, "rows 1 tokens columns"]]:
        """Prepare for `lengths[i]` more tokens in each of slots[i], which hold the same tokens.

        Return the position of each token, and what it may attend to.
        """
        first = [copies[0] for copies in slots]
        start = self._tensor([self.lengths[slot] for slot in first])[:, None]
        steps = torch.arange(width, device=self.device)
        real = steps < self._tensor(lengths)[:, None]
        columns = torch.where(real, start + steps, self.spare)
        for copies, length in zip(slots, lengths, strict=True):
            for slot in copies:
                self.lengths[slot] += length
        attended = max(self.lengths[slot] for slot in first)
        sources = [i for i, copies in enumerate(slots) for _ in copies]
        in_order = first == list(range(len(first)))
        self._prepare(
            sources,
            [slot for copies in slots for slot in copies],
            columns if len(sources) == len(slots) else columns[self._tensor(sources)],
            attended=(slice(0, len(first)) if in_order else self._tensor(first), attended),
        )
        allowed = torch.arange(attended, device=self.device) <= columns[:, :, None]
        return columns.clamp(max=self.spare - 1), allowed[:, None]

    def compact(self, slots: Sequence[int]) -> list[int]:
        """Keep these slots and close the gaps; return which old slot each new one holds."""
        order = list(range(len(slots)))
        gaps = sorted(set(order) - set(slots))
        movers = [slot for slot in slots if slot >= len(slots)]
        for gap, mover in zip(gaps, movers, strict=True):
            order[gap] = mover
            self.lengths[gap] = self.lengths[mover]
        if movers and self.stores is not None:
            width = max(self.lengths[gap] for gap in gaps)
            to, of = self._tensor(gaps), self._tensor(movers)
            for store in self.stores:
                store[:, to, :, :width] = store[:, of, :, :width]
        return order

    # The interface of transformers' Cache.

    def update(
        self, key_states: Keys, value_states: Keys, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values; return all that the new tokens attend to."""
        if self.stores is None:
            self.stores = self._allocate(key_states), self._allocate(value_states)
        if self.cells is None:
            self.cells = self._cells(key_states.shape[1])
        write, found = self.write, []
        for whole, new in zip(self.stores, (key_states, value_states), strict=True):
            store = whole[layer_idx]
            copies = new if write.sources is None else new[write.sources]
            store.flatten(0, 2).index_copy_(0, self.cells, copies.flatten(0, 2))
            if write.attended is not None:
                slots, columns = write.attended
                new = store[slots, :, :columns]
            found.append(new)
        return found[0], found[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: transformers asks only before a row's first tokens."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return 0: transformers asks only before a row's first tokens."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the length and offset of a mask over a row's first tokens."""
        return query_length, 0

    def _prepare(
        self,
        sources: list[int],
        slots: list[int],
        columns: Int[Tensor, "slots tokens"],
        attended: tuple[slice | Int[Tensor, " rows"], int] | None,
    ) -> None:
        in_order = sources == list(range(len(sources)))
        self.write = CacheWrite(
            None if in_order else self._tensor(sources), self._tensor(slots), columns, attended
        )
        self.cells = None

    def _cells(self, heads: int) -> Int[Tensor, " cells"]:
        """Return where each written head and token lies in a layer's flattened keys."""
        write, columns = self.write, self.shape[2]
        pairs = write.slots[:, None] * heads + torch.arange(heads, device=self.device)
        return (pairs[:, :, None] * columns + write.columns[:, None]).flatten()

    def _allocate(self, new: Keys) -> Store:
        layers, slots, columns = self.shape
        # Zeros, as a cell never written is masked by adding -inf, and NaN + -inf is NaN.
        return new.new_zeros(layers, slots, new.shape[1], columns, new.shape[3])

    def _tensor(self, numbers: Sequence[int]) -> Int[Tensor, " numbers"]:
        return torch.tensor(numbers, device=self.device)
