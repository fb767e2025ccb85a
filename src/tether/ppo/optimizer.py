"""Adam with gradient clipping, and the learning-rate schedule."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from tether.dist.collectives import all_reduce_gradients
from tether.dist.dtensor import as_dtensor, gradient_norm, local_parameter, local_shard, shard_like


def schedule_factor(schedule: str, iteration: int, iterations: int) -> float:
    """Return what the learning rate is multiplied by in this iteration, beside a warm-up."""
    progress = iteration / iterations
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - progress
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
    raise ValueError(f"unknown schedule {schedule!r}")


def warmup_factor(iteration: int, warmup_iterations: int) -> float:
    """Return the share of the learning rate in the role's `iteration`-th update, from 0.

    It rises linearly and is 1 from the last of `warmup_iterations` on.
    """
    return min(1.0, (iteration + 1) / warmup_iterations) if warmup_iterations else 1.0


class Optimizer:
    """AdamW with the gradient norm clipped; a step whose gradient is not finite is dropped."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        max_grad_norm: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        self.parameters = list(parameters)
        self.own = [local_parameter(parameter) for parameter in self.parameters]
        self.lr = lr
        self.max_grad_norm = max_grad_norm
        self.adam = torch.optim.AdamW(
            self.own, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True
        )

    def set_factor(self, factor: float) -> None:
        """Set the learning rate to `factor` times the configured one."""
        for group in self.adam.param_groups:
            group["lr"] = self.lr * factor

    def state(self) -> dict[str, Tensor]:
        """Return Adam's moments and step counts, by the parameter's index in the list."""
        return {
            f"{i}.{name}": as_dtensor(tensor, parameter)
            for i, (parameter, own) in enumerate(zip(self.parameters, self.own, strict=True))
            for name, tensor in self.adam.state[own].items()
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        for key, tensor in tensors.items():
            place, _, name = key.partition(".")
            parameter, own = self.parameters[int(place)], self.own[int(place)]
            self.adam.state[own][name] = shard_like(tensor, parameter).to(own.device)

    def reset(self) -> None:
        """Forget Adam's moments and the gradients, as before the first step."""
        self.adam.state.clear()
        self.drop()

    def drop(self) -> None:
        """Clear the gradients without a step."""
        for parameter in (*self.parameters, *self.own):
            parameter.grad = None

    def step(self) -> Tensor:
        """Apply the gradients and clear them. Return the norm before clipping, finite or not."""
        all_reduce_gradients(self.parameters)
        norm = gradient_norm(self.parameters)
        for parameter, own in zip(self.parameters, self.own, strict=True):
            own.grad = None if parameter.grad is None else local_shard(parameter.grad)
        nn.utils.clip_grads_with_norm_(self.own, self.max_grad_norm, norm)
        if bool(norm.isfinite()):
            self.adam.step()
        self.drop()
        return norm
