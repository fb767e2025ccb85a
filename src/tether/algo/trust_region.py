"""TRPO's step on flat vectors: conjugate gradient, step length, line search.

maximise g.x subject to x.F x / 2 <= delta, where F is the Fisher matrix: the Hessian of
KL(pi_old || pi_new) at pi_old. F is only ever seen through products with a vector.

Schulman et al. 2015 (1502.05477), section 6 and appendix C.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

Product = Callable[[Float[Tensor, " n"]], Float[Tensor, " n"]]


def conjugate_gradient(
    product: Product, target: Float[Tensor, " n"], iterations: int, tolerance: float = 1e-10
) -> Float[Tensor, " n"]:
    """Solve product(x) = target from x = 0.

    Stops when the squared residual has fallen to `tolerance` times the target's. Hestenes and
    Stiefel 1952.
    """
    x = torch.zeros_like(target)
    residual, direction = target.clone(), target.clone()
    squared = residual @ residual
    goal = tolerance * squared
    for _ in range(iterations):
        image = product(direction)
        curvature = direction @ image
        if not curvature > 0:  # rounding has taken over: x gets no better
            break
        step = squared / curvature
        x = x + step * direction
        residual = residual - step * image
        new_squared = residual @ residual
        if new_squared <= goal:
            break
        direction = residual + (new_squared / squared) * direction
        squared = new_squared
    return x


def longest_step(
    direction: Float[Tensor, " n"], image: Float[Tensor, " n"], max_kl: float
) -> Float[Tensor, " n"]:
    """Scale the direction x so that its quadratic KL, x.F x / 2, is `max_kl`; `image` is F x."""
    return direction * torch.sqrt(2 * max_kl / (direction @ image))


class LineSearchResult(NamedTuple):
    """Where a line search ended: the share of the full step taken (0 = refused), after `tries`."""

    share: float
    tries: int


def line_search(
    measure: Callable[[float], tuple[float, float]], max_kl: float, backtracks: int, ratio: float
) -> LineSearchResult:
    """Return the longest share of the step with KL <= max_kl and a better surrogate than at 0.

    `measure(share)` returns (surrogate, KL) there; share 0 is measured by the same code.
    """
    surrogate_before, _ = measure(0.0)
    for attempt in range(backtracks + 1):
        share = ratio**attempt
        surrogate, kl = measure(share)
        if kl <= max_kl and surrogate > surrogate_before:  # False for NaN
            return LineSearchResult(share, attempt + 1)
    return LineSearchResult(0.0, backtracks + 1)
