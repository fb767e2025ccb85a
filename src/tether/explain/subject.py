"""What is traced: a run's newest checkpoint, a recipe's model, or a model directory."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from tether.config import Config
from tether.errors import UserError
from tether.models.loading import find_model
from tether.recipes import load_config, read_recipe, shipped_recipes
from tether.run.checkpoints import latest_checkpoint
from tether.run.directory import CONFIG, is_run
from tether.train.checkpoint import load_checkpoint, read_progress, read_state
from tether.train.controls import Controls, first_controls
from tether.train.roles import Roles

RECIPE = "arithmetic"  # whose data and reward serve a bare model directory


@dataclass(frozen=True)
class Subject:
    name: str
    config: Config
    controls: Controls
    checkpoint: Path | None  # of a run


def find_subject(name: str, overrides: Mapping[str, Any]) -> Subject:
    """A run brings its own config, critic and beta; dotted overrides are laid over all of it."""
    path = Path(name)
    if is_ppo_run(path):
        config, checkpoint = load_config(path / CONFIG, overrides), latest_checkpoint(path)
        return Subject(name, config, _controls_of_run(checkpoint, config, overrides), checkpoint)
    if is_run(path):  # of a stage: weights, and neither data nor a reward for PPO
        name = str(latest_checkpoint(path) / "actor")
    if name in shipped_recipes() or path.suffix in (".yaml", ".yml"):
        config = load_config(name, overrides)
    else:
        config = load_config(RECIPE, {"model.actor": name, **overrides})
        find_model(config.model.actor, config.model.hub)  # before anything is asked of its data
    return Subject(name, config, first_controls(config), checkpoint=None)


def is_ppo_run(path: Path) -> bool:
    """Return whether it is a run of `tether train`, and not of a stage before it."""
    return is_run(path) and read_recipe(path / CONFIG).get("stage") is None


def _controls_of_run(checkpoint: Path, config: Config, overrides: Mapping[str, Any]) -> Controls:
    """As the run left them, but what is typed wins."""
    typed = first_controls(config)
    try:
        controls = read_progress(read_state(checkpoint)).controls
    except (KeyError, TypeError):
        raise UserError(f"{checkpoint} was written by another version of tether.") from None
    if "kl.in_reward.coef" in overrides:
        controls = replace(controls, beta=typed.beta)
    if any(field.startswith("actor.update.") for field in overrides):
        controls = replace(controls, penalty_coef=typed.penalty_coef)
    return controls


def restore(subject: Subject, roles: Roles, config: Config) -> None:
    """Put a run's weights and Adam moments in place of the fresh ones."""
    if subject.checkpoint is None:
        return
    try:
        load_checkpoint(subject.checkpoint, roles, config)
    except (OSError, SafetensorError, RuntimeError, IndexError) as error:
        reason = str(error).splitlines()[0].rstrip(".:")
        raise UserError(
            f"{subject.checkpoint} does not fit these fields: {reason}; leave out overrides that "
            f"change the models."
        ) from None
