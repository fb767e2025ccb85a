"""How a reward may be written, and the processes that it runs in."""

import asyncio
import time

import pytest
from helpers import table

from tether.errors import UserError
from tether.rewards.functions import RewardPart, call_reward, required_columns
from tether.rewards.scorers import Batch, InProcessScorer, Verdict
from tether.rewards.workers import ChildScorer

FORMS = '''
import asyncio, os, time
import tether

MADE = []

def plain(response, scale=1):
    return scale * len(response)

async def later(response, scale=1):
    await asyncio.sleep(0.002 * (5 - len(response)))  # the first to be asked is the last to answer
    return scale * len(response)

def ranked(prompts, completions, scale=1, **columns):
    """The rank of each completion among those of its prompt."""
    assert len({*prompts}) == 1, prompts
    order = sorted(completions, key=len)
    return [float(scale * order.index(c)) for c in completions]

async def ranked_later(prompts, completions, **columns):
    await asyncio.sleep(0.001)
    return ranked(prompts, completions)

class Lookup:
    def __init__(self, table, scale=1):
        MADE.append(1)
        assert len(MADE) == 1
        self.table, self.scale = table, scale

    def __call__(self, response, bonus=0):
        return self.scale * self.table[len(response)] + bonus

class Later:
    async def __call__(self, response):
        await asyncio.sleep(0.001)
        return len(response)

ready_object = Later()

def by_turn(policy_turns):
    return tether.TurnRewards([len(turn) for turn in policy_turns])

async def deeds(response):
    if response == "block":
        time.sleep(60)
    if response == "die":
        os._exit(4)
    if response == "wait":
        await asyncio.sleep(60)
    if response == "stubborn":
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(60)
    if response == "raise":
        raise KeyError("no")
    await asyncio.sleep(0.001)
    return len(response)

def hungry(response):
    if response == "eat":
        return len(bytearray(10**9))
    return 1.0

def short(prompts, completions):
    return [1.0]

def half_bad(prompts, completions):
    return [1.0, "x", None, {"turns": [1.0]}][: len(completions)]

def burns(response):
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    return len(response)
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("forms") / "forms.py"
    path.write_text(FORMS)
    return path


@pytest.fixture
def scored(file):
    """A function: what a reward of the file says of responses, two to a prompt."""

    def run(name: str, *responses: str, arguments=None, **settings):
        scorer = ChildScorer(
            [RewardPart(f"{file}:{name}", arguments or {})],
            **{"timeout_seconds": 5.0, "concurrency": 4, **settings},
        )
        rows = [
            {"prompt": f"p{i // 2}", "response": text, "policy_turns": [text], "answer": i}
            for i, text in enumerate(responses)
        ]
        try:
            return scorer.score(rows, Batch(range(len(rows)), samples=2))
        finally:
            scorer.close()

    return run


WORDS = ("aa", "a", "aaa", "aaaa", "", "aaaaa")


@table(
    ("name", "expected", "arguments"),
    [
        ("plain", [2, 1, 3, 4, 0, 5], {}),
        ("plain", [4, 2, 6, 8, 0, 10], {"scale": 2}),
        ("later", [2, 1, 3, 4, 0, 5], {}),
        ("ranked", [1, 0, 0, 1, 0, 1], {}),
        ("ranked", [3, 0, 0, 3, 0, 3], {"scale": 3}),
        ("ranked_later", [1, 0, 0, 1, 0, 1], {}),
        ("Lookup", [5, 6, 5, 6, 7, 7], {"table": [7, 6, 5, 5, 6, 7]}),
        ("Lookup", [11, 13, 11, 13, 15, 15], {"table": [7, 6, 5, 5, 6, 7], "scale": 2, "bonus": 1}),
        ("Later", [2, 1, 3, 4, 0, 5], {}),
        ("ready_object", [2, 1, 3, 4, 0, 5], {}),
        ("by_turn", [2, 1, 3, 4, 0, 5], {}),
    ],
)
def test_every_form_of_a_reward_scores_the_rows_in_their_order(scored, name, expected, arguments):
    """Whatever the number of processes, and whoever answers first."""
    verdicts = scored(name, *WORDS, arguments=arguments, workers=1 + (len(arguments) == 0))
    assert [v.score for v in verdicts] == expected, verdicts


@table(
    ("name", "expected"),
    [
        *((name, [2, 1, 3, 4, 0, 5]) for name in ("plain", "later", "Later", "ready_object")),
        *((name, [1, 0, 0, 1, 0, 1]) for name in ("ranked", "ranked_later")),
    ],
)
def test_a_function_in_python_may_have_the_same_forms(file, name, expected):
    scope: dict = {}
    exec(file.read_text(), scope)
    rows = [
        {"prompt": f"p{i // 2}", "response": text, "policy_turns": [text], "answer": i}
        for i, text in enumerate(WORDS)
    ]
    scorer = InProcessScorer(scope[name], concurrency=2)
    batch = Batch(range(6), samples=2)
    assert [v.score for v in scorer.score(rows, batch)] == expected

    async def in_a_notebook():
        return scorer.score(rows, batch)

    assert [v.score for v in asyncio.run(in_a_notebook())] == expected


@table(
    ("deed", "problem"),
    [
        ("wait", "the reward took longer than 0.3 s (reward.timeout_seconds)"),
        ("stubborn", "the reward took longer than 0.3 s (reward.timeout_seconds)"),
        ("block", "the reward took longer than 0.3 s (reward.timeout_seconds)"),
        ("die", "the reward's process ended with code 4"),
        ("raise", "KeyError: 'no'"),
    ],
)
def test_a_coroutine_that_fails_costs_its_own_row_alone(scored, deed, problem, monkeypatch):
    monkeypatch.setattr("tether.rewards.workers.GRACE_SECONDS", 0.2)
    rows = ["a", "bb", deed, "ccc", "d", "ee"]
    for workers in (1, 2) if deed == "block" else (1,):
        verdicts = scored("deeds", *rows, timeout_seconds=0.3, workers=workers)
        assert [v.score for v in verdicts] == [1, 2, None, 3, 1, 2]
        assert verdicts[2].problem.startswith(problem)


def test_calls_in_flight_wait_together(scored):
    began = time.monotonic()
    assert [v.score for v in scored("later", *["a"] * 200, concurrency=100)] == [1] * 200
    # 200 x 8 ms one after the other; the process itself starts in about 0.3 s
    assert time.monotonic() - began < 1.6


def test_a_memory_limit_costs_the_row_that_asks_for_more(scored):
    verdicts = scored("hungry", "a", "eat", "b", memory_gigabytes=0.5)
    assert [v.score for v in verdicts] == [1, None, 1]
    assert "MemoryError" in verdicts[1].problem


def test_a_list_of_the_wrong_length_costs_its_prompt_and_a_bad_entry_its_row(scored):
    verdicts = scored("short", "a", "b", "c")
    assert [v.score for v in verdicts] == [None, None, 1.0]
    assert "1 scores for 2 completions" in verdicts[1].problem
    good, bad = scored("half_bad", "a", "b")
    assert good == Verdict(1.0)
    assert "returned str, not a number" in bad.problem


def test_parts_of_every_form_are_one_sum(file):
    parts = [
        RewardPart(f"{file}:{name}", {}, weight, name)
        for name, weight in (("plain", 1.0), ("ranked", 10.0), ("later", 100.0))
    ]
    rows = [{"prompt": "p", "response": text} for text in ("aa", "a")]
    for workers in (1, 2):
        scorer = ChildScorer(parts, 5.0, workers=workers, concurrency=2)
        verdicts = scorer.score(rows, Batch(range(2), samples=2))
        scorer.close()
        assert [v.score for v in verdicts] == [2 + 10 + 200, 1 + 0 + 100]


def test_a_class_is_made_with_its_constants_or_refused(file):
    class Made:
        def __init__(self, table):
            self.table = table

        def __call__(self, response, answer):
            return self.table[response] + answer

    class NoCall:
        pass

    assert required_columns(Made, {"table": {}}) == ["answer"]
    assert call_reward(Made, {"response": "a", "answer": 2}, {"table": {"a": 1}}) == 3
    with pytest.raises(UserError, match=r"made with 'table'; write it in reward.arguments"):
        required_columns(Made)
    with pytest.raises(UserError, match="class without `__call__`"):
        required_columns(NoCall)
    scorer = ChildScorer([RewardPart(f"{file}:Lookup", {"table": None, "scale": 1})], 5.0)
    [verdict] = scorer.score([{"prompt": "", "response": ""}])
    scorer.close()
    assert "TypeError" in verdict.problem


def test_what_yields_is_refused():
    def numbers(response):
        yield 1.0

    async def later(response):
        yield 1.0

    for function in (numbers, later):
        with pytest.raises(UserError, match="yields instead of returning a number"):
            required_columns(function)
