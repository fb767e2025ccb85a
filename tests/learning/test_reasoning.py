"""The recipe `reasoning` must learn: held-out scores, before and after a quarter of it.

`scripts/measure_reasoning.py` runs the whole recipe over three seeds.
"""

import pytest

import tether

pytest.importorskip("reasoning_gym", reason="the extra `reasoning` is not installed")


@pytest.mark.long
def test_held_out_scores_rise_and_their_intervals_are_apart(tmp_path):
    changes = {"threads": 1, "train.iterations": 15, "run.rollouts_every": 0}
    result = tether.train(
        tether.load_config("reasoning", {**changes, "run.dir": tmp_path / "run", "seed": 101})
    )
    before, after = result.before.sampled, result.after.sampled
    assert before.mean <= 0.40
    assert after.low > before.high
