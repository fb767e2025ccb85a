"""PPO as a training that the session starts and the loop drives."""

import datetime
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tether import assets
from tether.config import Config, LaunchSection, OwnTool, SearchTool
from tether.data.curriculum import begin_curriculum
from tether.data.probe import read_probe
from tether.data.prompts import OnProgress
from tether.dist.collectives import seconds_in_collectives
from tether.dist.interrupt import Interrupt
from tether.dist.world import world
from tether.errors import UserError
from tether.models.locate import find_model
from tether.models.policy import Policy
from tether.models.weights import trainable_parameters
from tether.planning.plan import make_plan
from tether.ppo.ahead import Ahead, pending_state, pending_tensors
from tether.ppo.evaluate import Evaluation, evaluate, read_evaluations
from tether.ppo.iteration import run_iteration
from tether.ppo.optimizer import schedule_factor, warmup_factor
from tether.ppo.pretrain import Pretrained, pretrain_critic
from tether.ppo.probe import PROBE_TEMPERATURE, run_probe
from tether.ppo.result import Outcome, first_controls
from tether.ppo.roles import Roles, build_roles
from tether.ppo.rollout_log import rollout_rows
from tether.ppo.scoring import NUM_TRIED, Trial, response_text, try_reward
from tether.ppo.selfcheck import check_start
from tether.rewards.functions import Reward, learned_model, parts_of
from tether.rollout.apart import SamplersApart
from tether.run.directory import EVALS, REWARD_LOG, VERDICTS
from tether.run.metrics import Event
from tether.run.reader import read_lines
from tether.support.user_code import own_files
from tether.train.checkpoint import (
    ACTOR,
    ACTOR_OPTIMIZER,
    CRITIC,
    CRITIC_OPTIMIZER,
    CURRICULUM,
    PENDING,
    REFERENCE,
    learnt_file,
    load_roles,
    newest_and_best,
    read_controls,
    read_state,
)
from tether.train.checkpoint_files import read_tensors
from tether.train.fingerprint import changed_row_ids, model_files, prompts_digest
from tether.train.notices import NoiseNotice
from tether.train.samplers import set_samplers_apart
from tether.train.throughput import operator_timings
from tether.train.training import Contents, Evaluated, Iterated, Result, SavedModel, is_due
from tether.train.watch import IterationRecord, Sample, Watcher


@dataclass(frozen=True)
class PPOJob:
    """A run of `tether train`. `reward` is a function used instead of `reward.kind`."""

    config: Config
    reward: Reward | None = None
    in_worker: bool = False  # of Ray, which has placed this process

    @property
    def run_name(self) -> str:
        return self.config.run.name

    @property
    def launch(self) -> LaunchSection:
        return self.config.launch

    @property
    def rows(self) -> int:
        return self.config.rows

    @property
    def on_ray(self) -> bool:
        return self.config.launch.kind == "ray" and not self.in_worker

    @property
    def python_reward(self) -> bool:
        return self.reward is not None

    def dated(self, day: datetime.date | None) -> "PPOJob":
        return replace(self, config=with_date(self.config, day))

    def input_files(self) -> Iterator[tuple[str, dict[str, Path]]]:
        return ppo_input_files(self.config)

    def planned_iterations(self, state: Mapping[str, Any]) -> int:
        """More may be asked for than when the run was started."""
        return self.config.train.iterations

    def read_evaluations(self, run: Path) -> dict[int, Evaluation]:
        return {evaluation.iteration: evaluation for evaluation in read_evaluations(run)}

    def build(self, reading: OnProgress | None) -> "PPOTraining":
        roles = build_roles(self.config, self.reward, reading)
        samplers = None
        try:
            config = with_date(self.config, roles.day)
            if config.launch.samplers:
                roles, samplers = set_samplers_apart(roles, config)
            return PPOTraining(config, roles, self.python_reward, samplers)
        except BaseException:
            roles.reward.close()
            if samplers is not None:
                samplers.close()
            raise

    def start_on_ray(
        self, watch: Watcher[Evaluation], resume: bool, allow_changed: bool
    ) -> Result[Evaluation]:
        from tether.train.ray import start_on_ray  # whose workers start a session each

        rebuild = partial(PPOJob, reward=self.reward, in_worker=True)
        return start_on_ray(self.config, rebuild, watch, resume, allow_changed)


def with_date(config: Config, day: datetime.date | None) -> Config:
    """Return the config with the day that the chat template is told."""
    data = config.data.model_copy(update={"date": day})
    return config if day == config.data.date else config.model_copy(update={"data": data})


def ppo_input_files(config: Config) -> Iterator[tuple[str, dict[str, Path]]]:
    """Yield, by config field, the files that a run reads, by names that hold wherever they lie."""
    for role in ("actor", "reference", "critic"):
        model = getattr(config.model, role)
        if model is not None:
            yield f"model.{role}", model_files(find_model(model, config.model.hub))
    for split in ("train", "heldout"):
        given = config.data.files(split)
        for number, file in enumerate(given):
            if file.is_generated:  # by the config and an installed package, or the environment
                continue
            which = "" if len(given) == 1 else f"[{number}]"
            path = assets.resolve(file.path)
            yield f"data.{split}{which}", {path.name: path}
    for number, tool in enumerate(config.rollout.tools):
        if isinstance(tool, SearchTool) and tool.corpus is not None:
            path = assets.resolve(tool.corpus)
            yield f"rollout.tools[{number}].corpus", {path.name: path}
        elif isinstance(tool, OwnTool):
            yield f"rollout.tools[{number}]", own_files(tool.kind)
    if config.rollout.environment is not None:
        files = {
            name: path
            for kind in config.rollout.environment.code
            for name, path in own_files(kind).items()
        }
        if files:
            yield "rollout.environment", files
    reward = learned_model(config.reward)
    if reward is not None:
        yield "reward.kind", model_files(find_model(reward))
        return
    for part in parts_of(config.reward):
        field = "reward.kind" if part.name is None else f"reward.parts, {part.name}"
        files = own_files(part.kind)
        if files:
            yield field, files


class PPOTraining:
    """The four roles, and the coefficients that controllers move from iteration to iteration."""

    def __init__(
        self,
        config: Config,
        roles: Roles,
        python_reward: bool = False,
        samplers: SamplersApart | None = None,
    ) -> None:
        self.config, self.roles, self.python_reward = config, roles, python_reward
        self.samplers = samplers  # apart, by `launch.samplers`
        self.ended: float | None = None  # when this process was done with its last iteration
        curriculum = begin_curriculum(config, len(roles.train_prompts))
        self.controls = replace(first_controls(config), curriculum=curriculum)
        self.pretrained: Pretrained | None = None  # where critic.pretrain asks for it
        self.noise = NoiseNotice()
        self.ahead = Ahead() if config.rollout.lag else None
        if self.ahead is not None and world().size > 1:
            raise UserError(
                f"rollout.lag = {config.rollout.lag} needs one training process, and "
                f"{world().size} were started; start one, or write rollout.lag: 0."
            )
        self.plan = make_plan(config, roles)
        self.probe = None if config.train.probe is None else read_probe(config.train.probe)

    @property
    def iterations(self) -> int:
        return self.config.train.iterations

    @property
    def heldout_rows(self) -> int:
        heldout = self.roles.heldout_prompts
        return 0 if heldout is None else heldout.evaluated(self.config.train.eval_prompts)

    @property
    def bad_rows(self) -> Sequence[str]:
        return self.roles.broken

    @property
    def checkpoint_bytes(self) -> int:
        return self.plan.checkpoint_bytes

    @property
    def checkpoints_kept(self) -> int:
        return self.plan.checkpoints_kept

    def try_out(self) -> Sequence[Trial]:
        """Try a function that the config names. One that was handed over in Python belongs to the
        caller, who may count its calls."""
        if self.python_reward:
            return []
        return try_reward(self.roles.reward, self.roles.train_prompts.first(NUM_TRIED), self.config)

    def changed_rows(self, run: Path) -> list[str]:
        config, prompts = self.config, self.roles.train_prompts
        size, shuffle = config.rollout.prompts, config.data.shuffle

        def drawn(
            iteration: int, window: tuple[int, int] | None, rows: list[int] | None
        ) -> Sequence[Sequence[int]]:
            if rows is not None:
                return prompts.rows(row for row in rows if row < len(prompts)).ids
            start, count = window or (iteration * size, size)
            return prompts.window(start, count, config.seed, shuffle).ids

        return changed_row_ids(run, drawn)

    def log_into(self, run: Path) -> None:
        here = world()
        for name, use in (
            (REWARD_LOG, self.roles.reward.log_to),
            (VERDICTS, self.roles.reward.record_in),
        ):
            stem, suffix = Path(name).stem, Path(name).suffix
            use(run / (name if here.is_first else f"{stem}-{here.rank}{suffix}"))

    def ablations(self) -> list[str]:
        warnings = [
            f"{section} is an ablation: its estimator may lead to a wrong policy"
            for section in self.config.kl.ablations
        ]
        if not self.config.rollout.state_masking:
            warnings.append(
                "rollout.state_masking false is an ablation: the policy learns from tokens that "
                "it did not write"
            )
        if self.config.model.ablation:
            warnings.append(
                "model.ablation: weights that learn may be stored in bfloat16, in which most small "
                "steps are lost to rounding"
            )
        return warnings

    def check(self, fresh: bool) -> str:
        return check_start(self.roles, self.config, fresh=fresh)

    def iterate(self, iteration: int, interrupt: Interrupt) -> Iterated:
        """Run one iteration, then move the controllers and refresh the reference where due."""
        config, roles = self.config, self.roles
        pretrain = config.critic.pretrain
        if iteration == 0 and pretrain is not None and self.pretrained is None:
            self.pretrained = pretrain_critic(pretrain, self.controls.beta, roles, config)
        _set_learning_rates(iteration, config, roles)
        waited, began = seconds_in_collectives(), time.monotonic()
        outcome = run_iteration(iteration, self.controls, roles, config, interrupt, self.ahead)
        waited = seconds_in_collectives() - waited
        if self.ahead is not None:
            self.ahead.forget(iteration)
        metrics = outcome.metrics(config)
        if iteration == 0 and self.pretrained is not None:
            metrics |= self.pretrained.metrics()
            outcome.events.append(self.pretrained.event())
        skipped = roles.train_prompts.newly_broken()  # of files that are read as they are drawn
        outcome.events.extend(Event("bad_row", problem) for problem in skipped)
        self.controls = outcome.next_controls(metrics, config)
        refresh_every = config.kl.refresh_reference_every if config.refreshes_reference else 0
        if is_due(iteration + 1, refresh_every):
            roles.reference.refresh(roles.actor)
        timings, apart = outcome.timings(), None
        timings |= operator_timings(
            outcome.rollout, timings["time/iteration"], waited, self.plan, roles.actor.model.device
        )
        if self.samplers is not None:
            tally = self.samplers.take_tally()
            outcome.events.extend(tally.events)
            timings |= tally.timings()
            before, self.ended = self.ended, time.monotonic()
            apart = {
                "before": None if before is None else round(began - before, 4),
                "seconds": round(self.ended - began, 4),
                "stages": dict(outcome.seconds),
                "chunks": tally.lines(began),
            }
        window, samples, all_rows = None, config.rollout.samples_per_prompt, outcome.rollout.rows
        of_first = [
            ids if all_rows.number(row) % samples == 0 else []
            for row, ids in enumerate(outcome.prompts.ids)
        ]
        drawn = all_rows.gather(of_first)[::samples]
        if outcome.dropped is not None:
            window = (outcome.controls.prompts_drawn, outcome.dropped.prompts)
            shuffle = config.data.shuffle
            drawn = roles.train_prompts.window(*window, config.seed, shuffle).ids
        every, last = config.run.rollouts_every, config.train.iterations - 1
        is_logged = is_due(iteration, every) or (every > 0 and iteration == last)
        return Iterated(
            record=IterationRecord(
                iteration, metrics, timings, outcome.events, self._sample(outcome)
            ),
            rollouts=self._logged(outcome) if is_logged else (),
            prompts_sha256=prompts_digest(drawn),
            prompts_window=window,
            prompts_rows=outcome.drawn,
            notices=self.noise.read(metrics),
            no_progress=_reason(outcome) if outcome.no_progress else None,
            outcome=outcome,
            samplers=apart,
        )

    def _sample(self, outcome: Outcome) -> Sample:
        """Return one row, another one in each iteration."""
        rows = outcome.rollout.rows
        number = (outcome.iteration + 1) % rows.count(outcome.prompts)
        own = [
            Sample(
                prompt=outcome.prompts.texts[row],
                response=response_text(outcome.rollout, row, self.roles.vocabulary),
                score=float(outcome.scores.values[row]) if outcome.scores.scored[row] else None,
            )
            for row in rows.here(torch.tensor([number])).tolist()
        ]
        [found] = rows.together(own)
        return found

    def _logged(self, outcome: Outcome) -> Sequence[dict[str, Any]]:
        """Return the rows of an iteration's file: each process makes its own."""
        own = rollout_rows(outcome, self.roles.vocabulary, self.config)
        found = outcome.rollout.rows.together(own)
        return sorted(found, key=lambda row: row["row"]) if world().is_first else ()

    def evaluate(self, iterations_done: int) -> Evaluated[Evaluation]:
        assert self.roles.heldout_prompts is not None
        sets = self.roles.heldout_prompts.first(self.config.train.eval_prompts)
        priced = self.config.train.price_samples > 0 and iterations_done == self.iterations
        evaluation, events = evaluate(iterations_done, sets, self.roles, self.config, priced)
        if self.probe is not None and iterations_done in (0, self.iterations):
            actor = self.roles.actor
            asked = Policy(actor.model, PROBE_TEMPERATURE, actor.microbatch_tokens)
            found = run_probe(self.probe, asked, self.roles.vocabulary)
            evaluation = replace(evaluation, probe=found)
        return Evaluated(evaluation, evaluation.record(), evaluation.responses, events)

    def learning_modules(self) -> dict[str, nn.Module]:
        critic = nn.ModuleList([network.module for network in self.roles.critic.networks()])
        return {"actor": self.roles.actor.model, "critic": critic}

    def contents(self) -> Contents:
        roles, models = self.roles, {}
        tensors: dict[str, Mapping[str, Tensor]] = {ACTOR_OPTIMIZER: roles.actor_optimizer.state()}
        if self.config.model.learns_in_part:
            tensors[learnt_file(self.config)] = trainable_parameters(roles.actor.model)
        else:
            models[ACTOR] = SavedModel(roles.actor.model, roles.vocabulary.tokenizer)
        for name, saved in ((CRITIC, roles.critic.state()), (REFERENCE, roles.reference.state())):
            if saved:
                tensors[name] = saved
        if roles.critic_optimizer is not None:
            tensors[CRITIC_OPTIMIZER] = roles.critic_optimizer.state()
        controls, curriculum = asdict(self.controls), self.controls.curriculum
        del controls["curriculum"]  # which has tensors
        if curriculum is not None:
            tensors[CURRICULUM] = curriculum.state()
        state = {"controls": controls, **roles.reward.state()}
        if self.pretrained is not None:
            state["pretrained"] = asdict(self.pretrained)
        if self.ahead is not None:
            waiting = self.ahead.settle(roles, self.config)
            tensors[PENDING], state["pending"] = pending_tensors(waiting), pending_state(waiting)
        return Contents(models, tensors, state)

    def load(self, checkpoint: Path) -> None:
        load_roles(checkpoint, self.roles, self.config)
        state = read_state(checkpoint)
        curriculum = self.controls.curriculum
        if curriculum is not None:
            curriculum = curriculum.with_state(read_tensors(checkpoint / CURRICULUM))
        self.controls = replace(read_controls(state), curriculum=curriculum)
        if "pretrained" in state:
            self.pretrained = Pretrained.from_state(state["pretrained"])
        if self.ahead is not None:
            pending = read_tensors(checkpoint / PENDING)
            self.ahead.load(state["pending"], pending, self.roles, self.config)

    def checkpoints_to_keep(self, run: Path) -> list[Path]:
        scores = {e["iteration"]: e["sampled"]["mean"] for e in read_lines(run / EVALS)}
        train = self.config.train
        return newest_and_best(run, train.keep_last, train.keep_best, scores)

    def close(self) -> None:
        try:
            self.roles.reward.close()
        finally:
            if self.samplers is not None:
                self.samplers.close()


def _set_learning_rates(iteration: int, config: Config, roles: Roles) -> None:
    factor = schedule_factor(config.actor.schedule, iteration, config.train.iterations)
    # The actor's first update comes after the critic's warm-up, and so does its learning rate's.
    actor_updates = max(0, iteration - config.critic.warmup_iterations)
    warmup = warmup_factor(actor_updates, config.actor.lr_warmup_iterations)
    roles.actor_optimizer.set_factor(factor * warmup)
    if roles.critic_optimizer is not None:
        warmup = warmup_factor(iteration, config.critic_lr_warmup_iterations)
        roles.critic_optimizer.set_factor(factor * warmup)


def _reason(outcome: Outcome) -> str:
    return [e for e in outcome.events if e.kind.startswith("non_finite")][-1].message
