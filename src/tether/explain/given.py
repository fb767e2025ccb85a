"""A sampler whose first response is given, not drawn."""

from dataclasses import replace

import torch

from tether.data.collate import length_mask, pad_right
from tether.errors import UserError
from tether.models.loading import Vocabulary
from tether.rollout.episode import Draw, Episode, Greedy, Sampler
from tether.types import Rollout


def encode_response(text: str, vocabulary: Vocabulary, limit: int) -> list[int]:
    """The text's ids and EOS, as if the actor had written it and ended."""
    end = vocabulary.tokenizer.eos_token_id
    ids = vocabulary.tokenizer(text, add_special_tokens=False).input_ids
    ids = [*ids, min(vocabulary.eos_ids) if end is None else end]
    if len(ids) > limit:
        raise UserError(
            f"--response has {len(ids)} tokens with its end, more than "
            f"rollout.max_response_tokens = {limit}; shorten it or add "
            f"--rollout.max_response_tokens {len(ids)}."
        )
    return ids


class GivenFirst:
    """Samples as another sampler does, then puts the given response in the place of row 0.

    Nobody drew it, so its `rollout_log_probs` are 0 and mean nothing. Greedy responses (ReMax's
    baseline) stay the model's own.
    """

    def __init__(self, sampler: Sampler, response_ids: list[int]) -> None:
        self.sampler = sampler
        self.given_ids = response_ids

    def sync(self, weights: object, version: int) -> None:
        self.sampler.sync(weights, version)

    def run(self, episodes: list[Episode], choice: Draw | Greedy) -> Rollout:
        rollout = self.sampler.run(episodes, choice)
        if isinstance(choice, Greedy):
            return rollout
        drawn, lengths = rollout.response_ids.tolist(), rollout.response_lengths.tolist()
        others = [ids[:n] for ids, n in zip(drawn, lengths, strict=True)][1:]
        log_probs = rollout.rollout_log_probs.tolist()
        kept = [row[:n] for row, n in zip(log_probs, lengths, strict=True)][1:]
        device = rollout.response_ids.device
        ids = pad_right([self.given_ids, *others], torch.long).to(device)
        counts = torch.tensor([len(self.given_ids), *lengths[1:]], device=device)
        return replace(
            rollout,
            response_ids=ids,
            response_lengths=counts,
            response_mask=length_mask(counts, ids.shape[1]),
            rollout_log_probs=pad_right(
                [[0.0] * len(self.given_ids), *kept], rollout.rollout_log_probs.dtype
            ).to(device),
            finish_reasons=("eos", *rollout.finish_reasons[1:]),
            calls=((), *rollout.calls[1:]) if rollout.calls else (),
        )
