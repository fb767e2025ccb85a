"""A reward model: a sequence classifier with one label, applied to a dialogue's last token."""

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether.data.batching import length_mask, pad_right
from tether.dist.collectives import any_process
from tether.errors import UserError
from tether.models.forward import Network, map_microbatches, states_before_tokens, trunk
from tether.models.loading import load_classifier
from tether.models.vocabulary import load_tokenizer
from tether.types import Sequences

HEAD = "score.weight"  # its name in the files of every decoder


class RewardModel:
    """Scores whole dialogues, given as ids.

    A decoder's rows are right-padded and need no attention mask. The last token is found by
    length: unlike transformers' own pooling, that is right where padding and EOS share an id. An
    encoder attends to padding unless a mask forbids it.
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
        """Score dialogues in one pass, with gradients."""
        whole = dialogues_as_sequences(dialogues, self.model.device)
        return self._forward(whole)

    def scores(self, dialogues: Sequence[Sequence[int]]) -> Float[Tensor, " rows"]:
        """Score dialogues microbatch by microbatch, without gradients.

        All processes call it together, each with dialogues of its own.
        """
        if not any_process(len(dialogues) > 0):
            return torch.zeros(0, dtype=self.float_type, device=self.model.device)
        whole = dialogues_as_sequences(dialogues, self.model.device)
        every = torch.ones(len(dialogues), 0, dtype=torch.bool)
        (scores,) = map_microbatches(
            whole, every, 0, self.microbatch_tokens, lambda part, mask: (self._forward(part),)
        )
        return scores

    def network(self) -> Network:
        """Return the model; a decoder's trunk is called, and its head applied afterwards."""
        model = self.model
        return Network(model, trunk(model), trunk(model) if decoder_head(model) else model)

    def _forward(self, whole: Sequences) -> Float[Tensor, " rows"]:
        head = decoder_head(self.model)
        if head is not None:
            states = states_before_tokens(trunk(self.model), whole)[:, 0]
            logits = head(states.to(head.weight.dtype))
        else:
            mask = length_mask(whole.prompt_lengths, whole.ids.shape[1]).to(whole.ids.device)
            logits = self.model(input_ids=whole.ids, attention_mask=mask.long()).logits
        return logits.squeeze(-1).to(self.float_type)


def dialogues_as_sequences(dialogues: Sequence[Sequence[int]], device: torch.device) -> Sequences:
    """Pad dialogues as prompts without a response: their one state follows the last token."""
    lengths = torch.tensor([len(ids) for ids in dialogues], dtype=torch.long)
    return Sequences(pad_right(dialogues, torch.long), lengths, lengths * 0).to(device)


def decoder_head(model: nn.Module) -> nn.Linear | None:
    """Return the linear head that transformers puts on every causal trunk; None for an encoder."""
    head = getattr(model, "score", None)
    return head if isinstance(head, nn.Linear) else None


def start_reward_model(
    name: str, dtype: str, device: torch.device, microbatch_tokens: int, compute: str = "float32"
) -> RewardModel:
    """Put a head with one label on a language model's trunk; a reward model's head is kept.

    A new head starts at zero, so all scores are 0 and the first loss is log 2.
    """
    model, missing = load_classifier(name, dtype, device, compute, num_labels=1)
    head = decoder_head(model)
    if head is None:
        raise UserError(f"{name} is not a causal language model; only these become reward models.")
    if HEAD in missing:
        nn.init.zeros_(head.weight)
    tokenizer = load_tokenizer(name)
    # Plain transformers looks for the last token that is not padding; where padding is also how a
    # dialogue ends, that would be the wrong one.
    pad = tokenizer.pad_token_id
    model.config.pad_token_id = None if pad == tokenizer.eos_token_id else pad
    return RewardModel(model, tokenizer, microbatch_tokens)


def load_reward_model(
    name: str, dtype: str, device: torch.device, microbatch_tokens: int, compute: str = "float32"
) -> RewardModel:
    """Load a sequence classifier with one label, frozen."""
    model, missing = load_classifier(name, dtype, device, compute)
    if missing:
        raise UserError(
            f"{name} holds no {min(missing)}, so it is not a reward model; make one of it with "
            f"`tether reward-model`."
        )
    labels = model.config.num_labels
    if labels != 1:
        raise UserError(
            f"{name} has {labels} labels, but a reward model has one; train it with num_labels=1."
        )
    return RewardModel(model.requires_grad_(False), load_tokenizer(name), microbatch_tokens)


def load_head_weight(directory: Path, width: int) -> Float[Tensor, "1 width"] | None:
    """Return the head's weights from a reward model's files; None if none is that wide."""
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            if HEAD in file.keys():  # noqa: SIM118 (not a mapping)
                weight = file.get_tensor(HEAD)
                return weight if weight.shape == (1, width) else None
    return None
