"""Where a run that stopped goes on, and whether it may."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tether.config import Config
from tether.errors import UserError
from tether.run.checkpoints import newest_whole, set_aside, sweep
from tether.run.directory import CONFIG, EVALS, EVENTS, METRICS
from tether.run.events import Event
from tether.run.reader import read_lines
from tether.train.checkpoint import Progress, read_progress, read_state
from tether.train.controls import first_controls

# None of these changes a number of the run; who computes it, by `launch`, only its rounding.
MAY_CHANGE = {
    "run.name",
    "run.overwrite",
    "run.trackers",
    "train.checkpoint_every",
    "train.keep_last",
    "train.keep_best",
}


@dataclass(frozen=True)
class Start:
    """Where training begins: at the beginning, or after the iterations of a checkpoint."""

    progress: Progress
    checkpoint: Path | None = None
    attempt: int = 1
    inputs: Mapping[str, str] = field(default_factory=dict)  # as they were when it was written
    events: list[Event] = field(default_factory=list)


def first_start(config: Config) -> Start:
    return Start(Progress(iterations_done=0, controls=first_controls(config)))


def find_start(run: Path, config: Config, allow_changed: bool) -> Start:
    """The newest whole checkpoint of a run that nobody else is writing; else its beginning."""
    sweep(run)
    checkpoint, damaged = newest_whole(run)
    events = [
        Event("damaged_checkpoint", f"{path.name}: {problem}; set aside as {set_aside(path).name}")
        for path, problem in damaged.items()
    ]
    if checkpoint is None:
        written, inputs = yaml.safe_load((run / CONFIG).read_text(encoding="utf-8")), {}
        progress = first_start(config).progress
    else:
        state = read_state(checkpoint)
        try:
            written, inputs, progress = state["config"], state["inputs"], read_progress(state)
        except (KeyError, TypeError):
            raise UserError(
                f"{checkpoint} is of an older version of tether, without what a resume needs; "
                f"start a run from its weights: --model.actor {checkpoint / 'actor'}."
            ) from None
        _refuse_lost_lines(run, checkpoint, progress)
    events += refuse_changes(changed_fields(written, config), allow_changed)
    return Start(progress, checkpoint, _next_attempt(run), inputs, events)


def is_finished(run: Path, config: Config) -> bool:
    """Whether all iterations are done, saved, and evaluated where there is something to ask."""
    checkpoint, _ = newest_whole(run)
    if checkpoint is None or int(checkpoint.name) < config.train.iterations:
        return False
    evaluated = {record["iteration"] for record in read_lines(run / EVALS)}
    return config.data.heldout is None or int(checkpoint.name) in evaluated


def changed_inputs(start: Start, inputs: Mapping[str, str]) -> list[str]:
    """Files and versions that are not what the checkpoint was made from."""
    return [
        f"torch, {start.inputs['torch']} then and {inputs['torch']} now"
        if name == "torch"
        else f"the file behind {name}"
        for name in start.inputs
        if start.inputs[name] != inputs.get(name)
    ]


def changed_fields(written: Mapping[str, Any], config: Config) -> list[str]:
    """Fields that differ from what the run was started with and would make it another run."""
    before, now = _flat(written), _flat(config.to_dict())
    allowed = set(MAY_CHANGE)
    if config.actor.schedule == "constant":
        allowed.add("train.iterations")
    return [
        f"{name}, {before.get(name)} then and {now.get(name)} now"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
        and name not in allowed
        and not name.startswith("launch.")
    ]


def refuse_changes(changes: list[str], allow_changed: bool) -> list[Event]:
    if changes and not allow_changed:
        raise UserError(
            f"This would not be the same run: changed since the checkpoint: {'; '.join(changes)}. "
            f"Change it back, or go on all the same with --allow-changed."
        )
    return [Event("changed", f"the run went on with a change: {change}") for change in changes]


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
    path = run / EVENTS
    for line in path.read_bytes().splitlines() if path.exists() else []:
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
