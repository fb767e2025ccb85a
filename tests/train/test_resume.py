import collections
import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import Stop, changed, distinct_letters, stopping, tiny_recipe
from safetensors.torch import load_file

import tether
from tether import api
from tether.config.load import validate_config
from tether.errors import RunStopped, UserError
from tether.ppo.optimizer import Optimizer
from tether.run.checkpoint_store import latest_checkpoint, publish
from tether.run.lock import RunLock
from tether.train.resume import changed_fields
from tether.train.watch import Watcher


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def weights(run, name="critic.safetensors") -> bytes:
    return (latest_checkpoint(run) / name).read_bytes()


@pytest.fixture(scope="module")
def recipe(tiny_model_dir, tiny_data, tmp_path_factory):
    return changed(
        tiny_recipe(tiny_model_dir, tiny_data, tmp_path_factory.mktemp("resumed") / "run"),
        train__iterations=4,
        train__checkpoint_every=2,
        train__eval_every=1,
        train__eval_prompts=3,
        actor__schedule="linear",
        kl__in_reward={"coef": 0.1, "controller": "adaptive", "target": 0.1, "horizon": 100},
    )


@pytest.fixture
def config(recipe):
    """The same for every test; what an earlier one left in its directory is gone."""
    shutil.rmtree(recipe["run"]["dir"], ignore_errors=True)
    return changed(recipe)


@pytest.fixture(scope="module")
def trained(recipe):
    """A run that ended in its fourth iteration, two after its checkpoint: an evaluation asks for
    6 scores and an iteration for 12. Moved out of the way of the tests."""
    run = Path(recipe["run"]["dir"])
    shutil.rmtree(run, ignore_errors=True)
    with pytest.raises(Stop):
        tether.train(recipe, reward=stopping(4 * 6 + 3 * 12 + 5))
    return run.rename(run.with_name("trained"))


@pytest.fixture
def stopped(config, trained):
    """That run, where it was trained."""
    run = Path(shutil.copytree(trained, config["run"]["dir"], symlinks=True))
    assert [line["iteration"] for line in read_jsonl(run / "metrics.jsonl")] == [0, 1, 2]
    assert [line["iteration"] for line in read_jsonl(run / "evals.jsonl")] == [0, 1, 2, 3]
    assert sorted(path.stem for path in (run / "rollouts").iterdir())[-1] == "000002"
    return run


def test_a_stopped_run_goes_on_to_the_same_bits(config, stopped, tmp_path):
    result = api.resume(stopped, reward=distinct_letters)
    assert (result.resumed_from, result.iterations_done) == (2, 4)
    whole = tether.train(changed(config, run__dir=str(tmp_path / "whole")), reward=distinct_letters)
    for name in ("metrics.jsonl", "evals.jsonl", "rollouts/000003.jsonl"):
        assert (stopped / name).read_bytes() == (whole.run / name).read_bytes()
    for name in ("critic.safetensors", "actor_optimizer.safetensors", "actor/model.safetensors"):
        assert weights(stopped, name) == weights(whole.run, name)
    assert result.before == whole.before
    assert result.after == whole.after


@pytest.mark.long
def test_in_bfloat16_a_run_and_a_resumed_one_have_the_same_bits(config, tmp_path):
    """Until it is stopped, the second is another run of the same config."""
    coarse = changed(config, model__compute="bfloat16")
    with pytest.raises(Stop):
        tether.train(coarse, reward=stopping(4 * 6 + 3 * 12 + 5))
    resumed = api.resume(Path(coarse["run"]["dir"]), reward=distinct_letters).run
    whole = tether.train(changed(coarse, run__dir=str(tmp_path / "whole")), reward=distinct_letters)
    for name in ("metrics.jsonl", "evals.jsonl", "rollouts/000003.jsonl"):
        assert (resumed / name).read_bytes() == (whole.run / name).read_bytes()
    for name in ("critic.safetensors", "actor_optimizer.safetensors", "actor/model.safetensors"):
        assert weights(resumed, name) == weights(whole.run, name)


def test_moments_and_beta_matter_so_a_test_would_see_them_lost(stopped):
    """The optimizer and the controller have moved by the checkpoint that the test above uses."""
    state = json.loads((stopped / "checkpoints/000002/state.json").read_text())
    assert state["controls"]["beta"] != 0.1
    moments = load_file(stopped / "checkpoints/000002/actor_optimizer.safetensors")
    assert any(bool(x.any()) for name, x in moments.items() if name.endswith("exp_avg"))


def test_a_resumed_run_says_so_in_its_events_and_counts_attempts(stopped):
    api.resume(stopped, reward=distinct_letters)
    [event] = read_jsonl(stopped / "events.jsonl")
    assert (event["kind"], event["attempt"], event["iteration"]) == ("resumed", 2, 2)


def test_a_finished_run_is_left_as_it_is(stopped):
    api.resume(stopped, reward=distinct_letters)
    before = {p: p.read_bytes() for p in stopped.rglob("*") if p.is_file()}
    again = api.resume(stopped, reward=distinct_letters)
    assert again.resumed_from == again.iterations_done == 4
    assert again.after.iteration == 4
    assert before == {p: p.read_bytes() for p in stopped.rglob("*") if p.is_file()}


def test_train_with_resume_begins_or_goes_on(config, stopped, tmp_path):
    assert tether.train(config, reward=distinct_letters, resume=True).resumed_from == 2
    fresh = changed(config, run__dir=str(tmp_path / "fresh"))
    assert tether.train(fresh, reward=distinct_letters, resume=True).resumed_from == 0
    with pytest.raises(UserError, match=r"--run\.dir"):
        tether.train(changed(config, run__dir=None), reward=distinct_letters, resume=True)


def test_a_changed_field_is_refused_by_name_unless_allowed(config, stopped):
    other = changed(config, actor__lr=2e-3)
    with pytest.raises(UserError, match=r"actor\.lr, 0\.001 then and 0\.002 now"):
        tether.train(other, reward=distinct_letters, resume=True)
    tether.train(other, reward=distinct_letters, resume=True, allow_changed=True)
    kinds = [event["kind"] for event in read_jsonl(stopped / "events.jsonl")]
    assert "changed" in kinds


def test_more_iterations_may_be_asked_for_under_a_constant_schedule_only(config, stopped):
    with pytest.raises(UserError, match=r"train\.iterations, 4 then and 6 now"):
        api.resume(stopped, {"train.iterations": 6}, reward=distinct_letters)
    constant = validate_config(changed(config, actor__schedule="constant"))
    assert changed_fields(constant.to_dict(), constant) == []
    longer = constant.model_copy(
        update={"train": constant.train.model_copy(update={"iterations": 9, "keep_last": 5})}
    )
    assert changed_fields(constant.to_dict(), longer) == []


@pytest.mark.parametrize("field", ["data.train", "data.heldout"])
def test_changed_data_is_refused_by_name_unless_allowed(config, tmp_path, field):
    data = tmp_path / "data.jsonl"
    shutil.copy(config["data"]["train"], data)
    config = changed(config, **{field.replace(".", "__"): str(data)})
    with pytest.raises(Stop):
        tether.train(config, reward=stopping(60))
    data.write_text(data.read_text() + '{"prompt": "9+9=?", "answer": "18"}\n')
    with pytest.raises(UserError, match=rf"the file behind {field}"):
        api.resume(config["run"]["dir"], reward=distinct_letters)
    result = api.resume(config["run"]["dir"], reward=distinct_letters, allow_changed=True)
    assert result.iterations_done == 4


def test_another_torch_is_refused_by_name(stopped, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    with pytest.raises(UserError, match=r"torch, .* then and 9\.9\.9 now"):
        api.resume(stopped, reward=distinct_letters)


def test_a_run_that_another_writes_and_a_folder_that_is_none_are_refused(stopped, tmp_path):
    with RunLock(stopped), pytest.raises(UserError, match="another process"):
        api.resume(stopped, reward=distinct_letters)
    with pytest.raises(UserError, match=r"not a run: there is no config\.yaml"):
        api.resume(tmp_path / "nowhere")


def test_a_checkpoint_of_an_older_version_is_refused_in_a_sentence(stopped):
    checkpoint = latest_checkpoint(stopped)
    publish(stopped, "000003", lambda folder: (folder / "state.json").write_text('{"beta": 1}'))
    with pytest.raises(UserError, match="000003 is of an older version of tether"):
        api.resume(stopped, reward=distinct_letters)
    assert checkpoint.exists()


def test_lines_that_a_checkpoint_counts_on_must_be_there(stopped):
    lines = (stopped / "metrics.jsonl").read_text().splitlines(keepends=True)
    (stopped / "metrics.jsonl").write_text("".join(lines[1:]))
    with pytest.raises(UserError, match="no line for iteration 0, which checkpoint 000002"):
        api.resume(stopped, reward=distinct_letters)


def test_the_best_checkpoint_is_kept_besides_the_newest(config):
    scores = {0: 0.0, 1: 0.5, 2: 1.0, 3: 0.25, 4: 0.0}
    config = changed(config, train__checkpoint_every=1, train__keep_last=1, train__keep_best=1)
    done = []

    class Watch(Watcher):
        def evaluating(self, prompts):
            done.append(None)

    result = tether.train(config, reward=lambda: scores[len(done) - 1], watch=Watch())
    kept = sorted(path.name for path in (result.run / "checkpoints").glob("0*"))
    assert kept == ["000002", "000004"]


def test_weights_that_are_not_finite_are_never_saved(config, monkeypatch):
    step = Optimizer.step

    def poisoned(optimizer):
        norm = step(optimizer)
        with torch.no_grad():
            optimizer.parameters[0].view(-1)[0] = float("nan")
        return norm

    monkeypatch.setattr(Optimizer, "step", poisoned)
    config = changed(config, data__heldout=None, train__checkpoint_every=1)
    with pytest.raises(RunStopped, match="weights are not finite, so checkpoint 000001"):
        tether.train(config, reward=distinct_letters)
    assert not list((Path(config["run"]["dir"]) / "checkpoints").glob("0*"))


def test_too_little_disk_is_refused_before_training(config, monkeypatch):
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**9, 10**9, 1000))
    with pytest.raises(UserError, match=r"has 1 KiB free, but checkpoints need .* MiB"):
        tether.train(config, reward=distinct_letters)
    assert not Path(config["run"]["dir"]).exists()
