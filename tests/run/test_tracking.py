"""Trackers get every number once, and whatever they do, the run stays what it is."""

import json
import math
import os
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers import changed, distinct_letters, read_jsonl

import tether
from tether.config.load import validate_config
from tether.errors import UserError
from tether.run.tracking.manager import Trackers
from tether.run.tracking.process import Tail, numbers_in
from tether.run.writer import cut_back

Points = dict[tuple[str, int], list[float]]


def written(run: Path) -> Points:
    """(name, step) -> its values, straight from the run's files."""
    points: Points = {}
    for file in ("metrics.jsonl", "timings.jsonl"):
        for line in read_jsonl(run / file):
            for name in set(line) - {"schema", "iteration"}:
                points[name, line["iteration"]] = [line[name]]
    for line in read_jsonl(run / "evals.jsonl"):
        step = line["iteration"]
        points["eval/kl", step] = [line["kl"]]
        for way in ("greedy", "sampled"):
            for name in ("mean", "low", "high", "count"):
                points[f"eval/{way}/{name}", step] = [line[way][name]]
    return points


def in_tensorboard(run: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = run / "trackers" / "tensorboard"
    points: Points = {}
    for path in sorted(folder.glob("events.out.*")):
        events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
        for tag in events.Tags()["scalars"]:
            for event in events.Scalars(tag):
                points.setdefault((tag, event.step), []).append(event.value)
    return points


def wandb_records(path: Path) -> Iterator[bytes]:
    """Of LevelDB's log format: blocks of 32 KiB with pieces of 4 + 2 + 1 bytes and content."""
    data, position, record = path.read_bytes(), 7, b""  # after wandb's own seven
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:  # too little for a piece: padding
            position += left
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


def in_wandb(run: Path) -> Points:
    from wandb.proto.wandb_internal_pb2 import Record

    points: Points = {}
    for path in sorted((run / "trackers" / "wandb").glob("wandb/offline-run-*/*.wandb")):
        for data in wandb_records(path):
            items = Record.FromString(data).history.item
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}
            for name in row:
                if not name.startswith("_") and name != "iteration":
                    points.setdefault((name, row["iteration"]), []).append(row[name])
    return points


def in_trackio(run: Path) -> Points:
    import sqlite3

    points: Points = {}
    with sqlite3.connect(run / "trackers" / "trackio" / "tether.db") as base:
        for step, metrics in base.execute("select step, metrics from metrics"):
            for name, value in json.loads(metrics).items():
                points.setdefault((name, step), []).append(value)
    return points


def in_mlflow(run: Path) -> Points:
    import sqlite3

    points: Points = {}
    with sqlite3.connect(run / "trackers" / "mlflow" / "mlflow.db") as base:
        for name, step, value in base.execute("select key, step, value from metrics"):
            points.setdefault((name, step), []).append(value)
    return points


READ_BACK = {
    "tensorboard": in_tensorboard,
    "wandb": in_wandb,
    "trackio": in_trackio,
    "mlflow": in_mlflow,
}


def assert_same(found: Points, expected: Points, digits: type) -> None:
    """Every point once, and to the last bit of the tracker's number format."""
    assert found.keys() == expected.keys()
    for point, [value] in expected.items():
        assert found[point] == [float(digits(value))], point


def tracker_events(run: Path) -> list[str]:
    return [e["message"] for e in read_jsonl(run / "events.jsonl") if e["kind"] == "tracker"]


def track(run: Path, tracker: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tether.run.tracking.process", str(run), tracker]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def metrics_line(iteration: int) -> str:
    line = {"schema": 1, "iteration": iteration, "score/mean": iteration / 3, "odd": None}
    return json.dumps(line) + "\n"


@pytest.fixture
def tiny_config(tiny_config) -> dict:
    """A run that is shorter still: what is sent matters here, not what is learnt."""
    return changed(tiny_config, train__eval_prompts=2, actor__epochs=1, critic__epochs=1)


@pytest.fixture
def recorded(tmp_path) -> Path:
    """A run of five iterations, by hand."""
    run = tmp_path / "recorded"
    run.mkdir()
    (run / "config.yaml").write_text("seed: 3\nrollout: {prompts: 4}\n")
    (run / "metrics.jsonl").write_text("".join(map(metrics_line, range(5))))
    evaluation = {"schema": 1, "iteration": 5, "kl": 0.5, "greedy": {"mean": 0.25, "binary": True}}
    (run / "evals.jsonl").write_text(json.dumps(evaluation) + "\n")
    return run


# What a run sends.


@pytest.fixture(scope="module")
def untracked(tmp_path_factory):
    """The bytes of a run's metrics without trackers, by config."""
    found: dict[str, bytes] = {}

    def bytes_of(config: dict) -> bytes:
        key = json.dumps(changed(config, run__dir="", run__trackers=[]))
        if key not in found:
            directory = str(tmp_path_factory.mktemp("untracked") / "run")
            plain = changed(config, run__dir=directory, run__trackers=[])
            found[key] = (
                tether.train(plain, reward=distinct_letters).run / "metrics.jsonl"
            ).read_bytes()
        return found[key]

    return bytes_of


@pytest.mark.parametrize("tracker", READ_BACK)
def test_a_tracker_has_every_number_of_the_run_once(tracker, tiny_config, untracked):
    pytest.importorskip(tracker, reason=f"{tracker} is not installed (extra `trackers`)")
    config = changed(tiny_config, run__trackers=[tracker], train__eval_every=1)
    run = tether.train(config, reward=distinct_letters).run
    expected = written(run)
    assert len(expected) > 60
    digits = np.float32 if tracker == "tensorboard" else float
    assert_same(READ_BACK[tracker](run), expected, digits)
    assert tracker_events(run) == []
    assert (run / "metrics.jsonl").read_bytes() == untracked(config)


@pytest.mark.parametrize("tracker", READ_BACK)
def test_a_finished_run_is_sent_afterwards_and_only_once(tracker, recorded):
    pytest.importorskip(tracker, reason=f"{tracker} is not installed (extra `trackers`)")
    for _ in range(2):
        sent = track(recorded, tracker)
        assert sent.returncode == 0, sent.stderr
    expected = {("score/mean", i): [float(np.float32(i / 3))] for i in range(5)}
    expected |= {("eval/kl", 5): [0.5], ("eval/greedy/mean", 5): [0.25]}
    found = READ_BACK[tracker](recorded)
    assert {point: [np.float32(x) for x in found[point]] for point in found} == expected


@pytest.mark.parametrize("tracker", READ_BACK)
def test_a_resumed_run_goes_on_in_the_same_tracker_run_and_doubles_no_step(tracker, recorded):
    pytest.importorskip(tracker, reason=f"{tracker} is not installed (extra `trackers`)")
    assert track(recorded, tracker).returncode == 0
    position = recorded / "trackers" / tracker / "position.json"
    key = json.loads(position.read_text())["key"]
    cut_back(recorded, 3)
    with (recorded / "metrics.jsonl").open("a") as file:
        file.writelines(map(metrics_line, range(3, 8)))  # 5 had an evaluation, and no metrics yet
    assert track(recorded, tracker).returncode == 0
    steps = Counter(
        step
        for (name, step), values in READ_BACK[tracker](recorded).items()
        for _ in values
        if name == "score/mean"
    )
    assert steps == dict.fromkeys(range(8), 1)
    assert json.loads(position.read_text())["key"] == key


@pytest.mark.long
def test_a_run_that_was_resumed_is_one_curve_in_tensorboard(tiny_config):
    config = changed(tiny_config, run__trackers=["tensorboard"], train__checkpoint_every=1)
    run = tether.train(config, reward=distinct_letters).run
    tether.resume(run, {"train.iterations": 4}, reward=distinct_letters)
    found = in_tensorboard(run)
    assert [len(found["score/mean", step]) for step in range(4)] == [1, 1, 1, 1]
    assert {step for name, step in found if name == "eval/kl"} == {0, 2, 4}
    assert tracker_events(run) == []


@pytest.mark.long
def test_trackers_may_change_when_a_run_is_resumed(tiny_config):
    run = tether.train(tiny_config, reward=distinct_letters).run
    changes = {"train.iterations": 3, "run.trackers": ["tensorboard"]}
    tether.resume(run, changes, reward=distinct_letters)
    assert {step for name, step in in_tensorboard(run) if name == "score/mean"} == {0, 1, 2}


def test_names_are_those_of_the_files_and_what_is_no_number_is_left_out():
    record = {"schema": 1, "iteration": 7, "a/b": 1.5, "none": None, "yes": True, "n": 2}
    assert numbers_in(record, "") == {"a/b": 1.5, "n": 2}
    nested = {"schema": 1, "iteration": 7, "kl": 0.5, "greedy": {"mean": 1.0, "binary": False}}
    assert numbers_in(nested, "eval/") == {"eval/kl": 0.5, "eval/greedy/mean": 1.0}


# Files that grow, and shrink.


def test_half_a_line_waits_for_its_other_half(tmp_path):
    tail = Tail(tmp_path / "metrics.jsonl")
    assert list(tail.read()) == []
    tail.path.write_text('{"iteration": 0}\n{"itera')
    assert list(tail.read()) == [{"iteration": 0}]
    assert list(tail.read()) == []
    with tail.path.open("a") as file:
        file.write('tion": 1}\n')
    assert list(tail.read()) == [{"iteration": 1}]


def test_a_file_that_was_cut_back_is_read_from_its_top(tmp_path):
    tail = Tail(tmp_path / "metrics.jsonl")
    tail.path.write_text('{"iteration": 0}\n{"iteration": 1}\n')
    assert len(list(tail.read())) == 2
    tail.path.write_text('{"iteration": 0}\n')
    assert list(tail.read()) == [{"iteration": 0}]


def follower(run: Path, tracker: str = "tensorboard") -> subprocess.Popen:
    command = [sys.executable, "-m", "tether.run.tracking.process", str(run), tracker, "--follow"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_for(condition, seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_a_follower_sends_lines_as_they_come_and_the_last_ones_at_the_end(recorded):
    process = follower(recorded)
    position = recorded / "trackers" / "tensorboard" / "position.json"

    def has_sent(iteration: int) -> bool:
        text = position.read_text() if position.exists() else "{}"
        return json.loads(text).get("sent", {}).get("metrics.jsonl") == iteration

    assert wait_for(lambda: has_sent(4))
    with (recorded / "metrics.jsonl").open("a") as file:
        file.write(metrics_line(5))
        file.flush()
        assert wait_for(lambda: has_sent(5))
        file.write(metrics_line(6))
    process.stdin.close()
    assert process.wait(20) == 0
    assert has_sent(6)
    assert {step for name, step in in_tensorboard(recorded) if name == "score/mean"} == {*range(7)}


PARENT = """
import sys, time
from pathlib import Path
from tether.run.tracking.manager import Trackers
trackers = Trackers(Path(sys.argv[1]), ["tensorboard"])
assert trackers.start() == []
print(trackers.processes["tensorboard"].pid, flush=True)
time.sleep(60)
"""


def test_when_the_run_is_killed_the_tracker_sends_what_is_there_and_ends(recorded):
    command = [sys.executable, "-c", PARENT, str(recorded)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    assert wait_for(lambda: not Path(f"/proc/{child}/cmdline").exists() or _is_zombie(child))
    assert {step for name, step in in_tensorboard(recorded) if name == "score/mean"} == {*range(5)}


def _is_zombie(pid: int) -> bool:
    """Nobody may be there to collect it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_tracker_that_hangs_is_ended_by_the_kernel_once_its_run_is_gone():
    hang = (
        "import threading, time, tether.run.tracking.process as track\n"
        "track.GRACE_SECONDS = 0\n"
        "track.end_with_input(threading.Event())\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", hang]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    assert process.poll() is None
    process.stdin.close()
    assert process.wait(10) == -signal.SIGALRM


@pytest.mark.long
def test_a_second_reader_waits_until_the_first_has_ended(recorded):
    first = follower(recorded)
    position = recorded / "trackers" / "tensorboard" / "position.json"
    assert wait_for(lambda: position.exists() and '"metrics.jsonl": 4' in position.read_text())
    second = follower(recorded)
    second.stdin.close()
    time.sleep(1.0)
    assert second.poll() is None
    first.stdin.close()
    assert first.wait(20) == 0
    assert second.wait(20) == 0
    assert all(len(values) == 1 for values in in_tensorboard(recorded).values())


# A tracker that fails costs one event.

FAKE = """
import json, os, sys, time
from pathlib import Path
{at_import}
def init(**options):
    {at_init}
    return Run()
class Run:
    logged = 0
    def define_metric(self, *names, **options): pass
    def log(self, numbers):
        Run.logged += 1
        {at_log}
    def finish(self):
        {at_finish}
"""

WRONGS = {
    "failed: wandb is not installed": ("at_import", "raise ModuleNotFoundError(name='wandb')"),
    "failed: RuntimeError: broken install": ("at_import", "raise RuntimeError('broken\\ninstall')"),
    "failed: ValueError: no key": ("at_init", "raise ValueError('no key')"),
    "failed: OSError: server is gone": ("at_log", "raise OSError('server is gone')"),
    "ended with code 3": ("at_log", "os._exit(3)"),
    "ended with code 0": ("at_log", "os._exit(0)"),
    "ended with code -9": ("at_log", "os.kill(os.getpid(), 9)"),
    "ended with code 4": ("at_log", "sys.exit(4)"),
}
IN_A_RUN = {
    **WRONGS,
    "failed: OSError: at the end": ("at_finish", "raise OSError('at the end')"),
    "was still busy": ("at_init", "time.sleep(600)"),
    "busy after the run, and stopped": ("at_log", "time.sleep(600)"),
}
TOO_QUICK = {"ended with code 0", "ended with code -9", "failed: ValueError: no key"}


@pytest.fixture
def fake_wandb(tmp_path, monkeypatch):
    def make(**places: str) -> None:
        defaults = dict.fromkeys(("at_import", "at_init", "at_log", "at_finish"), "pass")
        folder = tmp_path / "packages"
        folder.mkdir()
        (folder / "wandb.py").write_text(FAKE.format(**defaults | places))
        before = os.environ.get("PYTHONPATH")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), before])))

    return make


@pytest.mark.parametrize("reason", WRONGS)
def test_one_that_ends_early_is_noticed_once(reason, fake_wandb, recorded):
    place, wrong = WRONGS[reason]
    fake_wandb(**{place: wrong})
    trackers = Trackers(recorded, ["wandb"])
    assert trackers.start() == []
    trackers.processes["wandb"].wait(30)
    [event] = trackers.ended()
    assert event.kind == "tracker"
    assert event.message.startswith(f"tracker wandb {reason}")
    assert event.message.endswith(
        f"`python -m tether.run.tracking.process {recorded} wandb` sends the rest"
    )
    assert "\n" not in event.message
    assert trackers.ended() == trackers.close() == []


@pytest.mark.parametrize("reason", sorted(IN_A_RUN.keys() - TOO_QUICK))
def test_whatever_a_tracker_does_the_run_is_the_same_and_has_one_event(
    reason, fake_wandb, tiny_config, untracked, monkeypatch
):
    place, wrong = IN_A_RUN[reason]
    fake_wandb(**{place: wrong})
    grace = 2.0 if "sleep" in wrong else 20.0
    monkeypatch.setattr("tether.run.tracking.manager.GRACE_SECONDS", grace)
    config = changed(tiny_config, run__trackers=["wandb"])
    result = tether.train(config, reward=distinct_letters)
    assert result.iterations_done == 2
    assert result.after is not None
    assert (result.run / "metrics.jsonl").read_bytes() == untracked(config)
    [message] = tracker_events(result.run)
    assert reason in message


def test_one_that_fails_does_not_harm_the_other(fake_wandb, tiny_config):
    fake_wandb(at_init="raise ValueError('no key')")
    config = changed(tiny_config, run__trackers=["wandb", "tensorboard", "wandb"])
    run = tether.train(config, reward=distinct_letters).run
    assert_same(in_tensorboard(run), written(run), np.float32)
    assert len(tracker_events(run)) == 1


def test_a_tracker_that_cannot_be_started_is_an_event_too(tiny_config, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    run = tether.train(changed(tiny_config, run__trackers=["wandb"]), reward=distinct_letters).run
    assert len(read_jsonl(run / "metrics.jsonl")) == 2
    [message] = tracker_events(run)
    assert "could not be started: No such file or directory" in message


@pytest.mark.long
def test_the_command_ends_with_0_and_says_what_failed(fake_wandb, tiny_config, tmp_path):
    fake_wandb(at_log="raise OSError('server is gone')")
    config = validate_config(changed(tiny_config, run__trackers=["wandb"]))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(config.to_yaml())
    command = [
        sys.executable,
        "-m",
        "tether",
        "train",
        str(recipe),
        "--run.dir",
        str(tmp_path / "r"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "server is gone" in " ".join((done.stdout + done.stderr).split())


# Nothing leaves the machine unless asked.


@pytest.mark.parametrize(("said", "heard"), [(None, "offline"), ("online", "online")])
def test_wandb_is_offline_unless_the_user_says_otherwise(
    said, heard, fake_wandb, recorded, tmp_path, monkeypatch
):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if said:
        monkeypatch.setenv("WANDB_MODE", said)
    dump = f"Path({str(tmp_path / 'seen')!r}).write_text(json.dumps([options, dict(os.environ)]))"
    fake_wandb(at_init=dump)
    assert track(recorded, "wandb").returncode == 0
    options, environment = json.loads((tmp_path / "seen").read_text())
    assert environment["WANDB_MODE"] == heard
    assert environment["WANDB_DISABLE_GIT"] == environment["WANDB_DISABLE_CODE"] == "true"
    assert options["dir"] == str(recorded / "trackers" / "wandb")
    assert options["name"] == "recorded"
    assert options["config"] == {"seed": 3, "rollout": {"prompts": 4}}


# Mistakes.


@pytest.mark.parametrize(
    ("tracker", "sentence"),
    [("tensorbord", "'tensorbord' is not a tracker"), ("../x", "'../x' is not a tracker")],
)
def test_an_unknown_tracker_is_refused_in_one_sentence(recorded, tracker, sentence):
    refused = track(recorded, tracker)
    assert refused.returncode == 2
    assert sentence in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert not (recorded / "trackers").exists()


def test_a_directory_that_is_no_run_is_refused(tmp_path):
    refused = track(tmp_path, "tensorboard")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == f"tether: {tmp_path} is not a run: there is no config.yaml in it.\n"


def test_a_damaged_line_is_named(recorded):
    path = recorded / "metrics.jsonl"
    path.write_text(path.read_text() + "{nonsense\n")
    refused = track(recorded, "tensorboard")
    assert refused.returncode == 2
    assert refused.stderr == f"tether: {path}, line 6 is not JSON.\n"


def test_the_config_knows_the_trackers(tiny_config):
    with pytest.raises(UserError, match=r"run\.trackers"):
        validate_config(changed(tiny_config, run__trackers=["tensorbord"]))


def test_what_is_not_finite_is_no_point(recorded):
    assert track(recorded, "tensorboard").returncode == 0
    found = in_tensorboard(recorded)
    assert all(math.isfinite(x) for values in found.values() for x in values)
    assert not any(name == "odd" for name, _ in found)
