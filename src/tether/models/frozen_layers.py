"""Frozen layers: which weights learn, and copies that share what does not.

A range of layers learns (`model.learn_layers`), with the last norm and, where it is not tied to the
embedding, the output head. What lies below the range never moves, so its states are computed once
per iteration (`Policy.with_lower_states`) for actor, reference, critic and every epoch: the "hydra"
models of trlx. Layers above a range are frozen, but gradients flow through them.
"""

import copy

from torch import nn
from transformers import PreTrainedModel

from tether.errors import UserError
from tether.models.forward import (
    AbsentLayers,
    layer_stack,
    output_head,
    resumes_above,
    trunk,
    weights_above_layers,
)


def freeze_other_layers(model: PreTrainedModel, learn_layers: int | str, name: str) -> range:
    """Let only these layers, the last norm and an untied head learn; return the layers' numbers.

    `model` may be a trunk without a head. `name` is what an error calls it.
    """
    network = trunk(model)
    stack = _stack_of(model, name)
    layers = layer_range(learn_layers, len(stack), name)
    last_norm = weights_above_layers(network)
    model.requires_grad_(False)
    learning = [w for number in layers for w in stack[number].parameters()]
    for weight in (*learning, *last_norm, *_untied_head(model)):
        weight.requires_grad_()
    return layers


def layer_range(learn_layers: int | str, num_layers: int, name: str) -> range:
    """Return the numbers of the layers that learn, from 0; refuse more than there are."""
    if isinstance(learn_layers, int):
        first, last = num_layers - learn_layers, num_layers - 1
    else:
        first, last = map(int, learn_layers.split(".."))
    if first < 0 or last >= num_layers:
        raise UserError(
            f"model.learn_layers is {learn_layers}, but {name} has {num_layers} layers, 0 to "
            f"{num_layers - 1}; write at most {num_layers}, or a range within these."
        )
    return range(first, last + 1)


def refuse_unsplittable(model: PreTrainedModel, lower_layers: int, name: str) -> None:
    """Refuse an architecture that cannot start from the states of its lower layers."""
    if lower_layers and not resumes_above(trunk(model), lower_layers):
        raise UserError(
            f"model.learn_layers does not go with {name}: a {model.config.model_type} model cannot "
            f"be started between two layers here; leave it out, or use model.lora."
        )


def upper_copy(model: PreTrainedModel, lower_layers: int) -> PreTrainedModel:
    """Copy what learns; share frozen weights with the copy, and leave out the lower layers.

    The copy reads `Sequences.lower_states`; with 0 lower layers it is whole.
    """
    memo: dict[int, object] = {id(w): w for w in model.parameters() if not w.requires_grad}
    if lower_layers:
        absent, stack = AbsentLayers(), layer_stack(model)
        memo |= {id(stack[number]): absent for number in range(lower_layers)}
        memo[id(model.get_input_embeddings())] = absent
    return copy.deepcopy(model, memo)


def lacks_lower_layers(network: nn.Module) -> bool:
    """Tell whether it is the trunk of an `upper_copy` that needs lower states."""
    return any(isinstance(layer, AbsentLayers) for layer in layer_stack(network))


def _stack_of(model: PreTrainedModel, name: str) -> nn.ModuleList:
    try:
        return layer_stack(trunk(model))
    except LookupError:
        raise UserError(
            f"model.learn_layers does not go with {name}, which has no layers."
        ) from None


def _untied_head(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the head's weights; none for a trunk, or if they are also the embedding."""
    if trunk(model) is model or output_head(model) is None:
        return []
    tied = {id(weight) for weight in trunk(model).parameters()}
    weights = list(output_head(model).parameters())
    return [] if any(id(weight) in tied for weight in weights) else weights
