"""A run that its caller steps: the loop of `tether.train`, one iteration at a time."""

import contextlib
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import cast

from tether.errors import RunStopped, UserError
from tether.ppo.evaluate import Evaluation
from tether.ppo.result import Outcome
from tether.ppo.rollout_log import rollout_rows
from tether.ppo.scoring import response_texts
from tether.run.metrics import Event
from tether.run.rows import Row
from tether.run.writer import note_stop
from tether.support import html
from tether.train.loop import Loop
from tether.train.ppo import PPOJob, PPOTraining
from tether.train.session import open_run
from tether.train.training import Iterated, Result
from tether.train.watch import Watcher
from tether.types import Experience, Prompts, Rollout, Scores

SHOWN_ROWS = 8


@dataclass(frozen=True)
class Iteration:
    """One iteration, after its updates: what was sampled, scored and learnt from.

    The tensors are those that the updates used; shapes as in `tether.types`. Of several processes
    each has its own rows. A caller that keeps iterations keeps their tensors.
    """

    number: int
    metrics: Mapping[str, float]
    timings: Mapping[str, float]
    events: Sequence[Event]
    outcome: Outcome
    training: PPOTraining

    @property
    def prompts(self) -> Prompts:
        """The prompt of each row, with the other columns of its data row."""
        return self.outcome.prompts

    @property
    def rollout(self) -> Rollout:
        """Token ids as sampled, and the sampler's log-probs."""
        return self.outcome.rollout

    @property
    def scores(self) -> Scores:
        """What the reward gave each row."""
        return self.outcome.scores

    @property
    def experience(self) -> Experience:
        """Log-probs, KL, values, rewards, advantages and returns of every token."""
        return self.outcome.experience

    @cached_property
    def responses(self) -> list[str]:
        """The text of each row's response, without its EOS."""
        return response_texts(self.rollout, self.training.roles.vocabulary)

    def row(self, number: int) -> Row:
        """Return one row with every number of every token, as rollouts/ holds it."""
        count = self.experience.rows.count(self.experience)
        if not 0 <= number < count:
            raise UserError(f"There is no row {number}: rows are 0 to {count - 1}.")
        vocabulary, config = self.training.roles.vocabulary, self.training.config
        found = rollout_rows(self.outcome, vocabulary, config, [number])
        if not found:
            raise UserError(f"Row {number} is with another process.")
        return Row(found[0])

    def __repr__(self) -> str:
        numbers = {name: f"{self.metrics[name]:.4g}" for name in _MAIN if name in self.metrics}
        told = ", ".join(f"{name} {number}" for name, number in numbers.items())
        return f"Iteration({self.number}: {len(self.experience)} rows, {told})"

    def _repr_html_(self) -> str:
        rows = [["row", "prompt", "response", "score"]]
        for row, text in enumerate(self.responses[:SHOWN_ROWS]):
            scored = bool(self.scores.scored[row])
            score = float(self.scores.values[row]) if scored else None
            rows.append([str(row), self.prompts.texts[row], text, html.number(score)])
        return html.paragraph(repr(self)) + html.table(rows, numbers_from=3)


_MAIN = ("score/mean", "kl/sequence_mean", "response/length_mean", "actor/entropy")


def _no_steps() -> Generator[Iterated, None, None]:
    """Yield nothing: the iterations of a run that is finished."""
    yield from ()


class Run:
    """A run that goes on one iteration at a time, made by `tether.start`.

    Iterating does all that `tether.train` does: evaluations, checkpoints and files fall due at the
    same places and hold the same bytes. Between two iterations the run waits: leaving the loop
    ends nothing, and a second `for` goes on. `close` ends it with its state saved, as does leaving
    a `with` block; `tether.resume` goes on later. A signal that arrives during an iteration ends
    the loop with the state saved, and `result.interrupted` names it.
    """

    def __init__(
        self, job: PPOJob, watch: Watcher[Evaluation], resume: bool, allow_changed: bool
    ) -> None:
        if job.on_ray:
            raise UserError(
                "launch.kind ray trains in other processes, which cannot be stepped from here; use "
                "tether.train with a watcher, or launch.kind local."
            )
        with ExitStack() as held:
            found = open_run(job, watch, resume, allow_changed, held)
            self._loop = found if isinstance(found, Loop) else None
            self._finished = None if isinstance(found, Loop) else found
            if self._loop is not None:
                held.enter_context(self._loop.tracked())
            self._held = held.pop_all()
        self._steps = _no_steps() if self._loop is None else self._loop.steps()
        self._ended = self._loop is None
        if self._ended:
            self._held.close()
        # A run that is dropped without `close` lets go of its lock, files and processes.
        weakref.finalize(self, self._held.close)

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self.result.run

    @property
    def iterations_done(self) -> int:
        """Iterations so far, those of earlier attempts included."""
        return self.result.iterations_done

    @property
    def evaluations(self) -> Mapping[int, Evaluation]:
        """Every evaluation on held-out prompts so far, by the iterations that were done."""
        return {} if self._loop is None else dict(self._loop.evaluations)

    @property
    def result(self) -> Result[Evaluation]:
        """How the run stands: what `tether.train` returns, at any time."""
        return self._loop.result() if self._loop else cast(Result[Evaluation], self._finished)

    def __iter__(self) -> "Run":
        return self

    def __next__(self) -> Iteration:
        if self._ended:
            raise StopIteration
        loop = cast(Loop[Evaluation], self._loop)
        try:
            with loop.interrupt:
                iterated = next(self._steps)
        except StopIteration:
            self._let_go()
            raise
        except BaseException:
            self._ended = True
            with self._held:  # what it holds adds to the error, as it does in `train`
                raise
        return self._shown(iterated)

    def stop(self) -> None:
        """Make the iteration done last the run's last one: the next step evaluates, saves, ends."""
        if self._loop is not None:
            self._loop.stop_asked = True

    def save(self) -> Path:
        """Write a checkpoint of where the run stands, and return its folder."""
        return self._open().save()

    def evaluate(self) -> Evaluation | None:
        """Evaluate on the held-out prompts now, unless that is done; None where there are none.

        An evaluation that is not due by `train.eval_every` adds a line to evals.jsonl, and changes
        nothing else.
        """
        loop = self._open()
        loop.evaluate()
        return loop.evaluations.get(loop.progress.iterations_done)

    def close(self) -> None:
        """End here with the state saved; a run that has ended is left as it is."""
        if self._ended:
            return
        loop = self._open()
        try:
            with contextlib.closing(self._steps):
                loop.save()
            done, planned = loop.progress.iterations_done, loop.training.iterations
            if done < planned:
                note_stop(loop.writer, done, planned)
        finally:
            self._let_go()

    def __enter__(self) -> "Run":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(RunStopped):  # of the save: the caller's own error goes on
            self.close()

    def __repr__(self) -> str:
        result = self.result
        planned = result.iterations_done if self._loop is None else self._loop.training.iterations
        state = "ended" if self._ended else "waits"
        return f"Run({result.run}: {result.iterations_done} of {planned} iterations done, {state})"

    def _open(self) -> Loop[Evaluation]:
        if self._ended or self._loop is None:
            raise UserError(
                f"{self.directory} has ended; go on with tether.start(…, resume=True) or "
                f"tether.resume."
            )
        return self._loop

    def _let_go(self) -> None:
        self._ended = True
        self._held.close()

    def _shown(self, iterated: Iterated) -> Iteration:
        record = iterated.record
        training = cast(PPOTraining, cast(Loop[Evaluation], self._loop).training)
        return Iteration(
            number=record.iteration,
            metrics=record.metrics,
            timings=record.timings,
            events=record.events,
            outcome=cast(Outcome, iterated.outcome),
            training=training,
        )
