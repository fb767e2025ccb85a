"""A run that its caller steps is the run of `tether.train`, byte for byte."""

import gc
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from helpers import changed, distinct_letters, read_jsonl, tiny_recipe

import tether
from tether.errors import RunStopped, UserError
from tether.run.lock import is_being_written
from tether.train.watch import Watcher

CLOCKED = {"timings.jsonl", "lock"}  # differ from run to run, or are empty


@pytest.fixture(scope="module")
def recipe(tiny_model_dir, tiny_data, tmp_path_factory):
    return changed(
        tiny_recipe(tiny_model_dir, tiny_data, tmp_path_factory.mktemp("stepped") / "run"),
        train__iterations=4,
        train__checkpoint_every=2,
        train__eval_every=2,
        train__eval_prompts=3,
        kl__in_reward={"coef": 0.1, "controller": "adaptive", "target": 0.1, "horizon": 100},
    )


@pytest.fixture(scope="module")
def whole(recipe):
    """The run that `tether.train` makes, moved out of the way of the others."""
    run = tether.train(recipe, reward=distinct_letters).run
    return run.rename(run.with_name("whole"))


@pytest.fixture
def config(recipe):
    shutil.rmtree(recipe["run"]["dir"], ignore_errors=True)
    return recipe


def contents(run: Path, *left_out: str) -> dict[str, bytes]:
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and path.name not in CLOCKED | set(left_out)
    }


def test_a_run_stepped_by_hand_is_the_run_of_train_byte_for_byte(config, whole):
    seen = [iteration.number for iteration in tether.start(config, reward=distinct_letters)]
    assert seen == [0, 1, 2, 3]
    stepped = contents(Path(config["run"]["dir"]))
    assert len(stepped) > 15
    assert stepped == contents(whole)


def test_leaving_the_loop_ends_nothing_and_saving_by_hand_changes_nothing(config, whole):
    run = tether.start(config, reward=distinct_letters)
    for iteration in run:
        if iteration.number == 1:
            break
    assert run.iterations_done == 2
    assert is_being_written(run.directory)
    assert run.save().name == "000002"
    assert [iteration.number for iteration in run] == [2, 3]
    assert not is_being_written(run.directory)
    assert run.result.after.iteration == 4
    assert contents(run.directory) == contents(whole)
    assert list(run) == []


def test_an_iteration_has_what_was_sampled_scored_and_learnt_from(config, whole):
    with tether.start(config, reward=distinct_letters) as run:
        iteration = next(run)
    [written, *_] = read_jsonl(whole / "metrics.jsonl")
    assert {"schema": 1, "iteration": 0, **iteration.metrics} == written
    scores = [distinct_letters(response) for response in iteration.responses]
    assert iteration.scores.values.tolist() == pytest.approx(scores)
    assert iteration.metrics["score/mean"] == pytest.approx(sum(scores) / 12)
    assert iteration.rollout.response_ids.shape == iteration.experience.advantages.shape
    assert torch.equal(iteration.experience.response_mask, iteration.rollout.response_mask)
    assert len(iteration.prompts) == len(iteration.responses) == 12
    rows = read_jsonl(whole / "rollouts" / "000000.jsonl")
    assert {"schema": 1, **iteration.row(7)} == rows[7]
    with pytest.raises(UserError, match="There is no row 12: rows are 0 to 11"):
        iteration.row(12)


def test_an_early_stop_evaluates_and_saves_and_resuming_makes_the_whole_run(config, whole):
    run = tether.start(config, reward=distinct_letters)
    for iteration in run:
        if iteration.number == 0:
            run.stop()
    assert run.result.iterations_done == 1
    assert run.result.after.iteration == 1
    assert run.result.checkpoint.is_dir()
    [event] = read_jsonl(run.directory / "events.jsonl")
    assert event["kind"] == "interrupted"
    assert event["message"] == "by its caller after 1 of 4 iterations; all saved"

    again = tether.start(config, reward=distinct_letters, resume=True)
    assert [iteration.number for iteration in again] == [1, 2, 3]
    assert (again.result.resumed_from, again.result.iterations_done) == (1, 4)
    beside = ("events.jsonl", "evals.jsonl", "000001.jsonl", "LATEST")
    mine, theirs = contents(run.directory, *beside), contents(whole, *beside)
    mine = {name: data for name, data in mine.items() if "checkpoints/000001" not in name}
    assert mine == theirs
    extra = [line["iteration"] for line in read_jsonl(run.directory / "evals.jsonl")]
    assert extra == [0, 1, 2, 4]

    finished = tether.start(config, reward=distinct_letters, resume=True)
    assert list(finished) == []
    assert finished.result.after.iteration == 4


def test_an_error_of_the_caller_leaves_the_state_saved_and_resumable(config, whole):
    run = tether.start(config, reward=distinct_letters)

    def step() -> None:
        with run:
            for iteration in run:
                _ = 1 / (2 - iteration.number)

    with pytest.raises(ZeroDivisionError):
        step()
    assert not is_being_written(run.directory)
    assert run.result.checkpoint.name == "000003"
    result = tether.resume(run.directory, reward=distinct_letters)
    assert (result.resumed_from, result.iterations_done) == (3, 4)
    for name in ("metrics.jsonl", "evals.jsonl", "checkpoints/000004/actor/model.safetensors"):
        assert (run.directory / name).read_bytes() == (whole / name).read_bytes()


def test_a_signal_during_an_iteration_ends_the_loop_with_the_state_saved(config):
    asked = []

    def interrupting(response: str) -> float:
        asked.append(response)
        if len(asked) == 6 + 12 + 3:  # an evaluation, an iteration, and into the next one
            os.kill(os.getpid(), signal.SIGINT)
        return distinct_letters(response)

    before = signal.getsignal(signal.SIGINT)
    run = tether.start(config, reward=interrupting)
    assert [iteration.number for iteration in run] == [0]
    assert run.result.interrupted == signal.SIGINT
    assert run.result.checkpoint.name == "000001"
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(UserError, match=r"has ended; go on with tether\.start"):
        run.save()


def test_between_two_iterations_a_signal_belongs_to_the_caller(config, request):
    """A cell of a notebook is interrupted as always; the run waits and can be closed."""
    before = signal.default_int_handler  # a worker of pytest-xdist has another
    held = signal.signal(signal.SIGINT, before)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, held))
    run = tether.start(config, reward=distinct_letters)
    next(run)
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert next(run).number == 1
    assert "2 of 4 iterations done, waits" in repr(run)
    run.close()
    run.close()
    assert "2 of 4 iterations done, ended" in repr(run)


def test_held_out_scores_are_there_when_asked_for(config):
    class Watch(Watcher):
        seen: list = []  # noqa: RUF012

        def iterated(self, record):
            self.seen.append(("iterated", record.iteration))

        def evaluated(self, evaluation):
            self.seen.append(("evaluated", evaluation.iteration))

    with tether.start(config, reward=distinct_letters, watch=Watch()) as run:
        next(run)
        assert list(run.evaluations) == [0]
        assert run.evaluate().iteration == 1
        assert run.evaluate() is run.evaluations[1]
    assert Watch.seen == [("evaluated", 0), ("iterated", 0), ("evaluated", 1)]


def test_a_run_that_fails_or_is_dropped_lets_go_of_its_lock(config):
    def broken(response: str) -> float:
        raise ValueError("no")

    run = tether.start(changed(config, data__heldout=None), reward=broken)
    with pytest.raises(RunStopped):
        next(run)
    assert not is_being_written(run.directory)
    assert list(run) == []
    assert read_jsonl(run.directory / "events.jsonl")[-1]["kind"] == "stopped"
    shutil.rmtree(run.directory)

    run = tether.start(config, reward=distinct_letters)
    next(run)
    place = run.directory
    assert is_being_written(place)
    with pytest.raises(UserError, match="is being written"):
        tether.start(config, reward=distinct_letters, resume=True)
    del run
    gc.collect()
    assert not is_being_written(place)


def test_what_runs_elsewhere_cannot_be_stepped(config):
    with pytest.raises(UserError, match=r"launch\.kind ray trains in other processes"):
        tether.start(changed(config, launch__kind="ray"))
    with pytest.raises(UserError, match="To resume, say which run"):
        tether.start(changed(config, run__dir=None), resume=True)
