"""A run on Ray workers: each does what a process that torchrun started does, and the command that
started them shows what the first one tells."""

import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tether.config.load import validate_config
from tether.dist.environment import launched_size
from tether.dist.interrupt import Interrupt
from tether.dist.ray_launch import InterruptedBeforeStart, run_on_ray
from tether.dist.ray_mailbox import WorkerMailbox
from tether.errors import UserError
from tether.ppo.evaluate import Evaluation
from tether.ppo.scoring import Trial
from tether.train.session import start
from tether.train.training import AnyConfig, E, Job, Result
from tether.train.watch import IterationRecord, Watcher

C = TypeVar("C", bound=AnyConfig)


def start_on_ray(
    config: C, rebuild: Callable[[C], Job[E]], watch: Watcher[E], resume: bool, allow_changed: bool
) -> Result[E]:
    """Run a session in each worker, of the job that `rebuild` makes there of the config; a run that
    loses some of them is resumed by the others."""
    if launched_size() > 1:
        raise UserError("launch.kind ray starts the workers itself; run it without torchrun.")
    work = partial(
        _work,
        schema=type(config),
        mapping=config.model_dump(mode="json", by_alias=True),
        written=config.paths_as_written,
        rebuild=rebuild,
        resume=resume,
        allow_changed=allow_changed,
        is_watched=type(watch) is not Watcher,
    )

    def on_message(name: str, *arguments: Any) -> None:
        getattr(watch, name)(*arguments)

    try:
        where = config.launch, config.device, config.threads
        return run_on_ray(work, *where, on_message, Interrupt())
    except InterruptedBeforeStart as stop:
        signal.raise_signal(stop.signal)
        raise


def _work(
    mailbox: WorkerMailbox,
    schema: type[C],
    mapping: dict[str, Any],
    written: dict[str, str],
    rebuild: Callable[[C], Job[E]],
    resume: bool,
    allow_changed: bool,
    is_watched: bool,
) -> Result[E]:
    """Run one worker's session. Workers that replace lost ones resume the run that had begun."""
    run_dir = mailbox.saved_run_dir()
    if run_dir is not None:
        mapping["run"]["dir"], resume = run_dir, True
    watch: Watcher[Any] = Relay(mailbox, is_watched) if mailbox.is_first else Watcher()
    if run_dir is not None:
        watch.warned("workers were lost; all have started anew")
    config = validate_config(mapping, schema).written_as(written)
    return start(rebuild(config), watch, resume, allow_changed)


class Relay(Watcher[Any]):
    """Send to the driver what a watcher is told; nothing where the watcher there is silent."""

    def __init__(self, mailbox: WorkerMailbox, is_watched: bool) -> None:
        self.mailbox = mailbox
        self.tell: Callable[..., None] = mailbox.send if is_watched else _ignore

    def reading(self, path: str, rows: int) -> None:
        self.tell("reading", path, rows)

    def started(self, run: Path, iterations: int) -> None:
        self.mailbox.save_run_dir(str(run))
        self.tell("started", run, iterations)

    def preparing(self, what: str) -> None:
        self.tell("preparing", what)

    def resumed(self, iterations_done: int, checkpoint: Path | None) -> None:
        self.tell("resumed", iterations_done, checkpoint)

    def warned(self, warning: str) -> None:
        self.tell("warned", warning)

    def checked(self, findings: str) -> None:
        self.tell("checked", findings)

    def tried(self, trial: Trial) -> None:
        self.tell("tried", trial)

    def evaluating(self, rows: int) -> None:
        self.tell("evaluating", rows)

    def evaluated(self, evaluation: Any) -> None:
        """Send the scores; the responses stay in the run's files."""
        if isinstance(evaluation, Evaluation):
            evaluation = replace(evaluation, responses=[])
        self.tell("evaluated", evaluation)

    def iterated(self, record: IterationRecord) -> None:
        self.tell("iterated", record)


def _ignore(*message: Any) -> None:
    """Send nothing."""
