"""Rows that no file holds: seeds of an environment, questions of reasoning-gym."""

import pytest
from helpers import changed, table

from tether.config import DataSection
from tether.config.load import validate_config
from tether.data.prompts import load_prompts
from tether.errors import UserError
from tether.rewards.rules import RULES, tagged_answer

reasoning_gym = pytest.importorskip(
    "reasoning_gym", reason="the extra `reasoning` is not installed"
)
SMALL = {"size": 20, "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def source(**arguments):
    return [{"path": "reasoning_gym:chain_sum", "arguments": {**SMALL, **arguments}}]


def test_the_rows_are_the_packages_own_questions_and_its_scores_too(byte_tokenizer):
    data = DataSection(train=source(), heldout=source())
    rows = load_prompts(data.files("train"), data, byte_tokenizer)
    own = reasoning_gym.create_dataset("chain_sum", seed=0, **SMALL)
    assert rows.prompts.texts == [item["question"] for item in own]
    score = RULES["reasoning_gym"]
    for number, item in enumerate(own):
        column = rows.prompts.columns[number]
        assert column["answer"] == item["answer"]
        for answer in (item["answer"], "7", "", "no idea", None):
            said = str(answer)
            expected = own.score_answer(said, item)
            assert score(said, column["reasoning_gym"]) == expected
            assert score(f"so <answer> {said} </answer>", column["reasoning_gym"]) == expected


def test_heldout_rows_have_other_seeds_and_no_question_of_training(byte_tokenizer):
    data = DataSection(train=source(size=60), heldout=source(size=60))
    train, heldout = (
        load_prompts(data.files(split), data, byte_tokenizer, heldout=split == "heldout")
        for split in ("train", "heldout")
    )
    own = reasoning_gym.create_dataset("chain_sum", seed=10**9, **{**SMALL, "size": 60})
    assert heldout.prompts.texts == [item["question"] for item in own]
    kept = heldout.without(train)
    assert set(kept.prompts.texts) == set(heldout.prompts.texts) - set(train.prompts.texts)
    assert 0 < len(kept) < len(heldout)
    assert kept.sizes == [len(kept)]
    assert "held-out questions are training questions as well" in kept.broken[0]


@table(
    ("path", "arguments", "why"),
    [
        ("reasoning_gym:nothing", {}, "has no family 'nothing'"),
        ("reasoning_gym:chain_sum", {"colour": 1}, "refuses its arguments"),
        ("reasoning_gym:chain_sum", {"min_terms": -1}, "refuses its arguments"),
    ],
)
def test_a_family_that_cannot_be_made_is_refused(byte_tokenizer, path, arguments, why):
    data = DataSection(train=[{"path": path, "arguments": arguments}])
    with pytest.raises(UserError, match=why):
        load_prompts(data.files("train"), data, byte_tokenizer)


def test_an_environments_rows_are_seeds_with_what_else_is_written(byte_tokenizer):
    given = [{"path": "environment", "arguments": {"size": 3, "seed": 5, "level": 2}}]
    data = DataSection(train=given, max_prompt_tokens=70)
    rows = load_prompts(data.files("train"), data, byte_tokenizer)
    assert rows.prompts.columns == [{"seed": s, "level": 2} for s in (5, 6, 7)]
    assert rows.prompts.ids == [[], [], []]
    assert rows.longest == 70  # what nobody knows yet is taken to be as long as it may be
    heldout = load_prompts("environment", data, byte_tokenizer, heldout=True)
    assert heldout.prompts.columns[0] == {"seed": 10**9}
    assert len(heldout) == 1000


@table(
    ("data", "why"),
    [
        ({"train": source(), "heldout": source(seed=19)}, "both have the seeds 19 to 19"),
        ({"train": [{"path": "a.jsonl", "arguments": {"size": 2}}]}, "arguments go with"),
        ({"train": source(size=0)}, "arguments.size is 0"),
        ({"train": source(seed="x")}, "arguments.seed is 'x'"),
        ({"train": "environment"}, "rollout.environment is not set"),
    ],
)
def test_sources_that_cannot_be_meant_are_refused(tiny_config, data, why):
    with pytest.raises(UserError) as refused:
        validate_config(changed(tiny_config, data=data))
    assert why in str(refused.value)


@table(
    ("response", "answer"),
    [
        (" 7 ", "7"),
        ("<answer>1</answer> <answer> 2\n</answer>", "2"),
        ("<answer>1", "<answer>1"),
    ],
)
def test_the_last_answer_between_tags_counts_or_else_all(response, answer):
    assert tagged_answer(response) == answer
