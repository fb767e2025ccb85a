"""The sampler of this process, on a random model whose answers end, or not, by chance."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from helpers import generated, mask_of, response, sample, slow_log_probs, tiny_llama
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.algo.random import uniform
from tether.data.batching import join
from tether.models.policy import Policy
from tether.rollout.sampler import Done, Draw, Greedy, Observe, SingleTurn

PROMPTS = [[5, 9, 200, 4], [1], [11, 12], [0, 0, 0, 0, 0, 21], [7, 7], [250]]
MANY_EOS = tuple(range(0, 256, 8))  # so that rows end at different columns


def same(a, b) -> bool:
    return all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(vars(a).values(), vars(b).values(), strict=True)
    )


def test_the_samplers_log_probs_are_those_of_the_training_forward(tiny_model):
    """Trap 5, to 1e-4; Trap 2 for the sampler: prompts of other rows pad on the left."""
    rollout = sample(tiny_model, PROMPTS, eos_ids=MANY_EOS)
    assert len(set(rollout.response_lengths.tolist())) > 2
    trained = Policy(tiny_model, 1.0, 10_000).log_probs(join(rollout), rollout.response_mask)
    torch.testing.assert_close(rollout.rollout_log_probs, trained, rtol=0, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_the_samplers_log_probs_are_tempered_and_of_the_whole_vocabulary(tiny_model, temperature):
    """Trap 7."""
    rollout = sample(tiny_model, PROMPTS, temperature=temperature)
    for row, prompt in enumerate(PROMPTS):
        expected = slow_log_probs(tiny_model, prompt, response(rollout, row), temperature)
        torch.testing.assert_close(rollout.rollout_log_probs[row], expected, rtol=0, atol=1e-4)


def test_sampled_ids_are_those_that_a_loop_without_cache_or_batch_draws(tiny_model):
    """Trap 4: each id is what its own number, computed from row and column, picks."""
    rollout = sample(tiny_model, PROMPTS, eos_ids=MANY_EOS, choice=Draw(3, "token", 2))
    for row, prompt in enumerate(PROMPTS):
        ids: list[int] = []
        while len(ids) < 8 and not (ids and ids[-1] in MANY_EOS):
            logits = tiny_model(input_ids=torch.tensor([prompt + ids])).logits[0, -1].double()
            u = float(uniform(3, "token", 2, row, len(ids)))
            ids.append(int((torch.softmax(logits, 0).cumsum(0) <= u).sum()))
        assert response(rollout, row) == ids


def test_greedy_decoding_is_transformers_own(tiny_model):
    rollout = sample(tiny_model, PROMPTS, limit=12, choice=Greedy())
    for row, prompt in enumerate(PROMPTS):
        assert response(rollout, row) == generated(tiny_model, prompt, 12)


def test_training_samples_come_from_the_whole_distribution():
    """Trap 7: no top-k, top-p or penalty, though the model's generation config asks for them.

    Chi-square over 20 tokens: 19 degrees of freedom, 0.1% point 43.8.
    """
    model = tiny_llama(20, 0, seed=1)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.3)
    for name, value in {"top_k": 2, "top_p": 0.3, "repetition_penalty": 9.0}.items():
        setattr(model.generation_config, name, value)
    rollout = sample(model, [[1, 2]] * 5000, limit=1)
    counts = np.bincount(rollout.response_ids[:, 0], minlength=20)
    logits = model(input_ids=torch.tensor([[1, 2]])).logits[0, -1]
    expected = 5000 * torch.softmax(logits.detach().double(), 0).numpy()
    assert expected.min() > 5
    assert ((counts - expected) ** 2 / expected).sum() < 43.8


def test_a_row_stops_at_any_eos_which_is_a_trained_action(tiny_model):
    """Trap 1: several EOS ids; the EOS is in ids, length, mask and log-probs."""
    rollout = sample(tiny_model, PROMPTS * 4, eos_ids=MANY_EOS)
    ends = set()
    for row, reason in enumerate(rollout.finish_reasons):
        ids = response(rollout, row)
        stops = [i for i, token in enumerate(ids) if token in MANY_EOS]
        assert stops in ([], [len(ids) - 1])
        assert reason == ("eos" if stops else "length")
        assert rollout.response_mask[row, : len(ids)].all()
        assert not rollout.response_mask[row, len(ids) :].any()
        assert (rollout.rollout_log_probs[row, : len(ids)] < 0).all()
        ends |= {ids[-1]} if stops else set()
    assert len(ends) > 1


def test_a_truncated_row_says_length_and_an_eos_in_the_last_column_says_eos(tiny_model):
    """Trap 4: truncated is not finished."""
    free = sample(tiny_model, PROMPTS, limit=3)
    assert free.finish_reasons == ("length",) * 6
    assert free.truncated.all()
    last = response(free, 0)[-1]
    ending = sample(tiny_model, PROMPTS[:1], limit=3, eos_ids=(last,))
    assert response(ending, 0) == response(free, 0)
    assert ending.finish_reasons == ("eos",)
    assert not ending.truncated.any()


def test_masks_come_from_lengths_where_a_sampled_token_has_the_id_of_padding():
    """Trap 1: a model that mostly says 0, the id of blanks, trains on every 0 it said."""
    model = tiny_llama(4, 3)
    rollout = sample(model, [[0, 1], [0], [2]] * 4, limit=6, eos_ids=(3,))
    said_zero = [
        (row, t) for row in range(12) for t, i in enumerate(response(rollout, row)) if i == 0
    ]
    assert len(said_zero) > 5
    assert all(rollout.response_mask[row, t] for row, t in said_zero)
    assert torch.equal(rollout.response_mask, mask_of(join(rollout)))


@settings(max_examples=15)
@given(st.lists(st.integers(0, 5), min_size=0, max_size=4), st.permutations(range(1, 6)))
def test_sampled_ids_do_not_depend_on_the_other_rows_of_the_batch(tiny_model, others, order):
    """Row 0 keeps its number and key; what is sampled beside it changes."""
    alone = sample(tiny_model, PROMPTS[:1], eos_ids=MANY_EOS)
    company = [PROMPTS[0], *(PROMPTS[i] for i in others), *(PROMPTS[i] for i in order)]
    beside = sample(tiny_model, company, eos_ids=MANY_EOS)
    assert response(beside, 0) == response(alone, 0)


def test_two_identical_runs_give_identical_rollouts(tiny_model):
    assert same(sample(tiny_model, PROMPTS), sample(tiny_model, PROMPTS))


@pytest.mark.parametrize("other", [Draw(8, "token", 0), Draw(7, "token", 1), Draw(7, "eval", 0)])
def test_another_seed_iteration_or_purpose_samples_otherwise(tiny_model, other):
    a, b = sample(tiny_model, PROMPTS), sample(tiny_model, PROMPTS, choice=other)
    assert not torch.equal(a.response_ids, b.response_ids)


STOPS = tuple(range(3, 256, 8))  # no EOS: tokens that end a turn


@dataclass
class Tool:
    """Answers the first turns of the policy with tokens of its own, then is done."""

    prompt_ids: list[int]
    observations: list[list[int]]
    stops: tuple[int, ...] = STOPS
    turns: list[list[int]] = field(default_factory=lambda: [[]])

    def add_token(self, token: int) -> bool:
        self.turns[-1].append(token)
        return token in self.stops

    def answer(self) -> Observe | Done:
        if not self.observations:
            return Done()
        self.turns.append([])
        return Observe(self.observations.pop(0))


def test_observed_tokens_are_read_but_not_sampled_and_the_policy_goes_on(tiny_model):
    """Tool output is in response_ids, masked, of log-prob 0; what follows is conditioned on it."""
    tool = Tool([5, 9], [[101, 102, 103], [111]])
    plain = SingleTurn([11, 12, 13])
    rollout = sample(tiny_model, [], limit=60, episodes=[tool, plain], choice=Draw(1, "t", 0))
    ids, mask = response(rollout, 0), rollout.response_mask[0].tolist()
    first, second, third = tool.turns
    assert ids == [*first, 101, 102, 103, *second, 111, *third]
    observed = [False] * 3, [False]
    expected = [True] * len(first) + observed[0] + [True] * len(second) + observed[1]
    assert mask[: len(ids)] == expected + [True] * len(third)
    assert all(turn[-1] in STOPS for turn in tool.turns)
    assert rollout.finish_reasons == ("stop", "length")

    scored = slow_log_probs(tiny_model, [5, 9], ids)
    scored = torch.where(rollout.response_mask[0, : len(ids)], scored, 0.0)
    torch.testing.assert_close(rollout.rollout_log_probs[0, : len(ids)], scored, rtol=0, atol=1e-4)


def test_the_other_rows_of_a_batch_do_not_notice_a_tool(tiny_model):
    choice = Draw(1, "t", 0)
    with_tool = [SingleTurn(PROMPTS[0]), Tool([5, 9], [[101, 102]])]
    without = [SingleTurn(PROMPTS[0]), SingleTurn([5, 9])]
    a, b = (
        sample(tiny_model, [], eos_ids=MANY_EOS, episodes=episodes, choice=choice)
        for episodes in (with_tool, without)
    )
    assert response(a, 0) == response(b, 0)


def test_an_eos_ends_an_episode_of_several_turns_without_a_question(tiny_model):
    every = tuple(range(256))
    tool = Tool([5, 9], [[101]], stops=every)
    rollout = sample(tiny_model, [], eos_ids=every, episodes=[tool])
    assert rollout.finish_reasons == ("eos",)
    assert rollout.response_lengths.tolist() == [1]
    assert tool.observations == [[101]]  # nobody asked for it
    assert tool.turns == [response(rollout, 0)]  # but it was told


def test_tool_output_that_fills_the_response_truncates_it(tiny_model):
    """Trap 4: and nothing of it is marked as sampled."""
    tool = Tool([5, 9], [list(range(100, 160))], stops=tuple(range(256)))
    rollout = sample(tiny_model, [], limit=20, episodes=[tool])
    assert rollout.finish_reasons == ("length",)
    assert response(rollout, 0)[1:] == list(range(100, 119))
    assert rollout.response_mask[0].tolist() == [True] + [False] * 19


def test_an_episode_that_is_over_with_its_last_token_is_not_truncated(tiny_model):
    """Trap 4: the answer is asked for before the length is."""
    tool = Tool([5, 9], [], stops=tuple(range(256)))
    rollout = sample(tiny_model, [], limit=1, episodes=[tool])
    assert rollout.finish_reasons == ("stop",)
    assert not rollout.truncated.any()
