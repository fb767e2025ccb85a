"""The sampler around an engine: turns, ends and seeds, with engines that are a few lines long."""

from dataclasses import dataclass, field

import pytest
import torch
from helpers import generated, response, slow_log_probs

from rollout.talk import episode
from tether.rollout.engine import Completion, Engine, EngineSampler
from tether.rollout.local import LocalSampler
from tether.rollout.sampler import Done, Draw, Greedy, Observe, Sampler, SingleTurn

EOS = frozenset({256, 7})
PROMPTS = [[5, 9, 200, 4], [1], [11, 12], [0, 0, 0, 0, 0, 21], [250], [3, 2, 1]]


@dataclass
class Scripted:
    """Says the next of its lines, whoever asks; the log-prob of a token is minus its id."""

    lines: list[list[int]]
    asked: list = field(default_factory=list)
    loaded: list = field(default_factory=list)
    rests: int = 0

    def load(self, weights) -> None:
        self.loaded.append(weights)

    def rest(self) -> None:
        self.rests += 1

    def generate(self, requests):
        self.asked += requests
        said = [self.lines.pop(0) for _ in requests]
        return [Completion(ids, [-float(i) for i in ids]) for ids in said]


class Plain:
    """Greedy tokens by transformers' own generate, a row at a time, up to an EOS."""

    def load(self, weights) -> None:
        self.model = weights

    def rest(self) -> None: ...

    def generate(self, requests):
        return [self._one(request) for request in requests]

    def _one(self, request) -> Completion:
        assert request.temperature == 0
        ids = generated(self.model, request.ids, request.max_tokens)
        ends = [at for at, token in enumerate(ids) if token in EOS]
        ids = ids[: ends[0] + 1] if ends else ids
        return Completion(ids, slow_log_probs(self.model, request.ids, ids).tolist())


@dataclass
class Talk:
    """A turn ends with every token of a kind; the second is followed by the end."""

    prompt_ids: list[int]
    every: int
    heard: list[int] = field(default_factory=list)
    turns: int = 0

    def add_token(self, token: int) -> bool:
        self.heard.append(token)
        return token % self.every == 0

    def answer(self) -> Observe | Done:
        self.turns += 1
        return Done() if self.turns > 2 else Observe([100 + self.turns, 102])


def run(engine, episodes, choice=None, limit=8, **options):
    sampler = EngineSampler(engine, EOS, limit, 1.0)
    return sampler.run(episodes, choice or Draw(7, "token", 0), **options)


def test_it_is_a_sampler_and_its_engines_are_engines():
    assert isinstance(EngineSampler(Scripted([]), EOS, 8, 1.0), Sampler)
    assert isinstance(Scripted([]), Engine)


def test_rows_end_with_any_eos_or_for_want_of_room():
    lines = [[3, 4, 256], [7], [1] * 8, [1, 2], [3, 256, 9, 9]]
    rollout = run(Scripted(lines), [SingleTurn([1])] * 5)
    assert [response(rollout, row) for row in range(5)] == [
        [3, 4, 256],
        [7],
        [1] * 8,
        [1, 2],  # an engine that stops by itself has met a limit of its own
        [3, 256],
    ]
    assert rollout.finish_reasons == ("eos", "eos", "length", "length", "eos")
    assert rollout.rollout_log_probs[0, :4].tolist() == [-3.0, -4.0, -256.0, 0.0]
    assert rollout.response_mask.sum().tolist() == 16
    assert rollout.calls == ()


def test_what_follows_a_turn_was_never_sampled(byte_tokenizer):
    def ids(text: str) -> list[int]:
        return byte_tokenizer(text, add_special_tokens=False).input_ids

    first, second = "<echo>hi</echo>", " so <answer>5</answer>"
    engine = Scripted([ids(first + " and then"), [*ids(second), 256]])
    row = episode(byte_tokenizer)
    rollout = run(engine, [row], limit=200)
    said = f"{first}<result>you said hi</result>{second}"
    assert byte_tokenizer.decode(response(rollout, 0)) == said
    assert [r.ids for r in engine.asked] == [[1, 2], [1, 2, *ids(said.removesuffix(second))]]
    assert set(engine.asked[0].stop) >= {"</echo>", "</answer>"}
    assert [r.max_tokens for r in engine.asked] == [200, 200 - len(ids(said)) + len(ids(second))]
    policy = ids(first) + ids(second)
    assert rollout.response_ids[rollout.response_mask].tolist() == policy
    assert rollout.rollout_log_probs[rollout.response_mask].tolist() == [-float(i) for i in policy]
    assert rollout.finish_reasons == ("stop",)
    assert [call.arguments for call in rollout.calls[0]] == ["hi"]


@pytest.mark.parametrize("every", [1, 3, 10, 1000])
def test_an_exact_engine_gives_the_local_sampler_s_greedy_rollout(tiny_model, every):
    local, ours = LocalSampler(EOS, 9, 1.0), EngineSampler(Plain(), EOS, 9, 1.0)
    rollouts, talks = [], []
    for sampler in (local, ours):
        sampler.sync(tiny_model, 0)
        talks.append([Talk(ids, every) for ids in PROMPTS])
        rollouts.append(sampler.run(talks[-1], Greedy()))
    expected, found = rollouts
    assert found.finish_reasons == expected.finish_reasons
    for name in ("prompt_ids", "prompt_lengths", "response_ids", "response_lengths"):
        assert getattr(found, name).equal(getattr(expected, name))
    assert found.response_mask.equal(expected.response_mask)
    torch.testing.assert_close(
        found.rollout_log_probs, expected.rollout_log_probs, rtol=0, atol=1e-5
    )
    assert [talk.heard for talk in talks[1]] == [talk.heard for talk in talks[0]]
    assert (~expected.response_mask[0, :9]).any() == (every < 10)  # there was more than one turn


def seeds(episodes, choice, **options) -> list[int]:
    engine = Scripted([[1, 256] for _ in range(20)])
    run(engine, episodes, choice, **options)
    return [request.seed for request in engine.asked]


def test_a_row_s_seed_is_its_own_wherever_it_is_sampled():
    rows, draw = [SingleTurn([1])] * 6, Draw(7, "token", 3)
    whole = seeds(rows, draw)
    assert len(set(whole)) == 6
    assert seeds(rows[:2], draw, numbers=[4, 5]) == whole[4:]
    for other in (Draw(8, "token", 3), Draw(7, "evaluate", 3), Draw(7, "token", 4)):
        assert not set(seeds(rows, other)) & set(whole)


def test_a_later_turn_has_another_seed_by_where_it_begins():
    engine = Scripted([[10, 3], [11, 256]])
    run(engine, [Talk([1], every=10)], Draw(7, "token", 3))
    first, second = (request.seed for request in engine.asked)
    assert first == seeds([SingleTurn([1])], Draw(7, "token", 3))[0]
    assert first != second


def test_greedy_asks_for_temperature_zero_and_sampling_for_the_run_s():
    engine = Scripted([[256], [256]])
    sampler = EngineSampler(engine, EOS, 8, 0.7)
    sampler.run([SingleTurn([1])], Greedy())
    sampler.run([SingleTurn([1])], Draw(7, "token", 0))
    assert [request.temperature for request in engine.asked] == [0.0, 0.7]


def test_weights_that_an_engine_has_are_not_sent_again(tiny_model):
    engine = Scripted([])
    sampler = EngineSampler(engine, EOS, 8, 1.0)
    for version in (0, 0, 1, 1, 5):
        sampler.sync(tiny_model, version)
    assert len(engine.loaded) == 3


def test_an_engine_rests_after_every_sampling():
    engine = Scripted([[7, 1], [8, 1]])
    sampler = EngineSampler(engine, frozenset({1}), 8, 1.0)
    for times in (1, 2):
        sampler.run([SingleTurn([5])], Greedy())
        assert engine.rests == times
