"""SFT and reward modelling as trainings that the session starts and the loop drives.

An iteration of these is one optimizer step: Adam under a rise and a cosine fall of the learning
rate, over rows in fresh permutations.
"""

import datetime
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether import assets
from tether.algo.random import permutation
from tether.config import LaunchSection
from tether.config.stages import RewardModelConfig, SFTConfig, StageTrainSection
from tether.data.chat_templates import asks_for_date, fix_date
from tether.data.prompts import OnProgress
from tether.dist.collectives import all_reduce_sum, on_first_process
from tether.dist.fsdp import shard
from tether.dist.interrupt import Interrupt
from tether.dist.tensor_parallel import refuse_unshareable
from tether.models.forward import Network
from tether.models.locate import find_model
from tether.models.precision import computed_in
from tether.models.stored import read_own_parts
from tether.models.weights import load_weights
from tether.ppo.optimizer import Optimizer
from tether.ppo.roles import pick_device
from tether.ppo.scoring import Trial
from tether.run.directory import EVALS
from tether.run.metrics import Event
from tether.run.reader import read_lines
from tether.train.checkpoint import newest_and_best
from tether.train.checkpoint_files import read_tensors
from tether.train.fingerprint import changed_row_ids, model_files, prompts_digest
from tether.train.ray import start_on_ray
from tether.train.training import Contents, Evaluated, Iterated, Result, SavedModel
from tether.train.watch import IterationRecord, Watcher

Record = dict[str, Any]
C = TypeVar("C", SFTConfig, RewardModelConfig)


@runtime_checkable
class Stage(Protocol):
    """A model, its rows, and the loss of some of them."""

    role: str  # folder of the model in a checkpoint
    num_rows: int
    num_heldout: int

    @property
    def model(self) -> PreTrainedModel: ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...

    def backward(self, rows: list[int]) -> Record:
        """Compute the gradients of the mean loss over these rows; return its metrics."""
        ...

    def evaluate(self) -> Record:
        """Return the loss on held-out rows and what goes with it."""
        ...

    def row_ids(self, row: int) -> list[int]:
        """Return the token ids of a row, which a resume compares."""
        ...

    def read_weights(self, folder: Path) -> Mapping[str, Tensor]:
        """Read the weights that a checkpoint holds."""
        ...


@dataclass(frozen=True)
class StageJob(Generic[C]):
    """A run of `tether sft` or `tether reward-model`."""

    config: C
    build_stage: Callable[[C, torch.device], Stage]
    in_worker: bool = False  # of Ray

    @property
    def run_name(self) -> str:
        return self.config.run.name or self.config.stage

    @property
    def launch(self) -> LaunchSection:
        return self.config.launch

    @property
    def rows(self) -> int:
        return self.config.train.minibatch_rows

    @property
    def on_ray(self) -> bool:
        return self.config.launch.kind == "ray" and not self.in_worker

    @property
    def python_reward(self) -> bool:
        return False

    def dated(self, day: datetime.date | None) -> "StageJob[C]":
        return replace(self, config=_with_date(self.config, day))

    def input_files(self) -> Iterator[tuple[str, dict[str, Path]]]:
        yield "model.start", model_files(find_model(self.config.model.start))
        for split in ("train", "heldout"):
            given = getattr(self.config.data, split)
            if given is not None:
                path = assets.resolve(given)
                yield f"data.{split}", {path.name: path}

    def planned_iterations(self, state: Mapping[str, Any]) -> int:
        return state["iterations"]

    def read_evaluations(self, run: Path) -> dict[int, Record]:
        return {line["iteration"]: line for line in read_lines(run / EVALS)}

    def build(self, reading: OnProgress | None) -> "StageTraining[C]":
        stage = self.build_stage(self.config, pick_device(self.config.device))
        day = template_day(self.config.data.date, stage.tokenizer)
        return StageTraining(_with_date(self.config, day), stage)

    def start_on_ray(
        self, watch: Watcher[Record], resume: bool, allow_changed: bool
    ) -> Result[Record]:
        rebuild = partial(_in_worker, build_stage=self.build_stage)
        return start_on_ray(self.config, rebuild, watch, resume, allow_changed)


def _in_worker(config: C, build_stage: Callable[[C, torch.device], Stage]) -> StageJob[C]:
    return StageJob(config, build_stage, in_worker=True)


def _with_date(config: C, day: datetime.date | None) -> C:
    data = config.data.model_copy(update={"date": day})
    return config if day == config.data.date else config.model_copy(update={"data": data})


def template_day(
    day: datetime.date | None, tokenizer: PreTrainedTokenizerBase
) -> datetime.date | None:
    """Return the day that the chat template is told in the whole run; None if it does not ask.

    The first process decides, as midnight may fall between two of them.
    """
    if day is not None or not asks_for_date(tokenizer):
        return day
    return on_first_process(datetime.date.today)


def fix_template_day(day: datetime.date | None, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make the chat template see that day, before any row is rendered."""
    fix_date(tokenizer, template_day(day, tokenizer))


def give_shards(
    config: SFTConfig | RewardModelConfig, network: Network, device: torch.device
) -> None:
    """Give every process a shard of the weights, where the config says so."""
    launch, layers = config.launch, cast(PreTrainedModel, network.trunk)
    if launch.tensor_parallel > 1:
        refuse_unshareable(layers.config, launch.tensor_parallel)
    if launch.weights == "sharded":
        computed, fill = computed_in(layers), partial(read_own_parts, device=device)
        shard(
            network.module,
            layers,
            network.called,
            computed_in=computed,
            fill=fill,
            sync_by_step=launch.gradient_sync == "step",
        )


def summed(*numbers: float) -> list[float]:
    """Return each number's sum over all replicas."""
    return all_reduce_sum(torch.tensor(numbers, dtype=torch.float64)).tolist()


class StageTraining(Generic[C]):
    """A stage under Adam, one optimizer step per iteration."""

    def __init__(self, config: C, stage: Stage) -> None:
        self.config, self.stage = config, stage
        train = config.train
        self.iterations = num_steps(stage.num_rows, train)
        self.optimizer = Optimizer(
            stage.model.parameters(),
            train.lr,
            train.max_grad_norm,
            train.weight_decay,
            train.betas,
            train.eps,
        )

    @property
    def heldout_rows(self) -> int:
        return self.stage.num_heldout

    @property
    def bad_rows(self) -> Sequence[str]:
        return ()

    @property
    def checkpoint_bytes(self) -> int:
        """Weights and two moments."""
        weights = self.stage.model.parameters()
        return 3 * sum(weight.numel() * weight.element_size() for weight in weights)

    @property
    def checkpoints_kept(self) -> int:
        return self.config.train.keep_last

    def try_out(self) -> Sequence[Trial]:
        return ()

    def changed_rows(self, run: Path) -> list[str]:
        return changed_row_ids(run, lambda step, *_: map(self.stage.row_ids, self._rows(step)))

    def log_into(self, run: Path) -> None: ...

    def ablations(self) -> Sequence[str]:
        return ()

    def check(self, fresh: bool) -> None: ...

    def iterate(self, iteration: int, interrupt: Interrupt) -> Iterated:
        """Take one optimizer step; it is dropped whole when the gradient is not finite."""
        train, began, rows = self.config.train, time.perf_counter(), self._rows(iteration)
        metrics = self.stage.backward(rows)
        interrupt.hold()
        warmup_steps = math.ceil(train.warmup_share * self.iterations)
        factor = warm_cosine(iteration, self.iterations, warmup_steps)
        self.optimizer.set_factor(factor)
        norm = float(self.optimizer.step())
        metrics |= {"grad_norm": norm, "lr": train.lr * factor}
        timings = {"time/iteration": time.perf_counter() - began}
        problem = None if math.isfinite(norm) else "the gradient was not finite"
        events = [Event("non_finite_step", f"{problem}, so the step was dropped")]
        return Iterated(
            record=IterationRecord(iteration, metrics, timings, events if problem else ()),
            prompts_sha256=prompts_digest([self.stage.row_ids(row) for row in rows]),
            no_progress=problem,
        )

    def _rows(self, step: int) -> list[int]:
        size = self.config.train.minibatch_rows
        return rows_of_step(step, self.stage.num_rows, size, self.config.seed)

    @torch.no_grad()
    def evaluate(self, iterations_done: int) -> Evaluated[Record]:
        found = {"iteration": iterations_done, **self.stage.evaluate()}
        return Evaluated(found, found)

    def learning_modules(self) -> dict[str, nn.Module]:
        return {self.stage.role: self.stage.model}

    def contents(self) -> Contents:
        stage = self.stage
        return Contents(
            models={stage.role: SavedModel(stage.model, stage.tokenizer)},
            tensors={_optimizer_file(stage): self.optimizer.state()},
            state={"iterations": self.iterations},
        )

    def load(self, checkpoint: Path) -> None:
        stage = self.stage
        load_weights(stage.model, stage.read_weights(checkpoint / stage.role))
        self.optimizer.load_state(read_tensors(checkpoint / _optimizer_file(stage)))

    def checkpoints_to_keep(self, run: Path) -> list[Path]:
        return newest_and_best(run, self.config.train.keep_last)

    def close(self) -> None: ...


def _optimizer_file(stage: Stage) -> str:
    return f"{stage.role}_optimizer.safetensors"


def num_steps(rows: int, train: StageTrainSection) -> int:
    return max(1, round(train.passes * rows / train.minibatch_rows))


def rows_of_step(step: int, count: int, minibatch_rows: int, seed: int) -> list[int]:
    """Return the rows of a step: a window on fresh permutations laid end to end."""
    begin, end = step * minibatch_rows, (step + 1) * minibatch_rows
    first, last = begin // count, (end - 1) // count
    order = [
        row
        for data_pass in range(first, last + 1)
        for row in permutation(count, seed, "sft", data_pass).tolist()
    ]
    return order[begin - first * count : end - first * count]


def warm_cosine(step: int, steps: int, warmup_steps: int) -> float:
    """Return what the peak learning rate is multiplied by: a linear rise, then a cosine fall to
    zero."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / (steps - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * progress))
