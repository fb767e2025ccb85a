"""The loop around the iterations: when to evaluate, save and stop, and what to write."""

import contextlib
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Generic

from tether.dist.collectives import any_process
from tether.dist.interrupt import Dropped, Interrupt
from tether.dist.world import world
from tether.errors import RunStopped
from tether.run.directory import EVENTS, REWARD_LOG
from tether.run.metrics import Event
from tether.run.tracking.manager import Trackers
from tether.run.writer import NoWriter, RunWriter, note_end, note_interrupt, note_stop
from tether.train.checkpoint import Progress, save_checkpoint
from tether.train.fingerprint import Inputs
from tether.train.training import E, Iterated, Result, Training, is_due
from tether.train.watch import Watcher

MAX_ITERATIONS_WITHOUT_PROGRESS = 3  # in a row, and the run stops: it would only burn time


class Loop(Generic[E]):
    """One attempt at a run, from `progress` to the last iteration or a signal.

    `run` goes to the end. A caller that looks at each iteration takes them from `steps`, inside
    `tracked`, and enters `interrupt` while it waits for the next one.
    """

    def __init__(
        self,
        training: Training[E],
        writer: RunWriter | NoWriter,
        watch: Watcher[E],
        progress: Progress,
        evaluations: dict[int, E],
        inputs: Inputs,
    ) -> None:
        self.training, self.writer, self.watch = training, writer, watch
        self.progress = progress
        self.evaluations = evaluations  # so far, also by earlier attempts
        self.inputs = inputs  # hashes of the files that the run is made from
        self.began_at = progress.iterations_done
        self.train_seconds = 0.0
        self.stop_asked = False  # by the caller: end after the iteration that was done last
        self.interrupt = Interrupt()
        trackers = training.config.run.trackers if world().is_first else []
        self.trackers = Trackers(writer.directory, trackers)

    def run(self) -> Result[E]:
        """Evaluate, save and iterate in turn. A signal ends it, with the state saved."""
        with self.tracked(), self.interrupt:
            # Keeps no item: the tensors of an iteration are freed before the next one.
            deque(self.steps(), maxlen=0)
        return self.result()

    def steps(self) -> Generator[Iterated, None, None]:
        """Yield every iteration once its lines are written; evaluate and save in between."""
        with self._noting_the_end():
            try:
                self._check()
                while self._between_iterations():
                    yield self._iterate()
            except Dropped:
                pass
            except RunStopped as stop:
                self._leave_word(stop)
                raise
            if self.interrupt.signal is not None:
                self.save()

    def _between_iterations(self) -> bool:
        """Evaluate and save where due; return whether another iteration follows."""
        done, train = self.progress.iterations_done, self.training.config.train
        last = done >= self.training.iterations or any_process(self.stop_asked)
        if last or done == 0 or is_due(done, train.eval_every):
            self.evaluate()
        if last or (done > 0 and is_due(done, train.checkpoint_every)):
            self.save()
        self.interrupt.agree()
        return not last and self.interrupt.signal is None

    def _iterate(self) -> Iterated:
        """Do one iteration, write its lines, and move the run's position past it."""
        now, began = self.progress, time.perf_counter()
        with self.interrupt.droppable():
            iterated = self.training.iterate(now.iterations_done, self.interrupt)
        self._write(iterated)
        self.progress = Progress(
            iterations_done=now.iterations_done + 1,
            without_progress=0 if iterated.no_progress is None else now.without_progress + 1,
        )
        self.train_seconds += time.perf_counter() - began
        if self.progress.without_progress >= MAX_ITERATIONS_WITHOUT_PROGRESS:
            raise RunStopped(
                f"{MAX_ITERATIONS_WITHOUT_PROGRESS} iterations in a row taught nothing, as their "
                f"numbers were not finite; the last reason: {iterated.no_progress}. Lower the "
                f"learning rates or look at events.jsonl; the weights are those of iteration "
                f"{self.progress.iterations_done - MAX_ITERATIONS_WITHOUT_PROGRESS}."
            )
        return iterated

    def _write(self, iterated: Iterated) -> None:
        record, writer = iterated.record, self.writer
        if iterated.rollouts:
            writer.rollouts(record.iteration, iterated.rollouts)
        if iterated.prompts_sha256 is not None:
            writer.prompts(
                record.iteration,
                iterated.prompts_sha256,
                iterated.prompts_window,
                iterated.prompts_rows,
            )
        writer.iteration(record.iteration, record.metrics, record.timings)
        if iterated.samplers is not None:
            writer.samplers(record.iteration, iterated.samplers)
        writer.events(record.iteration, record.events)
        self._warn([*iterated.notices, *self.trackers.ended()])
        self.watch.iterated(record)

    def evaluate(self) -> None:
        """Evaluate, unless there are no held-out rows or an earlier attempt did it with the same
        weights."""
        done, rows = self.progress.iterations_done, self.training.heldout_rows
        if rows == 0 or done in self.evaluations:
            return
        self.watch.evaluating(rows)
        with self.interrupt.droppable():
            evaluated = self.training.evaluate(done)
        self.writer.evaluation(evaluated.line, evaluated.responses)
        self.writer.events(done, evaluated.events)
        self.watch.evaluated(evaluated.found)
        self.evaluations[done] = evaluated.found

    def save(self) -> Path:
        """Write a checkpoint of where the run stands; one that is there already is kept."""
        self.writer.sync()
        return save_checkpoint(self.writer.directory, self.progress, self.training, self.inputs)

    def _check(self) -> None:
        for warning in self.training.ablations():
            self.writer.events(self.began_at, [Event("ablation", warning)])
            self.watch.warned(warning)
        with self.interrupt.droppable():
            findings = self.training.check(fresh=self.began_at == 0)
        if findings is not None:
            self.watch.checked(findings)

    @contextlib.contextmanager
    def _noting_the_end(self) -> Iterator[None]:
        """Write into the run why it ended, unless it is finished."""
        try:
            yield
        except Exception as error:
            note_end(self.writer, self.progress.iterations_done, error)
            raise
        done = self.progress.iterations_done
        if self.interrupt.signal is not None:
            note_interrupt(self.writer, done, self.interrupt.signal)
        elif done < self.training.iterations:
            note_stop(self.writer, done, self.training.iterations)

    @contextlib.contextmanager
    def tracked(self) -> Iterator[None]:
        """Run the trackers' processes meanwhile."""
        self._warn(self.trackers.start())
        try:
            yield
        finally:
            self._warn(self.trackers.close())

    def _leave_word(self, stop: RunStopped) -> None:
        """Write into the run what led to the stop, and say where it can be read."""
        with contextlib.suppress(RunStopped):  # of a disk that is full, which `stop` says already
            self.writer.events(self.progress.iterations_done, stop.events)
        run, more = self.writer.directory, []
        if stop.events:
            more.append(f"All of them are in {run / EVENTS}.")
        if (run / REWARD_LOG).is_file():
            more.append(f"What the reward printed is in {run / REWARD_LOG}.")
        stop.args = (" ".join([str(stop), *more]),)

    def _warn(self, events: Sequence[Event]) -> None:
        self.writer.events(self.progress.iterations_done, events)
        for event in events:
            self.watch.warned(event.message)

    def result(self) -> Result[E]:
        done = self.progress.iterations_done
        return Result(
            run=self.writer.directory,
            iterations_done=done,
            before=self.evaluations.get(0),
            after=self.evaluations.get(done) if done else None,
            train_seconds=self.train_seconds,
            interrupted=self.interrupt.signal,
            resumed_from=self.began_at,
        )
