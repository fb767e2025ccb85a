"""The probe that ships, and what is said about one that is broken."""

import json
from collections import Counter

import pytest
from helpers import table

from tether.data.probe import read_probe
from tether.errors import UserError

GOOD = {"question": "How many?", "choices": ["one", "two"], "answer": 1}


def test_the_shipped_facts_are_many_distinct_and_right_at_every_place_alike():
    probe = read_probe("tether:probe")
    assert len(probe.facts) >= 200
    assert len({fact.question for fact in probe.facts}) == len(probe.facts)
    assert {len(set(fact.choices)) for fact in probe.facts} == {4}
    places = Counter(fact.answer for fact in probe.facts)
    assert sorted(places) == [0, 1, 2, 3]
    assert max(places.values()) - min(places.values()) <= 1
    assert len({fact.subject for fact in probe.facts}) >= 8
    assert len(probe.questions) == len(set(probe.questions)) == 20
    assert sum(len(text.split()) for text in probe.texts) > 1000


@table(
    ("row", "reason"),
    [
        ({**GOOD, "answer": 2}, "answer is 2; write the right choice's number, 0 to 1"),
        ({**GOOD, "answer": "one"}, "answer is 'one'"),
        ({**GOOD, "answer": True}, "answer is True"),
        ({**GOOD, "choices": ["one"]}, "two or more choices"),
        ({**GOOD, "choices": ["one", "one"]}, "each of them once"),
        ({**GOOD, "choices": "one two"}, "not a list of texts"),
        ({"choices": ["one", "two"], "answer": 0}, "it has no question"),
        ({**GOOD, "question": "  "}, "the question is empty"),
        (7, "not an object"),
    ],
)
def test_a_broken_item_is_named_by_file_and_line(tmp_path_factory, row, reason):
    folder = tmp_path_factory.mktemp("probe")
    (folder / "facts.jsonl").write_text(f"{json.dumps(GOOD)}\n{json.dumps(row)}\n")
    with pytest.raises(UserError, match="line 2: ") as error:
        read_probe(str(folder))
    assert str(folder / "facts.jsonl") in str(error.value)
    assert reason in str(error.value)


def test_a_folder_without_any_of_the_files_is_not_a_probe(tmp_path):
    with pytest.raises(UserError, match="is not a probe"):
        read_probe(str(tmp_path))
    (tmp_path / "text.jsonl").write_text('{"text": "Only this."}\n')
    assert read_probe(str(tmp_path)).texts == ["Only this."]
