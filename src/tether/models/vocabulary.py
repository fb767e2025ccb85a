"""Tokenizers, and the ids at which a model ends its responses."""

from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tether.errors import UserError, one_line
from tether.models.gguf import transformers_source
from tether.models.locate import TOKENIZERS, find_model, has_tokenizer
from tether.models.untrusted import explain_load_errors, refuse_remote_code


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer and the ids at which its model ends a response."""

    tokenizer: PreTrainedTokenizerBase
    eos_ids: frozenset[int]
    _pieces: dict[int, str] = field(default_factory=dict, compare=False, repr=False)

    def decode(self, ids: list[int]) -> str:
        """Return the text of sampled ids without the final EOS; other special tokens are shown."""
        if ids and ids[-1] in self.eos_ids:
            ids = ids[:-1]
        return decode(self.tokenizer, ids)

    def pieces(self, ids: list[int]) -> list[str]:
        """Return the text of each token.

        A token that holds part of a character has no text of its own, and is given as the
        tokenizer spells it.
        """
        for i in {*ids} - self._pieces.keys():
            text, [spelt] = decode(self.tokenizer, [i]), self.tokenizer.convert_ids_to_tokens([i])
            self._pieces[i] = spelt if "\ufffd" in text else text
        return [self._pieces[i] for i in ids]


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Return the text of ids, special tokens included."""
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert isinstance(text, str)  # a list only for a list of rows
    return text


def load_tokenizer(name: str, hub: bool = False) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer; one that needs Python code of its own is refused."""
    if not has_tokenizer(name, hub):
        raise UserError(
            f"{name} has no tokenizer: none of {', '.join(TOKENIZERS)} is there; copy the "
            f"tokenizer's files from where the model comes from."
        )
    directory, options = transformers_source(find_model(name, hub))
    try:
        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False, **options
        )
    except Exception as error:  # the tokenizers library raises bare Exceptions
        refuse_remote_code(name, error)
        raise UserError(f"{name} has no tokenizer that loads: {one_line(error)}") from None


def load_vocabulary(name: str, model: PreTrainedModel, hub: bool = False) -> Vocabulary:
    """Load the tokenizer of a model that is loaded, and check that its ids fit the embedding."""
    tokenizer = load_tokenizer(name, hub)
    embedding = cast(nn.Embedding, model.get_input_embeddings())
    largest, rows = max(tokenizer.get_vocab().values()), embedding.num_embeddings
    if largest >= rows:
        raise UserError(
            f"{name}'s tokenizer has ids up to {largest}, but its embedding only {rows} rows; use "
            f"the tokenizer that the model was trained with, or resize the embedding."
        )
    eos_ids = _eos_ids(name, model.generation_config, model.config.vocab_size, tokenizer)
    return Vocabulary(tokenizer, eos_ids)


def load_vocabulary_without_model(name: str, hub: bool = False) -> Vocabulary:
    """Load a model's tokenizer and EOS ids; of its other files only the configs are read."""
    tokenizer = load_tokenizer(name, hub)
    directory, options = transformers_source(find_model(name, hub))
    with explain_load_errors(name, "a model"):
        try:
            generation = GenerationConfig.from_pretrained(directory, local_files_only=True)
        except OSError:  # there is none: the model's own config names the EOS token
            config = AutoConfig.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False, **options
            )
            generation = GenerationConfig.from_model_config(config)
    return Vocabulary(tokenizer, _eos_ids(name, generation, len(tokenizer), tokenizer))


def _eos_ids(
    name: str,
    generation: GenerationConfig | None,
    vocabulary_size: int,
    tokenizer: PreTrainedTokenizerBase,
) -> frozenset[int]:
    """Return every id that ends a response: a model may name several."""
    configured: Any = generation.eos_token_id if generation else None
    ids = configured if isinstance(configured, list) else [configured]
    for odd in (i for i in ids if i is not None and (type(i) is not int or i < 0)):
        raise UserError(
            f"{name} names {odd!r} as an EOS token; eos_token_id in its generation_config.json is "
            f"an id or a list of ids, whole numbers from 0."
        )
    own: Any = tokenizer.eos_token_id
    found: frozenset[int] = frozenset(i for i in (*ids, own) if i is not None)
    if not found:
        raise UserError(
            f"{name} names no EOS token, so no response could end; set eos_token_id in its "
            f"generation_config.json."
        )
    if max(found) >= vocabulary_size:
        raise UserError(f"{name} names EOS id {max(found)}, but has only {vocabulary_size} tokens.")
    return found
