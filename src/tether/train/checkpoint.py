"""What a checkpoint holds: all that the next iteration depends on, as safetensors and JSON.

checkpoints/000050/actor/                       a Hugging Face directory with its tokenizer
checkpoints/000050/critic.safetensors
checkpoints/000050/reference.safetensors        only where the reference is refreshed
checkpoints/000050/actor_optimizer.safetensors
checkpoints/000050/critic_optimizer.safetensors
checkpoints/000050/state.json

There is no random state to keep: every draw is computed from the seed and where it is used. Nor is
there a position in the data: it follows from the iteration.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

from tether.config import Config
from tether.errors import RunStopped
from tether.models.critic import Critic
from tether.models.loading import load_causal_lm
from tether.run.checkpoints import all_checkpoints, prune, publish
from tether.run.directory import CHECKPOINTS, EVALS, SCHEMA
from tether.run.reader import read_lines
from tether.train.controls import Controls
from tether.train.roles import Roles

STATE = "state.json"
ACTOR = "actor"
CRITIC = "critic.safetensors"
REFERENCE = "reference.safetensors"
ACTOR_OPTIMIZER = "actor_optimizer.safetensors"
CRITIC_OPTIMIZER = "critic_optimizer.safetensors"


@dataclass(frozen=True)
class Progress:
    """Where a run stands between two iterations, beside weights and moments."""

    iterations_done: int
    controls: Controls
    barren_iterations: int = 0  # in a row, that taught nothing for numbers that were not finite


def save_checkpoint(
    run: Path,
    progress: Progress,
    roles: Roles,
    config: Config,
) -> Path:
    """Write the state; one that exists already is left as it is, being the same."""
    name = f"{progress.iterations_done:06d}"
    place = run / CHECKPOINTS / name
    if place.exists():
        return place
    _refuse_non_finite(roles, name)

    def write(folder: Path) -> None:
        _write_weights(folder, roles, config)
        state = {
            "schema": SCHEMA,
            **asdict(progress),
            "config": config.to_dict(),
            "inputs": roles.inputs,
        }
        (folder / STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")

    try:
        publish(run, name, write)
    except (OSError, SafetensorError) as error:
        raise RunStopped(
            f"Checkpoint {place} could not be written: {_reason(error)}. Make room, then "
            f"`tether resume {run}` goes on from the one before."
        ) from None
    prune(run, _kept(run, config))
    return place


def load_checkpoint(checkpoint: Path, roles: Roles, config: Config) -> None:
    """Put weights and moments back; roles were built from the same config."""
    device = roles.actor.model.device
    saved = load_causal_lm(str(checkpoint / ACTOR), config.model.dtype, device)
    roles.actor.model.load_state_dict(saved.state_dict())
    if isinstance(roles.critic, Critic):
        load_model(roles.critic, str(checkpoint / CRITIC))
    if config.refreshes_reference:
        load_model(roles.reference.policy.model, str(checkpoint / REFERENCE))
    roles.actor_optimizer.load_state(load_file(checkpoint / ACTOR_OPTIMIZER))
    if roles.critic_optimizer is not None:
        roles.critic_optimizer.load_state(load_file(checkpoint / CRITIC_OPTIMIZER))


def read_state(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / STATE).read_text(encoding="utf-8"))


def read_progress(state: Mapping[str, Any]) -> Progress:
    fields = {name: state[name] for name in Progress.__dataclass_fields__ if name != "controls"}
    return Progress(controls=Controls(**state["controls"]), **fields)


def _write_weights(folder: Path, roles: Roles, config: Config) -> None:
    roles.actor.model.save_pretrained(folder / ACTOR)
    roles.vocabulary.tokenizer.save_pretrained(folder / ACTOR)
    if isinstance(roles.critic, Critic):
        save_model(roles.critic, str(folder / CRITIC))
    if config.refreshes_reference:
        save_model(roles.reference.policy.model, str(folder / REFERENCE))
    save_file(roles.actor_optimizer.state(), folder / ACTOR_OPTIMIZER)
    if roles.critic_optimizer is not None:
        save_file(roles.critic_optimizer.state(), folder / CRITIC_OPTIMIZER)


def _refuse_non_finite(roles: Roles, name: str) -> None:
    for role, module in (("actor", roles.actor.model), ("critic", roles.critic)):
        if isinstance(module, nn.Module) and not all(
            bool(weight.isfinite().all()) for weight in module.parameters()
        ):
            raise RunStopped(
                f"The {role}'s weights are not finite, so checkpoint {name} was not written; "
                f"resume from the one before with a lower learning rate."
            )


def _kept(run: Path, config: Config) -> list[Path]:
    """The newest `keep_last`, and of all the `keep_best` with the highest held-out score."""
    found = all_checkpoints(run)
    scores = {e["iteration"]: e["sampled"]["mean"] for e in read_lines(run / EVALS)}
    scored = [path for path in found if int(path.name) in scores]
    best = sorted(scored, key=lambda path: scores[int(path.name)], reverse=True)
    return found[: config.train.keep_last] + best[: config.train.keep_best]


def _reason(error: Exception) -> str:
    strerror = getattr(error, "strerror", None)
    return (strerror or str(error)).lower().removesuffix(".")
