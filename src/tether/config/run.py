"""The sections around the algorithm: run, model, data, train, launch."""

from __future__ import annotations

import copy
import datetime
import itertools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from tether.config.base import SCHEMA, Section, cores
from tether.config.devices import DEVICES, Device
from tether.support.http import refuse_userinfo

if TYPE_CHECKING:
    from typing_extensions import Self


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
    """rows written of each such iteration: whole groups, evenly spaced"""
    trackers: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = []
    """trackers that get a copy of the metrics, each a process that only reads the run's files"""


Dtype = Literal["float32", "float64", "bfloat16"]
# Its 8-bit mantissa rounds small steps away: at learning rate 1e-6, 99 of 100 weights never move.
TOO_COARSE_TO_LEARN = "bfloat16"
Compute = Literal["float32", "bfloat16"]


def _layer_range(value: Any) -> Any:
    """Check the top k, or a range FIRST..LAST, as far as that goes without a model."""
    if value is None:
        return None
    text = str(value)
    first, dots, last = text.partition("..")
    if isinstance(value, bool) or not (first.isdecimal() and (last.isdecimal() or not dots)):
        raise ValueError(
            f"{text[:40]!r} does not say which layers; write how many of the top ones learn, or a "
            f"range such as 12..20, both included"
        )
    if not dots and int(first) == 0:
        raise ValueError("0 layers cannot learn; write 1 or more")
    if dots and int(first) > int(last):
        raise ValueError(f"the range {text} is empty; write {last}..{first}")
    return text if dots else int(first)


LayerRange = Annotated[int | str, BeforeValidator(_layer_range)]


class LoraSection(Section):
    """LoRA: the base is frozen, and a pair of low-rank matrices beside each layer is trained."""

    rank: PositiveInt = 16
    """rank of the matrices"""
    alpha: PositiveFloat = 32.0
    """the adapter's output is multiplied by alpha / rank"""
    targets: Annotated[list[str], Field(min_length=1)] | None = None
    """ends of names of linear layers with an adapter, such as q_proj; default: all that learn"""


class ModelSection(Section):
    """The networks behind the roles."""

    actor: str
    """a local Hugging Face directory, a `.gguf` file, `tether:starter`, or see `hub`"""
    reference: str | None = None
    """the frozen policy that KL is measured against; default: the actor's starting weights"""
    critic: str | None = None
    """where the critic starts: a trunk under a zero head, or a reward model; default: the actor"""
    hub: bool = False
    """download a model whose name is not a directory from the Hugging Face hub"""
    dtype: Dtype = "float32"
    """format of stored weights without one below; bfloat16 only for weights that do not learn"""
    reference_dtype: Dtype | None = None
    """number format of the reference's stored weights"""
    reference_system_prompt: str | None = None
    """system turn that the reference reads, and the actor does not: what is to become weights"""
    critic_dtype: Dtype | None = None
    """number format of the critic's stored weights"""
    compute: Compute = "float32"
    """format of products and activations in training and sampling; weights stay as stored"""
    ablation: bool = False
    """train weights stored in bfloat16 all the same, to see that they lose small steps"""
    gradient_checkpointing: bool = False
    """store one state per layer and recompute the rest in the backward pass: slower, less memory"""
    share_prompts: bool = True
    """compute a prompt once for all of its rows in a microbatch, where that saves enough tokens"""
    lora: LoraSection | None = None
    """train an adapter on the actor; its base, without the adapter, is then the reference"""
    critic_lora: LoraSection | None = None
    """train an adapter and the value head, not the critic's whole trunk"""
    learn_layers: LayerRange | None = None
    """only the top k layers learn, or a range from 0 such as 12..20, both included; default: all"""

    @model_validator(mode="after")
    def _computes_what_is_stored(self) -> ModelSection:
        for field in ("dtype", "reference_dtype", "critic_dtype"):
            refuse_coarse_compute(self.compute, field, getattr(self, field))
        return self

    @property
    def adapter_off_is_reference(self) -> bool:
        """Return whether the actor's base serves as the reference, without a second copy of it."""
        return self.lora is not None and self.reference in (None, self.actor)

    @property
    def learns_in_part(self) -> bool:
        """Return whether a checkpoint holds only what learns, on a base that the config names."""
        return self.lora is not None or self.learn_layers is not None


def refuse_coarse_compute(compute: Compute, field: str, dtype: Dtype | None) -> None:
    """Refuse to compute in bfloat16 with weights whose extra digits it would throw away."""
    if compute == "bfloat16" and dtype == "float64":
        raise ValueError(
            f"compute is bfloat16 and {field} float64, whose digits no product would use; write "
            f"{field}: float32, or leave compute out"
        )


GENERATED_ROWS = 1000  # of a source that is not a file, unless its arguments say `size`
HELDOUT_SEED = 10**9  # the first seed of held-out rows; training rows start at 0


class DataFile(Section):
    """One of several files of prompts that are mixed."""

    path: str
    """a `.jsonl`, `.csv`, `.parquet` or `.arrow` file, `reasoning_gym:FAMILY`, or `environment`"""
    weight: PositiveFloat = 1.0
    """how often it is drawn from, relative to the other files"""
    arguments: dict[str, Any] = {}
    """of reasoning_gym or the environment: `size`, `seed`, and its own by name"""

    @property
    def is_environment(self) -> bool:
        """Return whether the prompts are what `rollout.environment` says when it is reset."""
        return self.path == "environment"

    @property
    def is_generated(self) -> bool:
        """Return whether the rows are made and not read."""
        return self.is_environment or self.path.startswith("reasoning_gym:")

    @property
    def is_mapped(self) -> bool:
        """Return whether the file stays on the disk, and its rows are read when they are drawn."""
        return self.path.lower().endswith(".arrow")

    @property
    def own_arguments(self) -> dict[str, Any]:
        """Return the arguments beside size and seed."""
        return {k: v for k, v in self.arguments.items() if k not in ("size", "seed")}

    def seeds(self, heldout: bool) -> range:
        """Return the seeds of a generated source's rows."""
        first = self.arguments.get("seed", HELDOUT_SEED if heldout else 0)
        return range(first, first + self.arguments.get("size", GENERATED_ROWS))

    @model_validator(mode="after")
    def _arguments_fit(self) -> DataFile:
        if self.arguments and not self.is_generated:
            raise ValueError(
                f"arguments go with reasoning_gym:FAMILY or environment, not {self.path}"
            )
        for name, least in (("size", 1), ("seed", 0)):
            value = self.arguments.get(name, least)
            if type(value) is not int or value < least:
                raise ValueError(
                    f"arguments.{name} is {value!r}; write a whole number from {least} on"
                )
        return self


def _path_or_files(value: Any) -> Any:
    """Validate a path or a list of files by hand: a union would report one error per member."""
    if isinstance(value, str):
        return value
    try:
        files = [DataFile.model_validate(item) for item in value]
    except ValidationError as error:
        own = [e["msg"] for e in error.errors() if e["type"] == "value_error"]
        if own:
            raise ValueError(own[0].removeprefix("Value error, ")) from None
        files = []
    except TypeError:
        files = []
    if not files:
        raise ValueError("write a path, or a list of {path: FILE, weight: NUMBER above 0}")
    return files


DataFiles = Annotated[list[DataFile], Field(min_length=1)]
UNNAMED_SET = "held-out"  # the set of `data.heldout` where it is a path or a list
SET_NAME = re.compile(r"\w[\w.-]*")


def _heldout_sets(value: Any) -> Any:
    """Validate what `data.heldout` may be: nothing, a path, files, or any of these by name."""
    if not isinstance(value, dict):
        return None if value is None else _path_or_files(value)
    wrong = [name for name in value if not (isinstance(name, str) and SET_NAME.fullmatch(name))]
    if wrong or not value:
        named = f"{wrong[0]!r} is not a name for a set" if wrong else "no set is named"
        raise ValueError(f"{named}; write {{NAME: FILE, …}} with letters, digits, _ - and .")
    found = {}
    for name, files in value.items():
        try:
            found[name] = _path_or_files(files)
        except ValueError as error:
            raise ValueError(f"set {name}: {error}") from None
    return found


class CurriculumSection(Section):
    """Which prompts an iteration draws, by what they have scored so far."""

    by: Literal["difficulty", "staleness"]
    """draw those that are right now and then, or those that were not drawn for the longest time"""
    solved: float = 1.0
    """mean score of a prompt's responses from which on it counts as solved"""
    failed: float = 0.0
    """mean score at which nothing of it is solved"""
    newest: Annotated[float, Field(gt=0, le=1)] = 0.5
    """weight of the newest draw in a prompt's running score"""
    retire_after: NonNegativeInt = 2
    """a prompt that was solved in so many draws on end is drawn no more; 0: it stays"""

    @model_validator(mode="after")
    def _solved_above_failed(self) -> CurriculumSection:
        if self.solved <= self.failed:
            raise ValueError(
                f"solved is {self.solved:g}, but it must be above failed ({self.failed:g}); put "
                f"the scores of a right and of a wrong response there"
            )
        return self


class DataSection(Section):
    """Prompts: rows of JSON lines, CSV, parquet or arrow; other columns go to the reward."""

    train: Annotated[str | DataFiles, BeforeValidator(_path_or_files)]
    """training prompts: a file, `reasoning_gym:NAME`, `environment`, or a list of {path, weight}"""
    heldout: Annotated[
        str | DataFiles | dict[str, str | DataFiles] | None, BeforeValidator(_heldout_sets)
    ] = None
    """prompts for evaluation only, written as `train`, or several sets as {NAME: FILE, …}"""
    prompt_column: str = "prompt"
    """the column that holds the prompt: text, or a list of messages"""
    columns: dict[str, str] = {}
    """second names for columns: {name that the reward asks for: column, or column.field}"""
    system_prompt: str | None = None
    """a system turn before every prompt that has none; needs a chat template"""
    chat_template: bool = True
    """put prompts into the model's chat template; false: plain text, which the model continues"""
    date: datetime.date | None = None
    """the date that a chat template is told, YYYY-MM-DD; default: the day the run starts"""
    max_prompt_tokens: PositiveInt = 512
    """a longer prompt is refused before training, by row"""
    shuffle: bool = True
    """a new order in each pass over the data; false: file order"""
    curriculum: CurriculumSection | None = None
    """draw prompts by difficulty or staleness and retire solved ones; null = pass over the data"""
    on_bad_row: Literal["refuse", "skip"] = "refuse"
    """what to do with a malformed row: stop before training, or skip it; both name its line"""
    cache: str | None = None
    """a folder: files are tokenised into it once, and their rows are read when they are drawn"""

    @model_validator(mode="after")
    def _plain_text_has_no_system_turn(self) -> DataSection:
        if self.system_prompt is not None and not self.chat_template:
            raise ValueError(
                "system_prompt needs the chat template, and chat_template is false; leave one out"
            )
        return self

    @model_validator(mode="after")
    def _curriculum_has_one_file(self) -> DataSection:
        if self.curriculum is not None and len(self.files("train")) > 1:
            raise ValueError(
                "curriculum chooses prompts by their scores and train by the weights of its files; "
                "put all rows into one file, or leave curriculum out"
            )
        return self

    @model_validator(mode="after")
    def _heldout_by_seed(self) -> DataSection:
        for file in self.files("train"):
            for other in self.files("heldout"):
                same = (file.path, file.own_arguments) == (other.path, other.own_arguments)
                a, b = file.seeds(False), other.seeds(True)
                if same and file.is_generated and max(a.start, b.start) < min(a.stop, b.stop):
                    raise ValueError(
                        f"train and heldout both have the seeds {max(a.start, b.start)} to "
                        f"{min(a.stop, b.stop) - 1} of {file.path}; leave `seed` out, or write "
                        f"seeds that do not meet"
                    )
        return self

    def files(self, split: Literal["train", "heldout"]) -> list[DataFile]:
        """Return the files of a split; a path alone is a list of one."""
        sets = [self.train] if split == "train" else self.heldout_sets.values()
        return [file for files in sets for file in _as_files(files)]

    @property
    def names_sets(self) -> bool:
        """Return whether held-out prompts come in sets with names."""
        return isinstance(self.heldout, dict)

    @property
    def heldout_sets(self) -> dict[str, str | list[DataFile]]:
        """Return the held-out files by set; one that was given no name is called held-out."""
        if self.heldout is None:
            return {}
        return self.heldout if isinstance(self.heldout, dict) else {UNNAMED_SET: self.heldout}


def _as_files(files: str | list[DataFile]) -> list[DataFile]:
    return [DataFile(path=files)] if isinstance(files, str) else files


LEAST_PRICE_SAMPLES = 64


class TrainSection(Section):
    """How long to train, and how often to evaluate and save."""

    iterations: PositiveInt = 100
    """rollout batches to train on"""
    eval_every: NonNegativeInt = 0
    """evaluate every so many iterations, besides before and after; 0 = never"""
    eval_prompts: PositiveInt = 512
    """held-out prompts per evaluation, from the top of the file, or of each set"""
    eval_samples: Annotated[int, Field(gt=0, le=1024)] = 1
    """sampled responses per held-out prompt; from 2 on, pass@k and maj@k are reported"""
    price_samples: NonNegativeInt = 0
    """responses of the reference per held-out prompt, 64 or more, for the least KL; 0 = none"""
    probe: str | None = None
    """folder of a probe that is run with the first and the last evaluation; tether:probe ships"""
    checkpoint_every: NonNegativeInt = 10
    """save every so many iterations, besides at the end and on a signal; 0 = never"""
    keep_last: PositiveInt = 2
    """how many of the newest checkpoints to keep"""
    keep_best: NonNegativeInt = 1
    """how many others to keep for their held-out score, among those that were evaluated"""

    @model_validator(mode="after")
    def _enough_reference_samples(self) -> TrainSection:
        if 0 < self.price_samples < LEAST_PRICE_SAMPLES:
            raise ValueError(
                f"price_samples is {self.price_samples}, too few for the least KL, which would be "
                f"too large; write {LEAST_PRICE_SAMPLES} or more, or 0"
            )
        return self


RAYS_OWN = ("worker_resources", "accelerator_type", "placement")


class LaunchSection(Section):
    """How processes are started, and how weights are spread over them."""

    kind: Literal["local", "ray"] = "local"
    """local: this process, or those that torchrun started; ray: workers that Ray Train places"""
    num_workers: PositiveInt | None = None
    """processes; default: as many as torchrun started, else 1"""
    address: str | None = None
    """address of the Ray cluster, such as ray://head:10001; default: a new one on this machine"""
    worker_resources: dict[str, PositiveFloat] = {}
    """what Ray sets aside per worker beside a GPU, such as {CPU: 8}; default: `threads` CPUs"""
    accelerator_type: str | None = None
    """place Ray's workers on nodes with this kind of GPU, as Ray calls it: H100, A100-80G, …"""
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Ray's workers on few nodes or on many; STRICT: on a single one, or on one each"""
    max_restarts: NonNegativeInt = 2
    """times that Ray restarts lost workers; they resume from the newest checkpoint"""
    weights: Literal["replicated", "sharded"] = "replicated"
    """a full copy on every process, or sharded over them by FSDP2"""
    tensor_parallel: PositiveInt = 1
    """processes that share the layers of one copy of a model"""
    gradient_sync: Literal["step", "microbatch"] = "step"
    """sum sharded gradients once per step, whole until then, or per microbatch, a shard of them"""
    samplers: NonNegativeInt = 0
    """samplers apart from training, placed by Ray; they overlap with it by rollout.lag; 0 = none"""
    sampler_resources: dict[str, PositiveFloat] = {"CPU": 1.0}
    """what Ray sets aside for each of them: CPU, GPU, or names of a cluster's own"""
    timeout_seconds: PositiveFloat = 600.0
    """the run ends if a process keeps the others waiting for longer; a sampler is replaced"""
    start_timeout_seconds: PositiveFloat = 600.0
    """the same until all processes, or workers of Ray, have started"""
    reward_timeout_seconds: PositiveFloat = 3600.0
    """the same while rewards are computed, each process its own rows'"""
    save_timeout_seconds: PositiveFloat = 3600.0
    """the same while a checkpoint is written, or verified before a resume"""
    device_kind: str | None = None
    """a device by name, such as h100-80gb: its data sheet is what `tether check` plans with"""
    teraflops: PositiveFloat | None = None
    """speed of a device, in 1e12 operations per second, for the times of `tether check`"""
    bandwidth_gigabytes: PositiveFloat | None = None
    """what a device reads from its own memory, in 1e9 bytes per second: decoding waits for it"""
    link_gigabytes: PositiveFloat | None = None
    """what a device sends to another, in 1e9 bytes per second, for the same"""

    @property
    def device(self) -> Device | None:
        """The device of that name."""
        return None if self.device_kind is None else DEVICES[self.device_kind]

    @model_validator(mode="after")
    def _device_is_known(self) -> LaunchSection:
        if self.device_kind is not None and self.device_kind not in DEVICES:
            raise ValueError(
                f"device_kind is {self.device_kind!r}; write one of {', '.join(DEVICES)}, or give "
                f"teraflops, bandwidth_gigabytes and link_gigabytes"
            )
        return self

    def resources_of_worker(self, threads: int, use_gpu: bool) -> dict[str, float]:
        """Return what Ray sets aside for each worker."""
        found = {"CPU": float(threads), **({"GPU": 1.0} if use_gpu else {})}
        return {**found, **self.worker_resources}

    @model_validator(mode="after")
    def _placed_by_ray(self) -> LaunchSection:
        usual = LaunchSection.model_fields
        given = [n for n in RAYS_OWN if getattr(self, n) != usual[n].default]
        if given and self.kind != "ray":
            raise ValueError(f"{given[0]} is for Ray's workers; write kind: ray, or leave it out")
        return self

    @property
    def timeouts_apart(self) -> dict[str, float]:
        """The time-outs beside `timeout_seconds`, by field."""
        names = "start_timeout_seconds", "reward_timeout_seconds", "save_timeout_seconds"
        return {name: getattr(self, name) for name in names}

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
    """The fields that every kind of run has: PPO, and the stages before it."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    schema_version: Annotated[Literal[1], Field(alias="schema")] = SCHEMA
    """version of this file's layout"""
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    """every random number is derived from it"""
    device: str = "auto"
    """cpu, cuda, or auto: cuda if there is one"""
    threads: Annotated[int, Field(gt=0, le=1024)] = Field(default_factory=cores)
    """CPU threads; the same number gives the same bits (default: the available cores)"""
    deterministic: bool = False
    """on GPUs: only kernels that repeat byte for byte, which are slower; CPUs always repeat"""

    @model_validator(mode="before")
    @classmethod
    def _workers_share_the_cores(cls, given: Any) -> Any:
        """Divide the cores by the workers that Ray will start; `cores` only knows torchrun's."""
        launch = given.get("launch") if isinstance(given, dict) else None
        if not isinstance(launch, dict) or launch.get("kind") != "ray" or "threads" in given:
            return given
        workers = launch.get("num_workers")
        share = cores() // workers if isinstance(workers, int) and workers > 0 else cores()
        return {**given, "threads": max(1, share)}

    _as_written: dict[str, str] = PrivateAttr(default_factory=dict)

    def written_as(self, paths: Mapping[str, str]) -> Self:
        """Remember how paths that were made absolute are written in the file they came from."""
        self._as_written.update(paths)
        return self

    @property
    def paths_as_written(self) -> dict[str, str]:
        """Return {absolute path: as its file writes it}."""
        return dict(self._as_written)

    def to_dict(self) -> dict[str, Any]:
        """Return the resolved config, with paths as written and without `run.dir`.

        A run that is resumed from another folder, or was moved, thus has the same config.
        """
        found = self.model_dump(mode="json", by_alias=True, exclude={"run": {"dir"}})
        return map_paths(found, lambda path: self._as_written.get(path, path))

    def to_yaml(self) -> str:
        """Return `to_dict` as YAML: the text of config.yaml."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)


def map_paths(mapping: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Return a copy of a config's mapping with the path of every file and model changed.

    The mapping need not be valid: what is missing or of another type is left alone.
    """
    found = copy.deepcopy(dict(mapping))

    def put(section: Any, *names: str, change: Callable[[str], str] = change) -> None:
        for name in names if isinstance(section, dict) else ():
            if isinstance(section.get(name), str):
                section[name] = change(section[name])

    def kind(value: str) -> str:
        """Change the path in `path/file.py:name` or `model:PATH`; a shipped rule has none."""
        if value.startswith("model:"):
            return f"model:{change(value.removeprefix('model:'))}"
        path, colon, name = value.rpartition(":")
        return f"{change(path)}:{name}" if colon and path.endswith(".py") else value

    def source(value: str) -> str:
        """Change the path of a file of rows; rows that are made have none."""
        return value if DataFile(path=value).is_generated else change(value)

    def items(section: Any, name: str) -> list[Any]:
        value = section.get(name) if isinstance(section, dict) else None
        return value if isinstance(value, list) else []

    model, data, rollout, reward = (found.get(n) for n in ("model", "data", "rollout", "reward"))
    put(found, "start")  # of a recipe of several stages
    put(model, "actor", "reference", "critic", "start")
    put(data, "train", "heldout", change=source)
    put(data, "cache")
    put(found.get("train"), "probe")
    sets = data.get("heldout") if isinstance(data, dict) else None
    named = sets if isinstance(sets, dict) else {}
    put(named, *named, change=source)
    lists = [items(data, "train"), items(data, "heldout"), *(items(named, name) for name in named)]
    for file in itertools.chain(*lists):
        put(file, "path", change=source)
    put(rollout, "environment", change=kind)
    environment = rollout.get("environment") if isinstance(rollout, dict) else None
    put(environment, "kind", change=kind)
    if isinstance(environment, dict):
        arguments = environment.get("arguments")
        classes = arguments.get("classes") if isinstance(arguments, dict) else None
        put(arguments, "class", change=kind)
        put(classes, *(classes if isinstance(classes, dict) else ()), change=kind)
    tools = items(rollout, "tools")
    for number, tool in enumerate(tools):
        if isinstance(tool, str):
            tools[number] = kind(tool)
        put(tool, "kind", change=kind)
        put(tool, "corpus")
    for part in (reward, *items(reward, "parts")):
        put(part, "kind", change=kind)
        if isinstance(part, dict) and part.get("kind") in ("judge", "http"):
            put(part.get("arguments"), "record")
    return found
