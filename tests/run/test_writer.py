import pytest
import torch

from tether.errors import UserError
from tether.run.checkpoint_store import latest_checkpoint
from tether.run.metrics import Event
from tether.run.reader import find_runs, read_lines
from tether.run.writer import RunWriter, shortest_floats


@pytest.fixture
def writer(tmp_path):
    (tmp_path / "run").mkdir()
    writer = RunWriter(tmp_path / "run", "seed: 1\n")
    yield writer
    writer.close()


def test_lines_can_be_read_as_soon_as_they_are_written(writer):
    writer.iteration(3, {"score/mean": 0.5}, {"time/update": 1.0})
    writer.events(3, [Event("unscorable", "no idea", row=7)])
    writer.evaluation({"iteration": 3, "kl": 0.1})
    read = {name: read_lines(writer.directory / f"{name}.jsonl") for name in ("metrics", "timings")}
    assert read["metrics"] == [{"schema": 1, "iteration": 3, "score/mean": 0.5}]
    assert read["timings"] == [{"schema": 1, "iteration": 3, "time/update": 1.0}]
    assert read_lines(writer.directory / "evals.jsonl")[0]["kl"] == 0.1
    [event] = read_lines(writer.directory / "events.jsonl")
    assert event == {
        "schema": 1,
        "iteration": 3,
        "kind": "unscorable",
        "row": 7,
        "message": "no idea",
        "attempt": 1,
    }


@pytest.mark.parametrize("odd", ["\u2028", "\u2029", "\x85", "\n", "\x1c", '"', "好"])
def test_whatever_a_model_says_is_read_back_as_it_was(writer, odd):
    writer.rollouts(0, [{"response": f"a{odd}b"}, {"response": "c"}])
    rows = read_lines(writer.directory / "rollouts" / "000000.jsonl")
    assert [row["response"] for row in rows] == [f"a{odd}b", "c"]


def test_a_half_written_last_line_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 0}\n{"iteration": 1}\n{"itera')
    assert [line["iteration"] for line in read_lines(path)] == [0, 1]
    assert read_lines(tmp_path / "nowhere.jsonl") == []


def test_shortest_floats_read_back_to_the_same_float32():
    x = torch.tensor([0.1, 1 / 3, 1e-7, -2.0, 3.4e38])
    assert shortest_floats(x)[:1] == [0.1]
    assert torch.equal(torch.tensor(shortest_floats(x), dtype=torch.float32), x)


def test_only_folders_with_a_config_are_runs(tmp_path, writer):
    (tmp_path / "other").mkdir()
    assert find_runs(tmp_path) == [writer.directory]
    assert find_runs(tmp_path / "nowhere") == []


def test_a_run_without_a_checkpoint_says_so(writer):
    with pytest.raises(UserError, match="no whole checkpoint yet"):
        latest_checkpoint(writer.directory)


@pytest.mark.parametrize("damage", [b"\x80\x04\x95binary\n", b"not json\n", b"[1, 2]\n"])
def test_a_line_that_is_no_object_is_named(writer, damage):
    path = writer.directory / "metrics.jsonl"
    path.write_bytes(b'{"iteration": 0}\n' + damage)
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2 is not a JSON object"):
        read_lines(path)
