"""Links, FIFOs, files of other programs and files that cannot be read, in a run directory."""

import errno
import json
import math
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tether.dist.interrupt import Interrupt
from tether.errors import UserError
from tether.ppo.estimates import estimate
from tether.ppo.evaluate import Evaluation
from tether.run.checkpoint_store import all_checkpoints, newest_whole, prune, publish, set_aside
from tether.run.directory import create_run_directory
from tether.run.lock import RunLock, is_being_written
from tether.run.writer import RunWriter, cut_back
from tether.train.export import model_card
from tether.types import Scores

# Reading it gives EIO, and every user may try.
FAILING = Path("/proc/self/mem")


def fill(folder: Path) -> None:
    (folder / "weights").write_bytes(b"weights")
    (folder / "weights").chmod(0o600)


def made_run(folder: Path) -> Path:
    """The files that a resume cuts, with three iterations in each."""
    for name in ("metrics.jsonl", "timings.jsonl", "evals.jsonl"):
        lines = [json.dumps({"schema": 1, "iteration": i}) + "\n" for i in range(3)]
        (folder / name).write_text("".join(lines))
    (folder / "rollouts").mkdir()
    for i in range(3):
        (folder / "rollouts" / f"{i:06d}.jsonl").write_text("{}\n")
    return folder


@pytest.mark.parametrize("name", ["weights", "manifest.json"])
def test_a_checkpoint_that_cannot_be_read_is_refused_and_not_passed_over(tmp_path, name):
    publish(tmp_path, "000001", fill)
    newest = publish(tmp_path, "000002", fill)
    (newest / name).unlink()
    (newest / name).symlink_to(FAILING)
    with pytest.raises(UserError, match=rf"{name} cannot be read: .* nothing was changed"):
        newest_whole(tmp_path)


def test_a_link_to_a_checkpoint_that_is_not_there_is_refused(tmp_path):
    publish(tmp_path, "000001", fill)
    (tmp_path / "checkpoints" / "000002").symlink_to(tmp_path / "unmounted")
    with pytest.raises(UserError, match=r"000002 is a link to .*unmounted, which is not there"):
        newest_whole(tmp_path)


def test_what_is_set_aside_never_replaces_what_was_set_aside_before(tmp_path):
    for _ in range(3):
        set_aside(publish(tmp_path, "000001", fill))
    names = {path.name for path in (tmp_path / "checkpoints").glob("damaged-*")}
    assert names == {"damaged-000001", "damaged-000001-2", "damaged-000001-3"}


def test_pruning_a_linked_checkpoint_removes_the_link_alone(tmp_path):
    first, last = publish(tmp_path, "000001", fill), publish(tmp_path, "000002", fill)
    elsewhere = tmp_path / "elsewhere"
    first.rename(elsewhere)
    first.symlink_to(elsewhere)
    assert newest_whole(tmp_path) == (last, {})
    prune(tmp_path, [last])
    assert all_checkpoints(tmp_path) == [last]
    assert (elsewhere / "weights").read_bytes() == b"weights"


def test_files_of_a_checkpoint_have_the_permissions_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        checkpoint = publish(tmp_path, "000001", fill)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in checkpoint.iterdir()} == {0o640}


def test_files_of_other_programs_are_left_alone(tmp_path):
    run = made_run(tmp_path)
    publish(run, "000001", fill)
    foreign = [run / "rollouts" / ".DS_Store", run / "rollouts" / "000002.jsonl~"]
    foreign += [run / "checkpoints" / ".DS_Store", run / "checkpoints" / "000001 copy"]
    for path in foreign:
        path.write_text("theirs")
    cut_back(run, 1)
    assert [path.name for path in all_checkpoints(run)] == ["000001"]
    assert all(path.read_text() == "theirs" for path in foreign)
    assert sorted(p.name for p in (run / "rollouts").glob("0*.jsonl")) == ["000000.jsonl"]


@pytest.mark.parametrize("name", ["timings.jsonl", "evals.jsonl"])
def test_a_damaged_line_is_named_and_no_file_is_cut(tmp_path, name):
    run = made_run(tmp_path)
    lines = (run / name).read_text().splitlines(keepends=True)
    (run / name).write_text("".join([lines[0], '{"iteration": 1, \n', lines[2]]))
    with pytest.raises(UserError, match=rf"{name}, line 2 is damaged"):
        cut_back(run, 2)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3


ASK = """
import sys
from pathlib import Path
from tether.run.lock import is_being_written
print(is_being_written(Path(sys.argv[1])))
"""


def test_a_fifo_called_lock_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "lock")
    asked = subprocess.run(
        [sys.executable, "-c", ASK, tmp_path], timeout=30, capture_output=True, text=True
    )
    assert asked.stdout == "False\n"
    assert not is_being_written(tmp_path)


def test_a_fifo_in_the_place_of_metrics_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    reader = os.open(tmp_path / "metrics.jsonl", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(UserError, match=r"metrics\.jsonl is not a regular file"):
            RunWriter(tmp_path, "schema: 1\n")
    finally:
        os.close(reader)


def test_overwriting_a_linked_run_replaces_what_the_link_leads_to(tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    (real / "config.yaml").write_text("old")
    (real / "metrics.jsonl").write_text("old")
    link.symlink_to(real)
    assert create_run_directory(link, "x", overwrite=True) == link
    assert link.is_symlink()
    assert list(real.iterdir()) == []


def test_the_folder_that_a_command_runs_in_is_not_removed_from_under_it(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("old")
    (tmp_path / "metrics.jsonl").write_text("old")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="run it from another folder"):
        create_run_directory(Path(), "x", overwrite=True)
    assert (tmp_path / "config.yaml").read_text() == "old"


def test_a_name_that_is_too_long_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"cannot be made: File name too long\.$"):
        create_run_directory(tmp_path / ("x" * 300), "x", overwrite=False)


@pytest.mark.parametrize("given", ["out/x", None])
def test_a_file_system_that_cannot_be_written_is_told_in_one_sentence(tmp_path, monkeypatch, given):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UserError, match=r"cannot be made: Read-only file system"):
        create_run_directory(given and Path(given), "x", overwrite=False)


def test_a_run_on_a_file_system_that_cannot_be_written_is_not_resumed(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UserError, match=r"lock cannot be opened for writing: read-only file"):
        RunLock(tmp_path).__enter__()


def test_an_interval_without_bounds_survives_its_way_through_the_file(tmp_path):
    one = estimate(Scores(torch.tensor([0.4]), torch.tensor([True]), torch.tensor([True])))
    writer = RunWriter(tmp_path, "schema: 1\n")
    writer.evaluation(Evaluation(0, one, one, None).record())
    writer.close()
    record = json.loads((tmp_path / "evals.jsonl").read_text())
    assert record["greedy"]["low"] is None
    found = Evaluation.from_record(record)
    assert (found.greedy.low, found.greedy.high) == (-math.inf, math.inf)


def test_a_model_card_has_no_infinite_interval(tiny_config):
    from tether.config.load import validate_config

    one = estimate(Scores(torch.tensor([0.4]), torch.tensor([True]), torch.tensor([True])))
    evaluations = [Evaluation(i, one, one, None) for i in (0, 2)]
    card = model_card(2, validate_config(tiny_config), evaluations)
    assert "inf" not in card.partition("Mean score")[2]


def test_a_hangup_is_remembered_as_other_signals_are():
    heard = []
    before = signal.signal(signal.SIGHUP, lambda number, frame: heard.append(number))
    try:
        with Interrupt() as interrupt:
            os.kill(os.getpid(), signal.SIGHUP)
        assert (interrupt.signal, heard) == (signal.SIGHUP, [])
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
        with Interrupt() as interrupt:
            os.kill(os.getpid(), signal.SIGHUP)
        assert interrupt.signal is None
    finally:
        signal.signal(signal.SIGHUP, before)
