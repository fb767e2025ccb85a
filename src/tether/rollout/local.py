"""The sampler of this process: batched decoding with a key-value cache."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from tether.data.collate import length_mask, pad_left, pad_right
from tether.models.forward import begin_decoding, decode_next, trunk
from tether.models.heads import log_softmax
from tether.rollout.choose import choose_tokens
from tether.rollout.episode import Done, Draw, Episode, Greedy, Observe, calls_of
from tether.rollout.turns import answer_all
from tether.types import FinishReason, Rollout


@dataclass
class Row:
    """One episode under way."""

    episode: Episode
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)  # observed tokens still to be fed
    asks: bool = False  # its turn has ended, and what follows is not known yet
    finish: FinishReason | None = None

    def append(self, token: int, log_prob: float, eos_ids: frozenset[int]) -> None:
        """Take the sampled token, or the next observed one in its place."""
        if self.unread:
            self._push(self.unread.pop(0), sampled=False, log_prob=0.0)
            return
        self._push(token, sampled=True, log_prob=log_prob)
        self.asks = self.episode.take(token)
        if token in eos_ids:
            self.asks, self.finish = False, "eos"

    def hear(self, answer: Observe | Done) -> None:
        self.asks = False
        match answer:
            case Observe(ids):
                self.unread = list(ids)
            case Done():
                self.finish = "stop"

    def _push(self, token: int, sampled: bool, log_prob: float) -> None:
        self.ids.append(token)
        self.sampled.append(sampled)
        self.log_probs.append(log_prob)


class LocalSampler:
    """Decodes all rows together; a row leaves when it ends. Depends on token counts only."""

    def __init__(
        self, eos_ids: frozenset[int], max_response_tokens: int, temperature: float
    ) -> None:
        self.eos_ids = eos_ids
        self.max_response_tokens = max_response_tokens
        self.temperature = temperature

    def sync(self, weights: PreTrainedModel, version: int) -> None:
        # In one process the sampler reads the actor's own weights: there is nothing to copy.
        self.model = weights
        self.version = version

    @torch.no_grad()
    def run(self, episodes: Sequence[Episode], choice: Draw | Greedy) -> Rollout:
        rows = [Row(episode) for episode in episodes]
        self._decode(rows, choice)
        return self._collate(rows)

    def _decode(self, rows: list[Row], choice: Draw | Greedy) -> None:
        device = self.model.device
        network, head = trunk(self.model), self.model.get_output_embeddings()
        prompt_ids = pad_left([row.episode.prompt_ids for row in rows]).to(device)
        lengths = torch.tensor([len(row.episode.prompt_ids) for row in rows], device=device)
        prompt_mask = length_mask(lengths, prompt_ids.shape[1]).flip(1)

        live = np.arange(len(rows))  # which rows the batch in the cache holds
        decoding, states = begin_decoding(network, prompt_ids, prompt_mask)
        while len(live):
            log_probs = log_softmax(head, states, self.temperature)
            columns = np.array([len(rows[i].ids) for i in live])
            tokens = choose_tokens(log_probs, choice, live, columns)
            chosen = log_probs.gather(1, tokens[:, None]).squeeze(1)
            for i, token, log_prob in zip(live, tokens.tolist(), chosen.tolist(), strict=True):
                rows[i].append(token, log_prob, self.eos_ids)
            self._answer([rows[i] for i in live])

            going = np.array([rows[i].finish is None for i in live])
            if not going.all():
                live = live[going]
                decoding.keep(torch.from_numpy(np.flatnonzero(going)).to(device))
            if len(live):
                fed = torch.tensor([rows[i].ids[-1] for i in live], device=device)
                states = decode_next(network, decoding, fed)

    def _answer(self, rows: list[Row]) -> None:
        """Rows whose turn ended in this step go on or are done, all before anything is sampled:
        nothing depends on which tool was faster. Whoever is full then is truncated."""
        asking = [row for row in rows if row.asks]
        answers = answer_all([row.episode for row in asking])
        for row, answer in zip(asking, answers, strict=True):
            row.hear(answer)
        for row in rows:
            if row.finish is None and len(row.ids) >= self.max_response_tokens:
                row.finish = "length"

    def _collate(self, rows: list[Row]) -> Rollout:
        device = self.model.device
        prompts = [row.episode.prompt_ids for row in rows]
        float_type = torch.promote_types(self.model.dtype, torch.float32)
        return Rollout(
            prompt_ids=pad_left(prompts).to(device),
            prompt_lengths=torch.tensor([len(ids) for ids in prompts], device=device),
            response_ids=pad_right([row.ids for row in rows], torch.long).to(device),
            response_lengths=torch.tensor([len(row.ids) for row in rows], device=device),
            response_mask=pad_right([row.sampled for row in rows], torch.bool).to(device),
            rollout_log_probs=pad_right([row.log_probs for row in rows], float_type).to(device),
            finish_reasons=tuple(row.finish for row in rows),
            calls=calls_of([row.episode for row in rows]),
        )
