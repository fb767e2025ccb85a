import subprocess
import sys

import pytest

from tether.errors import UserError
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
