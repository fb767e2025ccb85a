"""The settings that what-if can change: a run's own, and a person's. Imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from tether.config import ESTIMATORS, AdvantageSection, EstimatorTraits, KlInRewardSection
from tether.errors import UserError
from tether.view.metric_table import as_number

KL_ESTIMATORS = ("k1", "abs", "k2", "k3", "k1+", "k3+")  # `full` has no place in a reward
UNKNOWN = EstimatorTraits(formula="A", paper="")
LARGEST = 1e30  # that is computed with in float32


@dataclass(frozen=True)
class Settings:
    """What stands between a row's log-probs and its objective. None = no such bound."""

    beta: float
    kl_estimator: str
    gamma: float
    lam: float
    eps_low: float | None
    eps_high: float | None
    dual_clip: float | None
    estimator: str
    whiten: bool

    @property
    def traits(self) -> EstimatorTraits:
        """Of the estimator; a name that this version does not know has none of them."""
        return ESTIMATORS.get(self.estimator, UNKNOWN)

    @property
    def advantage(self) -> AdvantageSection:
        """The config's section, unchecked: a config.yaml may have been written by anybody."""
        return AdvantageSection.model_construct(
            estimator=self.estimator, gamma=self.gamma, lam=self.lam
        )

    def as_dict(self) -> dict[str, Any]:
        """The settings, and what the page has to know of the estimator to explain a token."""
        traits = {"needs_critic": self.traits.needs_critic, "formula": self.traits.formula}
        return {**asdict(self), **traits}


def inside(mapping: Any, *path: str) -> Any:
    """mapping[a][b]…, None where a step is missing or no mapping."""
    for name in path:
        mapping = mapping.get(name) if isinstance(mapping, Mapping) else None
    return mapping


def own_settings(config: Mapping[str, Any], row: Mapping[str, Any] | None = None) -> Settings:
    """What the run used; an adaptive beta differs by iteration, so the row's own comes first.

    A config that lacks a field is of an older version, which did what is now the default.
    """
    kl, advantage = KlInRewardSection(), AdvantageSection()
    estimator = _text(config, "advantage", "estimator") or advantage.estimator
    beta = _number(row or {}, "beta")
    if beta is None:
        beta = _number(config, "kl", "in_reward", "coef")
    return Settings(
        beta=kl.coef if beta is None else beta,
        kl_estimator=_text(config, "kl", "in_reward", "estimator") or kl.estimator,
        gamma=_either(_number(config, "advantage", "gamma"), advantage.gamma),
        lam=_either(_number(config, "advantage", "lam"), advantage.lam),
        eps_low=_number(config, "actor", "update", "eps_low"),
        eps_high=_number(config, "actor", "update", "eps_high"),
        dual_clip=_number(config, "actor", "update", "dual_clip"),
        estimator=estimator,
        whiten=_whitens(config, estimator),
    )


def samples_per_prompt(config: Mapping[str, Any]) -> int:
    samples = inside(config, "rollout", "samples_per_prompt")
    return samples if type(samples) is int and samples > 0 else 1


def update_kind(config: Mapping[str, Any]) -> str:
    return _text(config, "actor", "update", "kind") or "clip"


def choices(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """The estimators that this run's files hold enough for.

    A run with another estimator recorded neither a critic's values nor greedy responses, and a
    group needs more than one row.
    """
    own, grouped = own_settings(config).estimator, samples_per_prompt(config) > 1
    offered = [
        name
        for name, traits in ESTIMATORS.items()
        if name == own
        or not (traits.needs_critic or traits.needs_greedy or (traits.by_group and not grouped))
    ]
    return {
        "estimators": offered,
        "kl_estimators": list(KL_ESTIMATORS),
    }


def read_settings(query: Mapping[str, str], config: Mapping[str, Any], own: Settings) -> Settings:
    """A person's settings; what is not given is the run's own."""
    if own.estimator not in ESTIMATORS and "estimator" not in query:
        raise UserError(f"This version does not know the run's estimator, {own.estimator[:40]!r}.")
    offered, changes = choices(config), {}
    for name, text in query.items():
        match name:
            case "estimator" | "kl_estimator":
                changes[name] = _one_of(name, text, offered[f"{name}s"])
            case "beta":
                changes[name] = _within(name, text, 0, LARGEST)
            case "gamma" | "lam":
                changes[name] = _within(name, text, 0, 1)
            case "eps_low" | "eps_high" | "dual_clip" if text == "none":
                changes[name] = None
            case "eps_low":
                changes[name] = _within(name, text, 0, 1, open_below=True)
            case "eps_high":
                changes[name] = _within(name, text, 0, LARGEST, open_below=True)
            case "dual_clip":
                changes[name] = _within(name, text, 1, LARGEST, open_below=True)
            case _:
                raise UserError(f"{name} is no setting of what-if.")
    if "estimator" in changes:
        changes["whiten"] = _whitens(config, changes["estimator"])
    return replace(own, **changes)


def _whitens(config: Mapping[str, Any], estimator: str) -> bool:
    asked = inside(config, "advantage", "whiten")
    return asked if isinstance(asked, bool) else ESTIMATORS.get(estimator, UNKNOWN).whitens


def _within(name: str, text: str, low: float, high: float, open_below: bool = False) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isfinite(value) and low <= value <= high and not (open_below and value == low):
        return value
    least = f"above {low}" if open_below else f"at least {low}"
    most = f" and at most {high:g}"
    raise UserError(f"{name} is {text[:40]!r}, but it is a number {least}{most}.")


def _one_of(name: str, text: str, known: list[str]) -> str:
    if text not in known:
        raise UserError(f"{name} is {text[:40]!r}, but for this run it is {', '.join(known)}.")
    return text


def _number(mapping: Mapping[str, Any], *path: str) -> float | None:
    """A number that float32 can hold; a config.yaml may have been written by anybody."""
    value = as_number(inside(mapping, *path))
    return None if math.isnan(value) else min(max(value, -LARGEST), LARGEST)


def _text(mapping: Mapping[str, Any], *path: str) -> str | None:
    value = inside(mapping, *path)
    return value if isinstance(value, str) else None


def _either(value: float | None, default: float) -> float:
    return default if value is None else value
