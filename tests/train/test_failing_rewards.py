"""A reward that fails says where, on which row, and leaves its words in the run; one that is wrong
from the start is found before training."""

import json

import pytest
from helpers import changed, read_jsonl

from tether import api
from tether.config.load import validate_config
from tether.errors import RunStopped, UserError

FAILS = """
def f(response, answer):
    print("looking at", answer, "\\x1b[31m")
    return float(response.split("=")[1])
"""


@pytest.fixture
def config(tiny_config, tmp_path):
    """The tiny run with the reward `f` of this text."""

    def made(text: str, **dotted) -> dict:
        path = tmp_path / "mine.py"
        path.write_text(text)
        return changed(tiny_config, reward__kind=f"{path}:f", **dotted)

    return made


def test_a_run_that_stops_says_file_line_row_and_reason_and_keeps_them(config, tmp_path):
    """Before the first iteration: the evaluation's rows are named in the run as well."""
    with pytest.raises(RunStopped) as stop:
        api.train(validate_config(config(FAILS)))
    run = tmp_path / "run"
    said = str(stop.value)
    assert "18 of 18 rows could not be scored" in said
    assert "IndexError: list index out of range (mine.py, line 4, in f)" in said
    assert "prompt '0+1=?', response '" in said
    assert f"All of them are in {run / 'events.jsonl'}." in said
    assert f"What the reward printed is in {run / 'reward.log'}." in said
    events = read_jsonl(run / "events.jsonl")
    unscorable = [e for e in events if e["kind"] == "unscorable"]
    assert [e["row"] for e in unscorable] == list(range(18))
    assert "(mine.py, line 4, in f); prompt '0+1=?'" in unscorable[0]["message"]
    assert events[-1]["kind"] == "stopped"
    assert "18 of 18 rows could not be scored" in events[-1]["message"]
    log = (run / "reward.log").read_text()
    assert "looking at 1 \\x1b[31m\n" in log
    assert "\x1b" not in log


def test_a_trace_says_as_much(config, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(config(FAILS)))
    with pytest.raises(UserError) as stop:
        api.trace("0+1=?", str(recipe), columns={"answer": "1"})
    said = str(stop.value)
    assert "(mine.py, line 4, in f); prompt '0+1=?', response '" in said
    assert "events.jsonl" not in said  # there is no run
    assert "It had printed:\nlooking at 1 \\x1b[31m" in said


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def f(response): return '1.0'\n", "returned str, not a number"),
        (
            "def f(response): return [1.0]\n",
            "returned a list for one row",
        ),
        ("def f(completions, **kwargs): return 1.0\n", "returned float, not a list"),
        ("def f(response): yield 1.0\n", "yields instead of returning a number"),
    ],
)
@pytest.mark.parametrize("start", [api.check, api.train])
def test_a_reward_that_can_never_score_is_found_before_training(config, tmp_path, text, why, start):
    with pytest.raises(UserError, match=why):
        start(validate_config(config(text)))
    assert not (tmp_path / "run").exists()


def test_a_check_says_what_the_reward_returned(config):
    text = "def f(response, answer):\n    return {'1': 0.5, '22': None}.get(answer) or 1 / 0\n"
    plan = api.check(validate_config(config(text)))
    half, *others = plan.reward_lines()
    assert half[0].endswith("train.jsonl, row 1")
    assert half[1:] == ("0.5", "for the response '1'")
    assert others[0][1] == "no score"
    assert "for the response '22': ZeroDivisionError: division by zero (mine.py" in others[0][2]


def test_a_reward_with_no_opinion_of_a_made_up_response_is_no_reason_to_refuse(config):
    text = "def f(response): return None if len(response) < 4 else 1.0\n"
    plan = api.check(validate_config(config(text)))
    assert {line[1] for line in plan.reward_lines()} == {"no score"}


def test_a_function_handed_over_in_python_is_tried_by_check_alone(tiny_config):
    called = []

    def reward(response):
        called.append(response)
        return 1.0

    plan = api.check(validate_config(tiny_config), reward)
    assert [line[1] for line in plan.reward_lines()] == ["1", "1", "1"]
    assert called == ["1", "22", "333"]


def test_a_reward_in_python_cannot_change_the_rows_of_others(tiny_config, tmp_path):
    rows = [{"prompt": f"{i}", "answer": f"{i}", "nested": {"seen": []}} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    seen = []

    def reward(response, nested):
        nested["seen"].append(response)
        seen.append(len(nested["seen"]))
        return 1.0

    fields = {"data__train": str(tmp_path / "rows.jsonl"), "data__heldout": None}
    api.train(validate_config(changed(tiny_config, **fields)), reward)
    assert set(seen) == {1}
