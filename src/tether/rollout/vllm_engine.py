"""vLLM (PagedAttention, Kwon et al., arXiv 2309.06180) as an engine inside this process.

`python -m tether.rollout.vllm_engine IN OUT` is the child process of `VllmProcess` (see
`tether.support.child_process`). How weights come there is in `tether.rollout.vllm_weights`.
"""

import copy
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether.errors import UserError, describe
from tether.models.lora import adapter_merged
from tether.models.precision import compute_type
from tether.rollout.engine import Completion, GenerationRequest
from tether.rollout.vllm_weights import (
    missing_weights,
    note_weights,
    read_tensors,
    refuse_missing,
    takes_handles,
    update_of,
)
from tether.support.child_process import Answer, Respond, serve

# A single process, and no usage statistics.
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
    reads_text: bool = False  # it gets the tokenizer, so that texts can end a turn
    memory_share: float = 0.1  # of a GPU, free at the start
    eager: bool = True
    tensor_parallel: int = 1
    sleep: bool = False
    handles: bool = False  # weights may come as handles of this GPU's memory


class VllmEngine:
    """vLLM inside this process."""

    def __init__(
        self, settings: Settings, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        self.settings, self.tokenizer = settings, tokenizer
        self.llm: Any = None

    def load(self, weights: PreTrainedModel) -> None:
        """Sample with these weights from now on; vLLM starts with the first ones."""
        if self.llm is None:
            with tempfile.TemporaryDirectory() as folder:
                write_config(weights, self.tokenizer, Path(folder))
                self.llm = start_llm(folder, number_format(weights), self.settings)
        wake(self.llm, self.settings)
        with torch.no_grad():
            load_weights(self.llm, named_weights(weights))

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Return a completion per request, in order."""
        wake(self.llm, self.settings)
        return generate(self.llm, requests, self.settings.eos_ids)

    def rest(self) -> None:
        """Sleep until the next request, if the settings say so."""
        if self.llm is not None:
            rest(self.llm, self.settings)


def write_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path
) -> None:
    """Write the model's config and tokenizer, without weights.

    A head tied to the embedding is declared untied: given only the embedding, vLLM would leave the
    head as it was.
    """
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = False
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight by its name in a checkpoint, tied ones under both; adapters are merged."""
    with adapter_merged(model):
        for name, weight in model.named_parameters(remove_duplicate=False):
            if ".lora_" not in name:
                yield name.replace(".base_layer.", "."), weight.detach()


def start_llm(folder: str, floats: str, settings: Settings) -> Any:
    """Start vLLM with the shapes of the model in `folder`; `load_weights` fills them."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    set_num_threads = torch.set_num_threads
    try:
        vllm: Any = import_module("vllm")
        context = json.loads((Path(folder) / "config.json").read_bytes()).get(
            "max_position_embeddings", settings.max_row_tokens
        )
        return vllm.LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=not settings.reads_text,
            generation_config="vllm",  # ignore the model's own sampling settings
            dtype=floats,
            max_model_len=min(settings.max_row_tokens, context),
            kv_cache_memory_bytes=settings.cache_bytes,
            logprobs_mode="processed_logprobs",  # after the temperature, as the trainer has them
            enable_prefix_caching=True,
            enforce_eager=settings.eager,
            tensor_parallel_size=settings.tensor_parallel,
            enable_sleep_mode=settings.sleep,
            disable_log_stats=True,
            seed=0,
            **_of_a_gpu(settings),
            **_transfer(settings),
        )
    except Exception as error:  # of many kinds, for shapes, memory and versions
        said = describe(error)
        raise UserError(f"vLLM does not start with this model: {said}{_room(said)}") from error
    finally:
        torch.set_num_threads = set_num_threads  # vLLM on a CPU disables it
        torch.set_num_threads(settings.threads)


def _room(said: str) -> str:
    """Return which field gives vLLM the room that it says it lacks."""
    if "KV cache" in said:
        return "; raise rollout.vllm.cache_gigabytes"
    if "memory" in said:
        return "; lower rollout.vllm.memory_share, or free memory of that device"
    return ""


def _of_a_gpu(settings: Settings) -> dict[str, Any]:
    """Return what only a GPU is asked for.

    vLLM does not start unless this share of it is free, 0.92 by default, although the size of its
    cache is given. The trainer is there before it.
    """
    return {"gpu_memory_utilization": settings.memory_share} if torch.cuda.is_available() else {}


def _transfer(settings: Settings) -> dict[str, Any]:
    """Return the setting of vLLM's own weight transfer; a version without it has none."""
    if not settings.handles:
        return {}
    try:
        made = import_module("vllm.config").WeightTransferConfig
    except (ImportError, AttributeError):
        return {}
    return {"weight_transfer_config": made(backend="ipc")}


def rest(llm: Any, settings: Settings) -> None:
    """Move the weights to the machine's memory and drop the cache, until `wake`."""
    if settings.sleep:
        llm.sleep(level=1)


def wake(llm: Any, settings: Settings) -> None:
    """Take the GPU's memory back; vLLM ignores this while it is awake."""
    if settings.sleep:
        llm.wake_up()


def load_weights(llm: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Load weights by vLLM's own loader, which arranges them for its kernels.

    Its prefix cache, computed with the old weights, is emptied.
    """
    with watching_first(llm):
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    llm.reset_prefix_cache()


@contextmanager
def watching_first(llm: Any) -> Iterator[None]:
    """Refuse weights that did not arrive; what arrives the first time does so later."""
    if getattr(llm, "tether_loaded", False):
        yield
        return
    llm.collective_rpc(note_weights)
    yield
    refuse_missing(llm.collective_rpc(missing_weights))
    llm.tether_loaded = True


def generate(
    llm: Any, requests: Sequence[GenerationRequest], eos_ids: Sequence[int]
) -> list[Completion]:
    """Return a completion per request, in order.

    Log-probs of greedy tokens are at temperature 1; these are never trained on.
    """
    vllm: Any = import_module("vllm")
    settings = [
        vllm.SamplingParams(
            temperature=request.temperature,
            seed=request.seed if request.temperature > 0 else None,
            max_tokens=request.max_tokens,
            ignore_eos=True,  # vLLM's notion of EOS; `stop_token_ids` are ours
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
    with torch.compiler.set_stance("force_eager"):  # else it compiles a single sum, for seconds
        found = [output.outputs[0] for output in llm.generate(prompts, settings, use_tqdm=False)]
    return [
        Completion(
            ids=list(one.token_ids),
            log_probs=[at[i].logprob for at, i in zip(one.logprobs, one.token_ids, strict=True)],
        )
        for one in found
    ]


def number_format(model: PreTrainedModel) -> str:
    """Return the format in which a model computes, as vLLM calls it."""
    return str(compute_type(model)).removeprefix("torch.")


def set_up(spec: dict[str, Any]) -> Respond:
    """Start vLLM in the child process; return what answers a request."""
    folder, floats = spec.pop("folder"), spec.pop("number_format")
    settings = Settings(**{**spec, "eos_ids": tuple(spec["eos_ids"])})
    llm = start_llm(folder, floats, settings)

    def respond(line: str) -> Iterator[Answer]:
        try:
            yield from _follow(llm, json.loads(line), settings)
        except UserError as error:
            yield {"refused": str(error)}
        except Exception as error:  # vLLM may raise anything; the parent stops the run
            yield {"error": describe(error)}

    return respond


def _follow(llm: Any, order: dict[str, Any], settings: Settings) -> Iterator[Answer]:
    if "rest" in order:
        rest(llm, settings)
        yield {"rests": True}
        return
    wake(llm, settings)
    if "load" in order and "whole" in order:  # an iterator cannot be sent to vLLM's own processes
        with watching_first(llm):
            llm.collective_rpc(read_weights, args=(order["load"],))
        llm.reset_prefix_cache()
        yield {"loaded": True}
    elif "load" in order:
        yield {"reads": True}
        load_weights(llm, read_tensors(Path(order["load"])))
        yield {"loaded": True}
    elif "requests" in order:
        requests = [
            GenerationRequest(**{**one, "stop": tuple(one["stop"])}) for one in order["requests"]
        ]
        found = generate(llm, requests, settings.eos_ids)
        yield {"completions": [asdict(one) for one in found]}
    else:
        yield _transferred(llm, order)


def _transferred(llm: Any, order: dict[str, Any]) -> Answer:
    """Follow one order of a transfer by handles: begin, any number of updates, finish."""
    if "begin" in order:
        if not takes_handles(llm):
            return {"handles": False}
        if not getattr(llm, "tether_transfers", False):
            llm.init_weight_transfer_engine({"init_info": {}})
            llm.tether_transfers = True
        if not getattr(llm, "tether_loaded", False):
            llm.collective_rpc(note_weights)
        llm.start_weight_update()
        return {"handles": True}
    if "update" in order:
        llm.update_weights(update_of(order["update"]))
        return {"taken": True}
    llm.finish_weight_update()
    if not getattr(llm, "tether_loaded", False):
        refuse_missing(llm.collective_rpc(missing_weights))
        llm.tether_loaded = True
    llm.reset_prefix_cache()
    return {"loaded": True}


def read_weights(worker: Any, path: str) -> None:
    """Load a file in one of the processes that share the layers."""
    with safe_open(path, framework="pt") as file:
        names = file.keys()
        worker.reload_weights(weights_iterator=((name, file.get_tensor(name)) for name in names))


if __name__ == "__main__":
    serve(set_up)
