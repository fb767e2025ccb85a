"""A module's weights by name: those that training moves, and all that a checkpoint restores."""

from collections.abc import Mapping

from torch import Tensor, nn

from tether.dist.dtensor import copy_from_full


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights that training moves, by name; tied ones once."""
    return {name: weight for name, weight in module.named_parameters() if weight.requires_grad}


def load_trainable_parameters(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy back what `trainable_parameters` returned; other weights stay as they were loaded."""
    weights = trainable_parameters(module)
    if weights.keys() != tensors.keys():
        odd = min(weights.keys() ^ tensors.keys())
        raise RuntimeError(f"the weights that learn are others than those saved, such as {odd}")
    for name, weight in weights.items():
        copy_from_full(weight, tensors[name])


def plain_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name; tied ones once."""
    names = {name for name, _ in module.named_parameters()} | {n for n, _ in module.named_buffers()}
    return {name: tensor for name, tensor in module.state_dict().items() if name in names}


def load_weights(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy back what `plain_weights` returned."""
    weights = module.state_dict()
    for name, tensor in tensors.items():
        copy_from_full(weights[name], tensor)
