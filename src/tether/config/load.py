"""Load recipes: from YAML and dotted overrides to a validated Config, or one sentence per mistake.

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
# Fields by the names that other systems have for them.
OTHER_NAMES = {
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
    "warmup_steps": "actor.lr_warmup_iterations",
    "lr_warmup_steps": "actor.lr_warmup_iterations",
    "adam_epsilon": "actor.eps",
    "adam_beta1": "actor.betas",
    "adam_beta2": "actor.betas",
    "num_layers_unfrozen": "model.learn_layers",
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
ALIKE = 0.6  # difflib's similarity from which on one name may be a misspelling of another
DEFAULT_KIND = "clip"  # of actor.update
MAX_VALUES = 100_000  # of a recipe

Schema = TypeVar("Schema", bound=BaseModel)


def load_config(
    recipe: str | os.PathLike[str],
    overrides: Mapping[str, Any] | None = None,
    schema: type[Schema] = Config,
) -> Schema:
    """Load a shipped recipe or a YAML file, with dotted overrides: {"actor.lr": 1e-4}.

    `schema` says which kind of recipe it must be: PPO, or one of `tether.config.stages`.
    """
    mapping, written = _from_its_folder(_find(recipe), read_recipe(recipe))
    _refuse_other_stage(recipe, mapping, schema)
    _drop_shipped_heldout(mapping, overrides or {})
    merge_overrides(mapping, overrides or {}, schema)
    config = validate_config(mapping, schema)
    if isinstance(config, RunConfig):
        config.written_as(written)
    return config


def _from_its_folder(path: Path, mapping: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Resolve the relative paths of a run's config.yaml against the folder it was started in.

    Also return {resolved: as written}. The paths of a recipe are relative to the current folder.
    """
    folder = started_in(path.parent) if path.name in (CONFIG, RECIPE) else None
    written: dict[str, str] = {}
    if folder is None or folder == Path.cwd():
        return mapping, written
    model = mapping.get("model")
    hub = isinstance(model, dict) and model.get("hub") is True

    def locate(path: str) -> str:
        there = folder / path  # an absolute path stays as it is
        only_here = not there.exists() and (hub or Path(path).exists())
        if is_shipped(path) or there == Path(path) or only_here:
            return path
        written[str(there)] = path
        return str(there)

    return map_paths(mapping, locate), written


def _drop_shipped_heldout(mapping: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Drop the recipe's shipped held-out prompts when the user brings other training data.

    They would measure another task, and lack the columns that the user's reward asks for.
    """
    data = mapping.get("data")
    if "data.train" not in overrides or "data.heldout" in overrides or not isinstance(data, dict):
        return
    shipped = is_shipped(data.get("train")) and is_shipped(data.get("heldout"))
    if shipped and not is_shipped(overrides["data.train"]):
        del data["heldout"]


def validate_config(mapping: Mapping[str, Any], schema: type[Schema] = Config) -> Schema:
    """Validate a recipe's mapping; raise a UserError with one sentence per mistake."""
    try:
        return schema.model_validate(mapping)
    except ValidationError as error:
        raise UserError("\n".join(_sentence(dict(e), schema) for e in error.errors())) from None


def _refuse_other_stage(
    recipe: str | os.PathLike[str], mapping: Mapping[str, Any], schema: type[BaseModel]
) -> None:
    """Refuse the recipe of another command with one sentence, not one per field that is unknown."""
    stage, field = mapping.get("stage"), schema.model_fields.get("stage")
    if stage is not None and stage != (field.default if field else None):
        command = "train" if stage == "rlhf" else stage
        raise UserError(f"{recipe} is a recipe of `tether {command}`, not of this command.")


def shipped_recipes() -> dict[str, Path]:
    """Return the recipes of this package by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def read_recipe(recipe: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a recipe's mapping as its file has it, not yet validated."""
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
        raise UserError(f"{path} is not a mapping of sections; see `tether train --help`.")
    if values >= MAX_VALUES:  # an error about one field could quote all of them
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
        raise UserError(f"{path} is not a recipe: its name must end in .yaml.")
    return path


def merge_overrides(
    mapping: dict[str, Any], overrides: Mapping[str, Any], schema: type[BaseModel] = Config
) -> None:
    """Merge dotted overrides into the mapping; a new `kind` first removes the old one's fields."""
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
    """Say one pydantic error as one sentence with the field and what to write."""
    # Inside a union the location also names the kind, which is not part of the dotted name.
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
    # A right name in a wrong section is the likelier mistake, so leaves are compared first.
    same_leaf = [dotted for dotted in known if dotted.rsplit(".", 1)[-1] == leaf]
    renamed = [OTHER_NAMES[leaf]] if OTHER_NAMES.get(leaf) in known else []
    # Names are compared within the section first: a long common prefix would make all similar.
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
