"""Batches that are sampled ahead of the updates that learn from them: `rollout.lag`.

Version n is the weights after n iterations. The rows of iteration i are sampled with version
max(0, i - lag), whatever the clock says, so a run repeats bit for bit. They are asked for as soon
as that version is there, lag iterations before they are trained on.

A checkpoint holds the batches that wait, scored: the weights that sampled them are gone.

pending.safetensors     the tensors of rollouts and scores
state.json, "pending"   the rest of them, per iteration
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from tether.config import Config
from tether.ppo.result import Clock, sampling_version
from tether.ppo.roles import Roles
from tether.ppo.sampling import Asked, Batch, ask_batch, score_batch
from tether.run.metrics import Event
from tether.types import Call, Rollout, Scores

ROLLOUT = (
    "prompt_ids",
    "prompt_lengths",
    "response_ids",
    "response_lengths",
    "response_mask",
    "rollout_log_probs",
)
SCORES = ("values", "usable", "scored")


class Ahead:
    """The batches between sampling and training."""

    def __init__(self) -> None:
        self.waiting: dict[int, Asked | Batch] = {}  # by the iteration that trains on it

    def take(self, iteration: int, roles: Roles, config: Config, clock: Clock) -> Batch:
        """Return the batch of an iteration, once the ones that its weights sample are asked for.

        It is kept until `forget`: an iteration may be dropped, and done again.
        """
        lag, last = config.rollout.lag, config.train.iterations - 1
        roles.sampler.sync(roles.actor.model, iteration)
        for later in range(iteration, min(iteration + lag, last) + 1):
            if later not in self.waiting:
                if sampling_version(later, lag) != iteration:
                    raise RuntimeError(f"the rows of iteration {later} were never sampled")
                self.waiting[later] = ask_batch(later, roles, config)
                clock.lap("rollout")
        return self._scored(iteration, roles, config, clock)

    def _scored(self, iteration: int, roles: Roles, config: Config, clock: Clock) -> Batch:
        found = self.waiting[iteration]
        if isinstance(found, Asked):
            found = self.waiting[iteration] = score_batch(found, roles, config, clock)
        return found

    def forget(self, iteration: int) -> None:
        """Let go of the batch of an iteration that is done."""
        del self.waiting[iteration]

    def settle(self, roles: Roles, config: Config) -> dict[int, Batch]:
        """Wait for all rows that were asked for, and score them."""
        numbers = sorted(self.waiting)
        return {number: self._scored(number, roles, config, Clock()) for number in numbers}

    def load(
        self,
        state: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        roles: Roles,
        config: Config,
    ) -> None:
        """Take back what `pending_state` and `pending_tensors` returned."""
        self.waiting = {}
        samples = config.rollout.samples_per_prompt
        for name, rest in state.items():
            own = {
                key.removeprefix(f"{name}."): tensor
                for key, tensor in tensors.items()
                if key.startswith(f"{name}.")
            }
            count = config.rollout.prompts
            window = int(name) * count, count, config.seed, config.data.shuffle
            prompts = roles.train_prompts.window(*window).repeat(samples)
            device = roles.actor.model.device
            self.waiting[int(name)] = Batch(
                prompts,
                _read_rollout(own, rest).to(device),
                _read_scores(own, rest, device),
                [Event(**event) for event in rest["events"]],
            )


def pending_tensors(batches: Mapping[int, Batch]) -> dict[str, Tensor]:
    """Return the tensors of batches, by names that begin with their iteration."""
    found: dict[str, Tensor] = {}
    for iteration, batch in batches.items():
        scores = batch.scores
        own = {name: getattr(batch.rollout, name) for name in ROLLOUT}
        own |= {name: getattr(scores, name) for name in SCORES}
        own |= {f"part.{name}": values for name, values in scores.parts.items()}
        if scores.token_values is not None:
            own["token_values"] = scores.token_values
        found |= {f"{iteration}.{name}": tensor.clone() for name, tensor in own.items()}
    return found


def pending_state(batches: Mapping[int, Batch]) -> dict[str, Any]:
    """Return what of batches is no tensor, as JSON."""
    return {
        str(iteration): {
            "finish_reasons": batch.rollout.finish_reasons,
            "calls": [[asdict(call) for call in calls] for calls in batch.rollout.calls],
            "parts": [*batch.scores.parts],
            "extras": [[row, said] for row, said in batch.scores.extras.items()],
            "events": [asdict(event) for event in batch.events],
        }
        for iteration, batch in batches.items()
    }


def _read_rollout(tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> Rollout:
    given: dict[str, Any] = {name: tensors[name] for name in ROLLOUT}
    return Rollout(
        **given,
        finish_reasons=tuple(rest["finish_reasons"]),
        calls=tuple(tuple(Call(**call) for call in calls) for calls in rest["calls"]),
    )


def _read_scores(tensors: Mapping[str, Tensor], rest: Mapping[str, Any], device: Any) -> Scores:
    placed = tensors.get("token_values")
    return Scores(
        **{name: tensors[name].to(device) for name in SCORES},
        parts={name: tensors[f"part.{name}"].to(device) for name in rest["parts"]},
        extras=dict(rest["extras"]),
        token_values=None if placed is None else placed.to(device),
    )
