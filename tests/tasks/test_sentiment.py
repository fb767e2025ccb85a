"""Openings of reviews: many, varied, and held out by thing and by beginning."""

import random
from collections import Counter

import tether
from tether import assets
from tether.config.load import load_config
from tether.data.files import read_rows
from tether.run.reader import read_lines
from tether.tasks.sentiment import GROUPS, draw_openings, openings


def shipped(split):
    return [
        row["prompt"] for row in read_rows(str(assets.resolve(f"tether:sentiment/{split}.jsonl")))
    ]


def test_there_are_at_least_400_different_openings_and_100_held_out():
    train, heldout = shipped("train"), shipped("heldout")
    assert len(set(train)) == len(train) >= 400
    assert len(set(heldout)) == len(heldout) >= 100
    assert Counter(len(prompt.split()) for prompt in train).keys() >= set(range(8, 15))


def test_no_held_out_opening_has_a_thing_or_a_beginning_of_training():
    train, heldout = list(openings("train")), list(openings("heldout"))
    assert not {o.thing for o in train} & {o.thing for o in heldout}
    assert not {o.begins for o in train} & {o.begins for o in heldout}
    assert set(shipped("train")) <= {o.text for o in train}
    assert set(shipped("heldout")) <= {o.text for o in heldout}


def test_every_group_has_things_that_are_named_once_and_beginnings_with_one_place_for_them():
    things = [thing for group in GROUPS.values() for thing in group.things]
    assert len(set(things)) == len(things)
    for group in GROUPS.values():
        for begins in (*group.neutral, *group.trouble):
            assert begins.count("{}") == 1
            assert begins[-1].isalpha()  # the sentence is open


def test_openings_are_drawn_over_all_things_before_any_thing_comes_twice():
    drawn = draw_openings("train", 116, random.Random(0))
    assert Counter(Counter(o.thing for o in drawn).values()) == {1: 116}


def test_the_recipe_trains_with_random_weights_of_a_small_shape(tiny_model_dir, tmp_path):
    fields = {
        "run.dir": str(tmp_path / "run"),
        "threads": 1,
        "model.actor": tiny_model_dir,
        "model.learn_layers": 1,
        "rollout.prompts": 2,
        "rollout.max_response_tokens": 6,
        "actor.minibatch_rows": 8,
        "critic.minibatch_rows": 8,
        "train.iterations": 1,
        "train.eval_prompts": 2,
        "train.probe": None,
    }
    result = tether.train(load_config("sentiment", fields))
    assert result.iterations_done == 1
    [line] = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert {"score/part/glad", "score/part/repeats", "critic/explained_variance"} <= set(line)
    first = read_lines(tmp_path / "run" / "rollouts" / "000000.jsonl")[0]
    # Plain text, one token per byte: nothing of the chat template is in the prompt.
    assert len(first["prompt_ids"]) == len(first["prompt"].encode())
