"""Worked examples with right answers, recomputed by the functions that train.

The right answers were worked out elsewhere, in float64, and are typed in here to six decimals or
more. Beside some of them stands what people often get instead: key `mistake_…` of `words`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tether.explain import recompute

TOLERANCE = 1e-6


@dataclass(frozen=True)
class Example:
    section: str  # `title_…` in words
    name: str  # `example_…` in words
    quantity: str
    compute: Callable[[], Sequence[float]]
    right: tuple[float, ...]
    mistake: str | None = None  # `mistake_…` in words

    def computed(self) -> list[float]:
        return [float(x) for x in self.compute()]

    def difference(self) -> float:
        """The largest of its numbers from the right answer; infinite where their count differs."""
        computed = self.computed()
        if len(computed) != len(self.right):
            return math.inf
        return max(abs(a - b) for a, b in zip(computed, self.right, strict=True))


# Nats and bits of KL(P‖Q), then of KL(Q‖P).
KL_ANSWERS = {
    "die": (0.242586, 0.349978, 0.293893, 0.423998),
    "coin": (0.025732, 0.037124, 0.028168, 0.040637),
    "tokens": (0.083465, 0.120414, 0.088015, 0.126979),
    "tokens_again": (0.029149, 0.042053, 0.026812, 0.038682),
    "weather": (0.085123, 0.122806, 0.092033, 0.132775),
    "forecaster": (0.044403, 0.064060, 0.036690, 0.052933),
    "mild": (0.033493, 0.048320, 0.029145, 0.042048),
    "wild": (0.398898, 0.575489, 0.340684, 0.491504),
    "grades": (0.034754, 0.050139, 0.031334, 0.045205),
}
KL_MISTAKES = ("coin", "tokens_again", "weather", "forecaster", "mild", "wild", "grades")


def _kl(name: str) -> Example:
    mistake = name if name in KL_MISTAKES else None
    answers = KL_ANSWERS[name]
    return Example(
        "kl", name, "KL(P‖Q), KL(Q‖P)", lambda: recompute.kl_both_ways(name), answers, mistake
    )


def _of_tokens(
    quantity: str,
    compute: Callable[[], Sequence[float]],
    right: tuple[float, ...],
    mistake: str | None = None,
) -> Example:
    return Example("prompt", "answer", quantity, compute, right, mistake)


OBJECTIVE = "L^CLIP, ∂L/∂log π"
ONE_LAMBDA = (0.1786, 0.1489, 0.1191, 0.0994, 0.0796, 0.0499)
USUAL_LAMBDA = (0.155568, 0.132492, 0.108097, 0.093050, 0.077105, 0.049900)

EXAMPLES: list[Example] = [
    *map(_kl, KL_ANSWERS),
    Example(
        "code",
        "weather",
        "H(P), H(P, Q)",
        recompute.weather_code_lengths,
        (1.156780, 1.279586),
        "code",
    ),
    Example(
        "sampled",
        "tokens_again",
        "k1",
        recompute.sampled_k1,
        (0.154151, -0.405465, 0.0, 0.154151),
        "direction",
    ),
    Example(
        "sampled",
        "tokens_again",
        "mean k1",
        lambda: [math.fsum(recompute.sampled_k1()) / 4],
        (-0.024291,),
        "direction",
    ),
    _of_tokens(
        "π_old",
        recompute.old_probabilities,
        (0.886920, 0.923116, 0.860708, 0.904837, 0.951229, 0.980199),
    ),
    _of_tokens("k1", recompute.k1_tokens, (0.03, 0.02, 0.03, 0.02, 0.03, 0.01)),
    _of_tokens(
        "k3",
        recompute.k3_tokens,
        (0.00044553, 0.00019867, 0.00044553, 0.00019867, 0.00044553, 0.00004983),
    ),
    _of_tokens(
        "token_level_rewards",
        recompute.token_level_rewards,
        (-0.0003, -0.0002, -0.0003, -0.0002, -0.0003, 0.9999),
    ),
    _of_tokens(
        "δ",
        lambda: recompute.advantages(0.0),
        (0.0297, 0.0298, 0.0197, 0.0198, 0.0297, 0.0499),
    ),
    _of_tokens("advantages, λ = 1", lambda: recompute.advantages(1.0), ONE_LAMBDA, "illustrative"),
    _of_tokens(
        "returns, λ = 1",
        lambda: recompute.returns(1.0),
        (0.9986, 0.9989, 0.9991, 0.9994, 0.9996, 0.9999),
    ),
    _of_tokens(
        "advantages, λ = 0.95", lambda: recompute.advantages(0.95), USUAL_LAMBDA, "illustrative"
    ),
    _of_tokens(
        "returns, λ = 0.95",
        lambda: recompute.returns(0.95),
        (0.975568, 0.982492, 0.988097, 0.993050, 0.997105, 0.999900),
    ),
    Example("prompt_sums", "answer", "Σ k1, mean k1", recompute.k1_sum_and_mean, (0.14, 0.023333)),
    Example(
        "prompt_sums",
        "illustrative",
        "L^CPI, L^CLIP, r = 1",
        recompute.surrogates,
        (0.073333, 0.073333),
    ),
    Example("clip", "rise", "r, r·A", lambda: recompute.unclipped(2, 1), (2.0, 2.0)),
    Example("clip", "rise", OBJECTIVE, lambda: recompute.clipped(2, 1), (1.2, 0.0)),
    Example(
        "clip",
        "rise_reward",
        "k1, reward",
        lambda: recompute.kl_and_reward(0.3, 0.3, beta=0.1),
        (0.0, 1.0),
        "scaled",
    ),
    Example(
        "clip",
        "next_rollout",
        "k1, reward",
        lambda: recompute.kl_and_reward(0.6, 0.3, beta=0.1),
        (0.693147, 0.930685),
    ),
    Example("clip", "fall", OBJECTIVE, lambda: recompute.clipped(0.5, -1), (-0.8, 0.0), "max"),
    Example(
        "clip", "wrong_way", OBJECTIVE, lambda: recompute.clipped(1.5, -1), (-1.5, -1.5), "max"
    ),
    Example("clip", "dual", OBJECTIVE, lambda: recompute.clipped(5, -1, bound=3.0), (-3.0, 0.0)),
    Example(
        "surprisal",
        "million",
        "bits",
        lambda: recompute.surprisal_bits(1e-6),
        (19.931569,),
        "million",
    ),
    Example(
        "surprisal", "three_tenths", "bits", lambda: recompute.surprisal_bits(0.3), (1.736966,)
    ),
    Example("surprisal", "half", "bits", lambda: recompute.surprisal_bits(0.5), (1.0,)),
    Example(
        "surprisal",
        "log_ratio",
        "nats, bits",
        lambda: recompute.log_ratio_in_nats_and_bits(0.5, 0.3),
        (0.510826, 0.736966),
        "units",
    ),
    Example("counting", "steps", "steps", lambda: recompute.optimizer_steps(1024, 64, 4), (64.0,)),
]
