"""The only place where a network is called, and where positions are shifted by one.

Training forwards read right-padded `Sequences` and need no attention mask. Decoding reads
left-padded prompts with one, and goes on from a key-value cache.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from tether.types import Sequences


def trunk(model: PreTrainedModel) -> nn.Module:
    """The network below the language-model head."""
    return getattr(model, model.base_model_prefix)


def states_before_tokens(
    trunk: nn.Module, sequences: Sequences
) -> Float[Tensor, "rows states width"]:
    """Hidden states from which response tokens are predicted: states = response + 1.

    State t has read everything before response token t, so the logits over it score that token
    and the value over it is the value before it. State `response_lengths[row]` has read the
    whole response. Later states repeat the last one; nobody reads them.
    """
    hidden = trunk(input_ids=sequences.ids, use_cache=False).last_hidden_state
    columns = torch.arange(sequences.width + 1, device=hidden.device)
    source = (sequences.prompt_lengths[:, None] - 1 + columns).clamp(max=hidden.shape[1] - 1)
    return hidden.gather(1, source[:, :, None].expand(-1, -1, hidden.shape[2]))


@dataclass
class Decoding:
    """Rows under way in the sampler: their cache and which of its columns are real tokens."""

    cache: Cache
    mask: Bool[Tensor, "rows seen"]

    def keep(self, rows: Int[Tensor, " some"]) -> None:
        self.cache.batch_select_indices(rows)
        self.mask = self.mask[rows]


def begin_decoding(
    trunk: nn.Module,
    prompt_ids: Int[Tensor, "rows prompt"],
    prompt_mask: Bool[Tensor, "rows prompt"],
) -> tuple[Decoding, Float[Tensor, "rows width"]]:
    """Read left-padded prompts; the state after the last prompt token of each."""
    positions = (prompt_mask.cumsum(dim=1) - 1).clamp(min=0)
    output = trunk(
        input_ids=prompt_ids,
        attention_mask=prompt_mask.long(),
        position_ids=positions,
        use_cache=True,
    )
    return Decoding(output.past_key_values, prompt_mask), output.last_hidden_state[:, -1]


def decode_next(
    trunk: nn.Module, decoding: Decoding, tokens: Int[Tensor, " rows"]
) -> Float[Tensor, "rows width"]:
    """Read one more token a row; the state after it."""
    decoding.mask = torch.cat([decoding.mask, decoding.mask.new_ones(len(tokens), 1)], dim=1)
    output = trunk(
        input_ids=tokens[:, None],
        attention_mask=decoding.mask.long(),
        position_ids=decoding.mask.sum(dim=1, keepdim=True) - 1,
        past_key_values=decoding.cache,
        use_cache=True,
    )
    return output.last_hidden_state[:, -1]
