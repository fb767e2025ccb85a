"""What a run is made from is known from its start, and a run that would be another is refused."""

import json
import os
import shutil
from pathlib import Path

import pytest
from helpers import Stop, changed
from transformers import LlamaConfig, LlamaForCausalLM

import tether
from tether import api
from tether.errors import RunStopped, UserError
from tether.rewards.functions import RewardPart
from tether.rewards.workers import ChildScorer
from tether.train.watch import Watcher


class StopAfter(Watcher):
    """Ends the run, as rudely as a kill, once so many iterations are written."""

    def __init__(self, iterations: int, error: type[BaseException] = Stop) -> None:
        self.iterations, self.error = iterations, error

    def iterated(self, record):
        if record.iteration + 1 == self.iterations:
            raise self.error


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    }


@pytest.fixture(scope="module")
def world(tmp_path_factory, byte_tokenizer) -> Path:
    """A model of more than two megabytes, data, and a reward that imports a file beside it; two
    runs that were stopped, one before its first checkpoint and one after."""
    folder = tmp_path_factory.mktemp("world")
    settings = LlamaConfig(
        vocab_size=len(byte_tokenizer),
        hidden_size=32,
        intermediate_size=8192,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        eos_token_id=byte_tokenizer.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(settings).save_pretrained(folder / "model")
    byte_tokenizer.save_pretrained(folder / "model")
    rows = [{"prompt": f"{a}+1=?", "answer": str(a + 1)} for a in range(4)]
    for name in ("train.jsonl", "heldout.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(
        "import os, sys\nsys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))\n"
        "import helpers_of_reward\n\n\n"
        "def score(response):\n    return helpers_of_reward.SCALE * len(set(response))\n"
    )
    (folder / "helpers_of_reward.py").write_text("SCALE = 0.125\n")
    here = Path.cwd()
    os.chdir(folder)
    try:
        for name, every in (("before", 0), ("after", 1)):
            with pytest.raises(Stop):
                tether.train(recipe(name, every), watch=StopAfter(2))
    finally:
        os.chdir(here)
    return folder


def recipe(name: str, checkpoint_every: int) -> dict:
    return {
        "threads": 1,
        "run": {"dir": f"runs/{name}", "rollouts_every": 1},
        "model": {"actor": "model"},
        "data": {"train": "train.jsonl", "heldout": "heldout.jsonl"},
        "rollout": {"prompts": 2, "samples_per_prompt": 2, "max_response_tokens": 4},
        "reward": {"kind": "reward.py:score"},
        "advantage": {"estimator": "grpo"},
        "actor": {"lr": 1e-3, "minibatch_rows": 4},
        "train": {"iterations": 3, "checkpoint_every": checkpoint_every},
    }


@pytest.fixture
def run(request, world, tmp_path, monkeypatch) -> Path:
    """A copy of one of the two runs, from the folder that they were started in."""
    monkeypatch.chdir(world)
    shutil.copytree(world / "runs" / request.param, tmp_path / "run")
    return tmp_path / "run"


both = pytest.mark.parametrize("run", ["before", "after"], indirect=True)


def flip_in_the_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)


def append(text: str):
    return lambda path: path.write_text(path.read_text() + text)


CHANGES = {
    "data.train": ("train.jsonl", append('{"prompt": "9+9=?", "answer": "18"}\n')),
    "data.heldout": ("heldout.jsonl", append('{"prompt": "9+9=?", "answer": "18"}\n')),
    "model.actor (model.safetensors": ("model/model.safetensors", flip_in_the_middle),
    "model.actor (chat_template.jinja": ("model/chat_template.jinja", append("!")),
    "reward.kind (reward.py": ("reward.py", append("\n# other\n")),
    "reward.kind (helpers_of_reward.py": ("helpers_of_reward.py", append("SCALE = 1.0\n")),
}


@both
@pytest.mark.parametrize("named", CHANGES)
def test_a_changed_file_is_refused_by_name_and_nothing_is_cut(run, world, named):
    name, change = CHANGES[named]
    before, kept = contents(run), (world / name).read_bytes()
    change(world / name)
    try:
        with pytest.raises(UserError) as refused:
            api.resume(run)
    finally:
        (world / name).write_bytes(kept)
    assert f"the file behind {named}" in str(refused.value)
    assert contents(run) == before


@pytest.mark.parametrize("run", ["after"], indirect=True)
@pytest.mark.parametrize("how", ["damaged", "unreadable"])
def test_a_run_without_a_whole_checkpoint_is_not_begun_again_unasked(run, how):
    [state] = (run / "checkpoints").glob("0*/state.json")
    state.unlink()
    if how == "unreadable":
        state.symlink_to("/proc/self/mem")  # reading it gives EIO
    before = {path: path.read_bytes() for path in run.glob("*.jsonl")}
    with pytest.raises(UserError, match=r"none is whole .*move|cannot be read: .*output error"):
        api.resume(run)
    assert before == {path: path.read_bytes() for path in run.glob("*.jsonl")}
    assert [path.name for path in (run / "checkpoints").iterdir() if path.is_dir()] == ["000001"]


@both
def test_an_edited_config_is_refused_by_name(run):
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("lr: 0.001", "lr: 0.002", 1))
    with pytest.raises(UserError, match=r"actor\.lr, 0\.001 then and 0\.002 now"):
        api.resume(run)


@both
def test_prompts_that_would_be_drawn_with_other_ids_are_refused(run):
    path = run / "prompts.jsonl"
    lines = read_jsonl(path) if path.exists() else [{"iteration": 0}]
    lines[0]["sha256"] = "0" * 64
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match="token ids of the prompts of iteration 0"):
        api.resume(run)


@pytest.mark.parametrize("run", ["before"], indirect=True)
def test_scores_from_before_a_change_are_not_compared_with_those_after_it(run, world):
    """Before the first checkpoint the model is still the same, so both are of the new reward."""
    [old] = read_jsonl(run / "evals.jsonl")
    path = world / "helpers_of_reward.py"
    kept = path.read_text()
    path.write_text("SCALE = 0.25\n")
    try:
        result = api.resume(run, allow_changed=True)
    finally:
        path.write_text(kept)
    assert result.before.greedy.mean == pytest.approx(2 * old["greedy"]["mean"])
    assert read_jsonl(run / "evals-001.jsonl") == [old]


@pytest.mark.parametrize("run", ["after"], indirect=True)
def test_a_run_goes_on_and_is_evaluated_from_another_folder_to_the_same_files(
    run, world, tmp_path, monkeypatch
):
    other = tmp_path / "elsewhere"
    other.mkdir()
    monkeypatch.chdir(other)
    result = api.resume(run)
    assert (result.resumed_from, result.iterations_done) == (1, 3)
    assert "actor: model" in (run / "config.yaml").read_text()
    (world / "heldout.jsonl").rename(world / "moved.jsonl")
    try:
        with pytest.raises(UserError, match=rf"{world / 'heldout.jsonl'} cannot be opened"):
            api.evaluate(str(run), **trusted())
    finally:
        (world / "moved.jsonl").rename(world / "heldout.jsonl")
    assert api.evaluate(str(run), **trusted()).greedy.count == 4


def trusted() -> dict:
    """A run's own code is used only when that is asked for, in versions that ask."""
    import inspect

    return {"trust_run": True} if "trust_run" in inspect.signature(api.evaluate).parameters else {}


@pytest.mark.parametrize("run", ["after"], indirect=True)
def test_a_run_that_fits_its_disk_can_be_resumed_there(run, monkeypatch):
    """Four checkpoints at most lie there at once (two newest, the best, one being written), and one
    of them is there already: room for three more is enough."""
    [checkpoint] = (run / "checkpoints").glob("0*")
    size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    usage = type("Usage", (), {"free": int(3.5 * size)})
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    assert api.resume(run).iterations_done == 3


@pytest.mark.parametrize("run", ["after"], indirect=True)
def test_a_run_of_the_first_version_is_resumed_by_what_its_checkpoint_remembers(run):
    """Which is one hash per field, and the version of torch; from then on it has a fingerprint."""
    import hashlib

    import torch

    from tether.run.checkpoint_store import publish
    from tether.train.fingerprint import hash_ends

    (run / "fingerprint.json").unlink()
    (run / "prompts.jsonl").unlink()
    [checkpoint] = (run / "checkpoints").glob("0*")
    state = json.loads((checkpoint / "state.json").read_text())
    del state["versions"]
    files = {"data.train": "train.jsonl", "data.heldout": "heldout.jsonl"}
    files["reward.kind"] = "reward.py"
    state["inputs"] = {
        field: hashlib.sha256(Path(name).read_bytes()).hexdigest() for field, name in files.items()
    }
    state["inputs"] |= {"model.actor": hash_ends(Path("model")), "torch": torch.__version__}
    old = checkpoint.rename(run / "old")

    def write(folder):
        shutil.copytree(old, folder, dirs_exist_ok=True)
        (folder / "manifest.json").unlink()
        (folder / "state.json").write_text(json.dumps(state))

    publish(run, checkpoint.name, write)
    kept = Path("train.jsonl").read_text()
    Path("train.jsonl").write_text(kept + "\n")
    try:
        with pytest.raises(UserError, match=r"the file behind data\.train"):
            api.resume(run)
    finally:
        Path("train.jsonl").write_text(kept)
    assert api.resume(run).iterations_done == 3
    assert json.loads((run / "fingerprint.json").read_text())["inputs"]["model.actor"]


def test_a_chat_template_that_asks_for_the_time_gets_the_same_day_in_the_whole_run(
    world, tmp_path, monkeypatch
):
    """The clock moves between the two attempts, by microseconds at least."""
    monkeypatch.chdir(world)
    shutil.copytree(world / "model", tmp_path / "model")
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text('{{ strftime_now("%H%M%S%f") }}' + template.read_text())
    (tmp_path / "one.jsonl").write_text('{"prompt": "1+1=?", "answer": "2"}\n')
    config = changed(
        recipe("dated", 1),
        run__dir=str(tmp_path / "run"),
        model__actor=str(tmp_path / "model"),
        data={"train": str(tmp_path / "one.jsonl")},
    )
    with pytest.raises(Stop):
        tether.train(config, watch=StopAfter(2))
    assert tether.train(config, resume=True).iterations_done == 3
    prompts = {
        tuple(row["prompt_ids"])
        for name in ("000000", "000002")
        for row in read_jsonl(tmp_path / "run" / "rollouts" / f"{name}.jsonl")
    }
    assert len(prompts) == 1
    assert "date: '2" in (tmp_path / "run" / "config.yaml").read_text()


def test_a_reward_edited_during_a_run_stops_it_when_its_process_is_started_anew(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def score(response):\n    return 0.5\n")
    scorer = ChildScorer([RewardPart(f"{file}:score")], 30.0)
    row = {"prompt": "p", "response": "r", "finished": True}
    try:
        assert scorer.score([row])[0].score == 0.5
        file.write_text("def score(response):\n    return 0.75\n")
        assert scorer.score([row])[0].score == 0.5  # the process that runs has not read it
        scorer.close()  # as after a row that killed it
        with pytest.raises(RunStopped, match=r"mine\.py was edited during the run"):
            scorer.score([row])
    finally:
        scorer.close()


def test_why_a_run_stopped_itself_stands_in_the_run(world, tmp_path, monkeypatch):
    monkeypatch.chdir(world)
    config = changed(recipe("stops", 0), run__dir=str(tmp_path / "run"), data__heldout=None)

    def stop():
        raise RunStopped("the moon was full")

    class Stops(Watcher):
        def iterated(self, record):
            stop()

    with pytest.raises(RunStopped):
        tether.train(config, watch=Stops())
    last = read_jsonl(tmp_path / "run" / "events.jsonl")[-1]
    assert (last["kind"], last["message"]) == ("stopped", "the moon was full")


def test_a_reward_handed_over_in_python_is_not_replaced_by_the_one_of_the_config(
    tiny_config, tmp_path
):
    config = changed(tiny_config, reward__kind="exact_answer", train__iterations=1)
    tether.train(config, reward=lambda response: -float(len(response)))
    run = tmp_path / "run"
    more = {"train.iterations": 2}
    with pytest.raises(UserError, match=r"the reward, a function handed over in Python then"):
        tether.resume(run, more)
    with pytest.raises(UserError, match="pass it again as reward="):
        tether.evaluate(str(run))
    with pytest.raises(UserError, match="pass it again as reward="):
        tether.trace("0+1=?", str(run))
    tether.resume(run, more, reward=lambda response: -float(len(response)))
    found = tether.evaluate(str(run), reward=lambda response: -float(len(response)))
    assert found.iteration == 2
    assert found.sampled.mean <= 0  # and not the share of right answers
    assert tether.evaluate(str(run), overrides={"reward.kind": "exact_answer"}).sampled.mean >= 0
