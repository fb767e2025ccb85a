"""Models and tokenizers from local Hugging Face directories; no remote code, safetensors only."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from tether import assets
from tether.errors import UserError

logging.set_verbosity_error()  # what goes wrong in loading is said in one sentence below
logging.disable_progress_bar()  # a bar a model loaded would bury the run's own lines

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


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


def load_vocabulary(name: str, model: PreTrainedModel) -> Vocabulary:
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_directory(name), local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise UserError(f"{name} has no tokenizer that loads: {_first_line(error)}") from None
    return Vocabulary(tokenizer, _eos_ids(name, model, tokenizer))


def load_causal_lm(name: str, dtype: str, device: torch.device) -> PreTrainedModel:
    """A causal language model, dropout off for good: old and new log-probs must agree."""
    directory = model_directory(name)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=DTYPES[dtype],
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"{name} does not load as a causal language model: {_first_line(error)}"
        ) from None
    if not all(bool(weight.isfinite().all()) for weight in model.parameters()):
        raise UserError(f"{name} holds NaN or infinite weights; it cannot be trained or sampled.")
    return model.eval().to(device)


def model_directory(name: str) -> Path:
    directory = assets.resolve(name)
    if not directory.is_dir():
        raise UserError(
            f"No model directory {name!r}; give a local Hugging Face directory, a run or "
            f"tether:starter."
        )
    if not (directory / "config.json").is_file():
        raise UserError(f"{name} has no config.json, so it is no Hugging Face model directory.")
    return directory


def _eos_ids(
    name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """A model may end a response in several ways; all of them count."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    ids = configured if isinstance(configured, list) else [configured]
    found = frozenset(i for i in (*ids, tokenizer.eos_token_id) if i is not None)
    if not found:
        raise UserError(
            f"{name} names no EOS token, so no response could end; set eos_token_id in its "
            f"generation_config.json."
        )
    vocabulary = model.config.vocab_size
    if max(found) >= vocabulary:
        raise UserError(f"{name} names EOS id {max(found)}, but has only {vocabulary} tokens.")
    return found


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
