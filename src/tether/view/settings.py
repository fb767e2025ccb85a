"""The settings that what-if can change: a run's own, and those of the person asking.

They are three sections of the config, so a control of the page is a config field: its name, bounds
and doc line come from there, and a new kind of update or estimator needs no edit here. Imports no
torch.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from tether.config import (
    ESTIMATORS,
    UPDATE_KINDS,
    AdvantageSection,
    AnyUpdate,
    KlInRewardSection,
)
from tether.errors import UserError
from tether.view.metric_table import as_number

KL, ADVANTAGE, UPDATE = "kl.in_reward", "advantage", "actor.update"
# Of the two sections that every run has, the fields that a row's numbers follow from.
FIELDS = {KL: ("coef", "estimator"), ADVANTAGE: ("estimator", "gamma", "lam")}
UPDATES: dict[str, type[AnyUpdate]] = dict(zip(UPDATE_KINDS, get_args(AnyUpdate), strict=True))
LARGEST = 1e30  # float32 can compute with it
NONE = "none"  # in a query: no such bound
AnySection = TypeVar("AnySection", bound=BaseModel)


@dataclass(frozen=True)
class Settings:
    """The sections of the config that lead from a row's log-probs to its objective."""

    kl: KlInRewardSection
    advantage: AdvantageSection
    update: AnyUpdate | None  # None: a kind that this version does not know
    critic_lam: float | None = None  # of the returns; None: as the advantages
    part_weights: dict[str, float] = field(default_factory=dict)  # of reward.parts, by name
    # Why a field could not be read, by its name; a default is in its place.
    unknown: dict[str, str] = field(default_factory=dict, compare=False)

    def sections(self) -> dict[str, BaseModel]:
        """Return the sections by name."""
        update = {} if self.update is None else {UPDATE: self.update}
        return {KL: self.kl, ADVANTAGE: self.advantage, **update}

    def with_field(self, name: str, value: Any) -> "Settings":
        """Return the settings with one field changed, whether or not others now fit it."""
        section, _, leaf = name.rpartition(".")
        changed = self.sections()[section].model_copy(update={leaf: value})
        attribute = {KL: "kl", ADVANTAGE: "advantage", UPDATE: "update"}[section]
        return replace(self, **{attribute: changed})

    def for_page(self) -> dict[str, Any]:
        """Return what the page needs to put a token's numbers into words."""
        traits, update = self.advantage.traits, self.update
        return {
            "kl_estimator": self.kl.estimator,
            "gamma": self.advantage.gamma,
            "lam": self.advantage.lam,
            "lam_alpha": self.advantage.lam_alpha,
            "estimator": self.advantage.estimator,
            "needs_critic": traits.needs_critic,
            "advantage_formula": traits.formula,
            "whitens": self.advantage.whitens,
            "objective_formula": None if update is None else update.formula,
            "bound": None if update is None else update.bound,
        }


@dataclass(frozen=True)
class Control:
    """A control of the page: one field of the config."""

    name: str
    doc: str
    value: Any  # the run's own
    options: list[str] | None = None  # of a choice; else it is a number
    optional: bool = False  # may be none
    usual: float | None = None  # a number to begin with where it is none
    # How far the slider reaches; the number beside it may go further.
    low: float = 0.0
    high: float = 1.0
    step: float = 0.01


def inside(mapping: Any, *path: str) -> Any:
    """Return mapping[a][b]…, None where a step is missing or not a mapping."""
    for name in path:
        mapping = mapping.get(name) if isinstance(mapping, Mapping) else None
    return mapping


def samples_per_prompt(config: Mapping[str, Any]) -> int:
    """Return the rows of a group, 1 where the config does not say."""
    samples = inside(config, "rollout", "samples_per_prompt")
    return samples if type(samples) is int and samples > 0 else 1


def own_settings(
    config: Mapping[str, Any],
    row: Mapping[str, Any] | None = None,
    penalty_coef: float = math.nan,
) -> Settings:
    """Return what the run used; a field that a config of an older version lacks is the default.

    Controllers move two coefficients from one iteration to the next: beta, which the row has, and
    PPO-Penalty's, which is the metric `actor/penalty_coef` of the iteration (NaN = not recorded).
    """
    unknown: dict[str, str] = {}
    kl = _read_section(KL, KlInRewardSection, config, unknown)
    advantage = _read_section(ADVANTAGE, AdvantageSection, config, unknown)
    kind = inside(config, *UPDATE.split("."), "kind") or "clip"
    update_class = UPDATES.get(kind) if isinstance(kind, str) else None
    update = update_class and _read_section(UPDATE, update_class, config, unknown)
    beta = as_number((row or {}).get("beta"))
    if not math.isnan(beta):
        kl = kl.model_copy(update={"coef": _computable(beta)})
    if update is not None and not math.isnan(penalty_coef):
        update = update.model_copy(update={"coef": _computable(penalty_coef)})
    critic_lam = as_number(inside(config, "critic", "lam"))
    return Settings(
        kl,
        advantage,
        update,
        None if math.isnan(critic_lam) else _computable(critic_lam),
        _weights(config),
        unknown,
    )


def _weights(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the weights of the named rewards; 1 where the config does not say."""
    parts = inside(config, "reward", "parts")
    named = [p for p in parts if isinstance(p, Mapping)] if isinstance(parts, list) else []
    weights = {str(part.get("name")): as_number(part.get("weight", 1.0)) for part in named}
    return {name: 1.0 if math.isnan(w) else _computable(w) for name, w in weights.items()}


def read_settings(query: Mapping[str, str], config: Mapping[str, Any], own: Settings) -> Settings:
    """Return the settings that a query asks for; a field that it does not name is the run's own."""
    settings, offered = own, {control.name: control for control in controls(own, config)}
    for name, text in query.items():
        if name not in offered:
            raise UserError(f"{name[:80]} is not a setting of what-if.")
        settings = settings.with_field(name, _read_value(offered[name], text, own))
    for name, why in own.unknown.items():
        if name not in query:
            raise UserError(why)
    return settings


def controls(own: Settings, config: Mapping[str, Any]) -> list[Control]:
    """Return every field that what-if can change for this run."""
    fields = dict(FIELDS)
    if own.update is not None:
        skipped = ("kind", *own.update.beside_the_loss)
        fields[UPDATE] = tuple(n for n in type(own.update).model_fields if n not in skipped)
    sections = own.sections()
    made = [_control(s, leaf, sections[s]) for s, leaves in fields.items() for leaf in leaves]
    offered = {f"{KL}.estimator": _kl_estimators, f"{ADVANTAGE}.estimator": _estimators}
    return [
        replace(control, options=offered[control.name](own, config))
        if control.name in offered
        else control
        for control in made
    ]


def controls_for_page(own: Settings, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the controls as plain dicts."""
    return [asdict(control) for control in controls(own, config)]


def _kl_estimators(own: Settings, config: Mapping[str, Any]) -> list[str]:
    """Return those that a reward may use, if only as an ablation."""
    names = _schema(KlInRewardSection, "estimator")["enum"]
    return [name for name in names if _is_valid({"estimator": name, "ablation": True})]


def _is_valid(kl_in_reward: dict[str, Any]) -> bool:
    try:
        KlInRewardSection.model_validate(kl_in_reward)
    except ValidationError:
        return False
    return True


def _estimators(own: Settings, config: Mapping[str, Any]) -> list[str]:
    """Return the estimators that this run's files hold enough for.

    A run with another estimator recorded neither a critic's values nor greedy responses, and a
    group needs more than one row.
    """
    grouped = samples_per_prompt(config) > 1
    return [
        name
        for name, traits in ESTIMATORS.items()
        if name == own.advantage.estimator
        or not (
            (traits.by_group and not grouped)
            or (traits.needs_critic or traits.needs_greedy or traits.needs_parts)
            or traits.needs_teacher
        )
    ]


def _control(section: str, leaf: str, own: BaseModel) -> Control:
    """Make a field's control from its JSON schema."""
    schema, value = _schema(type(own), leaf), getattr(own, leaf)
    kinds = schema.get("anyOf", [schema])
    optional = any(kind.get("type") == "null" for kind in kinds)
    [kind] = [kind for kind in kinds if kind.get("type") != "null"]
    base = Control(f"{section}.{leaf}", schema.get("description", ""), value, optional=optional)
    if "enum" in kind or kind.get("type") == "boolean":
        return replace(base, options=kind.get("enum", ["true", "false"]))
    least = kind.get("exclusiveMinimum", kind.get("minimum", 0.0))
    usual = next((abs(x) for x in (value, schema.get("default")) if x), least + 2)
    most = kind.get("exclusiveMaximum", kind.get("maximum", math.inf))
    if most > 50 * usual:  # without a bound, or with one that is far away
        most = 5 * usual
    step = 10.0 ** math.floor(math.log10((most - least) / 50))
    if kind.get("type") == "integer":
        step = max(1.0, step)
    low = least + step if "exclusiveMinimum" in kind else least
    high = most - step if "exclusiveMaximum" in kind else most
    return replace(base, usual=usual, low=low, high=high, step=step)


def _read_value(control: Control, text: str, own: Settings) -> Any:
    """Parse a query's text as the field's type; what does not fit is a UserError with its name."""
    name, _, leaf = control.name.rpartition(".")
    shown = f"{control.name} is {text[:40]!r}"
    if control.options is not None and text not in control.options:
        raise UserError(f"{shown}, but for this run it is {', '.join(control.options)}.")
    if control.optional and text == NONE:
        return None
    try:
        value = _adapter(type(own.sections()[name]), leaf).validate_python(text)
    except ValidationError as error:
        raise UserError(f"{shown}: {error.errors()[0]['msg'].lower()}.") from None
    if isinstance(value, float) and abs(value) > LARGEST:
        raise UserError(f"{shown}, but it is a number of at most {LARGEST:g}.")
    return value


def _read_section(
    name: str, section: type[AnySection], config: Mapping[str, Any], unknown: dict[str, str]
) -> AnySection:
    """Read a section field by field: a config.yaml may be of another version, or forged."""
    given = inside(config, *name.split("."))
    read: dict[str, Any] = {}
    for leaf in section.model_fields:
        if not isinstance(given, Mapping) or leaf not in given:
            continue
        try:
            read[leaf] = _computable(_adapter(section, leaf).validate_python(given[leaf]))
        except ValidationError:
            unknown[f"{name}.{leaf}"] = (
                f"{name}.{leaf} is {str(given[leaf])[:40]!r}, which this version does not know."
            )
    return section.model_construct(**read)


def _computable(value: Any) -> Any:
    return min(max(value, -LARGEST), LARGEST) if isinstance(value, float) else value


@lru_cache
def _adapter(section: type[BaseModel], leaf: str) -> TypeAdapter[Any]:
    annotation = section.model_fields[leaf].rebuild_annotation()
    return TypeAdapter(annotation, config=ConfigDict(allow_inf_nan=False))


@lru_cache
def _schema(section: type[BaseModel], leaf: str) -> dict[str, Any]:
    return section.model_json_schema()["properties"][leaf]
