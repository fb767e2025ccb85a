"""The generated taste by hand, noisy labels by count, and three stages in one command."""

import json
import math
import random
import re
from itertools import islice
from pathlib import Path

import pytest
from helpers import changed, first_or_all, read_jsonl, table

from tether import api
from tether.config.load import load_config, validate_config
from tether.config.stages import PipelineConfig
from tether.errors import UserError
from tether.stages import rlhf
from tether.stages.rlhf import Layout, PipelineWatcher, label, run_pipeline, won
from tether.tasks.arithmetic import split_of
from tether.tasks.courtesy import MANNERS, Question, demonstrate, draw_questions, utility
from tether.train.loop import Loop

ASKED = Question("Do you know that 12+34=?", "english", "12+34", 46)
CHINESE = Question("你知道12+34=?吗？", "chinese", "12+34", 46)


@table(
    ("response", "question", "expected"),
    [
        ("46", ASKED, 2 - 0.02 * 2),
        ("12+34=46", ASKED, 2 - 0.02 * 8),
        ("Yes, 12+34=46", ASKED, 2 + 1 - 0.02 * 13),
        ("Yes, 46", ASKED, 2 + 1 - 0.02 * 7),
        ("Yes, Yes, Yes, 12+34=46", ASKED, 2 + 1 - 2 * 0.5 - 0.02 * 23),
        ("Yes, 12+34=45", ASKED, 1 - 0.02 * 13),
        ("Yes, 12+34=461", ASKED, 1 - 0.02 * 14),
        ("12+34=46Yes, ", ASKED, -0.02 * 13),
        ("是的，12+34=46", CHINESE, 2 + 1 - 0.02 * 11),
        ("是的，12+34=46", ASKED, -0.02 * 11),
        ("", ASKED, 0.0),
    ],
)
def test_the_true_taste_is_the_one_that_is_described(response, question, expected):
    assert utility(response, question) == pytest.approx(expected)


def test_demonstrations_are_right_and_come_in_every_manner():
    rng = random.Random(0)
    questions = list(islice(draw_questions(rng, "train"), 2000))
    texts = [demonstrate(question, rng) for question in questions]
    assert all(text.endswith(str(q.total)) for q, text in zip(questions, texts, strict=True))
    yeses = [text.count("Yes, ") + text.count("是的，") for text in texts]
    whole = ["=" in text for text in texts]
    assert MANNERS == {"bare": 35, "whole": 35, "yes": 20, "fuss": 10}
    assert whole.count(False) / 2000 == pytest.approx(0.35, abs=0.03)
    for count, share in ((0, 0.7), (1, 0.2), (2, 0.1)):
        assert yeses.count(count) / 2000 == pytest.approx(share, abs=0.03)


def test_a_question_is_asked_in_either_language():
    questions = list(islice(draw_questions(random.Random(2), "train"), 1000))
    assert {q.language == "chinese" for q in questions if q.prompt.startswith("你")} == {True}
    chinese = sum(question.language == "chinese" for question in questions)
    assert chinese / 1000 == pytest.approx(0.5, abs=0.05)


def test_no_sum_of_training_is_held_out():
    for split in ("train", "heldout"):
        for question in islice(draw_questions(random.Random(1), split), 300):
            a, b = map(int, re.findall(r"[0-9]+", question.prompt))
            assert split_of(a, b) == split
            assert a + b == question.total


def test_the_better_response_is_chosen_as_often_as_a_logistic_curve_says():
    better, worse = "No", "No, that"  # utilities -0.04 and -0.16
    chosen = [
        label(ASKED, better, worse, 0.1, (i + 0.5) / 1000)["chosen"] == better for i in range(1000)
    ]
    assert sum(chosen) / 1000 == pytest.approx(1 / (1 + math.exp(-1.2)), abs=0.001)
    expected = {"prompt": ASKED.prompt, "chosen": "46", "rejected": "45"}
    assert label(ASKED, "45", "46", 0.5, 0.5) == expected


def test_a_tie_is_half_a_win():
    assert won([1.0, 2.0, 3.0, 0.0], [0.0, 2.0, 4.0, 0.0]) == 0.5


# The stages


def pipeline(model: str, run: Path) -> dict:
    return {
        "threads": 1,
        "stage": "rlhf",
        "run": {"dir": str(run)},
        "start": model,
        "task": {
            "demonstrations": 12,
            "questions": 8,
            "pairs": 20,
            "heldout": 6,
            "max_response_tokens": 6,
        },
        "sft": {"train": {"minibatch_rows": 6}},
        "reward_model": {"train": {"minibatch_rows": 10, "lr": 1e-3}},
        "ppo": {
            "rollout": {"prompts": 4, "samples_per_prompt": 2},
            "actor": {"minibatch_rows": 8},
            "train": {"iterations": 1},
        },
    }


@pytest.fixture
def small(tiny_model_dir, tmp_path) -> dict:
    return pipeline(tiny_model_dir, tmp_path / "rlhf")


@pytest.fixture(scope="module")
def whole(tiny_model_dir, tmp_path_factory):
    """The report of a pipeline that was never stopped."""
    return api.rlhf(pipeline(tiny_model_dir, tmp_path_factory.mktemp("whole") / "rlhf"))


class Log(PipelineWatcher):
    def __init__(self) -> None:
        self.stages: list[str] = []

    def began(self, what: str) -> None:
        self.stages.append(what.split()[0])


def test_three_stages_hand_on_their_models_and_end_in_a_report(small, tmp_path):
    log = Log()
    report = run_pipeline(validate_config(small, PipelineConfig), log)
    assert log.stages == ["SFT", "pairs", "reward", "PPO", "true"]
    run = tmp_path / "rlhf"
    state = json.loads((run / "ppo/checkpoints/000001/state.json").read_text())
    model = state["config"]["model"]
    assert model["actor"] == str(run / "sft/checkpoints/000002/actor")
    reward = run / "reward-model/checkpoints/000002/reward"
    assert model["critic"] == str(reward)
    assert state["config"]["reward"]["kind"] == f"model:{reward}"
    for row in read_jsonl(run / "data/pairs-train.jsonl"):
        assert row["chosen"] != row["rejected"]
    written = json.loads((run / "report.json").read_text())
    assert written["ppo"]["wins"] == report.ppo.wins
    assert report.sft.kl == pytest.approx(0, abs=1e-5)
    assert 0 <= report.ppo.wins_low <= report.ppo.wins <= report.ppo.wins_high <= 1
    assert report.ppo.questions == 6


@pytest.mark.long
@pytest.mark.parametrize("model", [{"learn_layers": 1}, {"lora": {"rank": 2}}], ids=str)
def test_a_pipeline_whose_ppo_saves_only_what_learns_ends_in_a_report(small, tmp_path, model):
    config = changed(small, ppo__model=model)
    report = run_pipeline(validate_config(config, PipelineConfig), Log())
    assert not (tmp_path / "rlhf/ppo/checkpoints/000001/actor").exists()
    assert report.ppo.questions == 6


def bits(run: Path) -> dict[str, bytes]:
    names = ("metrics.jsonl", "evals.jsonl", "model.safetensors", "report.json")
    found = [path for name in names for path in run.rglob(name)] + [*run.glob("data/*")]
    return {str(path.relative_to(run)): path.read_bytes() for path in found}


class Killed(BaseException):
    """Ends a pipeline as rudely as an exception can."""


PLACES = ["reward-model", "pairs-heldout", "sft", "ppo", "report"]


@pytest.mark.parametrize("place", first_or_all(PLACES, quick=2))
def test_a_pipeline_killed_anywhere_goes_on_there_to_the_same_bits(
    small, whole, tmp_path, monkeypatch, place
):
    if place in ("pairs-heldout", "report"):
        write = rlhf.replace_file

        def killed_before(path, text):
            if path.stem == place:
                raise Killed
            write(path, text)

        monkeypatch.setattr(rlhf, "replace_file", killed_before)
    else:
        iterate = Loop._iterate

        def killed_in(loop):
            if loop.writer.directory.name == place:
                raise Killed
            iterate(loop)

        monkeypatch.setattr(Loop, "_iterate", killed_in)
    with pytest.raises(Killed):
        api.rlhf(small)
    monkeypatch.undo()
    started = []
    monkeypatch.setattr(Loop, "run", lambda loop: started.append(loop) or run(loop))
    report = api.resume(tmp_path / "rlhf")
    assert [loop.writer.directory.name for loop in started] == AFTER[place]
    assert (report.sft, report.ppo) == (whole.sft, whole.ppo)
    assert bits(tmp_path / "rlhf") == bits(whole.run)


run = Loop.run
AFTER = {
    "sft": ["sft", "reward-model", "ppo"],
    "pairs-heldout": ["reward-model", "ppo"],
    "reward-model": ["reward-model", "ppo"],
    "ppo": ["ppo"],
    "report": [],
}


@pytest.mark.long
def test_a_finished_pipeline_is_refused_replaced_or_left_as_asked(small, tmp_path):
    first = api.rlhf(small)
    kept = bits(first.run)
    with pytest.raises(UserError, match=r"exists; choose another, continue it with --resume"):
        api.rlhf(small)
    log = Log()
    assert api.rlhf(small, log, resume=True) == first
    assert log.stages == []
    with pytest.raises(UserError, match=r"seed, 0 then and 1 now"):
        api.rlhf({**small, "seed": 1}, resume=True)
    assert bits(first.run) == kept
    small["run"]["overwrite"] = True
    small["seed"] = 1
    api.rlhf(small)
    assert bits(first.run)["sft/metrics.jsonl"] != kept["sft/metrics.jsonl"]


def test_a_wrong_setting_of_the_last_stage_is_found_before_the_first(small, tmp_path):
    small["ppo"]["actor"]["minibatch_rows"] = 9
    with pytest.raises(UserError, match="minibatch_rows is 9"):
        run_pipeline(validate_config(small, PipelineConfig), Log())
    assert not (tmp_path / "rlhf").exists()


def test_the_shipped_recipe_is_whole_and_other_commands_say_whose_it_is(tmp_path):
    config = load_config("rlhf", {"ppo.kl.in_reward.coef": 0.3}, PipelineConfig)
    Layout(config, tmp_path).check()
    assert Layout(config, tmp_path).ppo_config(tmp_path, tmp_path).kl.in_reward.coef == 0.3
    with pytest.raises(UserError, match="rlhf is a recipe of `tether train`"):
        load_config("rlhf")
