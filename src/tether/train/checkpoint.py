"""What a checkpoint holds: all that the next iteration depends on, as safetensors and JSON.

checkpoints/000050/actor/                       a Hugging Face directory with its tokenizer
checkpoints/000050/adapter.safetensors          in its place where the actor has an adapter
checkpoints/000050/actor.safetensors            in its place where only some layers learn
checkpoints/000050/critic.safetensors           what learns: all of it, or adapter and head
checkpoints/000050/reference.safetensors        only where the reference is refreshed
checkpoints/000050/actor_optimizer.safetensors
checkpoints/000050/critic_optimizer.safetensors
checkpoints/000050/pending.safetensors          rows that wait to be trained on (rollout.lag)
checkpoints/000050/state.json

Those are PPO's. SFT has actor/, actor_optimizer and state.json, a reward model reward/,
reward_optimizer and state.json.

Several processes write a file in as many parts, NAME-00001-of-00002.safetensors, each of whole
tensors; any number of processes reads them.

There is no random state to save: every draw is computed from the seed and where it is used. The
position in the data follows from the iteration. The base below an adapter, or around the layers
that learn, is not part of a checkpoint: config.yaml names it, and state.json holds its hash.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel

from tether.config import Config
from tether.data.batching import balance
from tether.dist.collectives import any_process, gather_results, on_first_process
from tether.dist.dtensor import local_shard
from tether.dist.world import SAVING, waiting_for, world
from tether.errors import RunStopped, UserError
from tether.models.loading import DTYPES, load_causal_lm
from tether.models.locate import find_model
from tether.models.lora import add_adapter, merge_adapter
from tether.models.stored import weights_by_name
from tether.models.vocabulary import Vocabulary, load_vocabulary
from tether.models.weights import load_trainable_parameters, load_weights, plain_weights
from tether.ppo.result import Controls
from tether.ppo.roles import Roles, let_layers_learn, loads_in_parts
from tether.run.checkpoint_store import (
    all_checkpoints,
    damaged_files,
    discard,
    finish,
    promised_files,
    prune,
    seal_files,
    stage,
)
from tether.run.directory import CHECKPOINTS, SCHEMA
from tether.run.reader import read_regular
from tether.train.checkpoint_files import (
    OwnTensors,
    own_tensors,
    read_tensors,
    write_model,
    write_tensors,
)
from tether.train.fingerprint import Inputs, hash_ends, hash_model, versions
from tether.train.training import Contents, E, Training

STATE = "state.json"
ACTOR = "actor"
ADAPTER = "adapter.safetensors"
LEARNT_LAYERS = "actor.safetensors"
CRITIC = "critic.safetensors"
REFERENCE = "reference.safetensors"
ACTOR_OPTIMIZER = "actor_optimizer.safetensors"
CRITIC_OPTIMIZER = "critic_optimizer.safetensors"
CURRICULUM = "curriculum.safetensors"
PENDING = "pending.safetensors"


@dataclass(frozen=True)
class Progress:
    """Where a run stands between two iterations."""

    iterations_done: int
    without_progress: int = 0  # newest iterations that took no step, for numbers not finite

    def to_state(self) -> dict[str, int]:
        return {
            "iterations_done": self.iterations_done,
            "barren_iterations": self.without_progress,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Progress":
        return cls(state["iterations_done"], state["barren_iterations"])


def save_checkpoint(run: Path, progress: Progress, training: Training[E], inputs: Inputs) -> Path:
    """Write the state; one that exists already is left as it is, being the same."""
    name = f"{progress.iterations_done:06d}"
    place = run / CHECKPOINTS / name
    if on_first_process(place.exists):
        return place
    _refuse_non_finite(training, name)
    contents = training.contents()
    tensors = {name: own_tensors(named) for name, named in contents.tensors.items()}
    tensors |= {
        name: own_tensors(plain_weights(saved.model)) for name, saved in contents.models.items()
    }
    state = {
        "schema": SCHEMA,
        **progress.to_state(),
        **contents.state,
        "config": training.config.to_dict(),
        "inputs": inputs,
        "versions": versions(),
    }
    try:
        with waiting_for(SAVING):
            staged = on_first_process(lambda: stage(run, name))
            sealed = gather_results(lambda: _write(staged, tensors, contents, state))
            hashes = {file: found for one in sealed for file, found in one.items()}
            on_first_process(lambda: finish(staged, name, hashes))
            on_first_process(lambda: prune(run, training.checkpoints_to_keep(run)))
    except (OSError, SafetensorError) as error:
        on_first_process(lambda: discard(run, name))
        raise RunStopped(
            f"Checkpoint {place} could not be written: {_reason(error)}. Make room, then "
            f"`tether resume {run}` goes on from the one before."
        ) from None
    return place


def _write(
    folder: Path,
    tensors: Mapping[str, OwnTensors],
    contents: Contents,
    state: Mapping[str, Any],
) -> dict[str, str]:
    """Write this process's share of the tensors; rank 0 also writes the rest.

    Return the hashes of the files that it has written, which are on the disk then.
    """
    written: list[Path] = []
    for name, own in tensors.items():
        saved = contents.models.get(name)
        if saved is None:
            written.append(write_tensors(folder / name, own))
        else:
            written += write_model(folder / name, own, saved.model, saved.tokenizer)
    if world().is_first:
        text = json.dumps(state, indent=1) + "\n"
        (folder / STATE).write_text(text, encoding="utf-8")
        written.append(folder / STATE)
    return seal_files(folder, written)


def newest_whole_by_all(run: Path) -> tuple[Path | None, dict[Path, str]]:
    """Return what `newest_whole` does; each process verifies a share of every checkpoint."""
    damaged: dict[Path, str] = {}
    with waiting_for(SAVING):
        for checkpoint in on_first_process(lambda: all_checkpoints(run)):
            problem = _problem_by_all(checkpoint)
            if problem is None:
                return checkpoint, damaged
            damaged[checkpoint] = problem
    return None, damaged


def _problem_by_all(checkpoint: Path) -> str | None:
    promised = on_first_process(lambda: promised_files(checkpoint))
    if isinstance(promised, str):
        return promised
    names = list(promised)
    sizes = on_first_process(lambda: [_size(checkpoint / name) for name in names])
    mine = [names[i] for i in sorted(balance(sizes, world().size)[world().rank])]
    found = gather_results(lambda: damaged_files(checkpoint, {n: promised[n] for n in mine}))
    problems = {name: what for one in found for name, what in one.items()}
    return next((problems[name] for name in names if name in problems), None)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except (OSError, ValueError):  # whoever verifies it says what is wrong
        return 0


def load_checkpoint(checkpoint: Path, training: Training[E]) -> None:
    """Restore weights and moments into a training that was built from the same config."""
    try:
        training.load(checkpoint)
    except (SafetensorError, OSError, ValueError, KeyError, IndexError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{checkpoint} does not fit the run that it lies in: {type(error).__name__}: {reason}."
        ) from None


def load_roles(checkpoint: Path, roles: Roles, config: Config) -> None:
    """Restore the weights and moments of PPO's roles."""
    model = roles.actor.model
    if config.model.learns_in_part:
        load_trainable_parameters(model, read_tensors(checkpoint / learnt_file(config)))
    else:
        source = str(checkpoint / ACTOR), config.model.dtype, model.device
        saved = load_causal_lm(*source, in_parts=loads_in_parts(config.launch))
        load_weights(model, weights_by_name(saved))
    if roles.critic.state():
        roles.critic.load_state(read_tensors(checkpoint / CRITIC))
    if roles.reference.state():
        roles.reference.load_state(read_tensors(checkpoint / REFERENCE))
    roles.reward.load_state(read_state(checkpoint))
    roles.actor_optimizer.load_state(read_tensors(checkpoint / ACTOR_OPTIMIZER))
    if roles.critic_optimizer is not None:
        roles.critic_optimizer.load_state(read_tensors(checkpoint / CRITIC_OPTIMIZER))


def learnt_file(config: Config) -> str:
    """Return the file of an actor that learns in part (`ModelSection.learns_in_part`)."""
    return LEARNT_LAYERS if config.model.lora is None else ADAPTER


def load_learnt_part(checkpoint: Path, roles: Roles, config: Config) -> None:
    """Restore only the actor's adapter or layers that learn, on the base they were trained on."""
    _refuse_other_base(checkpoint, config)
    file = learnt_file(config)
    try:
        load_trainable_parameters(roles.actor.model, read_tensors(checkpoint / file))
    except (OSError, RuntimeError):
        raise UserError(
            f"{checkpoint / file} does not fit these fields; leave out overrides that change "
            f"model.lora or model.learn_layers."
        ) from None


def load_plain_actor(
    checkpoint: Path, config: Config, dtype: str, device: torch.device
) -> tuple[PreTrainedModel, Vocabulary]:
    """Load the actor as an ordinary model: what it has learnt is put into the base that the config
    names, or merged with it."""
    settings = config.model
    if not settings.learns_in_part:
        name = str(checkpoint / ACTOR)
        model = load_causal_lm(name, dtype, device)
        return model, load_vocabulary(name, model)
    _refuse_other_base(checkpoint, config)
    model = load_causal_lm(settings.actor, settings.dtype, device, settings.hub)
    vocabulary = load_vocabulary(settings.actor, model, settings.hub)
    cast(nn.Module, model).to(dtype=DTYPES[dtype])
    layers = let_layers_learn(model, settings.actor, config)
    if settings.lora is not None:
        add_adapter(model, settings.lora, config.seed, "actor", layers)
    load_trainable_parameters(model, read_tensors(checkpoint / learnt_file(config)))
    merge_adapter(model)
    return model, vocabulary


def read_state(checkpoint: Path) -> dict[str, Any]:
    try:
        state = json.loads(read_regular(checkpoint / STATE))
    except (OSError, ValueError):
        state = None
    if not isinstance(state, dict):
        raise UserError(f"{checkpoint / STATE} is missing or not a JSON object.")
    return state


def read_controls(state: Mapping[str, Any]) -> Controls:
    """Return the coefficients that PPO's controllers had reached."""
    return Controls(**state["controls"])


def _refuse_other_base(checkpoint: Path, config: Config) -> None:
    """Refuse an adapter on another base than its own, which is not the model that was trained."""
    base = config.model.actor
    written = read_state(checkpoint)["inputs"]["model.actor"]
    hashed = hash_ends if isinstance(written, str) else hash_model
    if hashed(find_model(base, config.model.hub)) != written:
        raise UserError(
            f"{base} is no longer the model that the {_learnt(config)} in {checkpoint} "
            f"{'was' if config.model.lora else 'were'} trained on; put it back as it was."
        )


def _learnt(config: Config) -> str:
    return "layers" if config.model.lora is None else "adapter"


def _refuse_non_finite(training: Training[E], name: str) -> None:
    for role, module in training.learning_modules().items():
        finite = all(bool(local_shard(weight).isfinite().all()) for weight in module.parameters())
        if any_process(not finite):
            raise RunStopped(
                f"The {role}'s weights are not finite, so checkpoint {name} was not written; "
                f"resume from the one before with a lower learning rate."
            )


def newest_and_best(
    run: Path, keep_last: int, keep_best: int = 0, scores: Mapping[int, float] | None = None
) -> list[Path]:
    """Return the newest `keep_last` checkpoints, and of all the `keep_best` with the highest
    held-out score."""
    found, scores = all_checkpoints(run), scores or {}
    scored = [path for path in found if int(path.name) in scores]
    best = sorted(scored, key=lambda path: scores[int(path.name)], reverse=True)
    return found[:keep_last] + best[:keep_best]


def _reason(error: Exception) -> str:
    strerror = getattr(error, "strerror", None)
    return (strerror or str(error)).lower().removesuffix(".")
