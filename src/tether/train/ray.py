"""A run on Ray workers: each does what a process that torchrun started does, and the command that
started them shows what the first one tells."""

import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tether.config import Config
from tether.config.load import validate_config
from tether.dist.environment import launched_size
from tether.dist.interrupt import Interrupt
from tether.dist.ray_launch import Unbegun, run_on_ray
from tether.dist.ray_mailbox import WorkerMailbox
from tether.errors import UserError
from tether.ppo.evaluate import Evaluation
from tether.ppo.scoring import Trial
from tether.rewards.functions import Reward
from tether.train.loop import Result
from tether.train.session import start_here
from tether.train.watch import IterationRecord, Watcher


def start_on_ray(
    config: Config, reward: Reward | None, watch: Watcher, resume: bool, allow_changed: bool
) -> Result:
    """As `attempt`, but in workers; a run that lost some of them goes on by itself."""
    if launched_size() > 1:
        raise UserError("launch.kind ray starts the workers itself; run it without torchrun.")
    work = partial(
        _work,
        mapping=config.model_dump(mode="json", by_alias=True),
        written=config.paths_as_written,
        reward=reward,
        resume=resume,
        allow_changed=allow_changed,
        is_watched=type(watch) is not Watcher,
    )

    def hear(name: str, *arguments: Any) -> None:
        getattr(watch, name)(*arguments)

    try:
        return run_on_ray(work, config.launch, config.device, hear, Interrupt())
    except Unbegun as stop:
        signal.raise_signal(stop.signal)
        raise


def _work(
    line: WorkerMailbox,
    mapping: dict[str, Any],
    written: dict[str, str],
    reward: Reward | None,
    resume: bool,
    allow_changed: bool,
    is_watched: bool,
) -> Result:
    """In each worker. Whoever starts anew after a loss goes on with the run that had begun."""
    began = line.found()
    if began is not None:
        mapping["run"]["dir"], resume = began, True
    watch = Relay(line, is_watched) if line.is_first else Watcher()
    if began is not None:
        watch.warned("workers were lost; all have started anew")
    config = validate_config(mapping).written_as(written)
    return start_here(config, reward, watch, resume, allow_changed)


class Relay(Watcher[Evaluation]):
    """Tells the command what it would tell a watcher; one that is silent there is not told."""

    def __init__(self, line: WorkerMailbox, is_watched: bool) -> None:
        self.line = line
        self.tell = line.say if is_watched else lambda *message: None

    def reading(self, path: str, rows: int) -> None:
        self.tell("reading", path, rows)

    def started(self, run: Path, iterations: int) -> None:
        self.line.keep(str(run))
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

    def evaluated(self, evaluation: Evaluation) -> None:
        self.tell("evaluated", replace(evaluation, responses=[]))

    def iterated(self, record: IterationRecord) -> None:
        self.tell("iterated", record)
