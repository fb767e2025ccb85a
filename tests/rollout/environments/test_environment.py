"""Environments of one's own: reset and step."""

import pytest

from rollout.talk import say, settings, vocabulary
from tether.errors import UserError
from tether.rollout.tools.build import build_episode_source
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
