"""Mean scores over held-out prompts, with 95% intervals: of one response per prompt, or several."""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tether.algo.pass_at_k import best_of_k, majority_of_k
from tether.types import Scores

Z95 = 1.959964  # the standard normal's 97.5% point


@dataclass(frozen=True)
class Interval:
    """A number with its 95% interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of_mean(cls, values: Sequence[float]) -> "Interval":
        """Return the mean of independent values; of fewer than two, without bounds."""
        mean = math.fsum(values) / len(values)
        if len(values) < 2:
            return cls(mean, -math.inf, math.inf)
        variance = math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1)
        half = Z95 * math.sqrt(variance / len(values))
        return cls(mean, mean - half, mean + half)

    def exp(self) -> "Interval":
        return Interval(*(math.exp(x) for x in (self.mean, self.low, self.high)))


@dataclass(frozen=True)
class Estimate:
    """A mean score with its 95% interval."""

    mean: float
    low: float
    high: float
    count: int  # prompts
    binary: bool  # every score was 0 or 1, so the mean is a share

    @property
    def has_interval(self) -> bool:
        """Whether the interval has bounds: one score that is not 0 or 1 has none."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Estimate":
        """Return the estimate of a line. Infinite bounds are null there: JSON has no infinity."""
        unbounded = {"low": -math.inf, "high": math.inf}
        bounds = {name: record[name] for name in unbounded if record[name] is not None}
        found = cls(**{**record, **unbounded, **bounds})
        if not isinstance(found.mean, float | int):
            raise TypeError("the mean is not a number")
        return found

    def __str__(self) -> str:
        """Return the mean with its interval: of 0/1 scores as percentages."""
        low, mean, high = (
            f"{x:.1%}" if self.binary else f"{x:.3f}" for x in (self.low, self.mean, self.high)
        )
        return f"{mean} ({low} – {high})" if self.has_interval else mean

    def apart_from(self, other: "Estimate") -> bool:
        """Return whether the two intervals do not overlap."""
        return self.low > other.high or other.low > self.high


def estimate(scores: Scores, samples: int = 1) -> Estimate:
    """Return the mean score of rows, `samples` neighbours for each prompt.

    The interval is that of prompts: responses to one prompt are not independent.
    """
    groups = [values for values, _ in _by_prompt(scores, samples, None) if values]
    means = [math.fsum(values) / len(values) for values in groups]
    return _mean_of(means, _is_binary(groups), samples)


def estimates_at_k(
    scores: Scores, samples: int, answers: Sequence[Hashable | None] | None
) -> dict[str, Estimate]:
    """Return pass@k (best@k where scores are not 0 and 1) and, where the rows' answers are known,
    maj@k, for k of 1, 2, 4, … and all samples; nothing for one sample.

    A prompt with fewer than k scored responses is left out of that k.
    """
    if samples == 1:
        return {}
    groups = list(_by_prompt(scores, samples, answers))
    binary = _is_binary([values for values, _ in groups])
    ks = sorted({2**i for i in range(samples.bit_length()) if 2**i < samples} | {samples})
    voted = answers is not None and any(answer is not None for answer in answers)
    kinds: dict[str, Callable[[list[float], list[Hashable | None], int], float]] = {
        "pass" if binary else "best": lambda values, _, k: best_of_k(values, k),
        **({"maj": majority_of_k} if voted else {}),
    }
    found = {}
    for kind, value_of in kinds.items():
        for k in ks:
            numbers = [value_of(values, said, k) for values, said in groups if len(values) >= k]
            if numbers:
                found[f"{kind}@{k}"] = _mean_of(numbers, binary, samples // k)
    return found


def _by_prompt(
    scores: Scores, samples: int, answers: Sequence[Hashable | None] | None
) -> Iterator[tuple[list[float], list[Hashable | None]]]:
    """Yield the scores of each prompt's scored rows, and their answers."""
    values, scored = scores.values.double().tolist(), scores.scored.tolist()
    for start in range(0, len(values), samples):
        rows = [row for row in range(start, start + samples) if scored[row]]
        said = [None if answers is None else answers[row] for row in rows]
        yield [values[row] for row in rows], said


def _is_binary(groups: Sequence[Sequence[float]]) -> bool:
    return all(value in (0.0, 1.0) for values in groups for value in values)


def _mean_of(values: Sequence[float], binary: bool, draws: int) -> Estimate:
    """Return the mean of one value per prompt, each made of `draws` independent parts.

    Shares have Wilson's interval for an effective number of prompts, mean (1 - mean) over the
    variance of the values: the number of prompts for one draw, and up to `draws` times that where
    prompts differ less than draws do (the design effect of a clustered sample, Kish 1965). Other
    scores have the normal one.
    """
    if not values:
        return Estimate(0.0, 0.0, 0.0, count=0, binary=False)
    numbers, count = torch.tensor(values, dtype=torch.float64), len(values)
    mean = float(numbers.mean())
    if binary:
        # Where all passed, or none, how much prompts differ is not known.
        worth = min(draws, _draws_worth(numbers)) if 0 < mean < 1 else 1
        low, high = wilson(mean, worth * count)
    else:
        half = Z95 * float(numbers.std()) / math.sqrt(count) if count > 1 else math.inf
        low, high = mean - half, mean + half
    return Estimate(mean, low, high, count, binary)


def _draws_worth(values: Float[Tensor, " prompts"]) -> float:
    """Return how many draws of 0 or 1 a prompt's value is worth: 1 where it is one itself."""
    mean, variance = float(values.mean()), float(values.var(correction=0))
    return max(1.0, mean * (1 - mean) / variance) if variance > 0 else math.inf


def wilson(share: float, count: float | int) -> tuple[float, float]:
    """Return Wilson's score interval of a share (Wilson 1927); unlike the normal interval it stays
    inside 0 and 1."""
    scale = 1 + Z95**2 / count
    centre = share + Z95**2 / (2 * count)
    half = Z95 * math.sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)
