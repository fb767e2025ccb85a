"""One attempt at a run: begun in a directory of its own, or gone on with where it stopped."""

from pathlib import Path

import torch

from tether.config import Config
from tether.rewards.function import Reward
from tether.run.directory import RUNS, create_run_directory, refuse_taken
from tether.run.events import Event
from tether.run.lock import RunLock
from tether.run.writer import RunWriter, cut_back
from tether.train.checkpoint import load_checkpoint
from tether.train.evaluate import read_evaluations
from tether.train.loop import Loop, Result, finished_result
from tether.train.plan import check_disk, make_plan
from tether.train.resume import (
    Start,
    changed_inputs,
    find_start,
    first_start,
    is_finished,
    refuse_changes,
)
from tether.train.roles import Roles, build_roles
from tether.train.watch import Watcher


def begin(config: Config, reward: Reward | None, watch: Watcher) -> Result:
    """A new run, once everything that it needs has been found to be there."""
    refuse_taken(config.run.dir, config.run.overwrite)
    torch.set_num_threads(config.threads)
    roles = build_roles(config, reward)
    try:
        check_disk(make_plan(config, roles), config.run.dir or RUNS)
        run = create_run_directory(config.run.dir, config.run.name, config.run.overwrite)
        with RunLock(run):
            return _run(run, config, roles, watch, first_start(config))
    finally:
        roles.reward.close()


def go_on(
    run: Path, config: Config, reward: Reward | None, watch: Watcher, allow_changed: bool
) -> Result:
    """From the newest whole checkpoint, with the run's files cut back to it."""
    with RunLock(run):
        if is_finished(run, config):
            return finished_result(run, config, read_evaluations(run))
        start = find_start(run, config, allow_changed)
        torch.set_num_threads(config.threads)
        roles = build_roles(config, reward)
        try:
            changes = changed_inputs(start, roles.inputs)
            start.events.extend(refuse_changes(changes, allow_changed))
            check_disk(make_plan(config, roles), run)
            if start.checkpoint is not None:
                load_checkpoint(start.checkpoint, roles, config)
            cut_back(run, start.progress.iterations_done)
            return _run(run, config, roles, watch, start)
        finally:
            roles.reward.close()


def _run(run: Path, config: Config, roles: Roles, watch: Watcher, start: Start) -> Result:
    done = start.progress.iterations_done
    writer = RunWriter(run, config.to_yaml(), start.attempt)
    try:
        watch.started(run, config.train.iterations)
        if start.attempt > 1:
            where = start.checkpoint.name if start.checkpoint else "the beginning"
            resumed = Event("resumed", f"attempt {start.attempt} goes on from {where}")
            writer.events(done, [resumed, *start.events])
            watch.resumed(done, start.checkpoint)
            for event in start.events:
                watch.warned(event.message)
        skipped = [Event("bad_row", problem) for problem in roles.broken]
        writer.events(done, skipped)
        if skipped:
            watch.warned(f"{len(skipped)} broken data rows left out; {skipped[0].message}")
        return Loop(config, roles, writer, watch, start.progress, read_evaluations(run)).run()
    finally:
        writer.close()
