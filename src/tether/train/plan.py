"""What a run will do and take, worked out before it starts."""

import math
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from tether.config import Config
from tether.errors import UserError
from tether.models.adapters import learned
from tether.models.reference import FrozenReference
from tether.train.roles import Roles


@dataclass(frozen=True)
class Size:
    """Numbers in a role's weights and, of these, the ones that learn."""

    parameters: int = 0
    weight_bytes: int = 0
    learning: int = 0
    learning_bytes: int = 0


@dataclass(frozen=True)
class Plan:
    config: Config
    train_prompts: int
    heldout_prompts: int
    longest_prompt: int
    actor: Size
    critic: Size
    reference: Size
    bytes_a_number: int  # of a state
    hidden_size: int
    layers: int
    vocabulary: int

    @property
    def state_bytes(self) -> int:
        """All weights; gradients and two Adam moments of what learns."""
        weights = sum(role.weight_bytes for role in (self.actor, self.critic, self.reference))
        return weights + 3 * self.learning_bytes

    @property
    def learning_bytes(self) -> int:
        return self.actor.learning_bytes + self.critic.learning_bytes

    @property
    def activation_bytes(self) -> int:
        """One microbatch's activations: some 34 numbers of width a layer and token, and logits.
        Gradient checkpointing keeps one of them a layer, and all of one layer at a time."""
        c = self.config
        rows = c.rows if c.actor.update.kind == "trpo" else c.actor.minibatch_rows
        tokens = min(c.actor.microbatch_tokens, rows * self.longest_row)
        a_layer, layers = 34 * self.hidden_size, self.layers
        kept = self.hidden_size * layers + a_layer
        states = kept if c.model.gradient_checkpointing else a_layer * layers
        a_token = states + 3 * self.vocabulary
        return tokens * a_token * self.bytes_a_number

    @property
    def checkpoint_bytes(self) -> int:
        """Weights and two moments of what learns, and the reference where it is refreshed."""
        refreshed = self.reference.weight_bytes if self.config.refreshes_reference else 0
        return 3 * self.learning_bytes + refreshed

    @property
    def checkpoints_kept(self) -> int:
        return self.config.train.keep_last + self.config.train.keep_best

    @property
    def disk_bytes(self) -> int:
        return (self.checkpoints_kept + 1) * self.checkpoint_bytes

    @property
    def longest_row(self) -> int:
        return self.longest_prompt + self.config.rollout.max_response_tokens

    def lines(self) -> list[tuple[str, str, str]]:
        """What, how much, and the arithmetic behind it."""
        c = self.config
        prompts, samples, longest = (
            c.rollout.prompts,
            c.rollout.samples_per_prompt,
            c.rollout.max_response_tokens,
        )
        evaluated = min(self.heldout_prompts, c.train.eval_prompts)
        passes = c.train.iterations * prompts / self.train_prompts
        tokens = c.train.iterations * c.rows * longest
        checkpoint = _bytes(self.checkpoint_bytes)
        return [
            ("rows an iteration", f"{c.rows}", f"{prompts} prompts x {samples} samples"),
            ("actor steps an iteration", *_actor_steps(c)),
            ("critic steps an iteration", *_critic_steps(c)),
            (
                "iterations",
                f"{c.train.iterations}",
                f"{passes:.1f} passes over {self.train_prompts} prompts",
            ),
            ("response tokens", _si(tokens), f"at most: {longest} a row"),
            (
                "longest row",
                f"{self.longest_row}",
                f"{self.longest_prompt} prompt + {longest} response",
            ),
            *self._turns(),
            ("held-out prompts", f"{evaluated}", f"of {self.heldout_prompts}"),
            ("parameters", _si(self.actor.parameters), self._roles()),
            ("memory for state", _bytes(self.state_bytes), "all weights + 3 x what learns"),
            ("memory for activations", _bytes(self.activation_bytes), "one microbatch, estimated"),
            (
                "disk for checkpoints",
                _bytes(self.disk_bytes),
                f"{self.checkpoints_kept} kept and one being written, {checkpoint} each",
            ),
        ]

    def _turns(self) -> list[tuple[str, str, str]]:
        rollout = self.config.rollout
        if not rollout.is_multi_turn:
            return []
        who = rollout.environment or ", ".join(tool.kind for tool in rollout.tools)
        most = f"with {who}; at most {rollout.max_observation_tokens} tokens an observation"
        return [("turns a row", f"{rollout.max_turns}", most)]

    def _roles(self) -> str:
        actor, critic, reference = self.actor, self.critic, self.reference
        whose = "actor"
        if actor.learning < actor.parameters:
            whose += f", of which {_si(actor.learning)} learn"
        whose += f"; critic {_si(critic.parameters)}"
        if critic.learning < critic.parameters:
            whose += f", of which {_si(critic.learning)} learn"
        return f"{whose}; reference {_si(reference.parameters)}"


def check_disk(plan: Plan, folder: Path) -> None:
    """Refuse, before training, a run whose checkpoints would not fit."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < plan.disk_bytes:
        raise UserError(
            f"{folder} has {_bytes(free)} free, but checkpoints need {_bytes(plan.disk_bytes)}: "
            f"{plan.checkpoints_kept} kept and one being written; make room, set run.dir, or lower "
            f"train.keep_last and train.keep_best."
        )


def make_plan(config: Config, roles: Roles) -> Plan:
    model = roles.actor.model
    return Plan(
        config=config,
        train_prompts=len(roles.train_prompts),
        heldout_prompts=len(roles.heldout_prompts) if roles.heldout_prompts else 0,
        longest_prompt=max(map(len, roles.train_prompts.prompts.ids)),
        actor=_size(model),
        critic=_critic_size(config, roles),
        reference=_reference_size(roles),
        bytes_a_number=model.dtype.itemsize,
        hidden_size=model.config.hidden_size,
        layers=model.config.num_hidden_layers,
        vocabulary=model.config.vocab_size,
    )


def _actor_steps(c: Config) -> tuple[str, str]:
    if c.actor.update.kind == "trpo":
        return "1", f"one step on all {c.rows} rows, or none"
    return _steps(c.rows, c.actor.minibatch_rows, c.actor.epochs)


def _critic_steps(c: Config) -> tuple[str, str]:
    if not c.has_critic:
        return "0", f"{c.advantage.estimator} needs no critic"
    if c.critic.shared_trunk:
        return "0", "its head learns in the actor's steps"
    return _steps(c.rows, c.critic_minibatch_rows, c.critic_epochs)


def _steps(rows: int, minibatch_rows: int, epochs: int) -> tuple[str, str]:
    minibatches = math.ceil(rows / minibatch_rows)
    return (
        str(epochs * minibatches),
        f"epochs {epochs} x minibatches {minibatches} of {minibatch_rows} rows",
    )


def _critic_size(config: Config, roles: Roles) -> Size:
    """What the critic adds: nothing, a head on the actor's trunk, or a model of its own."""
    if not config.has_critic:
        return Size()
    return _size(roles.critic.head if config.critic.shared_trunk else roles.critic)


def _reference_size(roles: Roles) -> Size:
    """What the reference adds; the actor's base with its adapter off is there already."""
    reference = roles.reference
    return _size(reference.policy.model) if isinstance(reference, FrozenReference) else Size()


def _size(module: nn.Module) -> Size:
    def count(weights: Iterable[nn.Parameter]) -> tuple[int, int]:
        counted = list(weights)
        return sum(w.numel() for w in counted), sum(w.nbytes for w in counted)

    return Size(*count(module.parameters()), *count(learned(module).values()))


def _si(number: int) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.2f}{letter}"
    return f"{number:g}"


def _bytes(number: int) -> str:
    for size, unit in ((2**30, "GiB"), (2**20, "MiB")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number / 2**10:.0f} KiB"
