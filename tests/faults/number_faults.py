"""I2: numbers that are not finite, put into every place a run computes them.

An iteration makes one step for each role here, so that a dropped step shows from the outside: the
checkpoints before and after it hold the same weights.
"""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from faults.attempt import Attempt, no_traceback, same_tensors, spoiled_weights, train
from faults.row import Row, tally
from faults.world import World

ITERATIONS = 5
STRUCK = 2  # iterations before it and after it are whole
ROW = 3
NUMBERS = {"NaN": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class Spoil:
    """Puts a number into what one place computes: in the struck iteration, or from it on."""

    place: str
    number: float
    forever: bool = False

    def __call__(self) -> None:
        PLACES[self.place].patch(self)

    def now(self) -> bool:
        return _iteration >= STRUCK if self.forever else _iteration == STRUCK


@dataclass(frozen=True)
class Place:
    """Who spoils it, and the roles that must lose a step to it; if none, it is a row that goes."""

    patch: Callable[[Spoil], None]
    roles: tuple[str, ...] = ()


_iteration = -1  # that the sabotaged process is in; the self-check comes before the first


def _count_iterations() -> None:
    from tether.train import ppo

    original = ppo.run_iteration

    def counted(iteration: int, *arguments: object) -> object:
        global _iteration
        _iteration = iteration
        return original(iteration, *arguments)

    ppo.run_iteration = counted


def _wrap(owner: object, name: str, spoil: Spoil, put: Callable) -> None:
    """After each call in the struck iteration, `put` spoils what was returned."""
    _count_iterations()
    original = getattr(owner, name)

    def wrapped(*arguments: object, **named: object) -> object:
        result = original(*arguments, **named)
        return put(result, spoil) if spoil.now() else result

    setattr(owner, name, wrapped)


def _row_of_logits(logits: torch.Tensor, spoil: Spoil) -> torch.Tensor:
    """A whole row of logits; a single -inf is no fault, only a token that cannot be drawn."""
    return logits.index_fill(0, _rows(spoil, len(logits)), spoil.number)


def _first_token(found: torch.Tensor, spoil: Spoil) -> torch.Tensor:
    found = found.clone()
    found[_rows(spoil, len(found)), 0] = spoil.number
    return found


def _rows(spoil: Spoil, rows: int) -> torch.Tensor:
    return torch.arange(rows) if spoil.forever else torch.tensor([min(ROW, rows - 1)])


def _sampler_logits(spoil: Spoil) -> None:
    from tether.rollout import local

    _wrap(local, "tempered_logits", spoil, _row_of_logits)


def _training_logits(spoil: Spoil) -> None:
    """Only where gradients flow: the forward pass of the update."""
    from tether.models import token_log_probs

    _count_iterations()
    original = token_log_probs.tempered_logits

    def spoiled(head: Callable, states: torch.Tensor, temperature: float) -> torch.Tensor:
        logits = original(head, states, temperature)
        return _row_of_logits(logits, spoil) if spoil.now() and states.requires_grad else logits

    token_log_probs.tempered_logits = spoiled


def _old_log_probs(spoil: Spoil) -> None:
    from tether.models.policy import Policy

    _wrap(Policy, "log_probs", spoil, _first_token)


def _new_log_probs(spoil: Spoil) -> None:
    from tether.models.policy import Policy

    def put(found: tuple, spoil: Spoil) -> tuple:
        return (_first_token(found[0], spoil), found[1]) if torch.is_grad_enabled() else found

    _wrap(Policy, "log_probs_and_entropies", spoil, put)


def _values(spoil: Spoil) -> None:
    from tether.models.critic import Critic

    _wrap(Critic, "values", spoil, lambda found, s: (_first_token(found[0], s), found[1]))


def _new_values(spoil: Spoil) -> None:
    from tether.models.critic import Critic

    def put(values: torch.Tensor, spoil: Spoil) -> torch.Tensor:
        return _first_token(values, spoil) if torch.is_grad_enabled() else values

    _wrap(Critic, "values_from_states", spoil, put)


def _gradients(spoil: Spoil) -> None:
    from tether.ppo.optimizer import Optimizer

    _count_iterations()
    original = Optimizer.step

    def step(self: Optimizer) -> torch.Tensor:
        if spoil.now():
            self.parameters[-1].grad.view(-1)[0] = spoil.number
        return original(self)

    Optimizer.step = step


PLACES = {
    "logits of the sampler": Place(_sampler_logits),
    "logits of the update": Place(_training_logits, ("actor",)),
    "old log-probs": Place(_old_log_probs),
    "new log-probs": Place(_new_log_probs, ("actor",)),
    "values": Place(_values),
    "new values": Place(_new_values, ("critic",)),
    "gradients": Place(_gradients, ("critic", "actor")),
}


def row_i2(world: World, folder: Path, tries: int, seed: int) -> Row:
    """Each number once in each place; then NaN for good in each, which must end the run."""
    cases = [Spoil(place, number) for place in PLACES for number in NUMBERS.values()]
    cases += [Spoil(place, math.nan, forever=True) for place in PLACES]
    every = 1 if tries >= 15 else len(cases) // tries
    verdicts = [_try(world, folder, case, seed) for case in cases[::every]]
    return tally("I2", "NaN, inf, -inf in logits, log-probs, values, gradients", verdicts)


def _try(world: World, folder: Path, spoil: Spoil, seed: int) -> str | None:
    name = f"{spoil.place} {spoil.number}{' for good' if spoil.forever else ''}"
    fields = {
        "actor.epochs": 1,
        "actor.minibatch_rows": 8,
        "run.rollouts_rows": 8,
        "train.iterations": ITERATIONS,
        "train.eval_every": 0,
        "train.checkpoint_every": 1,
        "train.keep_last": ITERATIONS,
        "data.heldout": "null",
        "seed": seed,
    }
    words = [word for field, value in fields.items() for word in (f"--{field}", str(value))]
    tried = train(folder / name.replace(" ", "_"), world.recipe, *words, sabotage=spoil)
    problem = no_traceback(tried) or _saved_rubbish(tried)
    problem = problem or (_wrong_stop(tried) if spoil.forever else _wrong_survival(tried, spoil))
    if problem is None:
        shutil.rmtree(tried.run)  # a checkpoint an iteration adds up
        return None
    return f"{name}: {problem}"


def _saved_rubbish(tried: Attempt) -> str | None:
    spoiled = spoiled_weights(tried.run)
    return f"{spoiled[0].relative_to(tried.run)} is not finite" if spoiled else None


def _wrong_stop(tried: Attempt) -> str | None:
    """Exit 1 with the reason, three iterations after the first one that taught nothing."""
    done = len(tried.lines("metrics.jsonl"))
    if tried.code != 1 or "not finite" not in tried.complaint:
        return f"code {tried.code}, {tried.complaint!r}"
    return None if done <= STRUCK + 3 else f"it stopped only after {done} iterations"


def _wrong_survival(tried: Attempt, spoil: Spoil) -> str | None:
    if tried.code != 0:
        return f"code {tried.code}, {tried.complaint!r}"
    events = [e for e in tried.lines("events.jsonl") if e["kind"].startswith("non_finite")]
    if not events or {e["iteration"] for e in events} != {STRUCK}:
        return f"events {events}"
    roles = PLACES[spoil.place].roles
    if not roles:
        return _wrong_row(tried, events)
    named = [
        role for e in events for role in ("critic", "actor") if f"the {role}'s" in e["message"]
    ]
    if named != list(roles):
        return f"the events name {named}: {events}"
    return next(filter(None, (_wrong_step(tried, role) for role in roles)), None)


def _wrong_row(tried: Attempt, events: list[dict]) -> str | None:
    """The row is named and out of the loss, and the others still taught something."""
    if [e["row"] for e in events] != [ROW]:
        return f"the events name rows {[e['row'] for e in events]}"
    for row in tried.lines(f"rollouts/{STRUCK:06d}.jsonl"):
        if row["usable"] is (row["row"] == ROW):
            return f"row {row['row']} is usable: {row['usable']}"
        if row["row"] == ROW and any(row["policy_advantages"]):
            return "the row is still in the loss"
    before, after = _saved(tried, STRUCK), _saved(tried, STRUCK + 1)
    return "no step was made" if same_tensors(before["actor"], after["actor"]) else None


def _wrong_step(tried: Attempt, role: str) -> str | None:
    """Weights and moments stand still over the struck iteration, and move again in the next."""
    before, struck, after = (_saved(tried, STRUCK + i) for i in range(3))
    for kept in (role, f"{role}_optimizer"):
        if not same_tensors(before[kept], struck[kept]):
            return f"{kept} changed in the struck iteration"
        if same_tensors(struck[kept], after[kept]):
            return f"{kept} never changed again"
    return None


def _saved(tried: Attempt, iterations_done: int) -> dict[str, Path]:
    folder = tried.run / "checkpoints" / f"{iterations_done:06d}"
    assert json.loads((folder / "state.json").read_text())["iterations_done"] == iterations_done
    return {
        "actor": folder / "actor" / "model.safetensors",
        "critic": folder / "critic.safetensors",
        "actor_optimizer": folder / "actor_optimizer.safetensors",
        "critic_optimizer": folder / "critic_optimizer.safetensors",
    }
