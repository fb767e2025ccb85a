"""One attempt at a run: begun in a directory of its own, or gone on with where it stopped."""

import datetime
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from tether.config import Config
from tether.dist.collectives import on_first_process
from tether.dist.environment import launched_size
from tether.dist.liveness import naming_lost_processes, reporting_exit_reason
from tether.dist.world import entered, world
from tether.errors import OthersLost, UserError
from tether.planning.plan import check_disk, make_plan
from tether.ppo.evaluate import read_evaluations
from tether.ppo.roles import Roles, build_roles, pick_device
from tether.ppo.scoring import NUM_TRIED, Trial, try_reward
from tether.rewards.functions import Reward
from tether.run.checkpoint_store import disk_bytes
from tether.run.directory import REWARD_LOG, RUNS, create_run_directory, is_run, refuse_taken
from tether.run.lock import RunLock
from tether.run.metrics import Event
from tether.run.writer import NoWriter, RunWriter
from tether.train.checkpoint import load_checkpoint
from tether.train.fingerprint import Inputs, take_fingerprint, write_fingerprint
from tether.train.loop import Loop, Result, finished_result
from tether.train.resume import (
    Start,
    changed_prompts,
    find_changes,
    find_start,
    first_start,
    recorded_day,
    refuse_changes,
    take_up,
)
from tether.train.watch import Watcher


@contextmanager
def joined(config: Config) -> Iterator[None]:
    """As one of the processes that torchrun or Ray started for this run; usually the only one."""
    launch, size = config.launch, launched_size()
    if launch.num_workers not in (None, size):
        raise UserError(
            f"launch.num_workers is {launch.num_workers}, but {size} of them run; start them with "
            f"`torchrun --nproc-per-node {launch.num_workers} -m tether train …`, or write "
            f"--launch.kind ray."
        )
    if size % launch.tensor_parallel:
        raise UserError(
            f"launch.tensor_parallel is {launch.tensor_parallel}, which does not divide the "
            f"{size} processes of this run; start a multiple of it, as by `torchrun "
            f"--nproc-per-node {launch.tensor_parallel} -m tether …`, or write "
            f"--launch.tensor_parallel 1."
        )
    if size > config.rows:
        raise UserError(
            f"An iteration has {config.rows} rows, too few for {size} processes; raise "
            f"rollout.prompts or start fewer."
        )
    kind = pick_device(config.device).type
    with (
        entered(kind, launch.tensor_parallel, launch.timeout_seconds),
        reporting_exit_reason(),
        naming_lost_processes(),
    ):
        yield


def start(
    config: Config, reward: Reward | None, watch: Watcher, resume: bool, allow_changed: bool
) -> Result:
    """Train here, or on the cluster that `launch.kind` names; with `resume`, a run that is already
    there goes on."""
    if config.launch.kind == "ray":
        from tether.train.ray import start_on_ray  # whose workers call `start_here`

        return start_on_ray(config, reward, watch, resume, allow_changed)
    return start_here(config, reward, watch, resume, allow_changed)


def start_here(
    config: Config, reward: Reward | None, watch: Watcher, resume: bool, allow_changed: bool
) -> Result:
    """Do this process's part of a run."""
    with joined(config):
        if resume and on_first_process(lambda: is_run(config.run.dir)):
            return resume_run(config.run.dir, config, reward, watch, allow_changed)
        return start_new(config, reward, watch)


def start_new(config: Config, reward: Reward | None, watch: Watcher) -> Result:
    """A new run, once everything that it needs has been found to be there."""
    settings = config.run
    on_first_process(lambda: refuse_taken(settings.dir, settings.overwrite))
    torch.set_num_threads(config.threads)
    roles = build_roles(config, reward, watch.reading)
    config = dated(config, roles.day)
    try:
        # A function that was handed over in Python belongs to the caller, who may count its calls.
        first_rows = roles.train_prompts.first(NUM_TRIED)
        tried = [] if reward is not None else try_reward(roles.reward, first_rows, config)
        plan = make_plan(config, roles)
        on_first_process(lambda: check_disk(plan, settings.dir or RUNS))
        fingerprint = on_first_process(
            lambda: take_fingerprint(config, watch.preparing, reward is not None)
        )
        run = on_first_process(
            lambda: create_run_directory(settings.dir, settings.name, settings.overwrite)
        )
        with _locked(run):
            on_first_process(lambda: write_fingerprint(run, fingerprint))
            start = first_start(config)
            return _run(run, config, roles, watch, start, fingerprint.inputs, tried=tried)
    finally:
        roles.reward.close()


def dated(config: Config, day: datetime.date | None) -> Config:
    """Return the config with the day that the run's chat template is told."""
    data = config.data.model_copy(update={"date": day})
    return config if day == config.data.date else config.model_copy(update={"data": data})


def resume_run(
    run: Path, config: Config, reward: Reward | None, watch: Watcher, allow_changed: bool
) -> Result:
    """Go on from the newest whole checkpoint, once everything has been found to be as it was.

    Until then the run's files are only read: whatever is refused, nothing of it is lost.
    """
    with _locked(run):
        config = dated(config, config.data.date or on_first_process(lambda: recorded_day(run)))
        start = on_first_process(lambda: find_start(run, config))
        if start.finished:
            return finished_result(run, config, read_evaluations(run))
        now = on_first_process(
            lambda: take_fingerprint(config, watch.preparing, reward is not None)
        )
        changes = on_first_process(lambda: find_changes(start, now, config))
        refuse_changes(changes, allow_changed)
        torch.set_num_threads(config.threads)
        roles = build_roles(config, reward, watch.reading)
        try:
            if not changes:
                changes = on_first_process(lambda: changed_prompts(run, roles, config))
                refuse_changes(changes, allow_changed)
            plan = make_plan(config, roles)
            on_first_process(lambda: check_disk(plan, run, disk_bytes(run)))
            if start.checkpoint is not None:
                load_checkpoint(start.checkpoint, roles, config)
            events = on_first_process(lambda: take_up(run, start, now, changes))
            return _run(run, config, roles, watch, start, now.inputs, events)
        finally:
            roles.reward.close()


@contextmanager
def _locked(run: Path) -> Iterator[None]:
    """One process writes the run; the others go by what it found."""
    with ExitStack() as held:
        on_first_process(lambda: held.enter_context(RunLock(run)) and None)
        yield


def _run(
    run: Path,
    config: Config,
    roles: Roles,
    watch: Watcher,
    start: Start,
    inputs: Inputs,
    events: Sequence[Event] = (),
    tried: Sequence[Trial] = (),
) -> Result:
    done = start.progress.iterations_done
    first = world().is_first
    log = REWARD_LOG if first else f"{Path(REWARD_LOG).stem}-{world().rank}.log"
    roles.reward.log_to(run / log)
    writer = RunWriter(run, config.to_yaml(), start.attempt) if first else NoWriter(run)
    try:
        watch.started(run, config.train.iterations)
        for trial in tried:
            watch.tried(trial)
        if start.attempt > 1:
            where = start.checkpoint.name if start.checkpoint else "the beginning"
            resumed = Event("resumed", f"attempt {start.attempt} goes on from {where}")
            writer.events(done, [resumed, *events])
            watch.resumed(done, start.checkpoint)
            for event in events:
                watch.warned(event.message)
        skipped = [Event("bad_row", problem) for problem in roles.broken]
        writer.events(done, skipped)
        if skipped:
            watch.warned(f"{len(skipped)} broken data rows left out; {skipped[0].message}")
        evaluations = read_evaluations(run)
        return Loop(config, roles, writer, watch, start.progress, evaluations, inputs).run()
    except OthersLost as lost:
        raise OthersLost(
            f"{lost} Start all of them again with `tether resume {run}`: it goes on from the "
            f"newest checkpoint."
        ) from None
    finally:
        writer.close()
