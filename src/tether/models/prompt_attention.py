"""Attention over packed rows: each prompt once, each response over its prompt and its own past."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig

from tether.data.shared_prompts import PackedLayout

KEYWORD = "packed_prompts"  # by which a layer hands `PackedPrompts` on to its attention

# Takes queries, keys, values (all rows x heads x length x width), a mask or None for a causal one,
# and a scale; returns rows x heads x length x width.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, float | None], Tensor]


class PackedPrompts:
    """The layout of a forward pass, and the masks that its layers share."""

    def __init__(self, layout: PackedLayout, config: PreTrainedConfig) -> None:
        self.layout, self.config = layout, config
        self._masks: dict[torch.dtype, Tensor] = {}

    @contextmanager
    def attention(self) -> Iterator[None]:
        """Let the layers attend by `packed_attention`, also when they are computed again."""
        usual = self.config._attn_implementation
        if usual == "sdpa":
            self.config._attn_implementation = PACKED
        try:
            yield
        finally:
            self.config._attn_implementation = usual

    def mask(self, float_type: torch.dtype) -> Float[Tensor, "#rows 1 response length"]:
        """Return 0 where a response token sees a column, and minus infinity elsewhere."""
        if float_type not in self._masks:
            allowed = self.layout.allowed
            zeros = torch.zeros(allowed.shape, dtype=float_type, device=allowed.device)
            self._masks[float_type] = zeros.masked_fill_(~allowed, -torch.inf)
        return self._masks[float_type]

    def attend(
        self,
        query: Float[Tensor, "1 heads tokens width"],
        key: Float[Tensor, "1 groups tokens width"],
        value: Float[Tensor, "1 groups tokens width"],
        scale: float | None,
        attend: Attend,
    ) -> Float[Tensor, "1 tokens heads width"]:
        """Attend in two rectangles: prompts causally; responses to their prompt and their past."""
        layout = self.layout
        prompts, rows = len(layout.last_prompt_tokens), len(layout.prompt_of_row)
        prompt_cells = prompts * layout.prompt_width

        def rectangles(x: Tensor) -> tuple[Tensor, Tensor]:
            cells = cast(Tensor, _ToCells.apply(x[0].transpose(0, 1), layout))
            ours, theirs = cells.split([prompt_cells, len(cells) - prompt_cells])
            return ours.unflatten(0, (prompts, -1)), theirs.unflatten(0, (rows, -1))

        def with_prompt(ours: Tensor, theirs: Tensor) -> Tensor:
            repeated = cast(Tensor, _ToRows.apply(ours, layout.prompt_of_row))
            return torch.cat([repeated, theirs], dim=1).transpose(1, 2)

        (q, q_response), (k, k_response), (v, v_response) = map(rectangles, (query, key, value))
        found = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, scale)
        found_response = attend(
            q_response.transpose(1, 2),
            with_prompt(k, k_response),
            with_prompt(v, v_response),
            self.mask(query.dtype),
            scale,
        )
        cells = torch.cat([x.transpose(1, 2).flatten(0, 1) for x in (found, found_response)])
        return cast(Tensor, _ToTokens.apply(cells, layout))[None]

    def states_before_tokens(
        self, hidden: Float[Tensor, "1 tokens width"]
    ) -> Float[Tensor, "rows states width"]:
        """Return the states before each response token and after the last, given the line's."""
        layout = self.layout
        shape = (*layout.response_cells.shape, hidden.shape[2])
        before = hidden[0].index_select(0, layout.last_prompt_tokens)
        after = hidden[0].index_select(0, layout.response_cells.flatten()).view(shape)
        first = cast(Tensor, _ToRows.apply(before, layout.prompt_of_row))
        return torch.cat([first[:, None], after], dim=1)


class _ToCells(torch.autograd.Function):
    """Copy the line's tokens into the rectangles' cells.

    A token has one cell that counts, so the backward pass copies as well: nothing is added up in an
    order that might change, and no index is visited one by one.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, layout: PackedLayout) -> Tensor:
        ctx.layout = layout
        return tokens.index_select(0, layout.cells)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        (by_cells,) = grad_outputs
        return by_cells.index_select(0, ctx.layout.token_cells), None


class _ToTokens(torch.autograd.Function):
    """Copy the cells that count back into the line; a padded cell has no gradient."""

    @staticmethod
    def forward(ctx: Any, cells: Tensor, layout: PackedLayout) -> Tensor:
        ctx.layout, ctx.shape = layout, cells.shape
        return cells.index_select(0, layout.token_cells)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        (by_tokens,) = grad_outputs
        by_cells = by_tokens.new_zeros(ctx.shape)
        return by_cells.index_copy_(0, ctx.layout.token_cells, by_tokens), None


class _ToRows(torch.autograd.Function):
    """Repeat a prompt's numbers for each of its rows.

    The backward pass adds up by a matrix product: in the same order every time, on a GPU too.
    """

    @staticmethod
    def forward(ctx: Any, prompts: Tensor, prompt_of_row: Tensor) -> Tensor:
        ctx.prompts = len(prompts)
        ctx.save_for_backward(prompt_of_row)
        return prompts.index_select(0, prompt_of_row)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        (by_rows,) = grad_outputs
        (prompt_of_row,) = ctx.saved_tensors
        numbers = torch.arange(ctx.prompts, device=by_rows.device)
        belongs = (numbers[:, None] == prompt_of_row).to(by_rows.dtype)
        return (belongs @ by_rows.flatten(1)).view(-1, *by_rows.shape[1:]), None


def packed_attention(
    module: nn.Module,
    query: Float[Tensor, "1 heads tokens width"],
    key: Float[Tensor, "1 groups tokens width"],
    value: Float[Tensor, "1 groups tokens width"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packed_prompts: PackedPrompts | None = None,
    **ignored: object,
) -> tuple[Float[Tensor, "1 tokens heads width"], None]:
    """Attend as transformers' `sdpa` would, had each row been read alone."""
    assert packed_prompts is not None
    return packed_prompts.attend(query, key, value, scaling, _attend), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    grouped = key.shape[1] < query.shape[1]
    if grouped and mask is not None and query.device.type != "cpu":
        # With a mask, other devices' fused kernels want as many key heads as query heads.
        ways = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(ways, dim=1) for x in (key, value))
        grouped = False
    return scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


PACKED = "tether_packed_prompts"
AttentionInterface.register(PACKED, packed_attention)
