"""The sampler in this process: continuous batching, in which rows that end make room for others."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from tether.data.batching import pad_left, pad_right
from tether.models.forward import decode_step, output_head, prefill
from tether.models.kv_cache import SlotCache
from tether.models.lean_trunk import SamplingTrunk, packed_trunk
from tether.models.lora import adapter_merged, merged_bytes
from tether.models.packed_weights import packed_bytes
from tether.models.token_log_probs import tempered_logits
from tether.rollout.sampler import (
    Done,
    Draw,
    Episode,
    Greedy,
    Observe,
    states_of,
    tool_calls_of,
    turn_rewards_of,
)
from tether.rollout.token_choice import choose_tokens
from tether.rollout.turns import answer_all, close_all
from tether.support.memory import return_freed_memory
from tether.types import FinishReason, Rollout

PREFILL_TOKENS = 2048  # padded tokens of prompts per forward pass
WORTH_PREFILLING = 8  # waiting rows are admitted when one slot in so many is free


@dataclass
class Row:
    """An episode under way and its tokens so far."""

    number: int
    episode: Episode
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    token: int = 0  # sampled last
    unread: list[int] = field(default_factory=list)  # observed since, not in the cache yet
    turn_over: bool = False
    finish: FinishReason | None = None

    def add_sampled(self, token: int, log_prob: float, eos_ids: frozenset[int], limit: int) -> None:
        """Append a sampled token."""
        self.ids.append(token)
        self.sampled.append(True)
        self.log_probs.append(log_prob)
        self.token = token
        self.turn_over = self.episode.add_token(token)
        if token in eos_ids and not getattr(self.episode, "continues_after_eos", False):
            self.finish = "eos"
        elif len(self.ids) >= limit and not self.turn_over:
            self.finish = "length"

    def add_observation(self, answer: Observe | Done, limit: int) -> None:
        """Append an observation, cut to the limit, or end the row.

        Its tokens are marked as not sampled, which leaves them out of the loss.
        """
        self.turn_over = False
        match answer:
            case Done(reason):
                self.finish = reason
            case Observe(ids):
                self.unread = list(ids)[: limit - len(self.ids)]
                self.ids += self.unread
                self.sampled += [False] * len(self.unread)
                self.log_probs += [0.0] * len(self.unread)
                if len(self.ids) >= limit:
                    self.finish = "length"


class LocalSampler:
    """Continuous batching over a key-value cache of fixed size.

    Which rows run together depends on token counts only, and each token's random number on its
    own key, so a run can be repeated bit for bit.
    """

    def __init__(
        self,
        eos_ids: frozenset[int],
        max_response_tokens: int,
        temperature: float,
        cache_tokens: int = 16_384,
    ) -> None:
        self.eos_ids = eos_ids
        self.max_response_tokens = max_response_tokens
        self.temperature = temperature
        self.cache_tokens = cache_tokens

    def sync(self, weights: PreTrainedModel, version: int) -> None:
        """Use the model itself from now on: nothing is copied."""
        self.model = weights
        self.version = version

    @torch.no_grad()
    def run(
        self,
        episodes: Sequence[Episode],
        choice: Draw | Greedy,
        numbers: Sequence[int] | None = None,
    ) -> Rollout:
        """Run every episode to its end (see `Sampler.run`)."""
        numbers = range(len(episodes)) if numbers is None else numbers
        rows = [Row(*pair) for pair in zip(numbers, episodes, strict=True)]
        with adapter_merged(self.model):
            self._decode(rows, choice)
        close_all(episodes)
        kind = self.model.device.type
        return_freed_memory(merged_bytes(self.model, kind) + packed_bytes(self.model, kind))
        float_type = torch.promote_types(self.model.dtype, torch.float32)
        return collate(rows, float_type)

    def _decode(self, rows: list[Row], choice: Draw | Greedy) -> None:
        cache = self._make_cache(rows)
        with packed_trunk(self.model, longest_row=cache.spare) as network:
            self._decode_with(network, cache, rows, choice)

    def _decode_with(
        self, network: SamplingTrunk, cache: SlotCache, rows: list[Row], choice: Draw | Greedy
    ) -> None:
        waiting = deque(_groups(rows, len(cache.lengths)))
        live: list[Row] = []  # live[i] is in slot i
        states = torch.empty(0)  # (live, width)
        while waiting or live:
            admitted = _admit(waiting, len(cache.lengths) - len(live), len(cache.lengths))
            if admitted:
                fresh = _prefill_groups(network, cache, admitted, first_slot=len(live))
                states = torch.cat([states, fresh]) if live else fresh
                live += [row for group in admitted for row in group]
            self._take_tokens(live, states, choice)
            self._answer_turns(live)

            going = [slot for slot, row in enumerate(live) if row.finish is None]
            live = [live[slot] for slot in cache.compact(going)]
            if live:
                states = _decode_sampled(network, cache, live)

    def _take_tokens(
        self, live: list[Row], states: Float[Tensor, "live width"], choice: Draw | Greedy
    ) -> None:
        """Sample a token per row from the state before it."""
        logits = tempered_logits(output_head(self.model), states, self.temperature)
        numbers = np.array([row.number for row in live])
        columns = np.array([len(row.ids) for row in live])
        tokens, log_probs = choose_tokens(logits, choice, numbers, columns)
        for row, token, log_prob in zip(live, tokens.tolist(), log_probs.tolist(), strict=True):
            row.add_sampled(token, log_prob, self.eos_ids, self.max_response_tokens)

    def _answer_turns(self, live: list[Row]) -> None:
        """Append observations to the rows whose turn is over.

        All of them, in the order of the rows, before anything more is sampled: nothing depends on
        which tool was faster.
        """
        over = [row for row in live if row.turn_over and row.finish is None]
        over.sort(key=lambda row: row.number)
        answers = answer_all([row.episode for row in over])
        for row, answer in zip(over, answers, strict=True):
            row.add_observation(answer, self.max_response_tokens)

    def _make_cache(self, rows: list[Row]) -> SlotCache:
        config = self.model.config
        longest = max(len(row.episode.prompt_ids) for row in rows)
        capacity = longest + self.max_response_tokens
        slots = max(1, min(len(rows), self.cache_tokens // capacity))
        return SlotCache(config.num_hidden_layers, slots, capacity, self.model.device)


def collate(rows: list[Row], float_type: torch.dtype) -> Rollout:
    """Pad rows that have ended into a rollout, on the CPU: it is sent to the other processes."""
    prompts = [row.episode.prompt_ids for row in rows]
    return Rollout(
        prompt_ids=pad_left(prompts),
        prompt_lengths=torch.tensor([len(ids) for ids in prompts], dtype=torch.long),
        response_ids=pad_right([row.ids for row in rows], torch.long),
        response_lengths=torch.tensor([len(row.ids) for row in rows], dtype=torch.long),
        response_mask=pad_right([row.sampled for row in rows], torch.bool),
        rollout_log_probs=pad_right([row.log_probs for row in rows], float_type),
        finish_reasons=tuple(row.finish for row in rows if row.finish is not None),
        calls=tool_calls_of([row.episode for row in rows]),
        turn_rewards=turn_rewards_of([row.episode for row in rows]),
        states=states_of([row.episode for row in rows]),
    )


def _groups(rows: list[Row], slots: int) -> list[list[Row]]:
    """Group neighbours with the same prompt, which is computed once; none exceeds the cache."""
    groups = [list(group) for _, group in groupby(rows, key=lambda row: row.episode.prompt_ids)]
    return [group[i : i + slots] for group in groups for i in range(0, len(group), slots)]


def _admit(waiting: deque[list[Row]], free: int, slots: int) -> list[list[Row]]:
    """Take the next groups, as many as fit, once enough slots are free to be worth it."""
    admitted: list[list[Row]] = []
    if free * WORTH_PREFILLING < slots:
        return admitted
    while waiting and len(waiting[0]) <= free:
        admitted.append(waiting.popleft())
        free -= len(admitted[-1])
    return admitted


def _prefill_groups(
    network: SamplingTrunk, cache: SlotCache, groups: list[list[Row]], first_slot: int
) -> Float[Tensor, "rows width"]:
    """Prefill each group's prompt once, in batches of a token budget.

    Return the state after the prompt, for every row.
    """
    slots, prompts, after = [], [group[0].episode.prompt_ids for group in groups], first_slot
    for group in groups:
        slots.append(range(after, after + len(group)))
        after += len(group)
    states: dict[int, Tensor] = {}
    for batch in _budgeted([len(ids) for ids in prompts]):
        found = _prefill(network, cache, [prompts[i] for i in batch], [slots[i] for i in batch])
        for i, state in zip(batch, found, strict=True):
            states[i] = state.expand(len(groups[i]), -1)
    return torch.cat([states[i] for i in range(len(groups))])


def _budgeted(lengths: Sequence[int]) -> list[list[int]]:
    """Batch prompts of similar length, at most PREFILL_TOKENS padded tokens per batch."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if not batches or lengths[i] * (len(batches[-1]) + 1) > PREFILL_TOKENS:
            batches.append([])
        batches[-1].append(i)
    return batches


def _prefill(
    network: SamplingTrunk,
    cache: SlotCache,
    prompts: list[list[int]],
    slots: list[range],
) -> Float[Tensor, "prompts width"]:
    """Write prompts into the cache; one that exceeds the budget goes in piece by piece."""
    device = cache.device
    heads = [ids[:PREFILL_TOKENS] for ids in prompts]
    ids = pad_right(heads, torch.long).to(device)
    states = prefill(network, cache, ids, [len(head) for head in heads], slots)
    for start in range(PREFILL_TOKENS, len(prompts[0]), PREFILL_TOKENS):  # such a prompt is alone
        piece = prompts[0][start : start + PREFILL_TOKENS]
        ids = torch.tensor([piece], device=device)
        states = decode_step(network, cache, ids, [len(piece)], slots)
    return states


def _decode_sampled(
    network: SamplingTrunk, cache: SlotCache, live: list[Row]
) -> Float[Tensor, "live width"]:
    """Decode the token that each row sampled, then the observations of some rows."""
    device = cache.device
    tokens = torch.tensor([[row.token] for row in live], device=device)
    states = decode_step(network, cache, tokens, [1] * len(live), [(i,) for i in range(len(live))])
    observed = [i for i, row in enumerate(live) if row.unread]
    if observed:
        pieces = [live[i].unread for i in observed]
        ids = pad_right(pieces, torch.long).to(device)
        lengths = [len(piece) for piece in pieces]
        states[observed] = decode_step(network, cache, ids, lengths, [(i,) for i in observed])
        for i in observed:
            live[i].unread = []
    return states
