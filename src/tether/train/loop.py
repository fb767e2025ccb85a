"""The loop around the iterations: when to evaluate, save and stop, and what to write."""

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tether.config import Config
from tether.dist.interrupt import Dropped, Interrupt
from tether.dist.world import world
from tether.errors import RunStopped
from tether.ppo.evaluate import Evaluation, evaluate
from tether.ppo.iteration import run_iteration
from tether.ppo.optimizer import schedule_factor
from tether.ppo.result import Outcome
from tether.ppo.roles import Roles
from tether.ppo.rollout_log import rollout_rows
from tether.ppo.scoring import response_text
from tether.ppo.selfcheck import check_start
from tether.run.directory import EVENTS, REWARD_LOG
from tether.run.metrics import Event
from tether.run.tracking.manager import Trackers
from tether.run.writer import NoWriter, RunWriter, note_end, note_interrupt
from tether.train.checkpoint import Progress, save_checkpoint
from tether.train.fingerprint import Inputs, prompts_digest
from tether.train.notices import NoiseNotice
from tether.train.watch import IterationRecord, Sample, Watcher

MAX_ITERATIONS_WITHOUT_PROGRESS = 3  # in a row, and the run stops: it would only burn time


@dataclass(frozen=True)
class Result:
    """How a run ended. `before` is None without held-out prompts, `after` also if interrupted."""

    run: Path
    iterations_done: int
    before: Evaluation | None
    after: Evaluation | None
    train_seconds: float
    interrupted: signal.Signals | None
    resumed_from: int = 0  # iterations that were done before this attempt


class Loop:
    """One attempt at a run, from where `progress` stands to the last iteration or a signal."""

    def __init__(
        self,
        config: Config,
        roles: Roles,
        writer: RunWriter | NoWriter,
        watch: Watcher[Evaluation],
        progress: Progress,
        evaluations: list[Evaluation],
        inputs: Inputs,
    ) -> None:
        self.config, self.roles = config, roles
        self.writer, self.watch = writer, watch
        self.progress = progress
        self.evaluations = evaluations  # so far, also by earlier attempts
        self.inputs = inputs  # hashes of the files that the run is made from
        self.began_at = progress.iterations_done
        self.train_seconds = 0.0
        self.interrupt = Interrupt()
        self.noise = NoiseNotice()
        self.trackers = Trackers(writer.directory, config.run.trackers if world().is_first else [])

    def run(self) -> Result:
        with self._tracked(), self.interrupt, self._noting_the_end():
            try:
                self._check()
                self._train()
            except Dropped:
                pass
            except RunStopped as stop:
                self._leave_word(stop)
                raise
            if self.interrupt.signal is not None:
                self._save()
        return self._result()

    @contextlib.contextmanager
    def _noting_the_end(self) -> Iterator[None]:
        """Write into the run why it ended, unless it is finished."""
        try:
            yield
        except Exception as error:
            note_end(self.writer, self.progress.iterations_done, error)
            raise
        if self.interrupt.signal is not None:
            note_interrupt(self.writer, self.progress.iterations_done, self.interrupt.signal)

    def _train(self) -> None:
        while True:
            done = self.progress.iterations_done
            last = done >= self.config.train.iterations
            if last or done == 0 or _due(done, self.config.train.eval_every):
                self._evaluate()
            if last or (done > 0 and _due(done, self.config.train.checkpoint_every)):
                self._save()
            self.interrupt.agree()
            if last or self.interrupt.signal is not None:
                return
            self._iterate()

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

    def _check(self) -> None:
        for warning in _ablations(self.config):
            self.writer.events(self.began_at, [Event("ablation", warning)])
            self.watch.warned(warning)
        with self.interrupt.droppable():
            findings = check_start(self.roles, self.config, fresh=self.began_at == 0)
        self.watch.checked(findings)

    def _iterate(self) -> None:
        """One iteration, its lines in the run's files, and where the run stands after it."""
        config, roles, now = self.config, self.roles, self.progress
        began = time.perf_counter()
        _set_learning_rates(now.iterations_done, config, roles)
        with self.interrupt.droppable():
            outcome = run_iteration(
                now.iterations_done, now.controls, roles, config, self.interrupt
            )
        metrics = self._write(outcome)
        self.progress = Progress(
            iterations_done=now.iterations_done + 1,
            controls=outcome.next_controls(metrics, config),
            barren_iterations=now.barren_iterations + 1 if outcome.no_progress else 0,
        )
        refresh_every = config.kl.refresh_reference_every if config.refreshes_reference else 0
        if _due(self.progress.iterations_done, refresh_every):
            roles.reference.refresh(roles.actor)
        self.train_seconds += time.perf_counter() - began
        if self.progress.barren_iterations >= MAX_ITERATIONS_WITHOUT_PROGRESS:
            reason = [e for e in outcome.events if e.kind.startswith("non_finite")][-1].message
            raise RunStopped(
                f"{MAX_ITERATIONS_WITHOUT_PROGRESS} iterations in a row taught nothing, as their "
                f"numbers were not finite; the last reason: {reason}. Lower the learning "
                f"rates or look at events.jsonl; the weights are those of iteration "
                f"{self.progress.iterations_done - MAX_ITERATIONS_WITHOUT_PROGRESS}."
            )

    def _write(self, outcome: Outcome) -> dict[str, float]:
        config, roles, writer = self.config, self.roles, self.writer
        metrics, timings = outcome.metrics(config), outcome.timings()
        every, last = config.run.rollouts_every, config.train.iterations - 1
        if _due(outcome.iteration, every) or (every and outcome.iteration == last):
            writer.rollouts(outcome.iteration, rollout_rows(outcome, roles.vocabulary, config))
        drawn = outcome.prompts.ids[:: config.rollout.samples_per_prompt]
        writer.prompts(outcome.iteration, prompts_digest(drawn))
        writer.iteration(outcome.iteration, metrics, timings)
        writer.events(outcome.iteration, outcome.events)
        self._warn([*self.noise.read(metrics), *self.trackers.ended()])
        sample = self._sample(outcome)
        self.watch.iterated(
            IterationRecord(outcome.iteration, metrics, timings, outcome.events, sample)
        )
        return metrics

    def _sample(self, outcome: Outcome) -> Sample:
        """Return one row, another one in each iteration."""
        row = (outcome.iteration + 1) % len(outcome.prompts)
        scored = bool(outcome.scores.scored[row])
        return Sample(
            prompt=outcome.prompts.texts[row],
            response=response_text(outcome.rollout, row, self.roles.vocabulary),
            score=float(outcome.scores.values[row]) if scored else None,
        )

    def _evaluate(self) -> None:
        """Unless there is nothing to ask, or an earlier attempt did it with the same weights."""
        done, heldout = self.progress.iterations_done, self.roles.heldout_prompts
        if heldout is None or any(e.iteration == done for e in self.evaluations):
            return
        prompts = heldout.first(self.config.train.eval_prompts)
        self.watch.evaluating(len(prompts))
        with self.interrupt.droppable():
            evaluation, events = evaluate(done, prompts, self.roles, self.config)
        self.writer.evaluation(evaluation.record(), evaluation.responses)
        self.writer.events(done, events)
        self.watch.evaluated(evaluation)
        self.evaluations.append(evaluation)

    @contextlib.contextmanager
    def _tracked(self) -> Iterator[None]:
        """While trackers read along."""
        self._warn(self.trackers.start())
        try:
            yield
        finally:
            self._warn(self.trackers.close())

    def _warn(self, events: Sequence[Event]) -> None:
        self.writer.events(self.progress.iterations_done, events)
        for event in events:
            self.watch.warned(event.message)

    def _save(self) -> None:
        self.writer.sync()
        save_checkpoint(self.writer.directory, self.progress, self.roles, self.config, self.inputs)

    def _result(self) -> Result:
        done = self.progress.iterations_done
        found = {evaluation.iteration: evaluation for evaluation in self.evaluations}
        return Result(
            run=self.writer.directory,
            iterations_done=done,
            before=found.get(0),
            after=found.get(done) if done else None,
            train_seconds=self.train_seconds,
            interrupted=self.interrupt.signal,
            resumed_from=self.began_at,
        )


def finished_result(run: Path, config: Config, evaluations: list[Evaluation]) -> Result:
    """Of a run that has nothing left to do."""
    done, found = config.train.iterations, {e.iteration: e for e in evaluations}
    return Result(run, done, found.get(0), found.get(done), 0.0, None, resumed_from=done)


def _ablations(config: Config) -> list[str]:
    """What the config asks for though it is known to be wrong."""
    warnings = [
        f"{section} is an ablation: its estimator may lead to a wrong policy"
        for section in config.kl.ablations
    ]
    if not config.rollout.state_masking:
        warnings.append(
            "rollout.state_masking false is an ablation: the policy learns from tokens that it "
            "did not write"
        )
    return warnings


def _set_learning_rates(iteration: int, config: Config, roles: Roles) -> None:
    factor = schedule_factor(config.actor.schedule, iteration, config.train.iterations)
    roles.actor_optimizer.set_factor(factor)
    if roles.critic_optimizer is not None:
        roles.critic_optimizer.set_factor(factor)


def _due(iteration: int, every: int) -> bool:
    return every > 0 and iteration % every == 0
