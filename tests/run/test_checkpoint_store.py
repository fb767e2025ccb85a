import json
import os

import pytest

from tether.errors import UserError
from tether.run.checkpoint_store import (
    all_checkpoints,
    latest_checkpoint,
    newest_whole,
    problem_with,
    prune,
    publish,
    set_aside,
    sweep,
)


def fill(folder):
    (folder / "actor").mkdir()
    (folder / "actor" / "weights").write_bytes(bytes(range(64)))
    (folder / "state.json").write_text('{"a": 1}')


@pytest.fixture
def checkpoint(tmp_path):
    return publish(tmp_path, "000010", fill)


def test_a_published_checkpoint_is_whole_and_latest(tmp_path, checkpoint):
    assert problem_with(checkpoint) is None
    assert (tmp_path / "checkpoints" / "LATEST").read_text() == "000010\n"
    assert latest_checkpoint(tmp_path) == checkpoint


@pytest.mark.parametrize("name", ["actor/weights", "state.json", "manifest.json"])
def test_a_file_cut_at_any_place_is_noticed(checkpoint, name):
    path = checkpoint / name
    content = path.read_bytes()
    # The manifest's last byte is a line feed, without which it says the same.
    for length in range(len(content) - (name == "manifest.json")):
        path.write_bytes(content[:length])
        assert problem_with(checkpoint) is not None, f"cut to {length} bytes"
    path.write_bytes(content)
    assert problem_with(checkpoint) is None


@pytest.mark.parametrize("name", ["actor/weights", "state.json", "manifest.json"])
def test_any_flipped_bit_is_noticed(checkpoint, name):
    path = checkpoint / name
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert problem_with(checkpoint) is not None, f"bit {bit}"


@pytest.mark.parametrize("name", ["actor/weights", "state.json", "manifest.json"])
def test_a_missing_file_is_noticed(checkpoint, name):
    (checkpoint / name).unlink()
    assert problem_with(checkpoint) is not None


def test_a_stray_file_is_no_damage(checkpoint):
    (checkpoint / "notes.txt").write_text("mine")
    assert problem_with(checkpoint) is None


def test_the_newest_whole_one_is_found_whatever_latest_says(tmp_path, checkpoint):
    newer = publish(tmp_path, "000020", fill)
    (tmp_path / "checkpoints" / "LATEST").write_text("../../etc")
    assert newest_whole(tmp_path) == (newer, {})
    (newer / "state.json").write_text("{}")
    found, damaged = newest_whole(tmp_path)
    assert found == checkpoint
    assert damaged == {newer: "state.json is damaged"}
    assert set_aside(newer).name == "damaged-000020"
    assert newest_whole(tmp_path) == (checkpoint, {})


def test_numbers_and_not_names_say_which_is_newer(tmp_path):
    for name in ("999999", "1000000"):
        publish(tmp_path, name, fill)
    assert [path.name for path in all_checkpoints(tmp_path)] == ["1000000", "999999"]


def test_a_write_that_fails_leaves_the_others_and_no_rubbish(tmp_path, checkpoint):
    def fails(folder):
        (folder / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        publish(tmp_path, "000020", fails)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["000010", "LATEST"]


def test_what_a_kill_left_staged_is_swept_and_never_loaded(tmp_path, checkpoint):
    staged = tmp_path / "checkpoints" / ".staged-000020"
    staged.mkdir()
    (staged / "half").write_text("x")
    assert newest_whole(tmp_path) == (checkpoint, {})
    sweep(tmp_path)
    assert not staged.exists()
    assert checkpoint.exists()


def test_pruning_keeps_what_it_is_told_to(tmp_path):
    made = [publish(tmp_path, f"{i:06d}", fill) for i in (1, 2, 3)]
    prune(tmp_path, [made[0], made[2]])
    assert all_checkpoints(tmp_path) == [made[2], made[0]]


def test_a_run_whose_only_checkpoint_is_damaged_says_what_is_wrong(tmp_path, checkpoint):
    (checkpoint / "state.json").write_text("{}")
    with pytest.raises(UserError, match=r"no whole checkpoint: state\.json is damaged"):
        latest_checkpoint(tmp_path)


def test_a_manifest_of_another_version_is_not_trusted(checkpoint):
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps({**manifest, "schema": 2}))
    assert "version" in problem_with(checkpoint)
