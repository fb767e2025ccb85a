"""The starter must learn to carry: held-out accuracy, before and after a short run.

`make learn` runs the whole recipe over three seeds; these are its quick form, one seed each.
"""

import pytest

import tether

QUICK = {
    "threads": 1,
    "train.iterations": 12,
    "train.eval_prompts": 300,
    "run.rollouts_every": 0,
}


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param({"train.iterations": 6, "train.eval_prompts": 200}, id="clip, half as long"),
        pytest.param({}, id="clip", marks=pytest.mark.long),
        pytest.param({"actor.update.kind": "penalty"}, id="penalty", marks=pytest.mark.long),
        pytest.param(
            {"actor.update.kind": "trpo", "actor.update.max_kl": 0.02},
            id="trpo",
            marks=pytest.mark.long,
        ),
        pytest.param({"advantage.estimator": "grpo"}, id="grpo", marks=pytest.mark.long),
    ],
)
def test_held_out_accuracy_rises_by_fifteen_points(variant, tmp_path):
    config = tether.load_config("arithmetic", {**QUICK, **variant, "run.dir": tmp_path / "run"})
    result = tether.train(config)
    for before, after in (
        (result.before.sampled, result.after.sampled),
        (result.before.greedy, result.after.greedy),
    ):
        assert before.mean <= 0.60
        assert after.mean - before.mean >= 0.15
        assert after.apart_from(before)
