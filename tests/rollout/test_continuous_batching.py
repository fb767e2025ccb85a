"""Continuous batching: whatever waits, shares or moves in the cache, the rows are the same."""

import pytest
import torch
from helpers import generated, response, slow_log_probs, tiny_llama
from hypothesis import given, settings
from hypothesis import strategies as st
from models.families import FAMILIES, make_family

from tether.config import LoraSection
from tether.models import packed_weights
from tether.models.kv_cache import SlotCache
from tether.models.lora import add_adapter
from tether.models.weights import trainable_parameters
from tether.rollout import local
from tether.rollout.local import LocalSampler
from tether.rollout.sampler import Done, Draw, Greedy, Observe, SingleTurn

PROMPTS = [[5, 9, 200, 4], [1], [11, 12], [0, 0, 0, 0, 0, 21], [7, 7], [250], [3, 2, 1]]
MANY_EOS = frozenset(range(0, 256, 8))


def sampled(model, prompts, cache_tokens=10_000, limit=9, choice=None, eos_ids=MANY_EOS):
    sampler = LocalSampler(eos_ids, limit, 1.0, cache_tokens)
    sampler.sync(model, 0)
    return sampler.run([SingleTurn(ids) for ids in prompts], choice or Draw(7, "token", 0))


def texts(rollout):
    return [response(rollout, row) for row in range(len(rollout.finish_reasons))]


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_rows_that_wait_for_a_place_are_the_rows_they_would_have_been(tiny_model, slots):
    together = sampled(tiny_model, PROMPTS * 3)
    in_turn = sampled(tiny_model, PROMPTS * 3, cache_tokens=slots * 15)
    assert texts(in_turn) == texts(together)
    assert in_turn.finish_reasons == together.finish_reasons
    torch.testing.assert_close(
        in_turn.rollout_log_probs, together.rollout_log_probs, rtol=0, atol=1e-5
    )


def test_a_cache_of_few_tokens_holds_no_more_than_that(tiny_model, monkeypatch):
    made = []
    monkeypatch.setattr(local, "SlotCache", lambda *a: made.append(SlotCache(*a)) or made[-1])
    sampled(tiny_model, PROMPTS * 3, cache_tokens=4 * 15 + 7)
    (cache,) = made
    assert cache.stores[0].shape[1] == 4
    assert (
        cache.stores[0].shape[3] == 6 + 9 + 1
    )  # longest prompt, longest response, the spare column


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache_tokens", [60, 10_000])
def test_greedy_text_of_every_family_is_that_of_generate(family, cache_tokens):
    model = make_family(family)
    prompts = [list(range(3, 3 + length)) for length in (1, 9, 4, 4, 2, 6, 9)]
    rollout = sampled(model, prompts, cache_tokens, 12, Greedy(), eos_ids=frozenset())
    for row, prompt in enumerate(prompts):
        assert response(rollout, row) == generated(model, prompt, 12)


def tokens_read(model, monkeypatch):
    """From now on the shape of every batch of ids that the trunk is given is kept here."""
    shapes, embedding = [], model.model.embed_tokens
    forward = embedding.forward

    def recorded(input_ids):
        shapes.append(tuple(input_ids.shape))
        return forward(input_ids)

    monkeypatch.setattr(embedding, "forward", recorded)
    return shapes


def test_a_prompt_is_read_once_for_all_its_samples(tiny_model, monkeypatch):
    alone = sampled(tiny_model, [PROMPTS[0]] * 5 + [PROMPTS[3]] * 5)
    shapes = tokens_read(tiny_model, monkeypatch)
    again = sampled(tiny_model, [PROMPTS[0]] * 5 + [PROMPTS[3]] * 5)
    assert shapes[0] == (2, 6)  # two prompts, ten rows
    assert shapes[1][1] == 1
    assert len(set(map(tuple, texts(again)))) > 4, "the samples differ"
    assert texts(again) == texts(alone)
    for row, prompt in enumerate([PROMPTS[0]] * 5 + [PROMPTS[3]] * 5):
        ids = response(again, row)
        expected = slow_log_probs(tiny_model, prompt, ids)
        found = again.rollout_log_probs[row, : len(ids)]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("budget", [1, 2, 4, 13])
def test_prompts_are_read_in_pieces_of_the_budget(tiny_model, monkeypatch, budget):
    whole = sampled(tiny_model, PROMPTS)
    monkeypatch.setattr(local, "PREFILL_TOKENS", budget)
    shapes = tokens_read(tiny_model, monkeypatch)
    pieces = sampled(tiny_model, PROMPTS)
    reading = [rows * width for rows, width in shapes if width > 1 or rows == 1]
    assert max(reading) <= max(budget, 1)
    assert texts(pieces) == texts(whole)


def test_only_one_position_a_row_goes_through_the_head(tiny_model, monkeypatch):
    seen, forward = [], tiny_model.lm_head.forward
    monkeypatch.setattr(tiny_model.lm_head, "forward", lambda x: seen.append(x.shape) or forward(x))
    rollout = sampled(tiny_model, PROMPTS)
    assert sum(shape[0] for shape in seen) == int(rollout.response_lengths.sum())
    assert all(len(shape) == 2 for shape in seen)


class Chatty:
    """After every third token the environment says so many tokens, so many times."""

    def __init__(self, prompt_ids, observations):
        self.prompt_ids, self.observations, self.taken = prompt_ids, list(observations), 0

    def add_token(self, token):
        self.taken += 1
        return self.taken % 3 == 0

    def answer(self):
        return Observe(self.observations.pop(0)) if self.observations else Done()


@settings(max_examples=20)
@given(
    st.lists(st.lists(st.lists(st.integers(1, 250), max_size=5), max_size=3), max_size=5),
    st.integers(1, 5),
)
def test_rows_with_observations_of_any_length_run_at_their_own_pace(tiny_model, worlds, slots):
    """Each row's log-probs are those of a lone forward over all that it sampled and heard."""
    prompts = PROMPTS[: len(worlds) + 1]
    episodes = [Chatty(ids, world) for ids, world in zip(prompts, [*worlds, [[1, 2]]], strict=True)]
    sampler = LocalSampler(frozenset(), 20, 1.0, slots * 26)
    sampler.sync(tiny_model, 0)
    rollout = sampler.run(episodes, Draw(3, "t", 0))
    for row, prompt in enumerate(prompts):
        ids = response(rollout, row)
        expected = slow_log_probs(tiny_model, prompt, ids)
        own = rollout.response_mask[row, : len(ids)]
        found = rollout.rollout_log_probs[row, : len(ids)]
        torch.testing.assert_close(found, torch.where(own, expected, 0.0), rtol=0, atol=1e-4)
        said = [token for world in [*worlds, [[1, 2]]][row : row + 1] for o in world for token in o]
        heard = [token for token, mine in zip(ids, own.tolist(), strict=True) if not mine]
        assert heard == said[: len(heard)]


def test_an_adapter_is_merged_for_the_rollout_and_the_base_is_untouched():
    model = tiny_llama(260, 256)
    add_adapter(model, LoraSection(rank=4, alpha=16.0), 3, "actor")
    for name, weight in trainable_parameters(model).items():
        if "lora_B" in name:
            weight.data = 0.1 * torch.randn(
                weight.shape, generator=torch.Generator().manual_seed(5)
            )
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rollout = sampled(model, PROMPTS)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    for row, prompt in enumerate(PROMPTS):
        ids = response(rollout, row)
        expected = slow_log_probs(model, prompt, ids)  # through the adapter itself
        found = rollout.rollout_log_probs[row, : len(ids)]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_packed_weights_give_the_same_numbers_and_are_left_afterwards(tiny_model, monkeypatch):
    plain = sampled(tiny_model, PROMPTS)
    monkeypatch.setattr(packed_weights, "MIN_PACKED_WEIGHTS", 1)
    with packed_weights.packed_weights(tiny_model):
        layers = [layer for layer in tiny_model.modules() if "forward" in vars(layer)]
    assert len(layers) == sum(type(m) is torch.nn.Linear for m in tiny_model.modules())
    found = sampled(tiny_model, PROMPTS)
    assert texts(found) == texts(plain)
    torch.testing.assert_close(found.rollout_log_probs, plain.rollout_log_probs, rtol=0, atol=1e-5)
    assert not any("forward" in vars(layer) for layer in tiny_model.modules())
