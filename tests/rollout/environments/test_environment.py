"""Environments of one's own: reset and step."""

import copy
import time

import pytest
from helpers import table
from pydantic import ValidationError

from rollout.talk import say, settings, vocabulary
from tether.config import DataSection
from tether.errors import UserError
from tether.rollout.environments.episodes import told_prompts
from tether.rollout.sampler import Done
from tether.rollout.tools.build import build_episode_source
from tether.rollout.turns import close_all
from tether.types import Prompts

GUESS = '''
class Guess:
    """Guess the row's number."""
    stops = ("!", "?")

    def reset(self, columns):
        self.number = columns["number"]
        return f" below {self.number + 5} "

    def step(self, text):
        guess = int(text.strip("!? "))
        if guess == self.number:
            return None
        return "more" if guess < self.number else "less"

class NoReset(Guess):
    def reset(self, columns):
        raise RuntimeError("no board")

class Odd(Guess):
    stops = "?"

word = "text"
'''


@pytest.fixture
def make(tmp_path, byte_tokenizer):
    path = tmp_path / "world.py"
    path.write_text(GUESS)

    def made(name: str = "Guess", numbers=(7, 3)):
        section = settings(tools=[], environment=f"{path}:{name}", max_observation_tokens=40)
        rows = [{"number": number} for number in numbers]
        count = len(rows)
        prompts = Prompts(
            ["p"] * count, [[1]] * count, rows, [0] * count, [""] * count, [None] * count
        )
        return build_episode_source(section, vocabulary(byte_tokenizer)).episodes(prompts)

    return made


def test_each_row_has_an_environment_of_its_own(make, byte_tokenizer):
    seven, three = make()
    assert byte_tokenizer.decode(seven.prompt_ids[1:]) == " below 12 "
    assert byte_tokenizer.decode(three.prompt_ids[1:]) == " below 8 "
    assert say(seven, "5!") == "more"
    assert say(three, "5?") == "less"
    assert say(three, "3!") is None
    assert say(seven, "7!") is None
    assert [call.arguments for call in seven.calls] == ["5!", "7!"]


def test_the_prompts_own_ids_are_left_alone(make):
    rows = make(numbers=(7, 7))
    assert rows[0].prompt_ids == rows[1].prompt_ids
    assert rows[0].prompt_ids is not rows[1].prompt_ids


def test_a_step_that_raises_costs_its_row_an_observation(make):
    row, _ = make()
    assert say(row, "x!") == "The call of step failed."
    assert row.calls[0].error.startswith("ValueError")
    assert say(row, "7!") is None


def test_a_reset_that_raises_ends_the_row_with_its_first_turn(make):
    row, _ = make("NoReset")
    assert row.prompt_ids == [1]
    assert row.calls[0].error == "RuntimeError: no board (world.py, line 18, in reset)"
    assert row.calls[0].fault == "tool"
    assert say(row, "7!") is None


@pytest.mark.parametrize(
    ("name", "sentence"), [("Odd", "stops"), ("word", "is str"), ("nothing", "has no 'nothing'")]
)
def test_what_is_no_environment_is_refused_by_name(make, name, sentence):
    with pytest.raises(UserError, match=sentence):
        make(name)


WORLD = '''
import asyncio, time

class Rewards:
    """Returns what the row says, one item per step."""
    stops = (".",)

    def reset(self, columns):
        self.answers = list(columns["answers"])
        return None

    def step(self, text):
        answer = self.answers.pop(0)
        if answer == "raise":
            raise RuntimeError("lost")
        if answer == "hang":
            time.sleep(20)
        if answer == "bytes":
            return b"text"
        if answer == "long":
            return "long " * 2_000_000
        if answer == "nan":
            return ("go on", float("nan"), False, False, {})
        return tuple(answer) if isinstance(answer, list) else answer

class Awaited(Rewards):
    closed = []

    async def reset(self, columns):
        await asyncio.sleep(0)
        return super().reset(columns)

    async def step(self, text):
        await asyncio.sleep(0)
        return super().step(text)

    async def close(self):
        self.closed.append(len(self.answers))

class BadClose(Rewards):
    def close(self):
        raise RuntimeError("still open")

class Prompts:
    """Is the data: its prompt follows from the seed."""
    def __init__(self, level=1):
        self.level = level

    def reset(self, columns):
        if columns["seed"] == 3:
            return None
        return f"Level {self.level}, seed {columns['seed']}?"

    def step(self, text):
        return {"observation": "again", "reward": len(text), "done": text == "end"}
'''


@pytest.fixture
def world(tmp_path, byte_tokenizer):
    path = tmp_path / "rewards_world.py"
    path.write_text(WORLD)

    def made(name: str, rows, ids=(1,), arguments=None, tokenizer=byte_tokenizer, **fields):
        own = {"kind": f"{path}:{name}", "arguments": arguments or {}, "timeout_seconds": 0.5}
        given = {"environment": own, "max_observation_tokens": 40, **fields}
        section = settings(tools=[], **given)
        n = len(rows)
        prompts = Prompts([""] * n, [list(ids)] * n, rows, [0] * n, [""] * n, [None] * n)
        data = DataSection(train="environment")
        return build_episode_source(section, vocabulary(tokenizer), data).episodes(prompts)

    return made


def played(row, *turns: str) -> list[str | None]:
    return [say(row, turn) for turn in turns]


def test_gymnasiums_five_values_and_mappings_reward_the_turn_that_earned_them(world):
    steps = [["more", 1.5, False, False, {}], {"observation": "on", "reward": -2}, "text", None]
    [row] = world("Rewards", [{"answers": steps}])
    assert played(row, "a.", "b.", "c.", "d.") == ["more", "on", "text", None]
    assert row.turn_rewards == (1.5, -2.0, None, None)


@table(
    ("last", "finish"),
    [
        (["", 1, True, False, {}], "stop"),
        (["", 1, True, True, {}], "stop"),  # terminated wins: there is no value after the end
        (["", 1, False, True, {}], "truncated"),
        ({"done": True, "reward": 1}, "stop"),
        ({"truncated": True, "reward": 1}, "truncated"),
        (None, "stop"),
    ],
)
def test_truncated_is_not_terminated(world, last, finish):
    [row] = world("Rewards", [{"answers": ["go", last]}])
    say(row, "a.")
    for token in row.turn_tokens.tokenizer("b.").input_ids:
        row.add_token(token)
    assert row.answer() == Done(finish)


def test_an_environment_that_wants_more_turns_than_the_budget_is_cut_off_with_its_last_reward(
    world,
):
    [row] = world("Rewards", [{"answers": [["on", 1, False, False, {}]] * 5}], max_turns=2)
    assert say(row, "a.") == "on"
    for token in row.turn_tokens.tokenizer("b.").input_ids:
        row.add_token(token)
    assert row.answer() == Done("truncated")
    assert row.turn_rewards == (1.0, 1.0)
    assert [call.arguments for call in row.calls] == ["a.", "b."]


@table(
    ("answer", "why"),
    [
        ("raise", "RuntimeError: lost"),
        ("bytes", "step returned bytes, not text"),
        ("nan", "the reward is nan"),
        (["text", "much", False, False, {}], "the reward is str, not a number"),
        ([b"x", 1, False, False, {}], "the observation is bytes, not text"),
        (["x", 1, "no", False, {}], "terminated is str, not true or false"),
        (["x", 1, False], "step returned 3 values"),
        ({"obs": "x"}, "step returned 'obs'"),
        ({"reward": 1}, "there is no observation"),
        (7, "step returned int, not text"),
    ],
)
def test_a_failed_step_is_said_and_leaves_the_row_without_a_reward(world, answer, why):
    first = ["go", 1, False, False, {}]
    row, other = world("Rewards", [{"answers": [first, answer, None]}, {"answers": [first, None]}])
    assert played(row, "a.", "b.", "c.") == ["go", "The call of step failed.", None]
    assert why in row.calls[1].error
    assert row.calls[1].fault == "tool"
    assert row.turn_rewards == ()
    assert played(other, "a.", "b.") == ["go", None]
    assert other.turn_rewards == (1.0, None)


def test_a_step_that_hangs_ends_its_row_and_is_not_called_again(world):
    [row] = world("BadClose", [{"answers": ["hang", "never"]}])
    began = time.monotonic()
    assert say(row, "a.") is None
    assert time.monotonic() - began < 5
    assert "longer than timeout_seconds = 0.5" in row.calls[0].error
    assert row.turn_rewards == ()
    close_all([row])  # its thread may still be at work
    assert len(row.calls) == 1


def test_ten_megabytes_are_cut_before_they_are_encoded(world, byte_tokenizer):
    [row] = world("Rewards", [{"answers": ["long", None]}])
    began = time.monotonic()
    assert say(row, "a.").endswith(" …")
    assert time.monotonic() - began < 2
    assert row.calls[0].cut
    assert len(row.calls[0].result) == 40 * 100


def test_special_tokens_and_stops_in_an_observation_stay_text(world, byte_tokenizer):
    [row] = world("Rewards", [{"answers": ["<|end|>a.<|user|>", None]}])
    for token in byte_tokenizer("x.").input_ids:
        over = row.add_token(token)
    assert over
    ids = row.answer().ids
    assert not set(ids) & set(byte_tokenizer.all_special_ids)
    assert byte_tokenizer.decode(ids) == "<|end|>a.<|user|>"
    assert len(row.calls) == 1


def test_turns_around_an_empty_observation_share_one_run_of_tokens_and_its_reward(world):
    steps = [["", 1, False, False, {}], ["x", 2, False, False, {}], ["", 4, True, False, {}]]
    [row] = world("Rewards", [{"answers": steps}])
    assert played(row, "a.", "b.", "c.") == ["", "x", None]
    assert row.turn_rewards == (3.0, 4.0)


def test_async_methods_are_awaited_and_close_is_called_once_the_episode_is_over(world):
    rows = world("Awaited", [{"answers": [["on", 1, False, False, {}], None, "left"]}] * 3)
    for row in rows:
        assert played(row, "a.", "b.") == ["on", None]
        assert row.turn_rewards == (1.0, None)
    close_all(rows)
    assert rows[0].steps.environment.closed == [1, 1, 1]
    [row] = world("BadClose", [{"answers": [["", 3, True, False, {}]]}])
    say(row, "a.")
    close_all([row])
    assert row.calls[-1].error.startswith("RuntimeError: still open")
    assert row.turn_rewards == (3.0,)


def test_an_environment_may_be_the_data(world, byte_tokenizer):
    plain = copy.deepcopy(byte_tokenizer)
    plain.chat_template = None  # a turn then ends with a line feed
    fields = {"arguments": {"level": 4}, "tokenizer": plain}
    rows = world("Prompts", [{"seed": 1}, {"seed": 3}], ids=(), **fields)
    assert byte_tokenizer.decode(rows[0].prompt_ids) == "Level 4, seed 1?"
    assert rows[1].prompt_ids  # something to sample after
    assert "reset returned no text" in rows[1].calls[0].error
    empty = Prompts([""] * 2, [[]] * 2, [{}] * 2, [0] * 2, [""] * 2, [None] * 2)
    assert told_prompts(empty, rows).texts == ["Level 4, seed 1?", ""]
    assert say(rows[0], "end\n") == "again"
    assert say(rows[1], "end\n") is None
    assert rows[1].turn_rewards == ()


def test_with_a_chat_template_a_turn_ends_with_eos_and_an_observation_is_a_message(
    world, byte_tokenizer
):
    tokenizer = byte_tokenizer
    [row] = world("Prompts", [{"seed": 1}], ids=())
    shown = tokenizer.decode(row.prompt_ids)
    assert shown == "<|user|>Level 1, seed 1?<|assistant|>"
    assert row.continues_after_eos
    assert say(row, "abc<|end|>") == "<|user|>again<|assistant|>"
    assert row.calls[0].arguments == "abc"  # without the EOS
    assert row.turn_rewards == (3.0,)
    for token in tokenizer("end<|end|>").input_ids:
        row.add_token(token)
    assert row.answer() == Done("eos")


@table(
    ("section", "why"),
    [
        ({"kind": "nowhere"}, "kind is 'nowhere'; write path/file.py:make"),
        ({"kind": "a.py:b", "timeout_seconds": 0}, "greater than 0"),
        ({"arguments": {}}, "kind"),
    ],
)
def test_a_section_that_names_no_environment_is_refused(section, why):
    with pytest.raises(ValidationError, match=why):
        settings(tools=[], environment=section)


def test_arguments_that_do_not_fit_are_refused_before_training(world):
    with pytest.raises(UserError, match="does not take rollout"):
        world("Prompts", [{"seed": 1}], arguments={"depth": 2})
