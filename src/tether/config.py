"""Every setting of a run: one frozen section a component, in data-flow order. Imports no torch.

A recipe is a YAML mapping of these sections. Dotted overrides are merged into the mapping, then
the whole is validated once: unknown keys are errors, and nothing is changed after that.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from tether.errors import UserError

SCHEMA = 1
RECIPES = Path(__file__).parent / "recipes"

Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class RunSection(Section):
    """Where a run writes, and how much of its rollouts it keeps."""

    dir: Path | None = None
    """the run directory itself; without it runs/NAME-001, -002, …"""
    name: str = "run"
    """the NAME in runs/NAME-001"""
    overwrite: bool = False
    """replace an earlier run at `run.dir`"""
    rollouts_every: NonNegativeInt = 10
    """write rollouts/ every so many iterations; 0 = never"""
    rollouts_rows: PositiveInt = 64
    """rows kept of each written iteration, evenly spaced"""


class ModelSection(Section):
    """The networks behind the roles."""

    actor: str
    """a local Hugging Face directory, or `tether:starter`"""
    reference: str | None = None
    """the frozen policy that KL is measured against; default: the actor's starting weights"""
    critic: str | None = None
    """the trunk that a zero value head is put on; default: the actor's starting weights"""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """number format of all weights"""


class DataSection(Section):
    """Prompts: JSON lines, one object a row; columns other than the prompt go to the reward."""

    train: str
    """path of the training prompts, or `tether:NAME` for a file that ships"""
    heldout: str | None = None
    """path of the prompts that only evaluation sees"""
    prompt_column: str = "prompt"
    """the column that holds the prompt"""
    system_prompt: str | None = None
    """a system turn before every prompt; needs a chat template"""
    max_prompt_tokens: PositiveInt = 512
    """a longer prompt is refused before training, by row"""
    shuffle: bool = True
    """a fresh order each data pass; without it, file order"""


class RolloutSection(Section):
    """How responses are sampled."""

    prompts: PositiveInt = 64
    """prompts an iteration"""
    samples_per_prompt: PositiveInt = 4
    """responses sampled for each prompt"""
    max_response_tokens: PositiveInt = 128
    """a response that has not ended by then is truncated"""
    temperature: PositiveFloat = 1.0
    """divides the logits, in sampling and in every log-prob alike"""


class RewardSection(Section):
    """What turns a response into a score."""

    kind: str
    """a rule that ships (`exact_answer`), or `path/file.py:function`"""
    timeout_seconds: PositiveFloat = 10.0
    """time one row may take before its score counts as failed"""
    max_failed_share: Share = 0.1
    """stop the run when more than this share of an iteration's rows could not be scored"""


class KlInRewardSection(Section):
    """The tether: beta times the KL to the reference, taken off every token's reward."""

    coef: NonNegativeFloat = 0.02
    """beta at the start"""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """keep beta, or steer it so that the KL stays near `target`"""
    target: PositiveFloat = 6.0
    """the KL that the adaptive controller steers to"""
    horizon: PositiveInt = 10_000
    """rows over which the adaptive controller may change beta by a fifth"""
    unit: Literal["token", "sequence"] = "sequence"
    """the KL that `target` speaks of: `kl/token_mean` or `kl/sequence_mean`"""


class KlSection(Section):
    """Where the KL to the reference enters."""

    in_reward: KlInRewardSection = KlInRewardSection()
    """the KL penalty in the reward"""


class AdvantageSection(Section):
    """From rewards and values to advantages."""

    gamma: Share = 1.0
    """discount a token"""
    lam: Share = 0.95
    """lambda of GAE: 1 trusts the rewards, 0 trusts the critic"""
    whiten: bool = True
    """give the policy loss advantages of mean 0 and variance 1"""
    truncation: Literal["zero", "bootstrap"] = "zero"
    """what follows a truncated response: nothing, or the critic's value (it is then not scored)"""


class CriticSection(Section):
    """The value update."""

    lr: PositiveFloat = 1e-5
    """learning rate"""
    epochs: PositiveInt = 1
    """passes over the rows of an iteration"""
    minibatch_rows: PositiveInt = 64
    """rows of one optimizer step"""
    microbatch_tokens: PositiveInt = 16_384
    """padded tokens of one backward; changes memory, and no number beyond rounding"""
    clip: PositiveFloat = 0.2
    """how far a value may move from the old one before its loss is flat"""
    max_grad_norm: PositiveFloat = 1.0
    """the gradient is scaled down to this norm"""


class ClipUpdate(Section):
    """PPO-Clip: the ratio new/old earns nothing beyond 1 - eps_low and 1 + eps_high."""

    kind: Literal["clip"] = "clip"
    """the trust region"""
    eps_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """how far the ratio may fall before the objective is flat"""
    eps_high: PositiveFloat = 0.2
    """how far the ratio may rise before the objective is flat"""


class ActorSection(Section):
    """The policy update."""

    lr: PositiveFloat = 1e-6
    """learning rate"""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """how both learning rates fall over train.iterations: not at all, or to zero"""
    epochs: PositiveInt = 1
    """passes over the rows of an iteration"""
    minibatch_rows: PositiveInt = 64
    """rows of one optimizer step"""
    microbatch_tokens: PositiveInt = 16_384
    """padded tokens of one backward; changes memory, and no number beyond rounding"""
    entropy_coef: NonNegativeFloat = 0.0
    """weight of the entropy bonus"""
    max_grad_norm: PositiveFloat = 1.0
    """the gradient is scaled down to this norm"""
    update: ClipUpdate = ClipUpdate()
    """the trust region and its own fields"""


class TrainSection(Section):
    """How long, and how often the rest happens."""

    iterations: PositiveInt = 100
    """rollout batches to train on"""
    eval_every: NonNegativeInt = 0
    """evaluate every so many iterations, besides before and after; 0 = never"""
    eval_prompts: PositiveInt = 512
    """held-out prompts an evaluation uses, from the top of the file"""
    checkpoint_every: NonNegativeInt = 0
    """save every so many iterations, besides at the end; 0 = never"""
    keep_last: PositiveInt = 2
    """checkpoints kept"""


class Config(Section):
    """One run. Sections stand in the order in which data flows through them."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    schema_version: Annotated[Literal[1], Field(alias="schema")] = SCHEMA
    """version of this file's layout"""
    seed: NonNegativeInt = 0
    """every random number is computed from it"""
    device: str = "auto"
    """cpu, cuda, or auto: cuda if there is one"""
    threads: PositiveInt = Field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """CPU threads; the same number gives the same bits (default: the cores at hand)"""

    run: RunSection = RunSection()
    model: ModelSection
    data: DataSection
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection
    kl: KlSection = KlSection()
    advantage: AdvantageSection = AdvantageSection()
    critic: CriticSection = CriticSection()
    actor: ActorSection = ActorSection()
    train: TrainSection = TrainSection()

    @cached_property
    def rows(self) -> int:
        """Sampled responses an iteration."""
        return self.rollout.prompts * self.rollout.samples_per_prompt

    @model_validator(mode="after")
    def _minibatches_fit(self) -> Config:
        for name, section in (("critic", self.critic), ("actor", self.actor)):
            if section.minibatch_rows > self.rows:
                raise ValueError(
                    f"{name}.minibatch_rows is {section.minibatch_rows}, but an iteration has only "
                    f"{self.rollout.prompts} prompts x {self.rollout.samples_per_prompt} samples "
                    f"= {self.rows} rows; write at most {self.rows}"
                )
        return self

    @model_validator(mode="after")
    def _adaptive_step_is_stable(self) -> Config:
        kl = self.kl.in_reward
        if kl.controller == "adaptive" and self.rows >= 5 * kl.horizon:
            raise ValueError(
                f"kl.in_reward.horizon is {kl.horizon}, too short for {self.rows} rows an "
                f"iteration: beta could reach zero in one step; write more than {self.rows // 5}"
            )
        return self

    def to_yaml(self) -> str:
        """The resolved config; `run.dir` is left out, as it is where the file itself lies."""
        values = self.model_dump(mode="json", by_alias=True, exclude={"run": {"dir"}})
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def load_config(
    recipe: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None
) -> Config:
    """A shipped recipe's name or a YAML path, with dotted overrides: {"actor.lr": 1e-4}."""
    mapping = read_recipe(recipe)
    for dotted, value in (overrides or {}).items():
        merge_override(mapping, dotted, value)
    return validate_config(mapping)


def validate_config(mapping: Mapping[str, Any]) -> Config:
    try:
        return Config.model_validate(mapping)
    except ValidationError as error:
        raise UserError("\n".join(_sentence(dict(e)) for e in error.errors())) from None


def shipped_recipes() -> dict[str, Path]:
    return {path.stem: path for path in sorted(RECIPES.glob("*.yaml"))}


def read_recipe(recipe: str | os.PathLike[str]) -> dict[str, Any]:
    shipped = shipped_recipes()
    path = shipped.get(str(recipe), Path(recipe))
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        close = difflib.get_close_matches(str(recipe), shipped, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"shipped: {', '.join(shipped)}."
        raise UserError(f"No recipe or YAML file {str(recipe)!r}; {hint}")
    try:
        mapping = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(mapping, dict):
        raise UserError(f"{path} holds no mapping of sections; see `tether train --help`.")
    return mapping


def merge_override(mapping: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, field = dotted.split(".")
    for depth, name in enumerate(sections, start=1):
        mapping = mapping.setdefault(name, {})
        if not isinstance(mapping, dict):
            raise UserError(f"{dotted}: {'.'.join(sections[:depth])} is not a section.")
    mapping[field] = value


def walk_fields(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf field as (dotted name, pydantic FieldInfo), in order."""
    for name, info in section.model_fields.items():
        dotted = f"{prefix}{info.alias or name}"
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from walk_fields(info.annotation, f"{dotted}.")
        else:
            yield dotted, info


def _sentence(error: dict[str, Any]) -> str:
    """One pydantic error as one sentence with the field and what to write."""
    field = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"Unknown field {field}{_nearest(field)}"
    if error["type"] == "missing":
        return f"{field} is missing: give it in the recipe or as --{field} VALUE."
    if not field:
        return str(error["ctx"]["error"]) + "."
    message = error["msg"].removeprefix("Input ").removeprefix("Value error, ")
    return f"{field} is {error['input']!r}, but {message}."


def _nearest(field: str) -> str:
    known = [dotted for dotted, _ in walk_fields()]
    leaf = field.rsplit(".", 1)[-1]
    # A right name in a wrong section is the likelier slip, so leaves are compared first.
    same_leaf = [dotted for dotted in known if dotted.rsplit(".", 1)[-1] == leaf]
    close = difflib.get_close_matches(field, same_leaf or known, n=1, cutoff=0.3)
    return f"; did you mean {close[0]}?" if close else "; see `tether train --help` for the fields."
