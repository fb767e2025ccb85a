"""The demo's data: held out by construction, right answers, and a starter that can read it."""

import re

import pytest
from helpers import table
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from tether import assets
from tether.data.files import read_rows
from tether.data.messages import render_prompt
from tether.tasks.arithmetic import split_of

SUM = re.compile(r"(\d+)\+(\d+)")


def pairs(name: str) -> set[tuple[int, int]]:
    found = (SUM.search(row["prompt"]) for row in read_rows(f"tether:arithmetic/{name}.jsonl"))
    return {tuple(sorted((int(m[1]), int(m[2])))) for m in found}


def test_no_pair_of_operands_is_on_both_sides():
    train, heldout = pairs("train"), pairs("heldout")
    assert not train & heldout
    assert {split_of(*pair) for pair in train} == {"train"}
    assert {split_of(*pair) for pair in heldout} == {"heldout"}


@given(st.integers(0, 99), st.integers(0, 99))
def test_the_order_of_the_operands_does_not_change_the_side(a, b):
    assert split_of(a, b) == split_of(b, a)


@table("name", ["train", "heldout"])
def test_every_answer_is_right(name):
    for row in read_rows(f"tether:arithmetic/{name}.jsonl"):
        a, b = map(int, SUM.search(row["prompt"]).groups())
        claim = re.search(r"=(\d+)", row["prompt"])
        if claim is None:
            expected = f"{a + b}"
        elif "你知道" in row["prompt"]:
            verdict = "是的" if int(claim[1]) == a + b else "不对"
            expected = f"{verdict}，{a}+{b}={a + b}"
        else:
            verdict = "Yes" if int(claim[1]) == a + b else "No"
            expected = f"{verdict}, {a}+{b}={a + b}"
        assert row["answer"] == expected


@pytest.fixture(scope="module")
def starter_tokenizer():
    return AutoTokenizer.from_pretrained(assets.resolve("tether:starter"))


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_the_starters_tokenizer_round_trips_any_text(starter_tokenizer, text):
    ids = starter_tokenizer(text, add_special_tokens=False).input_ids
    special = starter_tokenizer.all_special_tokens
    if not any(token in text for token in special):
        assert starter_tokenizer.decode(ids) == text


def test_every_digit_is_a_token_of_its_own(starter_tokenizer):
    ids = starter_tokenizer("1234", add_special_tokens=False).input_ids
    assert [starter_tokenizer.decode([i]) for i in ids] == ["1", "2", "3", "4"]


def test_the_template_opens_the_assistants_turn(starter_tokenizer):
    ids = render_prompt(starter_tokenizer, "1+1=?", "Be brief.")
    assert starter_tokenizer.decode(ids) == "<|system|>Be brief.<|user|>1+1=?<|assistant|>"


def test_the_starter_is_a_llama_of_about_a_million_parameters():
    model = AutoModelForCausalLM.from_pretrained(assets.resolve("tether:starter"))
    assert model.config.model_type == "llama"
    assert 0.5e6 < model.num_parameters() < 1.5e6
