import errno
import json
import os
import socket
import subprocess
import sys

import pytest

from tether.errors import UserError
from tether.run import lock
from tether.run.lock import RunLock, is_being_written

HOLD = """
import sys, time
from pathlib import Path
from tether.run.lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_run_has_one_writer(tmp_path, holder):
    assert is_being_written(tmp_path)
    with pytest.raises(UserError, match="another process"), RunLock(tmp_path):
        pass


def test_a_killed_writer_leaves_no_lock(tmp_path, holder):
    holder.kill()
    holder.wait()
    assert not is_being_written(tmp_path)
    with RunLock(tmp_path):
        pass


def test_a_lock_ends_with_its_block_and_asking_takes_none(tmp_path):
    assert not is_being_written(tmp_path)
    with RunLock(tmp_path):
        assert is_being_written(tmp_path)
    assert not is_being_written(tmp_path)
    with RunLock(tmp_path):
        pass


@pytest.fixture
def without_locks(monkeypatch):
    """A file system like Lustre without `-o flock`."""

    def refuse(descriptor, kind):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(lock.fcntl, "flock", refuse)


def test_without_locks_a_file_names_the_writer(tmp_path, without_locks):
    assert not is_being_written(tmp_path)
    with RunLock(tmp_path):
        assert is_being_written(tmp_path)
        named = json.loads((tmp_path / lock.HOLDER).read_text())
        assert (named["host"], named["pid"]) == (socket.gethostname(), os.getpid())
        sentence = rf"names process {os.getpid()} of .* -o flock"
        with pytest.raises(UserError, match=sentence), RunLock(tmp_path):
            pass
        assert is_being_written(tmp_path)  # the one that was refused has taken nothing away
    assert not is_being_written(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"lock"}


def test_without_locks_a_killed_writer_of_this_machine_is_followed(tmp_path, without_locks):
    with subprocess.Popen(["sleep", "60"]) as gone:
        began = lock._began(gone.pid)
        gone.kill()
    left = {"host": socket.gethostname(), "pid": gone.pid, "began": began}
    (tmp_path / lock.HOLDER).write_text(json.dumps(left))
    (tmp_path / lock.LOCK).touch()
    assert not is_being_written(tmp_path)
    with RunLock(tmp_path):
        assert json.loads((tmp_path / lock.HOLDER).read_text())["pid"] == os.getpid()


def test_without_locks_a_number_that_another_process_has_now_is_not_the_writer(
    tmp_path, without_locks
):
    left = {"host": socket.gethostname(), "pid": os.getpid(), "began": 1}
    (tmp_path / lock.HOLDER).write_text(json.dumps(left))
    with RunLock(tmp_path):
        pass


def test_without_locks_a_writer_of_another_machine_is_left_to_the_user(tmp_path, without_locks):
    """Nobody here knows whether it still runs."""
    left = {"host": "elsewhere", "pid": 1, "began": None}
    (tmp_path / lock.HOLDER).write_text(json.dumps(left))
    (tmp_path / lock.LOCK).touch()
    assert is_being_written(tmp_path)
    with pytest.raises(UserError, match=r"process 1 of elsewhere.*remove the file"):
        RunLock(tmp_path).__enter__()
