"""The loop around the iterations: when to evaluate, what to write, how to stop."""

import signal
import time
from dataclasses import dataclass
from pathlib import Path

from tether.config import Config
from tether.errors import RunStopped
from tether.run.events import Event
from tether.run.writer import RunWriter
from tether.train.checkpoint import save_checkpoint
from tether.train.controls import Controls, first_controls
from tether.train.evaluate import Evaluation, evaluate
from tether.train.interrupt import Interrupt
from tether.train.iteration import run_iteration
from tether.train.optimizer import schedule_factor
from tether.train.outcome import Outcome
from tether.train.record import rollout_rows
from tether.train.roles import Roles
from tether.train.scoring import response_texts
from tether.train.selfcheck import check_start
from tether.train.watch import Watcher


@dataclass(frozen=True)
class Result:
    """How a run ended. `before` is None without held-out prompts, `after` also if interrupted."""

    run: Path
    iterations_done: int
    before: Evaluation | None
    after: Evaluation | None
    train_seconds: float
    interrupted: signal.Signals | None


def run_loop(config: Config, roles: Roles, writer: RunWriter, watch: Watcher) -> Result:
    watch.started(writer.directory, config.train.iterations)
    for section in config.kl.ablations:
        warning = f"{section} is an ablation: its estimator may lead to a wrong policy"
        writer.events(0, [Event("ablation", warning)])
        watch.warned(warning)
    watch.checked(check_start(roles, config))
    before = _evaluate(0, config, roles, writer, watch)

    controls, done, train_seconds = first_controls(config), 0, 0.0
    after = None
    with Interrupt() as interrupt:
        while done < config.train.iterations and interrupt.signal is None:
            began = time.perf_counter()
            _set_learning_rates(done, config, roles)
            outcome = _run_iteration(done, controls, roles, config, writer)
            metrics = _write(outcome, config, roles, writer, watch)
            controls = outcome.next_controls(metrics, config)
            done += 1
            if _due(done, config.kl.refresh_reference_every):
                roles.reference.refresh(roles.actor)
            train_seconds += time.perf_counter() - began

            last = done == config.train.iterations
            due = last or _due(done, config.train.eval_every)
            after = _evaluate(done, config, roles, writer, watch) if due else None
            if last or interrupt.signal or _due(done, config.train.checkpoint_every):
                save_checkpoint(writer.directory, done, controls, roles, config.train.keep_last)
    return Result(writer.directory, done, before, after, train_seconds, interrupt.signal)


def _run_iteration(
    iteration: int, controls: Controls, roles: Roles, config: Config, writer: RunWriter
) -> Outcome:
    """An iteration that stops the run still leaves its events behind."""
    try:
        return run_iteration(iteration, controls, roles, config)
    except RunStopped as stop:
        writer.events(iteration, stop.events)
        raise


def _write(
    outcome: Outcome, config: Config, roles: Roles, writer: RunWriter, watch: Watcher
) -> dict[str, float]:
    metrics = outcome.metrics(config)
    texts = response_texts(outcome.rollout, roles.vocabulary)
    if _due(outcome.iteration, config.run.rollouts_every):
        writer.rollouts(outcome.iteration, rollout_rows(outcome, roles.vocabulary, config))
    writer.iteration(outcome.iteration, metrics, outcome.timings())
    writer.events(outcome.iteration, outcome.events)
    watch.iterated(outcome, metrics, texts)
    return metrics


def _evaluate(
    done: int, config: Config, roles: Roles, writer: RunWriter, watch: Watcher
) -> Evaluation | None:
    if roles.heldout_prompts is None:
        return None
    prompts = roles.heldout_prompts.first(config.train.eval_prompts)
    watch.evaluating(len(prompts))
    evaluation, events = evaluate(done, prompts, roles, config)
    writer.evaluation(evaluation.record())
    writer.events(done, events)
    watch.evaluated(evaluation)
    return evaluation


def _set_learning_rates(iteration: int, config: Config, roles: Roles) -> None:
    factor = schedule_factor(config.actor.schedule, iteration, config.train.iterations)
    roles.actor_optimizer.set_factor(factor)
    if roles.critic_optimizer is not None:
        roles.critic_optimizer.set_factor(factor)


def _due(iteration: int, every: int) -> bool:
    return every > 0 and iteration % every == 0
