"""The model that the recipe `reasoning` begins with: what it was taught, and how it reads."""

import hashlib
import importlib.util
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tether import assets
from tether.config.load import load_config
from tether.models.vocabulary import load_tokenizer

pytest.importorskip("reasoning_gym", reason="the extra `reasoning` is not installed")

ROOT = Path(__file__).resolve().parents[2]
STARTER = assets.resolve("tether:reasoning_starter")
FAMILIES = ["chain_sum", "gcd", "leg_counting", "letter_counting", "spell_backward"]
DIGESTS = {
    "model.safetensors": "c5ff2b38a9d741d33871c29af3d76a35dc7f585b3a9ae02dc397ed59e5efde77",
    "tokenizer.json": "3c1aa4549725f8b3b1504b6b4b24b62feb7d5410ee24ed2cc9c9070d9c5b6cf4",
}


@pytest.fixture(scope="module")
def script():
    """`scripts/build_reasoning_starter.py` as a module; scripts find each other by name."""
    path = ROOT / "scripts" / "build_reasoning_starter.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)
        patch.setitem(sys.modules, path.stem, module)  # where dataclasses look for their names
        spec.loader.exec_module(module)
    return module


def heldout(script):
    found = script.families().items()
    return [
        pair
        for family, arguments in found
        for pair in script.draw_questions(family, 1_000_000_000, arguments["size"], arguments)
    ]


def test_training_and_held_out_questions_are_of_the_same_five_families(script):
    data = load_config("reasoning").data
    assert list(script.families()) == FAMILIES
    for train, held in zip(data.files("train"), data.files("heldout"), strict=True):
        assert train.path == held.path
        assert {**train.arguments, "size": 0} == {**held.arguments, "size": 0}


def test_no_lesson_holds_a_held_out_question(script):
    """Of gcd there are 60 x 60 questions, so chance alone would bring some of the 200."""
    asked = {question for question, _ in heldout(script)}
    lesson = replace(script.LESSONS[0], num_questions=1000)
    questions = {question for question, _ in script.draw_lesson(lesson, random.Random(0))}
    assert not asked & questions
    arguments = script.families()["gcd"]
    drawn = script.draw_questions("gcd", lesson.seed, 1000, arguments)
    assert asked & {question for question, _ in drawn}


def test_the_first_lesson_is_right_and_every_second_answer_of_the_last_is_drawn(script):
    first, last = (replace(lesson, num_questions=400) for lesson in script.LESSONS)
    right = dict(
        pair
        for family, arguments in script.families().items()
        for pair in script.draw_questions(family, last.seed, 400, arguments)
    )
    taught = script.draw_lesson(replace(first, seed=last.seed), random.Random(0))
    assert all(right.get(question, answer) == answer for question, answer in taught)
    guessed = script.draw_lesson(last, random.Random(0))
    wrong = sum(right[question] != answer for question, answer in guessed) / len(guessed)
    assert 0.3 < wrong < 0.5  # some draws are right by chance


def test_every_question_and_answer_is_spelt_and_fits(script):
    tokenizer = load_tokenizer("tether:reasoning_starter")
    longest = load_config("reasoning").rollout.max_response_tokens
    for question, answer in heldout(script):
        ids = tokenizer(answer, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == answer
        assert len(ids) < longest  # and EOS
        assert len(tokenizer(question, add_special_tokens=False).input_ids) <= 48


def test_the_shipped_starter_is_the_one_that_was_measured():
    """After `make starter` with another outcome, the table of docs/reasoning-gym.md is another."""
    for name, digest in DIGESTS.items():
        assert hashlib.sha256((STARTER / name).read_bytes()).hexdigest() == digest
