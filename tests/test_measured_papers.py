"""The measurements of value pretraining on long responses and of dynamic sampling, by hand."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from helpers import table

from tether.config.load import load_config
from tether.config.stages import SFTConfig

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def scripts():
    sys.path.insert(0, str(SCRIPTS))
    yield lambda name: load(SCRIPTS / f"{name}.py")
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def long(scripts):
    return scripts("measure_long_responses")


@pytest.fixture(scope="module")
def refill(scripts):
    return scripts("measure_dynamic_sampling")


# Long responses -----------------------------------------------------------------------------------


@table(
    ("response", "finished", "expected"),
    [
        ("abca" + "l" * 60, True, 1.0),
        ("abca" + "l" * 60, False, 0.0),  # cut off
        ("abcb" + "l" * 60, True, 0.0),
        ("abca" + "l" * 59, True, 0.0),  # 63 letters
    ],
)
def test_an_opening_is_kept_where_a_long_response_begins_with_it(response, finished, expected):
    reward = load(SCRIPTS / "yardstick_recipes" / "opening.py")
    assert reward.opening_kept(response, "abca", finished) == expected


def test_demonstrations_keep_four_letters_of_five_and_have_no_held_out_opening(long, tmp_path):
    long.make(tmp_path, seed=100, demonstrations=2000)
    rows = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("heldout", "train", "demonstrations")
    }
    asked = {row["prompt"] for row in rows["heldout"]}
    assert not asked & {row["prompt"] for row in rows["train"] + rows["demonstrations"]}
    shown = rows["demonstrations"]
    kept = [
        a == b for row in shown for a, b in zip(row["prompt"], row["response"][:4], strict=False)
    ]
    assert 0.78 < sum(kept) / len(kept) < 0.82  # 8000 letters: four deviations
    assert {len(row["response"]) for row in shown} == {64}
    whole = sum(row["response"].startswith(row["prompt"][:4]) for row in shown) / len(shown)
    assert 0.36 < whole < 0.46  # 0.8^4 = 0.41, four deviations


def test_what_the_critic_explains_at_the_first_policy_step_by_hand(long, tmp_path):
    """Returns 1, 1 and 0, 0 around 1/2, residuals 1/2, 0 and -1/4, -1/4 around 0: squares of 1 and
    of 3/8 in all."""
    (tmp_path / "rollouts").mkdir()
    rows = [
        {"values": [0.5, 1.0], "token_level_rewards": [0.0, 1.0]},
        {"values": [0.25, 0.25], "token_level_rewards": [0.0, 0.0]},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rollouts" / "000000.jsonl").write_text(text)
    assert long.read_explained(tmp_path) == {"explained": pytest.approx(1 - 3 / 8)}


def test_every_variant_samples_as_many_rows(long):
    for fields in long.VARIANTS.values():
        given = {"reward.kind": f"{long.REWARD}:opening_kept", "actor.lr": 1e-3, **fields}
        config = load_config(long.RECIPE, given)
        pretrain = config.critic.pretrain
        banked = 0 if pretrain is None else pretrain.prompts * config.rollout.samples_per_prompt
        assert config.rows * config.train.iterations + banked == long.ROWS * long.ITERATIONS
        assert config.run.rollouts_every > config.train.iterations  # the first iteration's are kept
    load_config(long.SFT, {}, SFTConfig)


def opening_result(explained: float, share: float) -> dict:
    sampled = {"mean": share, "low": share - 0.04, "high": share + 0.04, "count": 500,
               "binary": True}  # fmt: skip
    return {"explained": explained, "evals": [{"sampled": sampled}, {"sampled": sampled}]}


@table(("explained", "score", "reached"), [(0.3, 0.7, True), (0.2, 0.7, False), (0.3, 0.57, False)])
def test_value_pretraining_has_to_explain_enough_and_to_be_better_on_every_seed(
    long, explained, score, reached
):
    found = {name: [opening_result(0.0, 0.5)] * 3 for name in long.VARIANTS}
    found[long.BOTH] = [opening_result(0.9, 0.9)] * 2 + [opening_result(explained, score)]
    assert long.is_reached(found) is reached


# Dynamic sampling ---------------------------------------------------------------------------------


def refill_result(scores, drawn=None) -> dict:
    """Evaluations after 0, 2, 4, … iterations."""
    iterations = 2 * (len(scores) - 1)
    curves = {"score/mean": [0.5] * iterations, "advantage/zero_spread_share": [0.4] * iterations}
    if drawn is not None:
        curves |= {
            "advantage/zero_spread_share": [0.0] * iterations,
            "rollout/prompts_drawn": drawn,
            "rollout/no_spread_share": [0.25, *[0.75] * (iterations - 1)],
        }
    evals = [{"iteration": 2 * i, "sampled": {"mean": s}} for i, s in enumerate(scores)]
    return {"curves": curves, "evals": evals}


def test_sampled_rows_count_those_that_are_left_out(refill):
    """16 groups of eight: 128 rows an iteration; with refilling 16, 32, 48 and 32 prompts."""
    settings = refill.Settings(4e-4, 16)
    plain = refill.read_trial(refill_result([0.5, 0.6, 0.7]), settings)
    assert [rows for rows, _ in plain.curve] == [0, 256, 512]
    assert [score for _, score in plain.curve] == pytest.approx([0.5, 0.55, 0.6])  # smoothed
    assert (plain.idle, plain.without_spread) == (pytest.approx(0.4), pytest.approx(0.4))
    filled = refill.read_trial(refill_result([0.5, 0.7, 0.9], [16, 32, 48, 32]), settings)
    assert [rows for rows, _ in filled.curve] == [0, 8 * 48, 8 * 128]
    assert filled.idle == 0
    assert filled.without_spread == pytest.approx((0.25 * 16 + 0.75 * 112) / 128)


def test_an_equal_score_is_the_last_one_of_the_groups_as_sampled(refill):
    plain = refill.Trial([(0, 0.5), (100, 0.6), (200, 0.7), (300, 0.7)], 0.4, 0.4)
    quick = refill.Trial([(0, 0.5), (150, 0.71), (400, 0.9)], 0.0, 0.5)
    never = refill.Trial([(0, 0.5), (150, 0.6)], 0.0, 0.5)
    found = {refill.PLAIN: [plain] * 2, refill.REFILLED: [quick, never]}
    assert refill.shares(found) == [150 / 200, None]  # theirs was there at 200
    assert [*refill.signs(found).values()] == [True, False]
    assert [*refill.signs({**found, refill.REFILLED: [quick] * 2}).values()] == [True, True]
    assert refill.score_at(250, plain.curve) == 0.7
    assert refill.score_at(149, quick.curve) == 0.5


def test_every_setting_of_the_search_is_a_valid_config(refill):
    for name in refill.VARIANTS:
        for rate in refill.RATES:
            for groups in refill.GROUPS:
                fields = refill.fields_of(name, refill.Settings(rate, groups))
                config = load_config(refill.RECIPE, fields)
                if name == refill.PLAIN:
                    assert config.rows * config.train.iterations == refill.ROWS


@pytest.mark.long
def test_a_variant_is_trained_and_kept(long, scripts, tmp_path, monkeypatch):
    """Two iterations from a model that has seen 256 demonstrations."""
    make = long.make
    monkeypatch.setattr(long, "make", lambda folder, seed: make(folder, seed, demonstrations=256))
    small = {"train.iterations": 2, "train.eval_prompts": 8, "rollout.prompts": 8,
             "actor.minibatch_rows": 8}  # fmt: skip
    pretrain = {"critic.lam": 1.0, "critic.pretrain.prompts": 8, "critic.pretrain.max_epochs": 1}
    monkeypatch.setattr(long, "VARIANTS", {long.PLAIN: small, long.BOTH: {**small, **pretrain}})
    store = scripts("yardstick_store").Store(tmp_path / "kept", tmp_path / "work")
    for name in long.VARIANTS:
        result = long.one_cell(store, name, 1e-3, seed=100)
        assert [line["iteration"] for line in result["evals"]] == [0, 2]
        assert result["explained"] <= 1
    assert len([*(tmp_path / "kept").iterdir()]) == 2
