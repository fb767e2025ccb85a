"""A reward model: a sequence classifier with one label, read at the last token of a dialogue."""

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tether.data.batching import length_mask, pad_right
from tether.errors import UserError, one_line
from tether.models.forward import Network, map_microbatches, states_before_tokens, trunk
from tether.models.loading import DTYPES, find_model, refuse_missing_weights
from tether.types import Sequences

HEAD = "score.weight"  # its name in the files of every decoder


class RewardModel:
    """Scores of whole dialogues, given as ids.

    A decoder's rows are right-padded and need no attention mask, and the last token is known from
    lengths: unlike transformers' own pooling, that holds where padding and EOS share an id. An
    encoder reads padding unless it is told not to.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, microbatch_tokens: int
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.microbatch_tokens = microbatch_tokens
        self.float_type = torch.promote_types(model.dtype, torch.float32)
        self.max_tokens = getattr(model.config, "max_position_embeddings", None)

    def scores_with_gradients(self, dialogues: Sequence[Sequence[int]]) -> Float[Tensor, " rows"]:
        """Scores in one pass, with gradients."""
        whole = dialogues_as_sequences(dialogues, self.model.device)
        return self._forward(whole)

    def scores(self, dialogues: Sequence[Sequence[int]]) -> Float[Tensor, " rows"]:
        """Scores, microbatch by microbatch."""
        whole = dialogues_as_sequences(dialogues, self.model.device)
        (scores,) = map_microbatches(
            whole, 0, self.microbatch_tokens, lambda part, rows: (self._forward(part),)
        )
        return scores

    def network(self) -> Network:
        """Return the model; a decoder's trunk is called, and its head applied afterwards."""
        model = self.model
        return Network(model, trunk(model), trunk(model) if decoder_head(model) else model)

    def _forward(self, whole: Sequences) -> Float[Tensor, " rows"]:
        head = decoder_head(self.model)
        if head is not None:
            logits = head(states_before_tokens(trunk(self.model), whole)[:, 0])
        else:
            mask = length_mask(whole.prompt_lengths, whole.ids.shape[1])
            logits = self.model(input_ids=whole.ids, attention_mask=mask.long()).logits
        return logits.squeeze(-1).to(self.float_type)


def dialogues_as_sequences(dialogues: Sequence[Sequence[int]], device: torch.device) -> Sequences:
    """Dialogues as prompts without a response: the one state that is read follows everything."""
    lengths = torch.tensor([len(ids) for ids in dialogues], device=device)
    return Sequences(pad_right(dialogues, torch.long).to(device), lengths, lengths * 0)


def decoder_head(model: nn.Module) -> nn.Module | None:
    """The linear map over hidden states that transformers puts on every causal trunk."""
    head = getattr(model, "score", None)
    return head if isinstance(head, nn.Linear) else None


def start_reward_model(
    name: str, dtype: str, device: torch.device, microbatch_tokens: int
) -> RewardModel:
    """A classifier with one label on a language model's trunk. A new head starts at zero, so all
    scores are 0 and the first loss is log 2; that of a reward model is kept."""
    model, missing = _load(name, dtype, num_labels=1)
    head = decoder_head(model)
    if head is None:
        raise UserError(f"{name} is no causal language model, so no reward model is made from it.")
    if HEAD in missing:
        nn.init.zeros_(head.weight)
    tokenizer = load_tokenizer(name)
    # Plain transformers looks for the last token that is not padding; where padding is also how a
    # dialogue ends, that would be the wrong one.
    pad = tokenizer.pad_token_id
    model.config.pad_token_id = None if pad == tokenizer.eos_token_id else pad
    return RewardModel(model.to(device), tokenizer, microbatch_tokens)


def load_reward_model(
    name: str, dtype: str, device: torch.device, microbatch_tokens: int
) -> RewardModel:
    """A sequence-classification directory with one label, frozen."""
    model, missing = _load(name, dtype)
    if missing:
        raise UserError(
            f"{name} holds no {sorted(missing)[0]}, so it is no reward model; make one of it with "
            f"`tether reward-model`."
        )
    labels = model.config.num_labels
    if labels != 1:
        raise UserError(
            f"{name} has {labels} labels, but a reward model has one; train it with num_labels=1."
        )
    frozen = model.requires_grad_(False).to(device)
    return RewardModel(frozen, load_tokenizer(name), microbatch_tokens)


def load_head_weight(directory: Path, width: int) -> Float[Tensor, "1 width"] | None:
    """The head's weights in a reward model's files, if there is one over states of that width."""
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            if HEAD in file.keys():  # noqa: SIM118 (it is no mapping)
                weight = file.get_tensor(HEAD)
                return weight if weight.shape == (1, width) else None
    return None


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(
            find_model(name), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise UserError(f"{name} has no tokenizer that loads: {one_line(error)}") from None


def _load(name: str, dtype: str, **changes: int) -> tuple[PreTrainedModel, set[str]]:
    """The model, dropout off for good, and the names of weights that the files do not hold."""
    path = find_model(name)
    refuse_missing_weights(name, AutoModelForSequenceClassification, path, dtype)
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            path,
            dtype=DTYPES[dtype],
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **changes,
        )
    except UserError:
        raise
    except Exception as error:  # over a config.json of any content transformers may raise anything
        raise UserError(f"{name} does not load as a reward model: {one_line(error)}") from None
    if not all(bool(weight.isfinite().all()) for weight in model.parameters()):
        raise UserError(f"{name} holds NaN or infinite weights; it cannot score anything.")
    return model.eval(), set(info["missing_keys"])
