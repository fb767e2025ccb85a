"""Rows as verl, TRL and others write them."""

import pytest
from helpers import table

from tether.data.files import BadRow
from tether.data.messages import parse_prompt, prompt_text, require_columns, reward_columns

USER = {"role": "user", "content": "1+1=?"}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [USER],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0},
}


def test_a_prompt_is_text_or_messages_and_null_fields_of_a_message_are_dropped():
    assert parse_prompt({"prompt": "hi"}, "prompt") == "hi"
    system = {"role": "system", "content": "Be brief."}
    messages = [{**system, "name": None}, {**USER, "name": "Ann"}]
    assert parse_prompt({"q": messages}, "q") == [system, {**USER, "name": "Ann"}]


@table(
    ("prompt", "reason"),
    [
        (None, "NoneType, not text"),
        ({"role": "user"}, "dict, not text"),
        ([], "empty"),
        (["hi"], "message 1 of the prompt is str"),
        ([USER, {"role": "user"}], "message 2 of the prompt: its content is missing"),
        ([{"role": "user", "content": [{"type": "image"}]}], "its content is list, not text"),
        ([{"role": None, "content": "x"}], "its role is NoneType"),
        ([{"role": "user", "content": " "}], "message 1 of the prompt is empty"),
        ([{"role": "user", "content": "\ud800"}], "half a surrogate"),
        ([USER, {"role": "assistant", "content": "2"}], "the last message is the assistant's"),
    ],
)
def test_what_is_no_prompt_is_refused(prompt, reason):
    with pytest.raises(BadRow, match=reason):
        parse_prompt({"prompt": prompt}, "prompt")


def test_messages_are_readable_as_who_says_what():
    assert prompt_text([USER]) == "1+1=?"
    assert prompt_text([{"role": "system", "content": "Add."}, USER]) == "system: Add.\nuser: 1+1=?"


def test_verls_ground_truth_comes_out_of_the_reward_model():
    columns = reward_columns(VERL, "prompt", {})
    assert columns["ground_truth"] == "2"
    assert columns["reward_model"] == VERL["reward_model"]
    assert "prompt" not in columns
    own = reward_columns({**VERL, "ground_truth": "3"}, "prompt", {})
    assert own["ground_truth"] == "3"  # a column of that name is not overwritten


def test_a_column_can_be_given_another_name_also_from_inside_one():
    renamed = {
        "answer": "ground_truth",
        "style": "reward_model.style",
        "number": "extra_info.index",
    }
    columns = reward_columns(VERL, "prompt", renamed)
    assert (columns["answer"], columns["style"], columns["number"]) == ("2", "rule", 0)
    dotted = reward_columns({"a.b": 1, "a": {"b": 2}}, "prompt", {"c": "a.b"})
    assert dotted["c"] == 1  # the column of that very name comes first


@table("path", ["solution", "reward_model.truth", "ability.x", "prompt"])
def test_a_name_for_what_is_not_there_is_refused(path):
    with pytest.raises(BadRow, match=rf"data\.columns asks for '{path}'.*data_source"):
        reward_columns(VERL, "prompt", {"answer": path})


def test_a_column_that_the_reward_wants_must_be_there_and_not_null():
    require_columns(["answer"], {"answer": ""})
    with pytest.raises(
        BadRow, match=r"asks for 'answer', but it has only a, b; .*data\.columns\.a"
    ):
        require_columns(["answer"], {"a": 1, "b": 2})
    with pytest.raises(BadRow, match="asks for 'answer', but it is null there"):
        require_columns(["answer"], {"answer": None})


@table("name", ["completion_ids", "trainer_state"])
def test_what_only_trl_hands_over_is_not_asked_of_the_data(name):
    with pytest.raises(BadRow, match=rf"{name}'.*give the parameter a default, or take it by"):
        require_columns([name], {"answer": "2"})
    require_columns([name], {name: [1, 2]})  # unless the data have such a column
