"""Every worked example against numbers typed here, not taken from the code."""

import pytest

from tether.explain import recompute
from tether.explain.examples import EXAMPLES, TOLERANCE

TYPED = {
    ("die", "KL(P‖Q), KL(Q‖P)"): [0.242586, 0.349978, 0.293893, 0.423998],
    ("coin", "KL(P‖Q), KL(Q‖P)"): [0.025732, 0.037124, 0.028168, 0.040637],
    ("tokens", "KL(P‖Q), KL(Q‖P)"): [0.083465, 0.120414, 0.088015, 0.126979],
    ("tokens_again", "KL(P‖Q), KL(Q‖P)"): [0.029149, 0.042053, 0.026812, 0.038682],
    ("weather", "KL(P‖Q), KL(Q‖P)"): [0.085123, 0.122806, 0.092033, 0.132775],
    ("forecaster", "KL(P‖Q), KL(Q‖P)"): [0.044403, 0.064060, 0.036690, 0.052933],
    ("mild", "KL(P‖Q), KL(Q‖P)"): [0.033493, 0.048320, 0.029145, 0.042048],
    ("wild", "KL(P‖Q), KL(Q‖P)"): [0.398898, 0.575489, 0.340684, 0.491504],
    ("grades", "KL(P‖Q), KL(Q‖P)"): [0.034754, 0.050139, 0.031334, 0.045205],
    ("weather", "H(P), H(P, Q)"): [1.156780, 1.279586],
    ("tokens_again", "k1"): [0.154151, -0.405465, 0, 0.154151],
    ("tokens_again", "mean k1"): [-0.024291],
    ("answer", "π_old"): [0.886920, 0.923116, 0.860708, 0.904837, 0.951229, 0.980199],
    ("answer", "k1"): [0.03, 0.02, 0.03, 0.02, 0.03, 0.01],
    ("answer", "k3"): [0.00044553, 0.00019867, 0.00044553, 0.00019867, 0.00044553, 0.00004983],
    ("answer", "token_level_rewards"): [-0.0003, -0.0002, -0.0003, -0.0002, -0.0003, 0.9999],
    ("answer", "δ"): [0.0297, 0.0298, 0.0197, 0.0198, 0.0297, 0.0499],
    ("answer", "advantages, λ = 1"): [0.1786, 0.1489, 0.1191, 0.0994, 0.0796, 0.0499],
    ("answer", "returns, λ = 1"): [0.9986, 0.9989, 0.9991, 0.9994, 0.9996, 0.9999],
    ("answer", "advantages, λ = 0.95"): [
        *(0.155568, 0.132492, 0.108097, 0.093050, 0.077105, 0.049900),
    ],
    ("answer", "returns, λ = 0.95"): [
        *(0.975568, 0.982492, 0.988097, 0.993050, 0.997105, 0.999900),
    ],
    ("answer", "Σ k1, mean k1"): [0.14, 0.023333],
    ("illustrative", "L^CPI, L^CLIP, r = 1"): [0.073333, 0.073333],
    ("rise", "r, r·A"): [2, 2],
    ("rise", "L^CLIP, ∂L/∂log π"): [1.2, 0],
    ("rise_reward", "k1, reward"): [0, 1],
    ("next_rollout", "k1, reward"): [0.693147, 0.930685],
    ("fall", "L^CLIP, ∂L/∂log π"): [-0.8, 0],
    ("wrong_way", "L^CLIP, ∂L/∂log π"): [-1.5, -1.5],
    ("dual", "L^CLIP, ∂L/∂log π"): [-3, 0],
    ("million", "bits"): [19.931569],
    ("three_tenths", "bits"): [1.736966],
    ("half", "bits"): [1],
    ("log_ratio", "nats, bits"): [0.510826, 0.736966],
    ("steps", "steps"): [64],
}


def test_every_example_is_typed_here_and_no_other():
    assert [(e.name, e.quantity) for e in EXAMPLES] == list(TYPED)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: f"{e.name}: {e.quantity}")
def test_an_example_comes_out_right(example):
    right = TYPED[example.name, example.quantity]
    assert list(example.right) == right
    assert example.computed() == pytest.approx(right, abs=1e-6, rel=0)
    assert example.difference() <= TOLERANCE == 1e-6


def test_a_wrong_number_is_a_difference(monkeypatch):
    [steps] = [e for e in EXAMPLES if e.name == "steps"]
    monkeypatch.setattr(recompute, "optimizer_steps", lambda *counts: [63.0])
    assert steps.difference() == 1.0
    monkeypatch.setattr(recompute, "optimizer_steps", lambda *counts: [])
    assert steps.difference() == float("inf")
