"""What a checkpoint holds: all that the next iteration depends on, as safetensors and JSON.

checkpoints/000050/actor/                       a Hugging Face directory with its tokenizer
checkpoints/000050/adapter.safetensors          in its place where the actor has an adapter
checkpoints/000050/critic.safetensors           what learns: all of it, or adapter and head
checkpoints/000050/reference.safetensors        only where the reference is refreshed
checkpoints/000050/actor_optimizer.safetensors
checkpoints/000050/critic_optimizer.safetensors
checkpoints/000050/state.json

Several processes write a file in as many parts, NAME-00001-of-00002.safetensors, each of whole
tensors; any number of processes reads them.

There is no random state to keep: every draw is computed from the seed and where it is used. Nor is
there a position in the data: it follows from the iteration. The base below an adapter is no part of
it either: it is what config.yaml names, and its hash is kept.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from tether.config import Config
from tether.dist.collectives import any_process, gather_results, on_first_process
from tether.dist.dtensor import local_shard
from tether.dist.world import world
from tether.errors import RunStopped, UserError
from tether.models.loading import DTYPES, load_causal_lm
from tether.models.locate import find_model
from tether.models.lora import add_adapter, merge_adapter
from tether.models.vocabulary import Vocabulary, load_vocabulary
from tether.models.weights import (
    load_trainable_parameters,
    load_weights,
    plain_weights,
    trainable_parameters,
)
from tether.ppo.result import Controls
from tether.ppo.roles import Roles
from tether.run.checkpoint_store import all_checkpoints, discard, finish, prune, stage
from tether.run.directory import CHECKPOINTS, EVALS, SCHEMA
from tether.run.reader import read_lines, read_regular
from tether.train.checkpoint_files import (
    OwnTensors,
    own_tensors,
    read_tensors,
    write_model,
    write_tensors,
)
from tether.train.fingerprint import Inputs, hash_ends, hash_model, versions

STATE = "state.json"
ACTOR = "actor"
ADAPTER = "adapter.safetensors"
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
    inputs: Inputs,
) -> Path:
    """Write the state; one that exists already is left as it is, being the same."""
    name = f"{progress.iterations_done:06d}"
    place = run / CHECKPOINTS / name
    if on_first_process(place.exists):
        return place
    _refuse_non_finite(roles, name)
    tensors = _own_tensors(roles, config)
    try:
        staged = on_first_process(lambda: stage(run, name))
        gather_results(lambda: _write(staged, tensors, progress, roles, config, inputs))
        on_first_process(lambda: finish(staged, name))
        on_first_process(lambda: prune(run, _kept(run, config)))
    except (OSError, SafetensorError) as error:
        on_first_process(lambda: discard(run, name))
        raise RunStopped(
            f"Checkpoint {place} could not be written: {_reason(error)}. Make room, then "
            f"`tether resume {run}` goes on from the one before."
        ) from None
    return place


def load_checkpoint(checkpoint: Path, roles: Roles, config: Config) -> None:
    """Put weights and moments back; roles were built from the same config."""
    try:
        _load(checkpoint, roles, config)
    except (SafetensorError, OSError, ValueError, KeyError, IndexError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{checkpoint} does not fit the run that it lies in: {type(error).__name__}: {reason}."
        ) from None


def _load(checkpoint: Path, roles: Roles, config: Config) -> None:
    model = roles.actor.model
    if config.model.lora is not None:
        load_trainable_parameters(model, read_tensors(checkpoint / ADAPTER))
    else:
        saved = load_causal_lm(str(checkpoint / ACTOR), config.model.dtype, model.device)
        load_weights(model, saved.state_dict())
    if roles.critic.state():
        roles.critic.load_state(read_tensors(checkpoint / CRITIC))
    if roles.reference.state():
        roles.reference.load_state(read_tensors(checkpoint / REFERENCE))
    roles.reward.load_state(read_state(checkpoint))
    roles.actor_optimizer.load_state(read_tensors(checkpoint / ACTOR_OPTIMIZER))
    if roles.critic_optimizer is not None:
        roles.critic_optimizer.load_state(read_tensors(checkpoint / CRITIC_OPTIMIZER))


def load_adapter(checkpoint: Path, roles: Roles, config: Config) -> None:
    """Put only the actor's adapter back, on the base that it was trained on."""
    _refuse_other_base(checkpoint, config)
    try:
        load_trainable_parameters(roles.actor.model, read_tensors(checkpoint / ADAPTER))
    except RuntimeError:
        raise UserError(
            f"The adapter in {checkpoint} does not fit these fields; leave out overrides that "
            f"change model.lora."
        ) from None


def load_plain_actor(
    checkpoint: Path, config: Config, dtype: str, device: torch.device
) -> tuple[PreTrainedModel, Vocabulary]:
    """The actor as an ordinary model; an adapter is merged into the base that the config names."""
    settings = config.model
    if settings.lora is None:
        name = str(checkpoint / ACTOR)
        model = load_causal_lm(name, dtype, device)
        return model, load_vocabulary(name, model)
    _refuse_other_base(checkpoint, config)
    model = load_causal_lm(settings.actor, settings.dtype, device, settings.hub)
    vocabulary = load_vocabulary(settings.actor, model, settings.hub)
    model.to(DTYPES[dtype])
    add_adapter(model, settings.lora, config.seed, "actor")
    load_trainable_parameters(model, read_tensors(checkpoint / ADAPTER))
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


def read_progress(state: Mapping[str, Any]) -> Progress:
    fields = {name: state[name] for name in Progress.__dataclass_fields__ if name != "controls"}
    return Progress(controls=Controls(**state["controls"]), **fields)


def _own_tensors(roles: Roles, config: Config) -> dict[str, OwnTensors]:
    """What this process writes of each file, gathered before anyone writes."""
    parts: dict[str, Mapping[str, Tensor]] = {ACTOR_OPTIMIZER: roles.actor_optimizer.state()}
    if config.model.lora is not None:
        parts[ADAPTER] = trainable_parameters(roles.actor.model)
    else:
        parts[ACTOR] = plain_weights(roles.actor.model)
    for name, state in ((CRITIC, roles.critic.state()), (REFERENCE, roles.reference.state())):
        if state:
            parts[name] = state
    if roles.critic_optimizer is not None:
        parts[CRITIC_OPTIMIZER] = roles.critic_optimizer.state()
    return {name: own_tensors(tensors) for name, tensors in parts.items()}


def _write(
    folder: Path,
    tensors: Mapping[str, OwnTensors],
    progress: Progress,
    roles: Roles,
    config: Config,
    inputs: Inputs,
) -> None:
    """This process's tensors; the first one's hands also write what is not a tensor."""
    for name, own in tensors.items():
        if name == ACTOR:
            write_model(folder / ACTOR, own, roles.actor.model, roles.vocabulary.tokenizer)
        else:
            write_tensors(folder / name, own)
    if not world().is_first:
        return
    state = {
        "schema": SCHEMA,
        **asdict(progress),
        "config": config.to_dict(),
        "inputs": inputs,
        "versions": versions(),
        **roles.reward.state(),
    }
    (folder / STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")


def _refuse_other_base(checkpoint: Path, config: Config) -> None:
    """An adapter on another base than its own would be a model that nobody trained."""
    base = config.model.actor
    written = read_state(checkpoint)["inputs"]["model.actor"]
    hashed = hash_ends if isinstance(written, str) else hash_model
    if hashed(find_model(base, config.model.hub)) != written:
        raise UserError(
            f"{base} is no longer the model that the adapter in {checkpoint} was trained on; put "
            f"it back as it was."
        )


def _refuse_non_finite(roles: Roles, name: str) -> None:
    critic = [network.module for network in roles.critic.networks()]
    for role, modules in (("actor", [roles.actor.model]), ("critic", critic)):
        weights = [weight for module in modules for weight in module.parameters()]
        if any_process(not all(bool(local_shard(weight).isfinite().all()) for weight in weights)):
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
