"""Mixed precision: products in bfloat16, whatever format weights are stored in.

`compute_in` gives a model layers that multiply in bfloat16: feed-forward layers, the projection
after attention, the output head. Attention itself (queries, keys, values and what is computed from
them) is in float32, and so are the sum that layers add to, norms, everything after the head, the
weights and their gradients. With attention in bfloat16 too, gradients of SmolLM2-135M had a cosine
of 0.9983 with exact ones; without, 0.9991.

Where the processor has no instructions for it, a product is computed in float32 from operands
rounded to bfloat16, and its result is rounded: the same numbers but for the order of float32 sums.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tether.models.cpu_matmul import OneDnnLinear, matmul_transposed
from tether.support.processor import hide_unusable_amx, multiplies_bfloat16

Product = Callable[[Float[Tensor, "*rows width"]], Float[Tensor, "*rows columns"]]

hide_unusable_amx()
NATIVE = multiplies_bfloat16()  # of a CPU; GPUs do
AFTER_ATTENTION = ("o_proj", "out_proj", "c_proj", "dense")  # last layers of attention modules


def compute_in(model: PreTrainedModel, compute: str) -> None:
    """Let the model's trunk and output head compute in this format from now on; weights stay.

    Heads for scores and values are left alone: theirs is a single number, not to be rounded. To be
    called again once layers were added.
    """
    if compute != "bfloat16":
        return
    trunk = cast(nn.Module, model.base_model)
    embedding = cast(nn.Module, model.get_input_embeddings())
    if computed_in(trunk) is None and _stored_in_bfloat16(embedding):
        embedding.register_forward_hook(_widen)
    vars(model)["computed_in"] = vars(trunk)["computed_in"] = torch.bfloat16
    exact = _attention_layers(trunk)
    for module in (*trunk.modules(), cast(nn.Module, model.get_output_embeddings())):
        if type(module) in (nn.Linear, OneDnnLinear):
            module.__class__ = WideLinear if module in exact else Bfloat16Linear
        elif type(module) is Conv1D:
            module.__class__ = WideConv1D if module in exact else Bfloat16Conv1D
        elif type(module) is nn.LayerNorm:
            module.__class__ = WideLayerNorm


def computed_in(network: nn.Module) -> torch.dtype | None:
    """Return the format of the network's products where it is not that of its weights."""
    return vars(network).get("computed_in")


def attention_type(model: PreTrainedModel) -> torch.dtype:
    """Return the format of the model's keys and values."""
    return model.dtype if computed_in(model) is None else torch.float32


def compute_type(model: PreTrainedModel) -> torch.dtype:
    """Return the format of the model's products."""
    return computed_in(model) or model.dtype


def operand(head: nn.Module, states: Tensor) -> Tensor:
    """Return the states in the format in which the head multiplies them."""
    return states.to(torch.bfloat16) if isinstance(head, Bfloat16Linear) else states


def multiply_by(
    b: Float[Tensor, "columns width"],
    bias: Float[Tensor, " columns"] | None,
    float_type: torch.dtype,
) -> Product:
    """Return the map a -> a b^T + bias with operands and result in this format, no gradients."""
    if float_type != torch.bfloat16:
        return partial(matmul_transposed, b=b, bias=bias)
    b, bias = b.to(float_type), None if bias is None else bias.to(float_type)
    if uses_instructions(b):
        return partial(linear, weight=b, bias=bias)
    wide, wide_bias = b.float(), None if bias is None else bias.float()

    def rounded(a: Tensor) -> Tensor:
        return matmul_transposed(a.float(), wide, wide_bias).to(float_type)

    return rounded


def uses_instructions(b: Tensor) -> bool:
    """Tell whether the device multiplies bfloat16 numbers as such."""
    return NATIVE or planned_device(b.device) != "cpu"


def planned_device(device: torch.device) -> str:
    """Return the kind of a device; that of tensors without numbers is the planned one."""
    return _planned_for if device.type == "meta" else device.type


@contextmanager
def planning_for(device: str) -> Iterator[None]:
    """Let tensors without numbers take the memory that they take on this kind of device."""
    global _planned_for
    before, _planned_for = _planned_for, device
    try:
        yield
    finally:
        _planned_for = before


_planned_for = "cpu"


class Bfloat16Matmul(torch.autograd.Function):
    """a b^T + bias in bfloat16; the gradients of b and bias have the formats of b and bias.

    What is kept for the backward pass is a in bfloat16 and b as it is stored: b is rounded again
    there, as a second copy of all weights would take more memory than that takes time.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        """Return a b^T + bias."""
        a = a.to(torch.bfloat16)
        ctx.save_for_backward(a, b)
        ctx.bias_type = None if bias is None else bias.dtype
        return multiply_by(b, bias, torch.bfloat16)(a)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator is untyped)
        ctx: Any, *grad_outputs: Any
    ) -> tuple[Any, ...]:
        """Return the gradients of a, b and bias."""
        (gradient,) = grad_outputs
        a, b = ctx.saved_tensors
        needs_a, needs_b, needs_bias = ctx.needs_input_grad
        flat, multiply = gradient.flatten(0, -2), partial(multiply_by, float_type=torch.bfloat16)
        return (
            multiply(b.T, None)(gradient) if needs_a else None,
            multiply(a.flatten(0, -2).T, None)(flat.T).to(b.dtype) if needs_b else None,
            flat.sum(dim=0, dtype=ctx.bias_type) if needs_bias else None,
        )


class Bfloat16Linear(nn.Linear):
    """An nn.Linear whose product is computed in bfloat16, whatever its weights are stored in."""

    def forward(self, input: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows columns"]:
        """Return input weight^T + bias in bfloat16."""
        return cast(Tensor, Bfloat16Matmul.apply(input, self.weight, self.bias))


class Bfloat16Conv1D(Conv1D):
    """GPT-2's linear layer, with its weight transposed, in bfloat16."""

    def forward(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows columns"]:
        """Return x weight + bias in bfloat16."""
        return cast(Tensor, Bfloat16Matmul.apply(x, self.weight.T, self.bias))


class WideLinear(OneDnnLinear):
    """A linear layer in float32, also where its weights are stored or gathered in bfloat16."""

    def forward(self, input: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows columns"]:
        """Return input weight^T + bias."""
        if self.weight.dtype == torch.float32:
            return super().forward(input.float())
        return linear(input.float(), self.weight.float(), _float(self.bias))


class WideConv1D(Conv1D):
    """GPT-2's linear layer in float32, also where its weights are bfloat16."""

    def forward(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows columns"]:
        """Return x weight + bias."""
        return linear(x.float(), self.weight.float().T, _float(self.bias))


class WideLayerNorm(nn.LayerNorm):
    """An nn.LayerNorm in float32, also where its weights are bfloat16."""

    def forward(self, input: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        """Return the normalised input."""
        weight, bias = _float(self.weight), _float(self.bias)
        return layer_norm(input.float(), self.normalized_shape, weight, bias, self.eps)


def names_read_rounded(model: nn.Module) -> set[str]:
    """Return the names of the weights that nothing but products in bfloat16 reads: rounded to it
    beforehand, they give the same numbers."""
    coarse: set[int] = set()
    exact: set[int] = set()
    for module in model.modules():
        own = coarse if isinstance(module, Bfloat16Linear | Bfloat16Conv1D) else exact
        own.update(id(weight) for weight in module.parameters(recurse=False))
    only = coarse - exact
    return {name for name, weight in model.named_parameters() if id(weight) in only}


def _attention_layers(trunk: nn.Module) -> set[nn.Module]:
    """Return what makes queries, keys and values: all of attention but its last layer."""
    parts = [m for m in trunk.modules() if "Attention" in type(m).__name__]
    named = [item for part in parts for item in part.named_modules()]
    return {module for name, module in named if not set(name.split(".")) & set(AFTER_ATTENTION)}


def _stored_in_bfloat16(module: nn.Module) -> bool:
    return any(weight.dtype == torch.bfloat16 for weight in module.parameters())


def _widen(module: nn.Module, inputs: object, states: Tensor) -> Tensor:
    """Let layers add to a sum in float32 where the embedding is stored in bfloat16."""
    return states.float()


def _float(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.float()
