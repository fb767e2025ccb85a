"""Instructions: constraints that fit together, and three ways of being held out."""

import random

from tether import assets
from tether.data.files import read_rows
from tether.rewards.constraints import KINDS, kept
from tether.tasks.instructions import (
    ASKED,
    CONFLICTS,
    SEEN_KINDS,
    UNSEEN_KINDS,
    compositions,
    draw_instructions,
    topics,
)

TRAIN, HELDOUT = (
    read_rows(str(assets.resolve(f"tether:instructions/{name}.jsonl")))
    for name in ("train", "heldout")
)


def kinds(row):
    return frozenset(constraint["kind"] for constraint in row["constraints"])


def topic(row):
    return row["prompt"].removeprefix("Write about ").partition(".")[0]


def test_there_are_60_topics_and_12_kinds_composed_one_to_three_at_a_time():
    assert set(ASKED) == set(KINDS)
    assert len(topics(False)) + len(topics(True)) >= 60
    assert len(SEEN_KINDS) >= 12
    assert len(UNSEEN_KINDS) == 3
    assert {len(row["constraints"]) for row in TRAIN} == {1, 2, 3}
    assert set().union(*map(kinds, TRAIN)) == set(SEEN_KINDS)


def test_held_out_topics_sets_and_kinds_are_in_no_training_prompt():
    seen_topics, seen_sets = set(map(topic, TRAIN)), set(map(kinds, TRAIN))
    parts = {part: [row for row in HELDOUT if row["part"] == part] for part in
             ("topics", "compositions", "kinds")}  # fmt: skip
    assert all(len(rows) >= 50 for rows in parts.values())
    assert not seen_topics & set(map(topic, parts["topics"]))
    assert not seen_sets & set(map(kinds, parts["compositions"]))
    assert all(kinds(row) & set(UNSEEN_KINDS) for row in parts["kinds"])
    assert not set().union(*seen_sets) & set(UNSEEN_KINDS)


def test_constraints_of_a_row_fit_together_and_can_be_checked():
    rng = random.Random(0)
    for part in ("train", "topics", "compositions", "kinds"):
        for one in draw_instructions(rng, part, 100):
            pairs = {frozenset((a, b)) for a in one.kinds for b in one.kinds if a != b}
            assert not pairs & CONFLICTS
            for constraint in one.row(part)["constraints"]:
                assert kept("", constraint) is False  # nothing is kept by saying nothing


def test_a_set_of_kinds_is_on_one_side():
    assert not set(compositions(False)) & set(compositions(True))
    assert {len(found) for found in compositions(True)} == {2, 3}
