"""Worked examples with right answers, recomputed by the functions that train.

The right answers were computed independently, in float64, and are typed in here to six decimals or
more. Most have a common wrong answer beside them: key `mistake_…` of `example_words`. Where an
explanation shows a number that no formula gives, the example has what the formula gives.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tether.explain import example_sums

TOLERANCE = 1e-6


@dataclass(frozen=True)
class Example:
    """One computation with its right answer; its texts are keys of `example_words`."""

    id: str
    section: str  # key `title_…`
    name: str  # key `example_…`
    quantity: str  # key `of_…`
    compute: Callable[[], Sequence[float]]
    right: tuple[float, ...]
    mistake: str | None = None  # key `mistake_…`

    def computed(self) -> list[float]:
        """Compute the numbers anew."""
        return [float(x) for x in self.compute()]

    def difference(self) -> float:
        """Return the largest absolute error; infinite where the number of answers differs."""
        computed = self.computed()
        if len(computed) != len(self.right):
            return math.inf
        pairs = zip(computed, self.right, strict=True)
        return max(0.0 if a == b else abs(a - b) for a, b in pairs)


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
    "kept": (0.0, 0.0, 0.0, 0.0),
    "turned": (1.757780, 2.535940, 1.757780, 2.535940),
    "ruled_out": (math.inf, math.inf, 0.693147, 1.0),
}
ONE_LAMBDA = (0.1786, 0.1489, 0.1191, 0.0994, 0.0796, 0.0499)
USUAL_LAMBDA = (0.155568, 0.132492, 0.108097, 0.093050, 0.077105, 0.049900)


def _kl(name: str) -> Example:
    answers = KL_ANSWERS[name]
    return Example(
        f"kl-{name.replace('_', '-')}",
        *("kl", name, "both_ways"),
        lambda: example_sums.kl_both_ways(name),
        answers,
        name,
    )


def _terms(name: str, right: tuple[float, ...], mistake: str) -> Example:
    return Example(
        f"terms-{name.replace('_', '-')}",
        *("terms", name, "terms"),
        lambda: example_sums.kl_terms(name),
        right,
        mistake,
    )


def _surprisal(name: str, p: float, right: float, mistake: str | None = None) -> Example:
    return Example(
        f"surprisal-{name.replace('_', '-')}",
        *("surprisal", name, "bits"),
        lambda: example_sums.surprisal_bits(p),
        (right,),
        mistake,
    )


def _clip(
    name: str, ratio: float, advantage: float, right: tuple[float, float], mistake: str | None
) -> Example:
    return Example(
        f"clip-{name.replace('_', '-')}",
        *("clip", name, "objective"),
        lambda: example_sums.clipped(ratio, advantage),
        right,
        mistake,
    )


def _steps(
    id: str, name: str, counts: tuple[int, int, int], right: float, mistake: str | None
) -> Example:
    return Example(
        id,
        *("counting", name, "steps"),
        lambda: example_sums.optimizer_steps(*counts),
        (right,),
        mistake,
    )


def _bias(name: str, mean: float, right: tuple[float, float, float]) -> Example:
    return Example(
        f"schulman-bias-{name}",
        *("schulman", name, "bias"),
        lambda: example_sums.biases_of_estimators(mean),
        right,
        "published_bias" if name == "near" else None,
    )


def _spread(name: str, mean: float, right: tuple[float, float, float]) -> Example:
    return Example(
        f"schulman-spread-{name}",
        *("schulman", name, "spread"),
        lambda: example_sums.spreads_of_estimators(mean),
        right,
        "values_only" if name == "far" else None,
    )


INFORMATION = [
    *map(_kl, KL_ANSWERS),
    _terms("coin", (0.106825, -0.081093), "coin_terms"),
    _terms("tokens", (-0.153248, 0.115073, 0.121640), "tokens_terms"),
    _terms("tokens_again", (-0.092490, 0.121640, 0.0), "again_terms"),
    _terms("grades", (0.069315, 0.054696, -0.089257, 0.0), "rounded"),
    Example(
        "terms-grades-backwards",
        *("terms", "grades", "terms_backwards"),
        lambda: example_sums.kl_terms_backwards("grades"),
        (-0.034657, -0.045580, 0.111572, 0.0),
        "rounded",
    ),
    Example(
        "logs-reference",
        *("logs", "again_reference", "log_p"),
        lambda: example_sums.log_probabilities((0.6, 0.3, 0.1)),
        (-0.510826, -1.203973, -2.302585),
        "two_decimals",
    ),
    Example(
        "logs-current",
        *("logs", "again_current", "log_p"),
        lambda: example_sums.log_probabilities((0.7, 0.2, 0.1)),
        (-0.356675, -1.609438, -2.302585),
        "two_decimals",
    ),
    Example(
        "logs-search",
        *("logs", "search", "log_p"),
        lambda: example_sums.log_probabilities((0.3, 0.5, 0.6)),
        (-1.203973, -0.693147, -0.510826),
    ),
    Example(
        "log-ratio",
        *("logs", "log_ratio", "nats_and_bits"),
        lambda: example_sums.log_ratio_in_nats_and_bits(0.5, 0.3),
        (0.510826, 0.736966),
        "units",
    ),
    Example(
        "code-entropy",
        *("code", "weather", "entropies"),
        example_sums.weather_code_lengths,
        (1.156780, 1.279586),
        "code",
    ),
    Example(
        "code-prefix",
        *("code", "prefix", "code_costs"),
        example_sums.weather_prefix_code,
        (1.3, 1.3, 0.0),
        "prefix",
    ),
    Example(
        "code-ideal",
        *("code", "ideal", "lengths"),
        example_sums.weather_ideal_lengths,
        (1.0, 1.736966, 2.321928),
        "ideal",
    ),
    _surprisal("sure", 1.0, 0.0),
    _surprisal("half", 0.5, 1.0),
    _surprisal("three_tenths", 0.3, 1.736966),
    _surprisal("million", 1e-6, 19.931569, "million"),
    _surprisal("sunny", 0.8, 0.321928),
    _surprisal("sunny_forecast", 0.9, 0.152003),
    _surprisal("rainy", 0.2, 2.321928),
    _surprisal("rainy_forecast", 0.1, 3.321928),
    Example(
        "surprisal-differences",
        *("differences", "forecaster", "differences"),
        lambda: example_sums.surprisal_differences("forecaster"),
        (-0.169925, 1.0, 0.064060),
        "turned_round",
    ),
    Example(
        "sampled-tokens",
        *("sampled", "tokens_again", "k1"),
        example_sums.sampled_k1,
        (0.154151, -0.405465, 0.0, 0.154151),
        "direction",
    ),
    Example(
        "sampled-mean",
        *("sampled", "tokens_again", "mean_k1"),
        example_sums.sampled_mean,
        (-0.024291,),
        "sampled_mean",
    ),
    Example(
        "sampled-expected",
        *("sampled", "all_tokens", "expected"),
        example_sums.expected_estimates,
        (0.026812, 0.024757, 0.026812),
        "taylor",
    ),
    Example(
        "sampled-held",
        *("sampled", "rare", "held"),
        example_sums.held_k3,
        (0.637146, 0.286266),
        "held",
    ),
    Example(
        "sequence-kl",
        *("sampled", "sequence", "sequence"),
        example_sums.sequence_kl,
        (0.7, 1.009887, 0.175),
        "sequence",
    ),
    _bias("near", 0.1, (0.0, 0.0025, 0.0)),
    _spread("near", 0.1, (20.0, 1.417745, 1.416575)),
    _bias("far", 1.0, (0.0, 0.25, 0.0)),
    _spread("far", 1.0, (2.0, 1.732051, 1.695030)),
    Example(
        "energy",
        *("physics", "energy", "energies"),
        example_sums.free_energy,
        (0.268941, 0.186334, 0.082608),
        "energy",
    ),
    Example(
        "temperature",
        *("physics", "temperature", "temperature"),
        lambda: example_sums.kl_of_optimum((0.5, 1.0, 2.0)),
        (0.449550, 0.122366, 0.029194),
        "temperature",
    ),
]


def _of_tokens(
    id: str,
    quantity: str,
    compute: Callable[[], Sequence[float]],
    right: tuple[float, ...],
    mistake: str | None = None,
) -> Example:
    return Example(id, "prompt", "answer", quantity, compute, right, mistake)


ROW = [
    _of_tokens(
        "row-old-probabilities",
        "pi_old",
        example_sums.old_probabilities,
        (0.886920, 0.923116, 0.860708, 0.904837, 0.951229, 0.980199),
    ),
    _of_tokens("row-k1", "k1", example_sums.k1_tokens, (0.03, 0.02, 0.03, 0.02, 0.03, 0.01)),
    _of_tokens(
        "row-k3",
        "k3",
        example_sums.k3_tokens,
        (0.00044553, 0.00019867, 0.00044553, 0.00019867, 0.00044553, 0.00004983),
    ),
    _of_tokens(
        "row-rewards",
        "rewards",
        example_sums.token_level_rewards,
        (-0.0003, -0.0002, -0.0003, -0.0002, -0.0003, 0.9999),
    ),
    _of_tokens(
        "row-deltas",
        "deltas",
        lambda: example_sums.advantages(0.0),
        (0.0297, 0.0298, 0.0197, 0.0198, 0.0297, 0.0499),
        "delta",
    ),
    _of_tokens(
        "row-advantages-1",
        "advantages_1",
        lambda: example_sums.advantages(1.0),
        ONE_LAMBDA,
        "illustrative",
    ),
    _of_tokens(
        "row-returns-1",
        "returns_1",
        lambda: example_sums.returns(1.0),
        (0.9986, 0.9989, 0.9991, 0.9994, 0.9996, 0.9999),
        "returns",
    ),
    _of_tokens(
        "row-advantages-95",
        "advantages_95",
        lambda: example_sums.advantages(0.95),
        USUAL_LAMBDA,
        "illustrative",
    ),
    _of_tokens(
        "row-returns-95",
        "returns_95",
        lambda: example_sums.returns(0.95),
        (0.975568, 0.982492, 0.988097, 0.993050, 0.997105, 0.999900),
        "returns",
    ),
    _of_tokens(
        "row-needed-lambdas",
        "needed_lambdas",
        example_sums.needed_lambdas,
        (1.003, 0.8775, 1.206, 1.006667, 0.006),
        "illustrative",
    ),
    _of_tokens(
        "row-illustrative-returns",
        "illustrative_returns",
        example_sums.illustrative_returns,
        (0.95, 0.95, 0.96, 0.95, 0.95, 1.0),
        "returns",
    ),
    Example(
        "row-kl",
        *("prompt_sums", "answer", "sum_and_mean"),
        example_sums.k1_sum_and_mean,
        (0.14, 0.023333),
    ),
    Example(
        "row-objective",
        *("prompt_sums", "answer", "row_objective"),
        example_sums.row_objective,
        (0.9986,),
    ),
    Example(
        "row-surrogates",
        *("prompt_sums", "illustrative", "surrogates"),
        example_sums.surrogates,
        (0.073333, 0.073333),
        "surrogate",
    ),
    Example(
        "update-value-loss",
        *("update", "illustrative", "value_losses"),
        example_sums.value_losses,
        (0.003267, 0.006533),
        "value_loss",
    ),
    Example(
        "update-policy-loss",
        *("update", "illustrative", "policy_loss"),
        example_sums.first_step_loss,
        (-0.073333,),
        "policy_loss",
    ),
    Example(
        "update-clip-fractions",
        *("update", "illustrative", "clip_fractions"),
        example_sums.clip_fractions,
        (0.0, 0.0),
        "clip_fractions",
    ),
    Example(
        "update-approx-kl",
        *("update", "answer", "approx_kl"),
        example_sums.approximate_kl,
        (0.0,),
        "approx_kl",
    ),
    Example(
        "update-surprisal",
        *("update", "answer", "mean_surprisal"),
        example_sums.mean_surprisal,
        (0.086667,),
        "entropy",
    ),
    Example(
        "update-most-entropy",
        *("update", "answer", "most_entropy"),
        lambda: example_sums.most_entropy(151_936),
        (1.252684,),
        "entropy",
    ),
    Example(
        "update-equal-choices",
        *("update", "entropy", "equal_choices"),
        lambda: example_sums.equal_choices(2.34),
        (10.381237,),
        "entropy",
    ),
]


def _of_turns(
    id: str,
    quantity: str,
    compute: Callable[[], Sequence[float]],
    right: tuple[float, ...],
    mistake: str | None = None,
) -> Example:
    return Example(id, "dialogue", "dialogue", quantity, compute, right, mistake)


TURNS = [
    _of_turns(
        "turns-rewards",
        "rewards",
        example_sums.turn_rewards,
        (-0.01, 0.48, -0.26, 0.0, 1.95),
    ),
    _of_turns(
        "turns-deltas",
        "deltas",
        lambda: example_sums.turn_advantages(0.0),
        (0.99, -1.02, 0.24, 0.5, 0.45),
    ),
    _of_turns(
        "turns-advantages",
        "advantages_turns",
        lambda: example_sums.turn_advantages(0.5),
        (0.630625, -0.71875, 0.6025, 0.725, 0.45),
        "reading",
    ),
    _of_turns(
        "turns-at-the-end",
        "advantages_at_end",
        lambda: example_sums.turn_advantages(0.5, by_turn=False),
        (0.45875, -1.0625, 0.915, 0.85, 0.7),
        "same_total",
    ),
    _of_turns(
        "turns-truncated",
        "advantages_truncated",
        lambda: example_sums.turn_advantages(0.5, after=2.0),
        (0.755625, -0.46875, 1.1025, 1.725, 2.45),
        "terminated",
    ),
]

STEP = [
    Example(
        "clip-ratio",
        "clip",
        "rise",
        "ratio",
        lambda: example_sums.unclipped(2, 1),
        (2.0, 2.0),
        "ratio_held",
    ),
    _clip("rise", 2, 1, (1.2, 0.0), "ratio_held"),
    _clip("inside", 1.1, 1, (1.1, 1.1), None),
    _clip("pulled_back", 0.5, 1, (0.5, 0.5), "both_sides"),
    _clip("fall", 0.5, -1, (-0.8, 0.0), "max"),
    _clip("inside_fall", 0.9, -1, (-0.9, -0.9), "max"),
    _clip("wrong_way", 1.5, -1, (-1.5, -1.5), "max"),
    _clip("hundred", 100, -1, (-100.0, -100.0), "hundred"),
    Example(
        "clip-dual",
        *("clip", "dual", "objective"),
        lambda: example_sums.clipped(5, -1, bound=3.0),
        (-3.0, 0.0),
    ),
    Example(
        "clip-loss",
        *("clip", "rise", "loss_and_min"),
        lambda: example_sums.lower_of_two(2, 1),
        (-1.2, -2.0),
        "min_of_losses",
    ),
    Example(
        "clip-reward",
        *("clip", "rise_reward", "k1_and_reward"),
        lambda: example_sums.kl_and_reward(0.3, 0.3, beta=0.1),
        (0.0, 1.0),
        "scaled",
    ),
    Example(
        "clip-next-rollout",
        *("clip", "next_rollout", "k1_and_reward"),
        lambda: example_sums.kl_and_reward(0.6, 0.3, beta=0.1),
        (0.693147, 0.930685),
        "scaled",
    ),
    Example(
        "clip-row",
        *("clip", "six_tokens", "row_ratio"),
        lambda: example_sums.ratio_of_row(1.2, 6),
        (2.985984,),
        "row_ratio",
    ),
    Example(
        "region-penalty",
        *("region", "penalty", "penalised"),
        example_sums.penalised,
        (0.183787, -1.816213),
        "penalty",
    ),
    Example(
        "region-mild",
        *("region", "mild", "distance"),
        lambda: example_sums.distance_and_kl("mild"),
        (0.1, 0.033493),
        "ninety",
    ),
    Example(
        "region-wild",
        *("region", "wild", "distance"),
        lambda: example_sums.distance_and_kl("wild"),
        (0.4, 0.398898),
    ),
    Example(
        "region-mild-ratios",
        *("region", "mild", "ratios"),
        lambda: example_sums.ratios("mild"),
        (1.125, 1.166667, 0.75, 0.5),
        "mild_ratios",
    ),
    Example(
        "region-kept-share",
        *("region", "kept_share", "kl"),
        lambda: example_sums.kl_of_keeping(0.9),
        (0.105361,),
        "ninety",
    ),
    Example(
        "region-largest-changes",
        *("region", "bounds", "largest_changes"),
        lambda: example_sums.largest_changes((0.001, 0.01, 0.5)),
        (0.022361, 0.070711, 0.5),
        "completely_different",
    ),
    _steps("steps", "steps", (1024, 64, 4), 64.0, None),
    _steps("steps-one-epoch", "one_epoch", (1024, 64, 1), 16.0, "one_epoch"),
    _steps("steps-ragged", "ragged", (1000, 64, 4), 64.0, "ragged"),
    Example(
        "row-lengths",
        *("counting", "lengths", "lengths_of_row"),
        example_sums.sequence_lengths,
        (8.0, 6.0, 14.0),
        "lengths",
    ),
]

EXAMPLES: list[Example] = [*INFORMATION, *ROW, *TURNS, *STEP]
