"""Draw the guide's figures into docs/figures: `python scripts/build_figures.py`.

Every curve is computed by the functions that train. Nothing is drawn from chance that is not
keyed by a seed, so a second build writes the same bytes.
"""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from data_flow import draw_data_flow
from torch import Tensor

from tether.algo.kl import adaptive_beta, estimate_kl, exact_kl
from tether.algo.losses import LossInputs, policy_loss
from tether.algo.random import uniform
from tether.config import ClipUpdate

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"
BLUE, VERMILION, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#6b6b6b"  # Okabe and Ito

EPS, DUAL_BOUND = 0.2, 3.0
FLAT = "flat: no gradient"

ESTIMATORS = {"k1": BLUE, "k2": VERMILION, "k3": GREEN}
VOCABULARY, SAMPLES, SEED = 32, 20_000, 7
SHIFTS = [
    0.05,
    0.1,
    0.2,
    0.4,
    0.7,
    1.0,
    1.4,
    2.0,
]  # how far the actor's logits lie from the reference's

TARGET, ROWS, HORIZON, ITERATIONS = 0.1, 256, 512, 160
STARTS = {0.02: VERMILION, 0.2: BLUE, 2.0: GREEN}
BANDIT_REFERENCE = torch.tensor([0.1, 0.2, 0.4, 0.2, 0.1], dtype=torch.float64)
BANDIT_REWARDS = torch.tensor([1.0, 0.5, 0.0, -0.5, -1.0], dtype=torch.float64)
RESPONSE = 0.1  # the share of the way to the best policy that the simulated actor goes


class Objective(NamedTuple):
    """The clipped objective a token, before averaging, and where it is flat."""

    plain: Tensor
    dual: Tensor
    flat: Tensor


def clipped_objective(ratio: Tensor, advantage: float) -> Objective:
    new_log_probs = ratio.log()[None]
    old_log_probs = torch.zeros_like(new_log_probs)
    advantages = torch.full_like(new_log_probs, advantage)
    everywhere = torch.ones_like(advantages, dtype=torch.bool)
    inputs = LossInputs(new_log_probs, old_log_probs, advantages, everywhere)
    loss = policy_loss(ClipUpdate(eps_low=EPS, eps_high=EPS), inputs)
    dual = ClipUpdate(eps_low=EPS, eps_high=EPS, dual_clip=DUAL_BOUND)
    bounded = policy_loss(dual, inputs)
    return Objective(-loss.per_token[0], -bounded.per_token[0], loss.clipped[0])


class Estimate(NamedTuple):
    """What one estimator gives on tokens drawn from the actor, as a share of the exact KL."""

    bias: float  # of the mean over all samples
    spread: float  # standard deviation of a single token's value
    true_bias: float  # the same two, summed over the vocabulary instead of sampled
    true_spread: float


def estimators_at(shift: float) -> tuple[float, dict[str, Estimate]]:
    """The exact KL(actor || reference) at this distance, and how each estimator does there."""
    tokens = np.arange(VOCABULARY)
    reference = torch.log_softmax(_normal("reference", tokens), dim=0)
    actor = torch.log_softmax(reference + shift * _normal("direction", tokens), dim=0)
    exact = exact_kl(actor.exp().tolist(), reference.exp().tolist())
    cumulative = actor.exp().cumsum(dim=0)
    draws = uniform(SEED, f"draw {shift}", np.arange(SAMPLES))
    sampled = torch.searchsorted(cumulative / cumulative[-1], draws, right=True)
    everywhere = torch.ones(VOCABULARY, dtype=torch.bool)
    found = {}
    for name in ESTIMATORS:
        value = estimate_kl(name, actor, reference, everywhere)
        mean = (actor.exp() * value).sum()
        variance = (actor.exp() * (value - mean) ** 2).sum()
        found[name] = Estimate(
            bias=float(value[sampled].mean() / exact - 1),
            spread=float(value[sampled].std() / exact),
            true_bias=float(mean / exact - 1),
            true_spread=float(variance.sqrt() / exact),
        )
    return exact, found


def _normal(purpose: str, words: np.ndarray) -> Tensor:
    """Standard normals from two keyed uniforms each."""
    radius = (-2 * torch.log1p(-uniform(SEED, f"{purpose}, radius", words))).sqrt()
    return radius * torch.cos(2 * math.pi * uniform(SEED, f"{purpose}, angle", words))


def steer(beta: float, controlled: bool) -> tuple[list[float], list[float]]:
    """KL and beta over the iterations of a simulated run.

    The actor is a five-armed bandit whose best policy under beta is known: reference x
    exp(reward / beta). Each iteration its logits go a tenth of the way there. A real actor answers
    to beta less simply; what the rule does with the KL it is told is the same.
    """
    logits = BANDIT_REFERENCE.log()
    kls, betas = [], []
    for _ in range(ITERATIONS):
        best = torch.log_softmax(BANDIT_REFERENCE.log() + BANDIT_REWARDS / beta, dim=0)
        logits = torch.log_softmax(logits + RESPONSE * (best - logits), dim=0)
        kl = exact_kl(logits.exp().tolist(), BANDIT_REFERENCE.tolist())
        kls.append(kl)
        betas.append(beta)
        if controlled:
            beta = adaptive_beta(beta, kl, TARGET, ROWS, HORIZON)
    return kls, betas


def draw_clip_objective(plt, path: Path) -> None:
    ratio = torch.linspace(0.001, 4.0, 4000, dtype=torch.float64)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    for axis, advantage in zip(axes, (1.0, -1.0), strict=True):
        objective = clipped_objective(ratio, advantage)
        flat = objective.plain.where(objective.flat, math.nan)
        axis.axvspan(1 - EPS, 1 + EPS, color="#ececec", zorder=0, label="1 ± ε, ε = 0.2")
        axis.plot(ratio, advantage * ratio, ":", color=GREY, label=r"unclipped, $r\,A$")
        axis.plot(ratio, objective.plain, color=BLUE, label="clipped objective")
        axis.plot(
            ratio, flat, color=BLUE, linewidth=7, alpha=0.3, solid_capstyle="butt", label=FLAT
        )
        if advantage < 0:
            beyond = objective.dual.where(objective.dual > objective.plain, math.nan)
            axis.plot(ratio, beyond, "--", color=VERMILION, label="with dual clip, c = 3")
        axis.plot(1, advantage, "o", color="black", markersize=5, zorder=5)
        axis.set(xlabel=r"ratio $r = \pi_{new}\,/\,\pi_{old}$", xlim=(0, 4))
        axis.set_xticks([0, 0.8, 1.2, 2, 3, 4], ["0", "0.8", "1.2", "2", "3", "4"])
        axis.legend(loc="upper left" if advantage > 0 else "lower left", fontsize=10)
        axis.grid(axis="y", alpha=0.3)
    axes[0].set(title="A = +1: a good token", ylabel="objective of one token", ylim=(0, 3))
    axes[1].set(title="A = −1: a bad token", ylim=(-5, 0.2))
    save(figure, path)


def draw_kl_estimators(plt, path: Path) -> None:
    measured = [estimators_at(shift) for shift in SHIFTS]
    exact = np.array([kl for kl, _ in measured])
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    for aside, (name, colour) in zip((0.92, 1.08, 1.0), ESTIMATORS.items(), strict=True):
        found = [estimates[name] for _, estimates in measured]
        two_errors = [200 * e.true_spread / math.sqrt(SAMPLES) for e in found]
        dots = {"color": colour, "marker": "o", "linestyle": "none", "markersize": 5}
        axes[0].plot(exact, [100 * e.true_bias for e in found], color=colour, label=name)
        sampled = [100 * e.bias for e in found]
        axes[0].errorbar(exact * aside, sampled, two_errors, capsize=2, linewidth=1.2, **dots)
        axes[1].plot(exact, [e.true_spread for e in found], color=colour, label=name)
        axes[1].plot(exact, [e.spread for e in found], **dots)
    axes[0].set(title="bias of the mean", ylabel="% of the exact KL", ylim=(-40, 60))
    axes[1].set(title="spread of one token", ylabel="standard deviation / KL", yscale="log")
    axes[1].set_yticks([1, 2, 5, 10, 20, 40], ["1", "2", "5", "10", "20", "40"])
    axes[1].minorticks_off()
    for axis in axes:
        axis.set(xscale="log", xlabel=r"exact KL$(\pi\,\|\,\pi_{ref})$, nats")
        axis.set_xticks([0.001, 0.01, 0.1, 1], ["0.001", "0.01", "0.1", "1"])
        axis.legend(fontsize=11, loc="upper center")
        axis.grid(alpha=0.3)
    save(figure, path)


def draw_adaptive_beta(plt, path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    for start, colour in STARTS.items():
        for controlled in (True, False):
            kls, betas = steer(start, controlled)
            style = {"color": colour, "linestyle": "-" if controlled else ":"}
            label = f"from β = {start:g}" if controlled else None
            axes[0].plot(kls, **style)
            axes[1].plot(betas, label=label, **style)
    axes[0].axhline(TARGET, color="black", linewidth=1, linestyle="--")
    axes[0].text(ITERATIONS, TARGET * 1.15, "target 0.1", ha="right", fontsize=11)
    axes[0].set(title="KL to the reference, nats", yscale="log", ylim=(5e-3, 5))
    axes[0].set_yticks([0.01, 0.1, 1], ["0.01", "0.1", "1"])
    axes[1].set(title="β", yscale="log", ylim=(0.01, 60))
    axes[1].set_yticks([0.01, 0.1, 1, 10], ["0.01", "0.1", "1", "10"])
    axes[1].plot([], [], ":", color=GREY, label="the same, β fixed")
    axes[1].legend(fontsize=10, loc="upper center", ncol=2)
    for axis in axes:
        axis.set(xlabel="iteration (simulated)")
        axis.grid(alpha=0.3)
    save(figure, path)


def save(figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "tether", "font.size": 12, "lines.linewidth": 2})
    import matplotlib.pyplot as plt

    FIGURES.mkdir(exist_ok=True)
    draw_clip_objective(plt, FIGURES / "clip-objective.svg")
    draw_kl_estimators(plt, FIGURES / "kl-estimators.svg")
    draw_adaptive_beta(plt, FIGURES / "adaptive-beta.svg")
    draw_data_flow(FIGURES)


if __name__ == "__main__":
    main()
