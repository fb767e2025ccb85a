"""The search starter must learn to search: a few iterations of `search_qa` that raise the score.

`make search` runs the whole recipe over three seeds, with its ablations.
"""

import pytest

import tether
from tether.run.directory import METRICS
from tether.run.reader import read_lines

pytestmark = pytest.mark.long

QUICK = {
    "threads": 1,
    "rollout.prompts": 32,
    "train.iterations": 6,
    "train.eval_prompts": 100,
    "run.rollouts_every": 0,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    run = tmp_path_factory.mktemp("learning") / "run"
    return tether.train(tether.load_config("search_qa", {**QUICK, "run.dir": run}))


def test_a_few_iterations_teach_it_to_search_and_to_answer(trained):
    before, after = trained.before, trained.after
    assert before.sampled.mean <= 0.30
    assert after.sampled.mean - before.sampled.mean >= 0.20
    assert after.sampled.apart_from(before.sampled)
    assert after.calls > before.calls + 0.3


def test_the_score_rises_within_training(trained):
    scores = [line["score/mean"] for line in read_lines(trained.run / METRICS)]
    assert sum(scores[-2:]) / 2 >= sum(scores[:2]) / 2 + 0.1
