"""How often a reward model is right about a pair, and whether it is as sure as it should be."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

BINS = 10  # of confidence, between a coin's 0.5 and 1


@dataclass(frozen=True)
class Bin:
    """Pairs that the model was about equally sure of."""

    confidence: float  # mean predicted probability of the side it prefers
    accuracy: float  # how often that side was the chosen one
    count: int


@dataclass(frozen=True)
class Reliability:
    accuracy: float
    calibration_error: float  # expected: |confidence - accuracy| over bins, weighted by count
    bins: list[Bin]


def reliability(chosen: Float[Tensor, " pairs"], rejected: Float[Tensor, " pairs"]) -> Reliability:
    """A tie is half right, at a confidence of 0.5."""
    difference = (chosen - rejected).double()
    confidence = torch.sigmoid(difference.abs())
    right = (difference > 0).double() + 0.5 * (difference == 0).double()
    places = ((confidence - 0.5) * 2 * BINS).long().clamp(max=BINS - 1)
    bins = [
        Bin(float(confidence[inside].mean()), float(right[inside].mean()), int(inside.sum()))
        for inside in (places == place for place in range(BINS))
        if bool(inside.any())
    ]
    gaps = sum(one.count * abs(one.confidence - one.accuracy) for one in bins)
    return Reliability(float(right.mean()), gaps / len(difference), bins)
