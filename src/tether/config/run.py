"""The sections around the algorithm: run, model, data, train, launch."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from tether.config.base import SCHEMA, Section, cores
from tether.support.http import refuse_userinfo


class RunSection(Section):
    """Where a run writes, and how much of its rollouts it keeps."""

    dir: Path | None = None
    """the run directory itself; without it runs/NAME-001, -002, …"""
    name: Annotated[str, Field(pattern=r"^[^/\\.][^/\\]*$")] = "run"
    """the NAME in runs/NAME-001"""
    overwrite: bool = False
    """replace an earlier run at `run.dir`"""
    rollouts_every: NonNegativeInt = 10
    """write rollouts/ every so many iterations, besides the first and the last; 0 = never"""
    rollouts_rows: PositiveInt = 64
    """rows kept of each written iteration: whole groups, evenly spaced"""
    trackers: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = []
    """who gets a copy of the numbers, each by a process that only reads the run's files"""


Dtype = Literal["float32", "float64", "bfloat16"]
# Its 8 bits hold no small step: at a learning rate of 1e-6, 99 of 100 weights would never move.
TOO_COARSE_TO_LEARN = "bfloat16"


class LoraSection(Section):
    """LoRA: the base stays as it is, and only a pair of thin matrices beside its layers learns."""

    rank: PositiveInt = 16
    """the thin side of the matrices"""
    alpha: PositiveFloat = 32.0
    """the adapter's output is multiplied by alpha / rank"""
    targets: Annotated[list[str], Field(min_length=1)] | None = None
    """names of the linear layers that get one, such as q_proj; default: all below the head"""


class ModelSection(Section):
    """The networks behind the roles."""

    actor: str
    """a local Hugging Face directory, a `.gguf` file, `tether:starter`, or see `hub`"""
    reference: str | None = None
    """the frozen policy that KL is measured against; default: the actor's starting weights"""
    critic: str | None = None
    """where the critic starts: a trunk under a zero head, or a reward model; default: the actor"""
    hub: bool = False
    """let a name that is no directory be fetched from the Hugging Face hub"""
    dtype: Dtype = "float32"
    """number format of all weights without one below; bfloat16 only for those that do not learn"""
    reference_dtype: Dtype | None = None
    """number format of the reference's weights"""
    critic_dtype: Dtype | None = None
    """number format of the critic's weights"""
    gradient_checkpointing: bool = False
    """keep one state a layer for the backward pass and compute the rest again: slower, smaller"""
    lora: LoraSection | None = None
    """train an adapter on the actor; its base, the adapter off, is then the reference"""
    critic_lora: LoraSection | None = None
    """train an adapter and the value head, not the critic's whole trunk"""

    @property
    def adapter_off_is_reference(self) -> bool:
        """The actor's base serves as the reference, so there is no second copy of it."""
        return self.lora is not None and self.reference in (None, self.actor)


class DataFile(Section):
    """One of several files of prompts that are mixed."""

    path: str
    """a `.jsonl`, `.csv` or `.parquet` file"""
    weight: PositiveFloat = 1.0
    """how often its turn comes, relative to the other files"""


def _path_or_files(value: Any) -> Any:
    """One sentence for whatever is neither, as a union would give one for each of its members."""
    if isinstance(value, str):
        return value
    try:
        files = [DataFile.model_validate(item) for item in value]
    except (TypeError, ValidationError):
        files = []
    if not files:
        raise ValueError("write a path, or a list of {path: FILE, weight: NUMBER above 0}")
    return files


DataFiles = Annotated[list[DataFile], Field(min_length=1)]


class DataSection(Section):
    """Prompts: rows of JSON lines, CSV or parquet; other columns go to the reward."""

    train: Annotated[str | DataFiles, BeforeValidator(_path_or_files)]
    """path of the training prompts (`tether:NAME` ships), or a list of {path, weight}"""
    heldout: Annotated[
        str | DataFiles | None,
        BeforeValidator(lambda value: None if value is None else _path_or_files(value)),
    ] = None
    """path of the prompts that only evaluation sees, or a list of {path, weight}"""
    prompt_column: str = "prompt"
    """the column that holds the prompt: text, or a list of messages"""
    columns: dict[str, str] = {}
    """second names for columns: {name that the reward asks for: column, or column.field}"""
    system_prompt: str | None = None
    """a system turn before every prompt that has none; needs a chat template"""
    date: datetime.date | None = None
    """the day that a chat template is told, YYYY-MM-DD; default: that on which the run starts"""
    max_prompt_tokens: PositiveInt = 512
    """a longer prompt is refused before training, by row"""
    shuffle: bool = True
    """a fresh order each data pass; without it, file order"""
    on_bad_row: Literal["refuse", "skip"] = "refuse"
    """what a broken row does: stop before training, with its line, or be left out and named"""

    def files(self, split: Literal["train", "heldout"]) -> list[DataFile]:
        """The files of a split; a path alone is a list of one."""
        given = self.train if split == "train" else self.heldout
        return [DataFile(path=given)] if isinstance(given, str) else given or []


class TrainSection(Section):
    """How long, and how often the rest happens."""

    iterations: PositiveInt = 100
    """rollout batches to train on"""
    eval_every: NonNegativeInt = 0
    """evaluate every so many iterations, besides before and after; 0 = never"""
    eval_prompts: PositiveInt = 512
    """held-out prompts an evaluation uses, from the top of the file"""
    checkpoint_every: NonNegativeInt = 10
    """save every so many iterations, besides at the end and on a signal; 0 = never"""
    keep_last: PositiveInt = 2
    """newest checkpoints kept"""
    keep_best: NonNegativeInt = 1
    """checkpoints kept besides for their held-out score, among those that were evaluated"""


class LaunchSection(Section):
    """Who starts the processes, and how the weights lie over them."""

    kind: Literal["local", "ray"] = "local"
    """local: this process, or those that torchrun started; ray: workers that Ray Train places"""
    num_workers: PositiveInt | None = None
    """processes; default: as many as torchrun started, else 1"""
    address: str | None = None
    """of the Ray cluster, such as ray://head:10001; default: one of this machine's own"""
    max_restarts: NonNegativeInt = 2
    """times that Ray starts lost workers anew; they go on from the newest checkpoint"""
    weights: Literal["replicated", "sharded"] = "replicated"
    """whole on every process, or a part on each, by FSDP2"""
    tensor_parallel: PositiveInt = 1
    """processes that share the layers of one copy of a model"""
    timeout_seconds: PositiveFloat = 600.0
    """a process that keeps the others waiting for longer ends the run, by name"""
    teraflops: PositiveFloat | None = None
    """what a device computes, in 1e12 operations a second, for the times of `tether check`"""
    link_gigabytes: PositiveFloat | None = None
    """what a device sends and receives, in 1e9 bytes a second, for the same"""

    @model_validator(mode="after")
    def _address_has_no_secret(self) -> LaunchSection:
        if self.address is not None:
            refuse_userinfo("address", self.address, "set RAY_AUTH_TOKEN in the environment")
        return self

    @model_validator(mode="after")
    def _mesh_fits(self) -> LaunchSection:
        workers = self.num_workers
        if workers is not None and workers % self.tensor_parallel:
            raise ValueError(
                f"tensor_parallel is {self.tensor_parallel}, which does not divide num_workers = "
                f"{workers}"
            )
        if self.tensor_parallel > 1 and self.weights == "replicated":
            raise ValueError(
                f"tensor_parallel = {self.tensor_parallel} divides the weights, so it needs "
                f"weights: sharded"
            )
        return self


class RunConfig(Section):
    """What every kind of run has: of PPO, and of the stages before it."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    schema_version: Annotated[Literal[1], Field(alias="schema")] = SCHEMA
    """version of this file's layout"""
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    """every random number is computed from it"""
    device: str = "auto"
    """cpu, cuda, or auto: cuda if there is one"""
    threads: Annotated[int, Field(gt=0, le=1024)] = Field(default_factory=cores)
    """CPU threads; the same number gives the same bits (default: the cores at hand)"""

    def to_dict(self) -> dict[str, Any]:
        """The resolved config; `run.dir` is left out, as it is where the file itself lies."""
        return self.model_dump(mode="json", by_alias=True, exclude={"run": {"dir"}})

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)
