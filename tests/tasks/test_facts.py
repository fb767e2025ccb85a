"""The world of `search_qa`: true, held out by document, found by search, and not to be guessed."""

import hashlib
import importlib.util
import random
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from helpers import table
from transformers import AutoModelForCausalLM, AutoTokenizer

from tether import assets
from tether.data.files import read_rows
from tether.tasks.facts import (
    Entity,
    Question,
    ask_one_hop,
    ask_two_hop,
    draw_world,
    split_of,
)

ROOT = Path(__file__).resolve().parents[2]
FOLDER = assets.resolve("tether:search")
STARTER = assets.resolve("tether:search_starter")
DIGESTS = {
    "model.safetensors": "7824e6a93b3b2374947bb86acbb45358d194bfb098b08d711370102ddb89f23c",
    "tokenizer.json": "87d9b950db67977d782daca61afda0e5a428e2ad1e5c973296291fd7b69c93be",
}

NAME = r"(.+?)"
STATEMENTS = {
    rf"{NAME} was born in the year (\d+) in the town {NAME}\.": ("year", "town"),
    rf"{NAME} was founded in the year (\d+) and has mayor {NAME} and judge {NAME}\.": (
        *("year", "mayor", "judge"),
    ),
    rf"{NAME}，出生年份(\d+)，出生地{NAME}。": ("year", "town"),
    rf"{NAME}，建镇年份(\d+)，镇长{NAME}，法官{NAME}。": ("year", "mayor", "judge"),
}
# What is asked, in the order in which it is looked up.
QUESTIONS = {
    rf"In which (year|town) was {NAME} born\?": [1],
    rf"In which (year) was {NAME} founded\?": [1],
    rf"Who is the (mayor|judge) of {NAME}\?": [1],
    rf"In which (year|town) was the (mayor|judge) of {NAME} born\?": [2, 1],
    rf"In which (year) was the (town) where {NAME} was born founded\?": [2, 1],
    rf"Who is the (mayor|judge) of the (town) where {NAME} was born\?": [2, 1],
    rf"{NAME}的(?:出生|建镇)(年份)是哪一年？": [2],
    rf"{NAME}的(出生地|镇长|法官)是(?:谁|哪里)？": [2],
    rf"{NAME}的(镇长|法官)的出生(年份)是哪一年？": [2, 3],
    rf"{NAME}的(镇长|法官)的(出生地)是哪里？": [2, 3],
    rf"{NAME}的(出生地)的建镇(年份)是哪一年？": [2, 3],
    rf"{NAME}的(出生地)的(镇长|法官)是谁？": [2, 3],
}
CHINESE = {"年份": "year", "出生地": "town", "镇长": "mayor", "法官": "judge"}


def corpus() -> dict[str, dict[str, str]]:
    """Facts by title, read from the documents' text."""
    facts = {}
    for row in read_rows("tether:search/corpus.jsonl"):
        title, text = row["contents"].split("\n")
        [(found, names)] = [
            (match, names)
            for pattern, names in STATEMENTS.items()
            if (match := re.fullmatch(pattern, text))
        ]
        assert found[1] == title
        facts[title] = dict(zip(names, found.groups()[1:], strict=True))
    return facts


def look_up(prompt: str, facts: dict[str, dict[str, str]]) -> tuple[str, list[str]]:
    """The answer, and the titles of the documents on the way to it. Of the readings of a question
    the one counts whose subject exists."""
    for pattern, path in QUESTIONS.items():
        match = re.fullmatch(pattern, prompt)
        name = match and next((group for group in match.groups() if group in facts), None)
        if name is None:
            continue
        titles, value = [], name
        for number in path:
            titles.append(value)
            value = facts[value][CHINESE.get(match[number], match[number])]
        return value, titles
    raise AssertionError(f"no reading of {prompt!r}")


def questions(name: str) -> list[dict]:
    return list(read_rows(f"tether:search/{name}.jsonl"))


@table("name", ["train", "heldout"])
def test_every_answer_stands_in_the_last_document_of_its_path(name):
    facts = corpus()
    for row in questions(name):
        answer, titles = look_up(row["prompt"], facts)
        assert row["ground_truth"] == answer
        assert row["hops"] == len(titles)


def test_no_document_answers_on_both_sides():
    facts = corpus()
    read = {
        name: {look_up(row["prompt"], facts)[1][-1] for row in questions(name)}
        for name in ("train", "heldout")
    }
    assert not read["train"] & read["heldout"]
    prompts = {name: {row["prompt"] for row in questions(name)} for name in read}
    assert not prompts["train"] & prompts["heldout"]


def test_the_side_depends_on_the_last_document_alone():
    def question(*names: str) -> Question:
        return Question("?", "!", "year", tuple(Entity(n, "town", "english", {}) for n in names))

    assert split_of(question("A", "Vask Fen")) == split_of(question("Vask Fen"))
    sides = {split_of(question(f"Town {n}")) for n in range(40)}
    assert sides == {"train", "heldout"}


@table("name", ["train", "heldout"])
def test_half_of_the_questions_need_two_documents_in_each_language(name):
    counts = Counter((row["hops"], row["prompt"].isascii()) for row in questions(name))
    total = sum(counts.values())
    assert counts[1, True] + counts[1, False] == total / 2
    assert all(count > total / 6 for count in counts.values())
    assert len(counts) == 4


def test_the_best_guess_is_right_less_than_once_in_twenty():
    """The commonest answer of the training questions of the same form; names taken out."""
    names = re.compile("|".join(map(re.escape, sorted(corpus(), key=len, reverse=True))))

    def form(row: dict) -> str:
        return names.sub("X", row["prompt"])

    seen = defaultdict(Counter)
    for row in questions("train"):
        seen[form(row)][row["ground_truth"]] += 1
    heldout = questions("heldout")
    right = sum(seen[form(row)].most_common(1)[0][0] == row["ground_truth"] for row in heldout)
    assert right / len(heldout) < 0.05


def test_no_answer_stands_in_its_question():
    assert not [row for row in questions("heldout") if row["ground_truth"] in row["prompt"]]


def test_searching_a_name_finds_its_document_first():
    from tether.rollout.tools.search import Bm25, read_corpus

    index = Bm25(read_corpus("tether:search/corpus.jsonl"))
    for title in corpus():
        [(document, _)] = index.search(title, 1)
        assert document["contents"].startswith(f"{title}\n")


@pytest.fixture(scope="module")
def script():
    """`scripts/build_search_starter.py` as a module; scripts find each other by name."""
    path = ROOT / "scripts" / "build_search_starter.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)
        patch.setitem(sys.modules, path.stem, module)  # where dataclasses look for their names
        spec.loader.exec_module(module)
    return module


def test_the_shipped_world_is_what_the_script_makes(script, tmp_path):
    script.write_world(tmp_path, random.Random("world 0"))
    names = ["corpus.jsonl", "heldout.jsonl", "train.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for name in names:
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()


def test_the_shipped_starter_is_the_one_that_was_measured():
    """After `make starter` with another outcome, `make search` has to be run as well."""
    for name, digest in DIGESTS.items():
        assert hashlib.sha256((STARTER / name).read_bytes()).hexdigest() == digest


def test_the_starters_habits_are_poor_but_what_it_read_it_tells(script):
    rng = random.Random(0)
    world = draw_world(rng, "english", num_people=60, num_towns=20)
    searched, found = [], 0
    for question in [*ask_one_hop(world), *ask_two_hop(world)] * 4:
        spans = list(script.transcribe(question, world, script.LESSONS[-1].habits, rng))
        read = [span.text.split("\n")[0] for span in spans if not span.learnt]
        searched.append(bool(read))
        if read == [entity.name for entity in question.path]:
            found += 1
            assert spans[-1].text == f"<answer> {question.answer} </answer>"
    assert sum(searched) < 0.5 * len(searched)
    assert 0 < found < 0.3 * len(searched)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(STARTER)


@pytest.mark.parametrize("tag", ["search", "information", "answer"])
def test_a_tag_is_one_token_and_may_also_be_split(tokenizer, tag):
    for mark in (f"<{tag}>", f"</{tag}>"):
        assert len(tokenizer(mark, add_special_tokens=False).input_ids) == 1
        split = [i for char in mark for i in tokenizer(char, add_special_tokens=False).input_ids]
        assert len(split) == len(mark)
        assert tokenizer.decode(split) == mark


def test_a_row_is_short(tokenizer):
    """A question and two documents with their searches."""
    facts = [row["contents"] for row in read_rows("tether:search/corpus.jsonl")]
    documents = [len(tokenizer(text, add_special_tokens=False).input_ids) for text in facts]
    prompts = [
        len(tokenizer(row["prompt"], add_special_tokens=False).input_ids)
        for row in questions("heldout")
    ]
    assert max(documents) <= 26
    assert max(prompts) <= 8


def test_the_starter_is_a_llama_of_less_than_a_million_parameters():
    model = AutoModelForCausalLM.from_pretrained(STARTER)
    assert model.config.model_type == "llama"
    assert 0.3e6 < model.num_parameters() < 1e6
