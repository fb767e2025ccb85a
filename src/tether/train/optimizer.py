"""Adam with gradient clipping, and the learning-rate schedule."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from tether.dist.reduce import total_gradients


def schedule_factor(schedule: str, iteration: int, iterations: int) -> float:
    """What the learning rate is multiplied by in this iteration."""
    progress = iteration / iterations
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - progress
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
    raise ValueError(f"unknown schedule {schedule!r}")


class Optimizer:
    """A step that is clipped, and dropped whole when the gradient is not finite."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        max_grad_norm: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        self.parameters = list(parameters)
        self.lr = lr
        self.max_grad_norm = max_grad_norm
        self.adam = torch.optim.AdamW(
            self.parameters, lr=lr, betas=betas, weight_decay=weight_decay, fused=True
        )

    def set_factor(self, factor: float) -> None:
        for group in self.adam.param_groups:
            group["lr"] = self.lr * factor

    def state(self) -> dict[str, Tensor]:
        """Adam's moments and step counts by the parameter's place in the list."""
        return {
            f"{i}.{name}": tensor
            for i, parameter in enumerate(self.parameters)
            for name, tensor in self.adam.state[parameter].items()
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        for key, tensor in tensors.items():
            place, _, name = key.partition(".")
            parameter = self.parameters[int(place)]
            self.adam.state[parameter][name] = tensor.to(parameter.device)

    def drop(self) -> None:
        """Forget the gradients without a step."""
        self.adam.zero_grad(set_to_none=True)

    def step(self) -> Tensor:
        """Apply the gradients and clear them; the norm before clipping, finite or not."""
        total_gradients(self.parameters)
        norm = nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        if bool(norm.isfinite()):
            self.adam.step()
        self.drop()
        return norm
