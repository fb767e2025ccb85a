"""Every worked example against numbers typed here, not taken from the code."""

import math
from fractions import Fraction
from itertools import groupby

import pytest
from helpers import table

from tether.explain import example_sums
from tether.explain.example_sums import huffman_lengths
from tether.explain.examples import EXAMPLES, TOLERANCE

TYPED = {
    "kl-die": [0.242586, 0.349978, 0.293893, 0.423998],
    "kl-coin": [0.025732, 0.037124, 0.028168, 0.040637],
    "kl-tokens": [0.083465, 0.120414, 0.088015, 0.126979],
    "kl-tokens-again": [0.029149, 0.042053, 0.026812, 0.038682],
    "kl-weather": [0.085123, 0.122806, 0.092033, 0.132775],
    "kl-forecaster": [0.044403, 0.064060, 0.036690, 0.052933],
    "kl-mild": [0.033493, 0.048320, 0.029145, 0.042048],
    "kl-wild": [0.398898, 0.575489, 0.340684, 0.491504],
    "kl-grades": [0.034754, 0.050139, 0.031334, 0.045205],
    "kl-kept": [0, 0, 0, 0],
    "kl-turned": [1.757780, 2.535940, 1.757780, 2.535940],
    "kl-ruled-out": [math.inf, math.inf, 0.693147, 1],
    "terms-coin": [0.106825, -0.081093],
    "terms-tokens": [-0.153248, 0.115073, 0.121640],
    "terms-tokens-again": [-0.092490, 0.121640, 0],
    "terms-grades": [0.069315, 0.054696, -0.089257, 0],
    "terms-grades-backwards": [-0.034657, -0.045580, 0.111572, 0],
    "logs-reference": [-0.510826, -1.203973, -2.302585],
    "logs-current": [-0.356675, -1.609438, -2.302585],
    "logs-search": [-1.203973, -0.693147, -0.510826],
    "log-ratio": [0.510826, 0.736966],
    "code-entropy": [1.156780, 1.279586],
    "code-prefix": [1.3, 1.3, 0],
    "code-ideal": [1, 1.736966, 2.321928],
    "surprisal-sure": [0],
    "surprisal-half": [1],
    "surprisal-three-tenths": [1.736966],
    "surprisal-million": [19.931569],
    "surprisal-sunny": [0.321928],
    "surprisal-sunny-forecast": [0.152003],
    "surprisal-rainy": [2.321928],
    "surprisal-rainy-forecast": [3.321928],
    "surprisal-differences": [-0.169925, 1, 0.064060],
    "sampled-tokens": [0.154151, -0.405465, 0, 0.154151],
    "sampled-mean": [-0.024291],
    "sampled-expected": [0.026812, 0.024757, 0.026812],
    "sampled-held": [0.637146, 0.286266],
    "sequence-kl": [0.7, 1.009887, 0.175],
    "schulman-bias-near": [0, 0.0025, 0],
    "schulman-spread-near": [20, 1.417745, 1.416575],
    "schulman-bias-far": [0, 0.25, 0],
    "schulman-spread-far": [2, 1.732051, 1.695030],
    "energy": [0.268941, 0.186334, 0.082608],
    "temperature": [0.449550, 0.122366, 0.029194],
    "row-old-probabilities": [0.886920, 0.923116, 0.860708, 0.904837, 0.951229, 0.980199],
    "row-k1": [0.03, 0.02, 0.03, 0.02, 0.03, 0.01],
    "row-k3": [0.00044553, 0.00019867, 0.00044553, 0.00019867, 0.00044553, 0.00004983],
    "row-rewards": [-0.0003, -0.0002, -0.0003, -0.0002, -0.0003, 0.9999],
    "row-deltas": [0.0297, 0.0298, 0.0197, 0.0198, 0.0297, 0.0499],
    "row-advantages-1": [0.1786, 0.1489, 0.1191, 0.0994, 0.0796, 0.0499],
    "row-returns-1": [0.9986, 0.9989, 0.9991, 0.9994, 0.9996, 0.9999],
    "row-advantages-95": [0.155568, 0.132492, 0.108097, 0.093050, 0.077105, 0.049900],
    "row-returns-95": [0.975568, 0.982492, 0.988097, 0.993050, 0.997105, 0.999900],
    "row-needed-lambdas": [1.003, 0.8775, 1.206, 1.006667, 0.006],
    "row-illustrative-returns": [0.95, 0.95, 0.96, 0.95, 0.95, 1],
    "row-kl": [0.14, 0.023333],
    "row-objective": [0.9986],
    "row-surrogates": [0.073333, 0.073333],
    "update-value-loss": [0.003267, 0.006533],
    "update-policy-loss": [-0.073333],
    "update-clip-fractions": [0, 0],
    "update-approx-kl": [0],
    "update-surprisal": [0.086667],
    "update-most-entropy": [1.252684],
    "update-equal-choices": [10.381237],
    "turns-rewards": [-0.01, 0.48, -0.26, 0, 1.95],
    "turns-deltas": [0.99, -1.02, 0.24, 0.5, 0.45],
    "turns-advantages": [0.630625, -0.71875, 0.6025, 0.725, 0.45],
    "turns-at-the-end": [0.45875, -1.0625, 0.915, 0.85, 0.7],
    "turns-truncated": [0.755625, -0.46875, 1.1025, 1.725, 2.45],
    "clip-ratio": [2, 2],
    "clip-rise": [1.2, 0],
    "clip-inside": [1.1, 1.1],
    "clip-pulled-back": [0.5, 0.5],
    "clip-fall": [-0.8, 0],
    "clip-inside-fall": [-0.9, -0.9],
    "clip-wrong-way": [-1.5, -1.5],
    "clip-hundred": [-100, -100],
    "clip-dual": [-3, 0],
    "clip-loss": [-1.2, -2],
    "clip-reward": [0, 1],
    "clip-next-rollout": [0.693147, 0.930685],
    "clip-row": [2.985984],
    "region-penalty": [0.183787, -1.816213],
    "region-mild": [0.1, 0.033493],
    "region-wild": [0.4, 0.398898],
    "region-mild-ratios": [1.125, 1.166667, 0.75, 0.5],
    "region-kept-share": [0.105361],
    "region-largest-changes": [0.022361, 0.070711, 0.5],
    "steps": [64],
    "steps-one-epoch": [16],
    "steps-ragged": [64],
    "row-lengths": [8, 6, 14],
}


def test_every_example_is_typed_here_and_no_other():
    assert [e.id for e in EXAMPLES] == list(TYPED)


def test_examples_of_one_section_stand_together():
    sections = [section for section, _ in groupby(EXAMPLES, key=lambda e: e.section)]
    assert len(sections) == len(set(sections))


@table("example", EXAMPLES, ids=lambda e: e.id)
def test_an_example_comes_out_right(example):
    right = TYPED[example.id]
    assert list(example.right) == right
    assert example.computed() == pytest.approx(right, abs=1e-6, rel=0)
    assert example.difference() <= TOLERANCE == 1e-6


# The typed numbers themselves, worked out a second way: by hand, with math and fractions only.


def f(*numbers: str) -> list[Fraction]:
    return [Fraction(n) for n in numbers]


def kl(p: list[Fraction], q: list[Fraction]) -> float:
    return sum(float(a) * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True))


ACTOR, REFERENCE = f("7/10", "1/5", "1/10"), f("3/5", "3/10", "1/10")
GIVEN = f("13/100", "1/10", "8/100", "5/100", "3/100", "5/100")
VALUES = f("82/100", "85/100", "88/100", "9/10", "92/100", "95/100")
OLD = f("-12/100", "-8/100", "-15/100", "-1/10", "-5/100", "-2/100")
KL1 = f("3/100", "2/100", "3/100", "2/100", "3/100", "1/100")
REWARDS = [-k / 100 for k in KL1[:5]] + [1 - KL1[5] / 100]
DELTAS = [
    r + after - v for r, v, after in zip(REWARDS, VALUES, [*VALUES[1:], Fraction(0)], strict=True)
]


def best(beta: float) -> list[float]:
    weights = [0.6, 0.3 * math.exp(1 / beta), 0.1]
    return [w / sum(weights) for w in weights]


def binary_entropy_and_rest(p: float, choices: int) -> float:
    return -p * math.log(p) - (1 - p) * math.log(1 - p) + (1 - p) * math.log(choices)


def halved(deltas: list[str]) -> list[Fraction]:
    """A_t = delta_t + A_(t+1) / 2, from the end."""
    found = [Fraction(0)]
    for delta in reversed(deltas):
        found.insert(0, Fraction(delta) + found[0] / 2)
    return found[:-1]


BY_HAND = {
    # -0.01 + 2 - 1, 0.5 - 0.02 + 0.5 - 2, -0.25 - 0.01 + 1 - 0.5, 1.5 - 1, 2 - 0.05 - 1.5
    "turns-advantages": halved(["0.99", "-1.02", "0.24", "0.5", "0.45"]),
    "turns-at-the-end": halved(["0.99", "-1.52", "0.49", "0.5", "0.7"]),
    "turns-truncated": halved(["0.99", "-1.02", "0.24", "0.5", "2.45"]),
    "kl-turned": [
        *(0.8 * math.log(9), 0.8 * math.log2(9)),
        *(0.8 * math.log(9), 0.8 * math.log2(9)),
    ],
    "kl-ruled-out": [math.inf, math.inf, math.log(2), 1],
    "terms-coin": [0.8 * math.log(8 / 7), -0.2 * math.log(1.5)],
    "terms-tokens": [-0.3 * math.log(5 / 3), 0.4 * math.log(4 / 3), 0.3 * math.log(1.5)],
    "terms-tokens-again": [-0.6 * math.log(7 / 6), 0.3 * math.log(1.5), 0],
    "terms-grades": [0.1 * math.log(2), 0.3 * math.log(1.2), -0.4 * math.log(1.25), 0],
    "terms-grades-backwards": [-0.05 * math.log(2), -0.25 * math.log(1.2), 0.5 * math.log(1.25), 0],
    "logs-reference": [math.log(0.6), math.log(0.3), -math.log(10)],
    "logs-current": [math.log(0.7), -math.log(5), -math.log(10)],
    "logs-search": [math.log(0.3), -math.log(2), math.log(0.6)],
    "code-prefix": [Fraction(7, 10) + 2 * Fraction(3, 10)] * 2 + [0],
    "code-ideal": [1, math.log2(10 / 3), math.log2(5)],
    "surprisal-sunny": [math.log2(5) - 2],
    "surprisal-sunny-forecast": [math.log2(10) - 2 * math.log2(3)],
    "surprisal-rainy": [math.log2(5)],
    "surprisal-rainy-forecast": [math.log2(10)],
    "surprisal-differences": [3 - math.log2(9), 1, 0.8 * (3 - math.log2(9)) + 0.2],
    "sampled-mean": [(2 * math.log(7 / 6) - math.log(1.5)) / 4],
    "sampled-expected": [
        kl(ACTOR, REFERENCE),
        0.7 * math.log(7 / 6) ** 2 / 2 + 0.2 * math.log(1.5) ** 2 / 2,
        0.7 * (6 / 7 - 1 + math.log(7 / 6)) + 0.2 * (1.5 - 1 - math.log(1.5)),
    ],
    "sampled-held": [
        kl(f("1/100", "99/100"), f("1/2", "1/2")),
        0.01 * 10 + 0.99 * (50 / 99 - 1 - math.log(50 / 99)),
    ],
    "sequence-kl": [0.7, 0.7 / math.log(2), Fraction(7, 40)],
    "energy": [
        1 / (1 + math.e),
        math.log(1 + math.exp(-1)) - math.log(1 + math.exp(-2)),
        1 / (1 + math.e) - math.log((1 + math.exp(-1)) / (1 + math.exp(-2))),
    ],
    "temperature": [
        sum(p * math.log(p / float(q)) for p, q in zip(best(beta), REFERENCE, strict=True))
        for beta in (0.5, 1, 2)
    ],
    "row-needed-lambdas": [(GIVEN[t] - DELTAS[t]) / GIVEN[t + 1] for t in range(5)],
    "row-illustrative-returns": [a + v for a, v in zip(GIVEN, VALUES, strict=True)],
    "row-objective": [1 - sum(KL1) / 100],
    "update-value-loss": [sum(a * a for a in GIVEN) / 12, sum(a * a for a in GIVEN) / 6],
    "update-policy-loss": [-sum(GIVEN) / 6],
    "update-surprisal": [-sum(OLD) / 6],
    "update-most-entropy": [
        sum(binary_entropy_and_rest(math.exp(x), 151_935) for x in OLD) / 6,
    ],
    "update-equal-choices": [math.e**2.34],
    "clip-row": [Fraction(6, 5) ** 6],
    "region-penalty": [
        0.7 * math.log(7 / 4) - 0.3 * math.log(2),
        0.7 * math.log(7 / 4) - 0.3 * math.log(2) - 2,
    ],
    "region-mild": [
        Fraction(4 * 5, 100) / 2,
        kl(f("2/5", "3/10", "1/5", "1/10"), f("9/20", "7/20", "3/20", "1/20")),
    ],
    "region-wild": [
        Fraction(40 + 20 + 15 + 5, 100) / 2,
        kl(f("2/5", "3/10", "1/5", "1/10"), f("4/5", "1/10", "1/20", "1/20")),
    ],
    "region-mild-ratios": f("9/8", "7/6", "3/4", "1/2"),
    "region-kept-share": [math.log(10 / 9)],
    "region-largest-changes": [math.sqrt(0.0005), math.sqrt(0.005), 0.5],
    "steps-one-epoch": [1024 // 64],
    "steps-ragged": [4 * math.ceil(1000 / 64)],
}


def schulman(mean: float) -> tuple[list[float], list[float]]:
    """Biases and spreads in closed form. Drawn from N(0, 1), k1 is normal: N(m²/2, m²)."""
    m2 = mean**2
    kl = m2 / 2
    # E[k2] = (m² + m⁴/4)/2; Var[k1²] = m⁶ + 2m⁴; Var[k3] = Var[r] + Var[k1] + 2 Cov[r, k1] with
    # r = e^(−k1): Var[r] = e^m² − 1, and under the other normal k1 has the mean −m²/2.
    spreads = [mean, math.sqrt(m2**3 + 2 * m2**2) / 2, math.sqrt(math.exp(m2) - 1 + m2 - 2 * m2)]
    return [0, ((m2 + m2**2 / 4) / 2 - kl) / kl, 0], [x / kl for x in spreads]


BY_HAND |= {
    "schulman-bias-near": schulman(0.1)[0],
    "schulman-spread-near": schulman(0.1)[1],
    "schulman-bias-far": schulman(1.0)[0],
    "schulman-spread-far": schulman(1.0)[1],
}


@table("mean", [0.1, 1.0])
def test_the_closed_forms_of_schulmans_table_are_what_an_integral_gives(mean):
    """A sum over a fine grid, and formulas of the note: r = p/q drawn from q = N(0, 1)."""
    step = 1e-3
    grid = [i * step for i in range(-12_000, 12_001)]
    weights = [math.exp(-x * x / 2) / math.sqrt(2 * math.pi) * step for x in grid]
    log_r = [mean * x - mean**2 / 2 for x in grid]
    estimates = {
        "k1": [-x for x in log_r],
        "k2": [x * x / 2 for x in log_r],
        "k3": [math.exp(x) - 1 - x for x in log_r],
    }
    kl = mean**2 / 2
    biases, spreads = [], []
    for values in estimates.values():
        first = math.fsum(w * v for w, v in zip(weights, values, strict=True))
        second = math.fsum(w * v * v for w, v in zip(weights, values, strict=True))
        biases.append((first - kl) / kl)
        spreads.append(math.sqrt(second - first**2) / kl)
    assert biases == pytest.approx(schulman(mean)[0], abs=1e-9)
    assert spreads == pytest.approx(schulman(mean)[1], abs=1e-9)


def test_schulmans_table_is_the_one_that_is_printed_in_the_note():
    """joschu.net/blog/kl-approx.html, bias and deviation over the true KL, two or three digits."""
    published = {0.1: ([0, 0.002, 0], [20, 1.42, 1.42]), 1.0: ([0, 0.25, 0], [2, 1.73, 1.7])}
    for mean, (biases, spreads) in published.items():
        assert schulman(mean)[0] == pytest.approx(biases, abs=6e-4)
        assert schulman(mean)[1] == pytest.approx(spreads, abs=6e-3)


@table("id", BY_HAND)
def test_a_typed_number_is_what_comes_out_by_hand(id):
    assert TYPED[id] == pytest.approx([float(x) for x in BY_HAND[id]], abs=5.1e-7, rel=0)


def test_a_code_of_whole_bits_is_the_shortest_that_there_is():
    assert huffman_lengths([0.7, 0.2, 0.1]) == huffman_lengths([0.5, 0.3, 0.2]) == [1, 2, 2]
    assert huffman_lengths([0.1, 0.4, 0.2, 0.3]) == [3, 1, 3, 2]
    assert huffman_lengths([0.25] * 4) == [2, 2, 2, 2]


def test_a_kl_bound_moves_no_more_probability_than_is_said():
    """No pair of two-outcome distributions within the bound is further apart."""
    for bound, most in zip((0.001, 0.01, 0.5), TYPED["region-largest-changes"], strict=True):
        for i in range(1, 100):
            for j in range(1, 100):
                p, q = i / 100, j / 100
                if p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)) <= bound:
                    assert abs(p - q) <= most


def test_a_wrong_number_is_a_difference(monkeypatch):
    [steps] = [e for e in EXAMPLES if e.id == "steps"]
    monkeypatch.setattr(example_sums, "optimizer_steps", lambda *counts: [63.0])
    assert steps.difference() == 1.0
    monkeypatch.setattr(example_sums, "optimizer_steps", lambda *counts: [])
    assert steps.difference() == float("inf")


def test_infinity_differs_from_every_number_and_from_nothing_else():
    [ruled_out] = [e for e in EXAMPLES if e.id == "kl-ruled-out"]
    assert ruled_out.difference() <= TOLERANCE
    [steps] = [e for e in EXAMPLES if e.id == "steps"]
    finite = type(steps)(*("x", "kl", "die", "k1"), lambda: [1e9], (math.inf,))
    assert finite.difference() == math.inf
