"""Recipes: from YAML and dotted overrides to a validated Config, or one sentence that says why not.

Overrides are merged into the recipe's mapping, and the whole is validated once. Imports no torch.
"""

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from tether.assets import is_shipped
from tether.config import (
    TOOL_TAGS,
    UPDATE_KINDS,
    Config,
    RunConfig,
    count_values,
    map_paths,
    walk_fields,
)
from tether.errors import UserError
from tether.run.directory import CONFIG, RECIPE, started_in
from tether.support.strict_yaml import load_yaml

FOLDER = Path(__file__).parent.parent / "recipes"
# What people type who come from other systems.
ELSEWHERE = {
    "learning_rate": "actor.lr",
    "beta": "kl.in_reward.coef",
    "kl_coef": "kl.in_reward.coef",
    "kl_loss_coef": "kl.in_loss.coef",
    "target_kl": "kl.in_reward.target",
    "batch_size": "rollout.prompts",
    "train_batch_size": "rollout.prompts",
    "mini_batch_size": "actor.minibatch_rows",
    "ppo_mini_batch_size": "actor.minibatch_rows",
    "ppo_micro_batch_size_per_gpu": "actor.microbatch_tokens",
    "per_device_train_batch_size": "actor.microbatch_tokens",
    "clip_ratio": "actor.update.eps_high",
    "cliprange": "actor.update.eps_high",
    "epsilon": "actor.update.eps_high",
    "epsilon_high": "actor.update.eps_high",
    "cliprange_value": "critic.clip",
    "n": "rollout.samples_per_prompt",
    "num_generations": "rollout.samples_per_prompt",
    "n_samples_per_prompt": "rollout.samples_per_prompt",
    "max_new_tokens": "rollout.max_response_tokens",
    "max_tokens": "rollout.max_response_tokens",
    "max_completion_length": "rollout.max_response_tokens",
    "max_response_length": "rollout.max_response_tokens",
    "response_length": "rollout.max_response_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "prompt_key": "data.prompt_column",
    "train_files": "data.train",
    "val_files": "data.heldout",
    "adv_estimator": "advantage.estimator",
    "loss_agg_mode": "actor.aggregation",
    "loss_type": "actor.aggregation",
    "entropy_coeff": "actor.entropy_coef",
    "num_ppo_epochs": "actor.epochs",
    "ppo_epochs": "actor.epochs",
    "num_iterations": "actor.epochs",
    "grad_clip": "actor.max_grad_norm",
    "lr_scheduler_type": "actor.schedule",
    "total_training_steps": "train.iterations",
    "max_steps": "train.iterations",
    "num_train_epochs": "train.iterations",
    "total_epochs": "train.iterations",
    "save_freq": "train.checkpoint_every",
    "save_steps": "train.checkpoint_every",
    "test_freq": "train.eval_every",
    "eval_steps": "train.eval_every",
    "output_dir": "run.dir",
    "default_local_dir": "run.dir",
    "report_to": "run.trackers",
    "lora_rank": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "model_path": "model.actor",
    "model_name_or_path": "model.actor",
    "reward_funcs": "reward.kind",
}
ALIKE = 0.6  # of two names, from which on one may be a slip of the other
DEFAULT_KIND = "clip"  # of actor.update
MAX_VALUES = 100_000  # of a recipe

Schema = TypeVar("Schema", bound=BaseModel)


def load_config(
    recipe: str | os.PathLike[str],
    overrides: Mapping[str, Any] | None = None,
    schema: type[Schema] = Config,
) -> Schema:
    """A shipped recipe's name or a YAML path, with dotted overrides: {"actor.lr": 1e-4}.

    `schema` is what it has to be a recipe of: PPO, or one of `tether.config.stages`.
    """
    mapping, written = _from_its_folder(_find(recipe), read_recipe(recipe))
    _refuse_other_stage(recipe, mapping, schema)
    _drop_shipped_heldout(mapping, overrides or {})
    merge_overrides(mapping, overrides or {}, schema)
    config = validate_config(mapping, schema)
    return config.written_as(written) if isinstance(config, RunConfig) else config


def _from_its_folder(path: Path, mapping: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Make the relative paths of a run's config.yaml mean what they meant where the run was
    started; also return how they were written. A recipe's are meant from where the command runs.
    """
    folder = started_in(path.parent) if path.name in (CONFIG, RECIPE) else None
    written: dict[str, str] = {}
    if folder is None or folder == Path.cwd():
        return mapping, written
    model = mapping.get("model")
    hub = isinstance(model, dict) and model.get("hub") is True

    def locate(given: str) -> str:
        there = folder / given  # of an absolute path, the path itself
        here_alone = not there.exists() and (hub or Path(given).exists())
        if is_shipped(given) or there == Path(given) or here_alone:
            return given
        written[str(there)] = given
        return str(there)

    return map_paths(mapping, locate), written


def _drop_shipped_heldout(mapping: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Held-out prompts that ship belong to training data that ship: with data of the user's own
    they would measure another task, and ask the reward about columns that it does not know."""
    data = mapping.get("data")
    if "data.train" not in overrides or "data.heldout" in overrides or not isinstance(data, dict):
        return
    shipped = is_shipped(data.get("train")) and is_shipped(data.get("heldout"))
    if shipped and not is_shipped(overrides["data.train"]):
        del data["heldout"]


def validate_config(mapping: Mapping[str, Any], schema: type[Schema] = Config) -> Schema:
    try:
        return schema.model_validate(mapping)
    except ValidationError as error:
        raise UserError("\n".join(_sentence(dict(e), schema) for e in error.errors())) from None


def _refuse_other_stage(
    recipe: str | os.PathLike[str], mapping: Mapping[str, Any], schema: type[BaseModel]
) -> None:
    """The file of one command given to another: none of its fields would fit."""
    stage, field = mapping.get("stage"), schema.model_fields.get("stage")
    if stage is not None and stage != (field.default if field else None):
        command = "train" if stage == "rlhf" else stage
        raise UserError(f"{recipe} is a recipe of `tether {command}`, and of no other command.")


def shipped_recipes() -> dict[str, Path]:
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def read_recipe(recipe: str | os.PathLike[str]) -> dict[str, Any]:
    path = _find(recipe)
    try:
        mapping = load_yaml(path.read_text(encoding="utf-8"))
        values = count_values(mapping, MAX_VALUES)
    except yaml.MarkedYAMLError as error:
        where = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{where} is not YAML: {error.problem}.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}.") from None
    except RecursionError:
        raise UserError(f"{path} is nested too deeply to be a recipe.") from None
    if not isinstance(mapping, dict):
        raise UserError(f"{path} holds no mapping of sections; see `tether train --help`.")
    if values >= MAX_VALUES:  # they would be quoted whole in a sentence about one of them
        raise UserError(f"{path} holds more than {MAX_VALUES:,} values, so it is not a recipe.")
    return mapping


def _find(recipe: str | os.PathLike[str]) -> Path:
    shipped = shipped_recipes()
    path = shipped.get(str(recipe), Path(recipe))
    if not path.is_file():
        close = difflib.get_close_matches(str(recipe), shipped, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"shipped: {', '.join(shipped)}."
        raise UserError(f"No recipe or YAML file {str(recipe)!r}; {hint}")
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"{path} is no recipe: its name must end in .yaml.")
    return path


def merge_overrides(
    mapping: dict[str, Any], overrides: Mapping[str, Any], schema: type[BaseModel] = Config
) -> None:
    """Put dotted overrides in place; another `kind` takes the fields of the old one away first."""
    kinds_first = sorted(overrides.items(), key=lambda item: item[0] != "actor.update.kind")
    for dotted, value in kinds_first:
        section, field = _find_section(mapping, dotted, schema)
        if dotted == "actor.update.kind" and section.get("kind", DEFAULT_KIND) != value:
            section.clear()
        section[field] = value


def _find_section(
    mapping: dict[str, Any], dotted: str, schema: type[BaseModel]
) -> tuple[dict[str, Any], str]:
    inside = [name for name, _ in walk_fields(schema) if name.startswith(f"{dotted}.")]
    if inside:
        raise UserError(f"{dotted} is a section; write one of its fields, such as --{inside[0]}.")
    *sections, field = dotted.split(".")
    for depth, name in enumerate(sections, start=1):
        if mapping.get(name) is None:
            mapping[name] = {}
        mapping = mapping[name]
        if not isinstance(mapping, dict):
            raise UserError(f"{dotted}: {'.'.join(sections[:depth])} is not a section.")
    return mapping, field


def _sentence(error: dict[str, Any], schema: type[BaseModel]) -> str:
    """One pydantic error as one sentence with the field and what to write."""
    # Inside a union the location names the kind as well, which is no part of the dotted name.
    field = ".".join(str(part) for part in error["loc"] if part not in (*UPDATE_KINDS, *TOOL_TAGS))
    match error["type"]:
        case "extra_forbidden":
            return _unknown(field, schema)
        case "missing":
            names = [name for name, _ in walk_fields(schema)]
            wanted = next((name for name in names if f"{name}.".startswith(f"{field}.")), field)
            return f"{wanted} is missing: give it in the recipe or as --{wanted} VALUE."
        case "union_tag_invalid":
            tag = error["ctx"]["tag"]
            return f"{field}.kind is {tag!r}, but it is one of {', '.join(UPDATE_KINDS)}."
        case "value_error":
            return f"{field}: {error['ctx']['error']}.".removeprefix(": ")
        case "model_type" | "dict_type" | "model_attributes_type":
            return f"{field} is {error['input']!r}, but it is a section with fields of its own."
    return f"{field} is {error['input']!r}, but {error['msg'].removeprefix('Input ')}."


def _unknown(field: str, schema: type[BaseModel]) -> str:
    known = [dotted for dotted, _ in walk_fields(schema)]
    if field in known:
        return f"{field} is a field of another kind; see `tether train --help`."
    leaf = field.rsplit(".", 1)[-1]
    # A right name in a wrong section is the likelier slip, so leaves are compared first.
    same_leaf = [dotted for dotted in known if dotted.rsplit(".", 1)[-1] == leaf]
    renamed = [ELSEWHERE[leaf]] if ELSEWHERE.get(leaf) in known else []
    # Names are compared within the section first: a long one in common would make all alike.
    section = field.rpartition(".")[0]
    beside = {d.rpartition(".")[2]: d for d in known if d.rpartition(".")[0] == section}
    slip = [beside[name] for name in difflib.get_close_matches(leaf, beside, 1, cutoff=ALIKE)]
    close = (
        renamed
        or difflib.get_close_matches(field, same_leaf, 1, cutoff=0)
        or slip
        or difflib.get_close_matches(field, [] if beside else known, 1, cutoff=ALIKE)
    )
    hint = f"did you mean {close[0]}?" if close else "see `tether train --help` for the fields."
    return f"Unknown field {field}; {hint}"
