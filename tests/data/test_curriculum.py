"""Prompts drawn by what they scored: weights, draws, retirement by hand, resume bit for bit."""

import json
import os
import signal

import numpy as np
import pytest
import torch
from helpers import changed, configured, read_jsonl, table, tiny_recipe

import tether
from tether.config import CurriculumSection
from tether.data.curriculum import NEVER, Curriculum
from tether.errors import RunStopped, UserError
from tether.run.checkpoint_store import latest_checkpoint


def known(by="difficulty", score=(), drawn_at=(), solved_draws=None, **settings) -> Curriculum:
    solved_draws = solved_draws or [0] * len(score)
    section = CurriculumSection(by=by, **settings)
    return Curriculum(section, np.array(score), np.array(drawn_at), np.array(solved_draws))


def test_weights_by_difficulty_are_the_variance_of_a_score_and_new_prompts_have_the_most():
    """4 p (1 - p): 0.75 at 1/4, 1 at a half, and at the ends the least weight."""
    state = known(score=[0.25, 0.5, 0.0, 1.0, 0.0], drawn_at=[3, 3, 3, 3, NEVER])
    assert state.weights(4).tolist() == [0.75, 1.0, 0.05, 0.05, 1.0]
    scaled = known(score=[-1.0, 0.0, 3.0], drawn_at=[0, 0, 0], failed=-2.0, solved=2.0)
    assert scaled.weights(1).tolist() == [0.75, 1.0, 0.05]


def test_weights_by_staleness_are_iterations_since_the_draw():
    state = known("staleness", score=[1.0, 0.0, 0.0], drawn_at=[6, 2, NEVER])
    assert state.weights(7).tolist() == [1, 5, 8]


def test_prompts_are_drawn_as_often_as_their_weights_say():
    """Weights 0.75, 1, 0.05 and 0.75, of 2.55 in all: shares of .294, .392, .020 and .294."""
    state = known(score=[0.25, 0.5, 0.0, 0.75], drawn_at=[0, 0, 0, 0])
    first = [state.draw(iteration, 1, seed=5)[0] for iteration in range(1, 4_001)]
    shares = np.bincount(first, minlength=4) / len(first)
    assert shares == pytest.approx(np.array([0.75, 1.0, 0.05, 0.75]) / 2.55, abs=0.03)


def test_a_draw_has_different_prompts_and_depends_on_its_key_alone():
    state = known("staleness", score=[0.0] * 9, drawn_at=[NEVER] * 9)
    assert sorted(state.draw(0, 9, seed=1)) == list(range(9))
    assert state.draw(3, 4, seed=1) == state.draw(3, 4, seed=1)
    assert len({tuple(state.draw(i, 4, seed=s)) for i in range(3) for s in range(3)}) == 9


def test_running_scores_ages_and_solved_draws_after_an_iteration():
    """Prompt 2 has 1 and 0, mean 0.5: half way from 0.25 is 0.375. Prompt 0 is new: its mean is 1.
    Prompt 3 has one row that counts, 1: half way from 0.5. Prompt 4 has none and keeps all."""
    before = known(
        score=[0.0, 0.9, 0.25, 0.5, 0.7],
        drawn_at=[NEVER, 1, 1, 1, 1],
        solved_draws=[0, 1, 1, 1, 1],
    )
    scores = torch.tensor([1.0, 0.0, 1.0, 1.0, 9.0, 1.0, 0.0, 0.0])
    scored = torch.tensor([1, 1, 1, 1, 0, 1, 0, 0], dtype=torch.bool)
    after = before.after(7, [2, 0, 3, 4], scores, scored)
    assert after.score.tolist() == [1.0, 0.9, 0.375, 0.75, 0.7]
    assert after.drawn_at.tolist() == [7, 1, 7, 7, 7]
    assert after.solved_draws.tolist() == [1, 1, 0, 2, 1]
    assert after.retired.tolist() == [False, False, False, True, False]
    assert before.drawn_at.tolist() == [NEVER, 1, 1, 1, 1]
    assert after.metrics() == {"curriculum/drawn_share": 1.0, "curriculum/retired_share": 0.2}


def test_retired_prompts_fill_a_draw_last_and_oldest_first():
    state = known(
        score=[1.0, 0.5, 1.0, 1.0], drawn_at=[5, 6, 3, 4], solved_draws=[2, 0, 3, 2], retire_after=2
    )
    assert state.draw(7, 1, seed=0) == [1]
    assert state.draw(7, 3, seed=0) == [1, 2, 3]
    all_solved = known(score=[1.0, 1.0], drawn_at=[0, 0], solved_draws=[2, 2])
    with pytest.raises(
        RunStopped, match=r"All 2 training prompts scored 1 or more in .* = 2 draws"
    ):
        all_solved.draw(3, 1, seed=0)
    kept = known(score=[1.0, 1.0], drawn_at=[0, 0], solved_draws=[9, 9], retire_after=0)
    assert sorted(kept.draw(3, 2, seed=0)) == [0, 1]


@pytest.fixture(scope="module")
def recipe(tiny_model_dir, tmp_path_factory):
    """Eight prompts; every second is always solved."""
    folder = tmp_path_factory.mktemp("curriculum")
    lines = [{"prompt": f"p{i}", "answer": str(i % 2)} for i in range(8)]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return changed(
        tiny_recipe(tiny_model_dir, str(folder / "data.jsonl"), folder / "run"),
        data__heldout=None,
        data__curriculum={"by": "difficulty", "retire_after": 1},
        rollout={"prompts": 3, "samples_per_prompt": 2, "max_response_tokens": 4},
        actor__minibatch_rows=6,
        train__iterations=4,
        train__checkpoint_every=1,
    )


def solved_if_odd(answer: str, response: str) -> float:
    return 1.0 if answer == "1" else (sum(map(ord, response)) % 7) / 8


def test_a_run_retires_what_is_solved_and_goes_on_to_the_same_bits_after_a_stop(recipe, tmp_path):
    whole = tether.train(changed(recipe, run__dir=str(tmp_path / "whole")), reward=solved_if_odd)
    lines = read_jsonl(whole.run / "metrics.jsonl")
    drawn = [line["rows"] for line in read_jsonl(whole.run / "prompts.jsonl")]
    solved = set()
    for rows, line in zip(drawn, lines, strict=True):
        fresh = [row for row in range(8) if row not in solved]
        assert set(rows) <= set(fresh) or len(fresh) < 3
        solved |= {row for row in rows if row % 2}
        assert line["curriculum/retired_share"] == len(solved) / 8

    stopped, calls = tmp_path / "stopped", []

    def stops(answer: str, response: str) -> float:
        calls.append(response)
        if len(calls) == 15:  # in the third iteration of six rows
            os.kill(os.getpid(), signal.SIGTERM)
        return solved_if_odd(answer, response)

    config = changed(recipe, run__dir=str(stopped))
    assert tether.train(config, reward=stops).interrupted
    again = tether.train(config, reward=solved_if_odd, resume=True)
    for file in ("metrics.jsonl", "prompts.jsonl"):
        assert (again.run / file).read_bytes() == (whole.run / file).read_bytes()
    weights = [
        latest_checkpoint(run) / "actor" / "model.safetensors" for run in (stopped, whole.run)
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_data_that_changed_under_a_curriculum_is_refused(recipe, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"prompt": "p{i}", "answer": "0"}}\n' for i in range(8)))
    config = changed(
        recipe, data__train=str(data), run__dir=str(tmp_path / "run"), train__iterations=1
    )
    tether.train(config, reward=solved_if_odd)
    data.write_text(data.read_text().replace('"p', '"q'))
    with pytest.raises(UserError, match=r"data\.train"):
        tether.train(changed(config, train__iterations=2), reward=solved_if_odd, resume=True)


@table(
    ("fields", "message"),
    [
        ({"data__curriculum": {"by": "luck"}}, "data.curriculum.by"),
        ({"data__curriculum": {"by": "staleness", "solved": 0.0}}, "must be above failed"),
        ({"data__curriculum": {"by": "staleness", "newest": 0.0}}, "data.curriculum.newest"),
        ({"rollout__dynamic_sampling": {}}, "both choose the prompts"),
    ],
)
def test_what_cannot_be_is_refused_by_field(recipe, fields, message):
    with pytest.raises(UserError, match=message):
        configured(recipe, **fields)


def test_fewer_prompts_than_an_iteration_takes_are_refused(recipe, tmp_path):
    config = changed(recipe, rollout__prompts=9, run__dir=str(tmp_path / "run"))
    with pytest.raises(UserError, match=r"data.train has 8 and .* rollout.prompts = 9"):
        tether.train(config, reward=solved_if_odd)
