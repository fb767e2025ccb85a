"""Where a run that stopped goes on, and whether it may."""

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tether.config import Config, RunConfig
from tether.config.load import validate_config
from tether.errors import UserError, one_line
from tether.run.checkpoint_store import set_aside, sweep
from tether.run.directory import CHECKPOINTS, CONFIG, EVALS, EVENTS, FINGERPRINT, METRICS
from tether.run.metrics import Event
from tether.run.reader import NotRegular, read_lines, read_regular
from tether.run.writer import cut_back
from tether.support.strict_yaml import load_yaml
from tether.train.checkpoint import Progress, read_state
from tether.train.fingerprint import (
    Fingerprint,
    changed_inputs,
    changed_versions,
    first_version_inputs,
    read_fingerprint,
    write_fingerprint,
)
from tether.train.training import E, Job

# None of these changes a number of the run; who computes it, by `launch`, only its rounding.
MAY_CHANGE = {
    "run.name",
    "run.overwrite",
    "run.trackers",
    "train.checkpoint_every",
    "train.keep_last",
    "train.keep_best",
}
# Changes after which a held-out score is still what it was: they concern learning alone.
NOT_EVALUATED = (
    *("actor.", "critic.", "advantage.", "kl.in_", "run.", "train.iterations"),
    *("train.eval_every", "the file behind data.train", "data.train", "data.shuffle"),
    *("train.passes", "train.minibatch_rows", "train.lr", "train.warmup_share"),
    *("train.weight_decay", "train.max_grad_norm", "train.betas", "train.eps"),
)


@dataclass(frozen=True)
class Start:
    """Where training begins: at the beginning, or after the iterations of a checkpoint."""

    progress: Progress
    checkpoint: Path | None = None
    attempt: int = 1
    finished: bool = False
    written: Mapping[str, Any] = field(default_factory=dict)  # the config it was started with
    inputs: Mapping[str, Any] = field(default_factory=dict)  # files, as they were then
    versions: Mapping[str, str] = field(default_factory=dict)
    python_reward: bool | None = None  # None: a run of the first version, which does not say
    damaged: Mapping[Path, str] = field(default_factory=dict)  # newer ones, and what is wrong


def find_start(run: Path, job: Job[E], found: tuple[Path | None, Mapping[Path, str]]) -> Start:
    """Begin at the newest whole checkpoint, by what was found of all, or at the run's beginning;
    nothing is changed yet."""
    checkpoint, damaged = found
    if checkpoint is None and damaged:
        which, problem = next(iter(damaged.items()))
        raise UserError(
            f"{run} has {len(damaged)} checkpoints and none is whole ({which.name}: {problem}), so "
            f"that it would begin again at iteration 0. Restore one; or, to begin again, move "
            f"{run / CHECKPOINTS} elsewhere first."
        )
    if checkpoint is None:
        progress = Progress(0)
        written: dict[str, Any] = {"config": read_config(run), "inputs": {}, "versions": {}}
    else:
        written = read_state(checkpoint)
        try:
            progress = Progress.from_state(written)
            finished = is_finished(run, job, written, progress)
            _ = written["config"], written["inputs"]
        except (KeyError, TypeError):
            raise UserError(
                f"{checkpoint} is of an older version of tether, without what a resume needs; "
                f"start a run from its weights: {_weights_option(checkpoint, job)}."
            ) from None
        if finished:
            return Start(progress, checkpoint, finished=True)
        _refuse_lost_lines(run, checkpoint, progress)
    fingerprint = read_fingerprint(run)
    if fingerprint is not None:
        written = asdict(fingerprint)
    return Start(
        progress,
        checkpoint,
        _next_attempt(run),
        written=written["config"],
        inputs=written["inputs"],
        versions=written.get("versions", {}),
        python_reward=written.get("python_reward"),
        damaged=damaged,
    )


def _weights_option(checkpoint: Path, job: Job[E]) -> str:
    if isinstance(job.config, Config):
        return f"--model.actor {checkpoint / 'actor'}"
    [model] = [path.parent for path in checkpoint.glob("*/config.json")] or [checkpoint]
    return f"--model.start {model}"


def is_finished(run: Path, job: Job[E], state: Mapping[str, Any], progress: Progress) -> bool:
    """Return whether all iterations are done, saved, and evaluated where there are rows."""
    if progress.iterations_done < job.planned_iterations(state):
        return False
    evaluated = {record.get("iteration") for record in read_lines(run / EVALS)}
    return job.config.data.heldout is None or progress.iterations_done in evaluated


def find_changes(start: Start, now: Fingerprint, job: Job[E]) -> list[str]:
    """Name everything that would make this another run."""
    fields, config = changed_fields(start.written, job.config), job.config
    if isinstance(config, Config) and any(isinstance(x, str) for x in start.inputs.values()):
        now_then = first_version_inputs(config, job.input_files())
        inputs = _changed_since_first_version(start.inputs, now_then)
    elif start.inputs:
        inputs = changed_inputs(start.inputs, now.inputs)
    else:  # a run of the first version, without a checkpoint
        inputs = []
    return [
        *fields,
        *inputs,
        *changed_versions(start.versions, now.versions),
        *_changed_reward(start.python_reward, now.python_reward),
    ]


def _changed_reward(before: bool | None, now: bool) -> list[str]:
    said = {True: "a function handed over in Python", False: "the one of reward.kind"}
    if before in (None, now):
        return []
    return [f"the reward, {said[before]} then and {said[now]} now"]


def _changed_since_first_version(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [
        f"torch, {before['torch']} then and {now['torch']} now"
        if name == "torch"
        else f"the file behind {name}"
        for name in before
        if before[name] != now.get(name)
    ]


def take_up(run: Path, start: Start, now: Fingerprint, changes: list[str]) -> list[Event]:
    """Cut the run's files back to the checkpoint, once everything is known to be good."""
    cut_back(run, start.progress.iterations_done)
    events = [Event("changed", f"the run went on with a change: {change}") for change in changes]
    if any(not change.startswith(NOT_EVALUATED) for change in changes):
        events += _set_evaluations_aside(run)
    for path, problem in start.damaged.items():
        place = set_aside(path).name
        events.append(Event("damaged_checkpoint", f"{path.name}: {problem}; set aside as {place}"))
    sweep(run)
    if changes or not (run / FINGERPRINT).is_file():
        write_fingerprint(run, now)
    return events


def _set_evaluations_aside(run: Path) -> list[Event]:
    """A score from before the change must not be compared with one from after it."""
    if not read_lines(run / EVALS):
        return []
    number = 1
    while (place := run / f"evals-{number:03d}.jsonl").exists():
        number += 1
    os.rename(run / EVALS, place)
    message = (
        f"held-out scores from before the change are not comparable any more; they were set aside "
        f"as {place.name}"
    )
    return [Event("evaluations_set_aside", message)]


def changed_fields(
    written: Mapping[str, Any], config: RunConfig, sections: Sequence[str] = ("",)
) -> list[str]:
    """Name the fields that differ from what the run was started with and make it another run.

    `sections` are the prefixes under which a run of several stages holds those of each stage.
    """
    before, now = _flat(_with_defaults(written, type(config))), _flat(config.to_dict())
    allowed = {f"{section}{name}" for section in sections for name in MAY_CHANGE}
    if (
        isinstance(config, Config)
        and config.actor.schedule == "constant"
        and not config.rollout.lag
    ):
        allowed.add("train.iterations")
    return [
        f"{name}, {before.get(name)} then and {now.get(name)} now"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
        and name not in allowed
        and not name.startswith("launch.")
    ]


def _with_defaults(written: Mapping[str, Any], schema: type[RunConfig]) -> Mapping[str, Any]:
    """Fill in the fields that tether has got since the run was started."""
    try:
        return validate_config(written, schema).to_dict()
    except UserError:  # a field that it has lost since: named as changed
        return written


def refuse_changes(changes: list[str], allow_changed: bool) -> None:
    if changes and not allow_changed:
        raise UserError(
            f"This would not be the same run: changed since it was started: {'; '.join(changes)}. "
            f"Change it back, or go on all the same with --allow-changed."
        )


def recorded_day(run: Path) -> datetime.date | None:
    """Return the day that the chat template was told when the run was started, if it asked."""
    fingerprint = read_fingerprint(run)
    day = (fingerprint.config.get("data") or {}).get("date") if fingerprint else None
    return datetime.date.fromisoformat(day) if day else None


def read_config(run: Path) -> dict[str, Any]:
    return load_yaml((run / CONFIG).read_text(encoding="utf-8"))


def _refuse_lost_lines(run: Path, checkpoint: Path, progress: Progress) -> None:
    written = {line["iteration"] for line in read_lines(run / METRICS)}
    lost = [i for i in range(progress.iterations_done) if i not in written]
    if lost:
        raise UserError(
            f"{run / METRICS} has no line for iteration {lost[0]}, which checkpoint "
            f"{checkpoint.name} counts as done; restore the file, or remove that checkpoint to go "
            f"on from the one before."
        )


def _next_attempt(run: Path) -> int:
    attempts = [1]
    try:
        lines = read_regular(run / EVENTS).splitlines()
    except FileNotFoundError:
        lines = []
    except (OSError, NotRegular) as error:
        raise UserError(f"{run / EVENTS} cannot be read: {one_line(error)}.") from None
    for line in lines:
        try:
            attempts.append(int(json.loads(line)["attempt"]))
        except (ValueError, KeyError, TypeError):
            continue  # half a line; the writer cuts it off
    return max(attempts) + 1


def _flat(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
