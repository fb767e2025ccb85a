"""The loop of a stage before PPO: steps, evaluations, files, one checkpoint at the end.

Nothing is resumed: a stage is short, and begins again from the same bits.
"""

import contextlib
import json
import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError
from torch import nn

from tether.algo.random import permutation
from tether.config import RunConfig
from tether.config.stages import StageTrainSection
from tether.dist.environment import launched_size
from tether.dist.interrupt import Interrupt
from tether.errors import RunStopped, UserError, one_line
from tether.ppo.optimizer import Optimizer
from tether.ppo.roles import pick_device
from tether.run.checkpoint_store import publish
from tether.run.directory import CHECKPOINTS, RUNS, SCHEMA, create_run_directory, refuse_taken
from tether.run.lock import RunLock
from tether.run.metrics import Event
from tether.run.writer import RunWriter, note_end, note_interrupt
from tether.support.units import byte_text

BETAS = (0.9, 0.95)  # Adam's: a short memory suits a loss that falls fast
WAIT_SECONDS = 5.0  # between two tries to write on a full disk
MAX_STEPS_WITHOUT_PROGRESS = 3  # in a row whose gradient is not finite, and the stage stops

Record = dict[str, Any]


@runtime_checkable
class Stage(Protocol):
    """What is learnt, and from what."""

    model: nn.Module
    num_rows: int

    def backward(self, rows: list[int]) -> Record:
        """Gradients of the mean loss over these rows, and what to write about them."""
        ...

    def evaluate(self) -> Record | None:
        """On held-out rows, or None where there are none."""
        ...

    def save(self, folder: Path) -> None:
        """Into a checkpoint's folder."""
        ...


class StageWatcher:
    """What a stage tells whoever watches it; this one is silent."""

    def started(self, run: Path, steps: int) -> None: ...

    def stepped(self, step: int, metrics: Record) -> None: ...

    def evaluated(self, step: int, evaluation: Record) -> None: ...

    def waiting(self, problem: str) -> None:
        """Called when something cannot be written and the stage waits until it can."""


@dataclass(frozen=True)
class StageResult:
    run: Path
    checkpoint: Path
    steps_done: int
    before: Record | None
    after: Record | None
    train_seconds: float
    interrupted: signal.Signals | None


Build = Callable[[Any, torch.device], Stage]


def run_stage(config: RunConfig, build: Build, watch: StageWatcher) -> StageResult:
    """Load and check everything, then learn in a run directory of its own."""
    refuse_several(f"tether {config.stage}")
    settings = config.run
    refuse_taken(settings.dir, settings.overwrite)
    torch.set_num_threads(config.threads)
    stage = build(config, pick_device(config.device))
    refuse_small_disk(stage.model, settings.dir or RUNS)
    run = create_run_directory(settings.dir, settings.name or config.stage, settings.overwrite)
    with RunLock(run):
        writer = RunWriter(run, config.to_yaml())
        try:
            return learn(config, stage, writer, watch)
        finally:
            writer.close()


def refuse_several(command: str) -> None:
    """Each process of torchrun would train a model of its own."""
    if launched_size() > 1:
        raise UserError(
            f"{command} runs in one process, but {launched_size()} were started; start it without "
            f"torchrun."
        )


def learn(config: RunConfig, stage: Stage, writer: RunWriter, watch: StageWatcher) -> StageResult:
    """All steps, unless a signal says enough; what has been learnt by then is saved."""
    train = config.train
    steps = num_steps(stage.num_rows, train)
    optimizer = Optimizer(
        stage.model.parameters(), train.lr, train.max_grad_norm, train.weight_decay, BETAS
    )
    slices = row_slices(stage.num_rows, steps, train.minibatch_rows, config.seed)
    interrupt = Interrupt()
    writer.wait_for_room = waiting(watch, interrupt)
    watch.started(writer.directory, steps)
    before = after = _evaluate(0, stage, writer, watch)
    seconds, barren, done = 0.0, 0, 0
    with interrupt, _noting_the_end(writer, interrupt, lambda: done):
        for step, rows in enumerate(slices):
            if interrupt.signal is not None:
                break
            began = time.perf_counter()
            metrics = stage.backward(rows)
            factor = warm_cosine(step, steps, math.ceil(train.warmup_share * steps))
            optimizer.set_factor(factor)
            norm = float(optimizer.step())
            spent = time.perf_counter() - began
            seconds, done = seconds + spent, step + 1
            metrics |= {"grad_norm": norm, "lr": train.lr * factor}
            writer.iteration(step, metrics, {"time/iteration": spent})
            watch.stepped(step, metrics)
            barren = 0 if math.isfinite(norm) else barren + 1
            _note_barren(step, barren, writer)
            if done == steps or (train.eval_every and done % train.eval_every == 0):
                after = _evaluate(done, stage, writer, watch)
        writer.sync()
        checkpoint = save_patiently(writer, done, stage, config)
    return StageResult(writer.directory, checkpoint, done, before, after, seconds, interrupt.signal)


@contextlib.contextmanager
def _noting_the_end(
    writer: RunWriter, interrupt: Interrupt, done: Callable[[], int]
) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        note_end(writer, done(), error)
        raise
    if interrupt.signal is not None:
        note_interrupt(writer, done(), interrupt.signal)


def num_steps(rows: int, train: StageTrainSection) -> int:
    return max(1, round(train.passes * rows / train.minibatch_rows))


def row_slices(count: int, steps: int, minibatch_rows: int, seed: int) -> Iterator[list[int]]:
    """Rows of each step: a window on fresh permutations laid end to end."""
    queue: list[int] = []
    data_pass = 0
    for _ in range(steps):
        while len(queue) < minibatch_rows:
            queue += permutation(count, seed, "sft", data_pass).tolist()
            data_pass += 1
        yield queue[:minibatch_rows]
        queue = queue[minibatch_rows:]


def warm_cosine(step: int, steps: int, warmup_steps: int) -> float:
    """What the peak learning rate is multiplied by: a linear rise, then a cosine fall to zero."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / (steps - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * progress))


@torch.no_grad()
def _evaluate(step: int, stage: Stage, writer: RunWriter, watch: StageWatcher) -> Record | None:
    evaluation = stage.evaluate()
    if evaluation is not None:
        writer.evaluation({"iteration": step, **evaluation})
        watch.evaluated(step, evaluation)
    return evaluation


def _note_barren(step: int, barren: int, writer: RunWriter) -> None:
    if barren:
        message = "the gradient was not finite, so the step was dropped"
        writer.events(step, [Event("non_finite_step", message)])
    if barren >= MAX_STEPS_WITHOUT_PROGRESS:
        raise RunStopped(
            f"The gradients of {barren} steps in a row were not finite; lower train.lr, or look "
            f"at the rows of these steps."
        )


def refuse_small_disk(model: nn.Module, folder: Path) -> None:
    """Refuse, before training, a stage whose one checkpoint would not fit."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    needed = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    if free < needed:
        raise UserError(
            f"{folder} has {byte_text(free)} free, but the trained model needs "
            f"{byte_text(needed)}; make room, or set run.dir."
        )


def waiting(watch: StageWatcher, interrupt: Interrupt) -> Callable[[str], None]:
    """Return what is called between two tries to write. A stage has nothing to go back to, so it
    keeps what it has learnt in memory until there is room, or a signal says that it may go."""
    said: set[str] = set()

    def wait(problem: str) -> None:
        before = interrupt.signal
        if problem not in said:
            said.add(problem)
            watch.waiting(
                f"{problem}. Nothing that was learnt is lost: make room and it goes on by itself; "
                f"Ctrl-C gives it up."
            )
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            if interrupt.signal is not before:
                raise RunStopped(f"{problem}, and it was not waited for: nothing was saved.")
            time.sleep(0.05)

    return wait


def save_patiently(writer: RunWriter, steps_done: int, stage: Stage, config: RunConfig) -> Path:
    """Save, however often it takes."""
    while True:
        try:
            return save(writer.directory, steps_done, stage, config)
        except (OSError, SafetensorError) as error:
            place = writer.directory / CHECKPOINTS
            reason = one_line(error).lower().removesuffix(".")
            writer.wait_for_room(f"{place} could not be written: {reason}")


def save(run: Path, steps_done: int, stage: Stage, config: RunConfig) -> Path:
    def write(folder: Path) -> None:
        stage.save(folder)
        state = {"schema": SCHEMA, "iterations_done": steps_done, "config": config.to_dict()}
        (folder / "state.json").write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")

    return publish(run, f"{steps_done:06d}", write)
