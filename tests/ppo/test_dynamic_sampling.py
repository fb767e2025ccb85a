"""DAPO's parts: groups without spread replaced, truncated rows masked, long ones penalised."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from helpers import changed, configured, read_jsonl, table, tiny_recipe

import tether
from tether import api
from tether.errors import RunStopped
from tether.ppo.iteration import run_iteration
from tether.ppo.result import Clock, first_controls
from tether.ppo.roles import build_roles
from tether.ppo.sampling import groups_with_spread, sample_batch
from tether.run.checkpoint_store import latest_checkpoint
from tether.types import Scores

PROMPTS = 12


@pytest.fixture(scope="module")
def recipe(tiny_model_dir, tmp_path_factory):
    """Twelve prompts; the responses to every third have scores that differ."""
    folder = tmp_path_factory.mktemp("dynamic")
    lines = [{"prompt": f"p{i}", "answer": str(i % 3)} for i in range(PROMPTS)]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = str(folder / "data.jsonl")
    return changed(
        tiny_recipe(tiny_model_dir, data, folder / "run"),
        data__shuffle=False,
        data__heldout=None,
        rollout={
            **{"prompts": 3, "samples_per_prompt": 2, "max_response_tokens": 4},
            "dynamic_sampling": {"max_rounds": 4, "round_prompts": 4},
        },
        advantage__estimator="grpo",
        actor__minibatch_rows=6,
        critic={},
        kl__in_reward={"coef": 0.1, "controller": "adaptive", "target": 0.1, "horizon": 100},
        train__iterations=3,
        train__checkpoint_every=1,
    )


def spread_where_0(answer: str, response: str) -> float:
    """A score by the response where the answer is 0, and else the answer."""
    return len(set(response)) + sum(map(ord, response)) / 1e7 if answer == "0" else float(answer)


@pytest.fixture
def roles(recipe):
    return build_roles(configured(recipe), spread_where_0)


def test_groups_without_spread_are_replaced_in_the_order_of_the_data(recipe, roles):
    """Of prompts 0 to 3 the groups 0 and 3 have a spread, of 4 to 7 group 6: two rounds of four."""
    config = configured(recipe)
    batch = sample_batch(0, first_controls(config), roles, config, Clock())
    assert batch.prompts.texts[::2] == ["p0", "p3", "p6"]
    assert batch.prompts.texts == [t for t in batch.prompts.texts[::2] for _ in range(2)]
    assert len(batch.rollout.finish_reasons) == len(batch.scores.values) == 6
    dropped = batch.dropped
    assert (dropped.rounds, dropped.prompts, dropped.without_spread) == (2, 8, 5)
    assert sorted(dropped.scores.tolist()) == [1, 1, 1, 1, 1, 1, 2, 2, 2, 2]
    assert int(dropped.kl_per_row.count) == 10


def test_the_rows_are_those_that_were_sampled_and_scored(recipe, roles):
    config = configured(recipe)
    batch = sample_batch(0, first_controls(config), roles, config, Clock())
    for row, text in enumerate(batch.prompts.texts):
        ids = batch.rollout.response_ids[row, : batch.rollout.response_lengths[row]].tolist()
        expected = spread_where_0("0", roles.vocabulary.decode(ids))
        assert float(batch.scores.values[row]) == pytest.approx(expected), text
        length = int(batch.rollout.prompt_lengths[row])
        prompt_ids = batch.rollout.prompt_ids[row, -length:].tolist()
        assert prompt_ids == batch.prompts.ids[row]


def test_mean_score_and_controller_count_all_rows_and_the_next_iteration_goes_on_after_them(
    recipe, roles
):
    config = configured(recipe)
    outcome = run_iteration(0, first_controls(config), roles, config)
    metrics = outcome.metrics(config)
    everything = [*outcome.scores.values.tolist(), *[1.0] * 6, *[2.0] * 4]
    assert metrics["score/mean"] == pytest.approx(sum(everything) / 16, rel=1e-6)
    assert metrics["rollout/no_spread_share"] == pytest.approx(5 / 8)
    assert metrics["advantage/zero_spread_share"] == 0
    following = outcome.next_controls(metrics, config)
    assert following.prompts_drawn == 8
    # All 16 rows, KL 0 to the reference against a target of 0.1: 20% per 100 rows.
    assert following.beta == pytest.approx(0.1 * (1 - 0.2 * 16 / 100), rel=1e-6)
    later = sample_batch(1, following, roles, config, Clock())
    assert later.prompts.texts[::2] == ["p9", "p0", "p3"]  # 8 to 11, then from the beginning


def test_a_batch_that_cannot_be_filled_is_trained_on_as_it_is_and_an_empty_one_ends_the_run(recipe):
    config = configured(recipe, rollout__dynamic_sampling={"max_rounds": 2, "round_prompts": 2})
    roles = build_roles(config, spread_where_0)
    outcome = run_iteration(0, first_controls(config), roles, config)
    assert outcome.prompts.texts[::2] == ["p0", "p3"]
    assert [e.message for e in outcome.events if e.kind == "batch_not_filled"] == [
        "2 groups of 3 had a spread after 2 rounds"
    ]
    solved = build_roles(config, lambda response: 1.0)
    with pytest.raises(RunStopped, match=r"None of 4 prompts .*max_rounds = 2 rounds of 2.*solved"):
        run_iteration(0, first_controls(config), solved, config)


@table(
    ("values", "usable", "scored", "expected"),
    [
        ([1.0, 1.0, 0.0, 1.0], [1, 1, 1, 1], [1, 1, 1, 1], [False, True]),
        ([0.0, 1.0, 0.0, 1.0], [1, 0, 0, 0], [1, 0, 0, 0], [False, False]),
        # The critic stands for the second row, so it is not known to be like the first.
        ([0.0, 0.0, 0.0, 0.0], [1, 1, 1, 1], [1, 0, 1, 1], [True, False]),
    ],
)
def test_a_spread_needs_two_usable_rows_that_differ(values, usable, scored, expected):
    scores = Scores(torch.tensor(values), torch.tensor(usable) > 0, torch.tensor(scored) > 0)
    assert groups_with_spread(scores, 2).tolist() == expected


def signalling(call: int):
    seen = []

    def reward(answer: str, response: str) -> float:
        seen.append(response)
        if len(seen) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return spread_where_0(answer, response)

    return reward


def test_a_run_interrupted_within_a_refill_goes_on_to_the_same_bits(recipe):
    """Rounds of 8 scores; the second iteration's second round ends with score 32."""
    run = Path(recipe["run"]["dir"])
    tether.train(recipe, reward=spread_where_0)
    whole = run.rename(run.with_name("whole"))
    lines = read_jsonl(whole / "metrics.jsonl")
    assert all(line["rollout/rounds"] >= 2 for line in lines)
    for call in (10, 16 + 8 + 3):
        shutil.rmtree(run, ignore_errors=True)
        assert tether.train(recipe, reward=signalling(call)).interrupted == signal.SIGTERM
        api.resume(str(run), reward=spread_where_0)
        for name in ("metrics.jsonl", "prompts.jsonl"):
            assert (run / name).read_bytes() == (whole / name).read_bytes()
        ours, theirs = (latest_checkpoint(x) / "actor/model.safetensors" for x in (run, whole))
        assert ours.read_bytes() == theirs.read_bytes()


def test_prompts_that_changed_are_noticed_on_resume(recipe):
    run = Path(recipe["run"]["dir"])
    shutil.rmtree(run, ignore_errors=True)
    tether.train(recipe, reward=signalling(16 + 8 + 3))
    line = read_jsonl(run / "prompts.jsonl")[0]
    assert line["window"] == [0, 8]
    changed_line = json.dumps({**line, "window": [1, 8]})
    (run / "prompts.jsonl").write_text(changed_line + "\n")
    with pytest.raises(Exception, match="the token ids of the prompts of iteration 0"):
        api.resume(str(run), reward=spread_where_0)


def test_truncated_rows_are_scored_but_in_no_loss_and_no_baseline(recipe, tiny_model_dir):
    """Every response of the tiny model is cut off at 4 tokens but those that end by chance."""
    config = configured(
        recipe, rollout__dynamic_sampling=None, advantage__truncation="mask", train__iterations=1
    )
    roles = build_roles(config, spread_where_0)
    before = {n: w.detach().clone() for n, w in roles.actor.model.state_dict().items()}
    outcome = run_iteration(0, first_controls(config), roles, config)
    assert outcome.rollout.truncated.all()
    assert outcome.scores.scored.all()
    assert not outcome.scores.usable.any()
    assert not outcome.experience.response_mask.any()
    assert outcome.metrics(config)["score/mean"] == pytest.approx(
        float(outcome.scores.values.mean())
    )
    now = roles.actor.model.state_dict()
    assert all(torch.equal(before[name], now[name]) for name in before)


def test_overlong_shaping_is_in_training_scores_and_a_part_of_its_own(recipe):
    """Four tokens of at most four, a buffer of two: every truncated row loses 0.5 x 1."""
    plain = configured(recipe, rollout__dynamic_sampling=None)
    shaped = configured(
        recipe,
        rollout__dynamic_sampling=None,
        reward={"kind": "exact_answer", "overlong": {"buffer_tokens": 2, "penalty": 0.5}},
    )
    found = [
        run_iteration(0, first_controls(c), build_roles(c, spread_where_0), c)
        for c in (plain, shaped)
    ]
    raw, lower = (outcome.scores for outcome in found)
    assert lower.parts["overlong"].tolist() == [-0.5] * 6
    torch.testing.assert_close(lower.values, raw.values - 0.5)
    sums = found[1].experience.token_level_scores.sum(dim=1)
    torch.testing.assert_close(sums, lower.values)
