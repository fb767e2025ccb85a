"""One attempt at a run: begun in a directory of its own, or resumed where it stopped.

PPO, SFT and reward models all start here; what they are is a `Job`.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from tether.dist.collectives import on_first_process
from tether.dist.environment import launched_size
from tether.dist.liveness import naming_lost_processes, reporting_exit_reason
from tether.dist.world import entered, world
from tether.errors import OthersLost, UserError
from tether.planning.plan import check_disk
from tether.ppo.roles import pick_device
from tether.ppo.scoring import Trial
from tether.run.checkpoint_store import disk_bytes
from tether.run.directory import RUNS, create_run_directory, is_run, refuse_taken
from tether.run.lock import RunLock
from tether.run.metrics import Event
from tether.run.writer import NoWriter, RunWriter
from tether.train.checkpoint import Progress, load_checkpoint, newest_whole_by_all
from tether.train.fingerprint import Inputs, take_fingerprint, write_fingerprint
from tether.train.loop import Loop
from tether.train.resume import (
    Start,
    find_changes,
    find_start,
    recorded_day,
    refuse_changes,
    take_up,
)
from tether.train.training import E, Job, Result, Training
from tether.train.watch import Watcher


def start(
    job: Job[E], watch: Watcher[E], resume: bool = False, allow_changed: bool = False
) -> Result[E]:
    """Train here, or on the cluster that the job names. With `resume`, a run that is already at
    `run.dir` goes on from its newest whole checkpoint."""
    if job.on_ray:
        return job.start_on_ray(watch, resume, allow_changed)
    with ExitStack() as held:
        found = open_run(job, watch, resume, allow_changed, held)
        return found.run() if isinstance(found, Loop) else found


def open_run(
    job: Job[E], watch: Watcher[E], resume: bool, allow_changed: bool, held: ExitStack
) -> Loop[E] | Result[E]:
    """Return the loop over a run's iterations, or the result of a run that is finished.

    `held` gets the processes, lock, models and files, to be released in the reverse order.
    """
    held.enter_context(process_group(job))
    run = job.config.run.dir
    if not (resume and run is not None and on_first_process(lambda: is_run(run))):
        return start_new(job, watch, held)
    held.enter_context(_locked(run))
    job = job.dated(job.config.data.date or on_first_process(lambda: recorded_day(run)))
    whole = newest_whole_by_all(run)
    found = on_first_process(lambda: find_start(run, job, whole))
    if found.finished:
        return _finished(run, found.progress.iterations_done, job)
    return resume_run(run, found, job, watch, allow_changed, held)


@contextmanager
def process_group(job: Job[E]) -> Iterator[None]:
    """Join the processes that torchrun or Ray started for this run; usually there is only one."""
    launch, size = job.launch, launched_size()
    stage = getattr(job.config, "stage", None)
    if launch.num_workers not in (None, size):
        processes = "1 process is" if size == 1 else f"{size} processes are"
        raise UserError(
            f"launch.num_workers is {launch.num_workers}, but only {processes} running; start them "
            f"with `torchrun --nproc-per-node {launch.num_workers} -m tether "
            f"{stage or 'train'} …`, or write --launch.kind ray."
        )
    if size % launch.tensor_parallel:
        raise UserError(
            f"launch.tensor_parallel is {launch.tensor_parallel}, which does not divide the "
            f"{size} processes of this run; start a multiple of it, as by `torchrun "
            f"--nproc-per-node {launch.tensor_parallel} -m tether …`, or write "
            f"--launch.tensor_parallel 1."
        )
    if size > job.rows:
        raise UserError(
            f"An iteration has {job.rows} rows, too few for {size} processes; raise "
            f"{'train.minibatch_rows' if stage else 'rollout.prompts'} or start fewer."
        )
    kind = pick_device(job.config.device).type
    with (
        entered(kind, launch.tensor_parallel, launch.timeout_seconds, launch.timeouts_apart),
        reporting_exit_reason(),
        naming_lost_processes(),
    ):
        yield


def start_new(job: Job[E], watch: Watcher[E], held: ExitStack) -> Loop[E]:
    """Create a run, once everything that it needs has been found to be there."""
    settings = job.config.run
    on_first_process(lambda: refuse_taken(settings.dir, settings.overwrite))
    training = _build(job, watch, held)
    job = job.dated(training.config.data.date)
    tried = training.try_out()
    on_first_process(lambda: _check_disk(training, settings.dir or RUNS))
    fingerprint = on_first_process(
        lambda: take_fingerprint(
            job.config.to_dict(), job.input_files(), watch.preparing, job.python_reward
        )
    )
    run = on_first_process(
        lambda: create_run_directory(settings.dir, job.run_name, settings.overwrite)
    )
    held.enter_context(_locked(run))
    on_first_process(lambda: write_fingerprint(run, fingerprint))
    begun = Start(Progress(0))
    return _loop(run, job, training, watch, begun, fingerprint.inputs, held, tried=tried)


def resume_run(
    run: Path, found: Start, job: Job[E], watch: Watcher[E], allow_changed: bool, held: ExitStack
) -> Loop[E]:
    """Go on from the newest whole checkpoint, once everything has been found to be as it was.

    Until then the run's files are only read: if anything is refused, nothing is lost.
    """
    now = on_first_process(
        lambda: take_fingerprint(
            job.config.to_dict(), job.input_files(), watch.preparing, job.python_reward
        )
    )
    changes = on_first_process(lambda: find_changes(found, now, job))
    refuse_changes(changes, allow_changed)
    training = _build(job, watch, held)
    if not changes:
        changes = on_first_process(lambda: training.changed_rows(run))
        refuse_changes(changes, allow_changed)
    on_first_process(lambda: _check_disk(training, run, disk_bytes(run)))
    if found.checkpoint is not None:
        load_checkpoint(found.checkpoint, training)
    events = on_first_process(lambda: take_up(run, found, now, changes))
    return _loop(run, job, training, watch, found, now.inputs, held, events)


def _build(job: Job[E], watch: Watcher[E], held: ExitStack) -> Training[E]:
    torch.set_num_threads(job.config.threads)
    if job.config.deterministic and pick_device(job.config.device).type == "cuda":
        repeat_on_gpus()
    training = job.build(watch.reading)
    held.callback(training.close)
    return training


def repeat_on_gpus() -> None:
    """Choose only kernels that repeat, byte for byte; an operation that has none is refused.

    cuBLAS reads its variable when it is first used.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def _check_disk(training: Training[E], folder: Path, own_bytes: int = 0) -> None:
    check_disk(training.checkpoint_bytes, training.checkpoints_kept, folder, own_bytes)


@contextmanager
def _locked(run: Path) -> Iterator[None]:
    """Hold the run's lock on rank 0; the other processes go by what it found."""
    with ExitStack() as lock:
        on_first_process(lambda: lock.enter_context(RunLock(run)) and None)
        yield


def _loop(
    run: Path,
    job: Job[E],
    training: Training[E],
    watch: Watcher[E],
    found: Start,
    inputs: Inputs,
    held: ExitStack,
    events: Sequence[Event] = (),
    tried: Sequence[Trial] = (),
) -> Loop[E]:
    """Open the run's files, say how it starts, and return the loop over its iterations."""
    done, is_first = found.progress.iterations_done, world().is_first
    held.enter_context(_naming_the_resume(run))
    training.log_into(run)
    config = training.config
    writer = RunWriter(run, config.to_yaml(), found.attempt) if is_first else NoWriter(run)
    held.callback(writer.close)
    watch.started(run, training.iterations)
    for trial in tried:
        watch.tried(trial)
    if found.attempt > 1:
        where = found.checkpoint.name if found.checkpoint else "the beginning"
        resumed = Event("resumed", f"attempt {found.attempt} goes on from {where}")
        writer.events(done, [resumed, *events])
        watch.resumed(done, found.checkpoint)
        for event in events:
            watch.warned(event.message)
    skipped = [Event("bad_row", problem) for problem in training.bad_rows]
    writer.events(done, skipped)
    if skipped:
        watch.warned(f"{len(skipped)} broken data rows left out; {skipped[0].message}")
    evaluations = job.read_evaluations(run)
    return Loop(training, writer, watch, found.progress, evaluations, inputs)


@contextmanager
def _naming_the_resume(run: Path) -> Iterator[None]:
    """Name, in the sentence about lost processes, the command that goes on."""
    try:
        yield
    except OthersLost as lost:
        raise OthersLost(
            f"{lost} Start all of them again with `tether resume {run}`: it goes on from the "
            f"newest checkpoint."
        ) from None


def _finished(run: Path, iterations: int, job: Job[E]) -> Result[E]:
    """Return the result of a run that has nothing left to do."""
    found = job.read_evaluations(run)
    before, after = found.get(0), found.get(iterations)
    return Result(run, iterations, before, after, 0.0, None, resumed_from=iterations)
