"""The shapes in TRL's documentation of rewards: lists in and out, `async def`, several functions of
which each scores its own rows, and functions that read environments."""

import time

import pytest
from helpers import table

from tether.config import RewardSection
from tether.rewards.functions import (
    RewardPart,
    call_reward,
    columns_for_reward,
    required_columns,
    signature_of,
)
from tether.rewards.scorers import Batch, InProcessScorer, Verdict, weighted_sum
from tether.rewards.workers import ChildScorer

FILE = '''
import asyncio


async def not_empty(prompts, completions, **kwargs):
    """Ask something far away."""
    await asyncio.sleep(0.2)
    return [1.0 if completion else 0.0 for completion in completions]


async def long_enough(completions, **kwargs):
    await asyncio.sleep(0.2)
    return [float(len(completion) >= 3) for completion in completions]


def right(completions, ground_truth, log_extra=None, log_metric=None, **kwargs):
    found = [float(c == truth) for c, truth in zip(completions, ground_truth)]
    if log_extra:
        log_extra("truth", ground_truth)
    return found


def sums(prompts, completions, task, **kwargs):
    return [float(c == "4") if t == "sum" else None for c, t in zip(completions, task)]


def words(prompts, completions, task, **kwargs):
    return [float(len(c)) if t == "word" else None for c, t in zip(completions, task)]


def by_environment(environments, **kwargs) -> list[float]:
    return [env.reward for env in environments]


def of_guessing(environments, **kwargs) -> list[float | None]:
    return [env.reward if type(env).__name__ == "Guessing" else None for env in environments]


def of_catching(environments, **kwargs) -> list[float | None]:
    return [max(env.reward, 0.0) if env.active == "catch" else None for env in environments]


async def later(environments, completions, **kwargs):
    await asyncio.sleep(0)
    return [float(env.done) for env in environments]


def opens(environments, **kwargs):
    return [env.client for env in environments]
'''


@pytest.fixture
def score(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text(FILE)

    def scored(rows, *names, samples=1, weights=None):
        weights = weights or [1.0] * len(names)
        parts = [
            RewardPart(f"{path}:{name}", {}, weight, name)
            for name, weight in zip(names, weights, strict=True)
        ]
        scorer = ChildScorer(parts, 5.0, concurrency=32)
        try:
            return scorer.score(rows, Batch(range(len(rows)), 0, samples))
        finally:
            scorer.close()

    return scored


def row(response, **columns):
    return {"prompt": "p", "response": response, "finished": True, **columns}


def ended(name="Guessing", **values):
    return {"environments": {"name": name, "values": values}}


def test_async_functions_of_trls_signature_overlap_and_are_summed_with_plain_ones(score):
    """24 calls of 0.2 s one after the other would take 4.8 s."""
    rows = [row("four" if i % 2 else "", ground_truth="four") for i in range(12)]
    score(rows[:1], "not_empty")  # the child's import is not timed
    began = time.perf_counter()
    names, weights = ("not_empty", "right", "long_enough"), [1.0, 2.0, 0.5]
    verdicts = score(rows, *names, weights=weights)
    assert time.perf_counter() - began < 4.0
    assert [v.score for v in verdicts] == [0.0, 3.5] * 6
    assert verdicts[1].parts == {"not_empty": 1.0, "right": 1.0, "long_enough": 1.0}


def test_a_function_that_says_none_leaves_the_row_to_the_others(score):
    rows = [row("4", task="sum"), row("abc", task="word"), row("x", task="rhyme")]
    summed, worded, neither = score(rows, "sums", "words")
    assert summed == Verdict(1.0, parts={"sums": 1.0})
    assert worded == Verdict(3.0, parts={"words": 3.0})
    assert neither.score is None
    assert neither.problem == "part 'sums': the reward returned None"


def test_a_plain_function_that_says_none_still_takes_the_row_out():
    """It was asked about this row alone, and cannot say."""
    parts = [RewardPart("a", name="a"), RewardPart("b", name="b")]
    found = weighted_sum(parts, [Verdict(None, "the reward returned None"), Verdict(1.0)])
    assert found.score is None


def test_rewards_read_the_attributes_of_environments(score):
    rows = [row("a", **ended(reward=0.25)), row("b", **ended(reward=1.5))]
    assert [v.score for v in score(rows, "by_environment")] == [0.25, 1.5]
    assert [v.score for v in score(rows, "by_environment", samples=2)] == [0.25, 1.5]


def test_each_function_scores_the_environments_that_are_its_own(score):
    rows = [
        row("a", **ended("Guessing", reward=0.5, active="guess")),
        row("b", **ended("Catching", reward=-1.0, active="catch", done=True)),
    ]
    guessed, caught = score(rows, "of_guessing", "of_catching")
    assert guessed == Verdict(0.5, parts={"of_guessing": 0.5})
    assert caught == Verdict(0.0, parts={"of_catching": 0.0})
    assert [v.score for v in score(rows[1:], "later")] == [1.0]


def test_what_was_not_plain_data_is_named(score):
    [verdict] = score([row("a", **ended(reward=1.0))], "opens")
    assert "the environment Guessing kept no 'client'" in verdict.problem


def test_a_function_passed_in_python_reads_environments_too():
    scorer = InProcessScorer(lambda environments, **kwargs: [e.reward for e in environments])
    [verdict] = scorer.score([row("a", **ended(reward=0.5))])
    assert verdict == Verdict(0.5)


@table(
    "function, kind",
    [
        (lambda prompts, completions, **kwargs: 0, "trl"),
        (lambda environments, **kwargs: 0, "trl"),
        (lambda response, environments: 0, "plain"),  # a column of the data
        (lambda response: 0, "plain"),
    ],
    ids=["completions", "environments", "column", "plain"],
)
def test_a_signature_is_trls_where_it_names_lists_of_trl(function, kind):
    assert signature_of(function) == kind


def test_environments_are_asked_of_the_rows_where_no_class_keeps_them(tmp_path):
    (tmp_path / "r.py").write_text(FILE)
    section = RewardSection(kind=f"{tmp_path}/r.py:by_environment")
    assert columns_for_reward(section, None) == ["environments"]
    assert required_columns(lambda completions, ground_truth: 0) == ["ground_truth"]


def test_a_column_that_is_called_environments_stays_what_it_is():
    seen = call_reward(
        lambda completions, environments: [len(environments[0])], row("a", environments=[1, 2])
    )
    assert seen == 2.0
