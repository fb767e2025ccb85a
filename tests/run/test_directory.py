import pytest

from tether.errors import UserError
from tether.run import directory
from tether.run.directory import create_run_directory


def test_runs_without_a_directory_are_numbered_and_never_collide(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "RUNS", tmp_path / "runs")
    made = [create_run_directory(None, "demo", False).name for _ in range(3)]
    assert made == ["demo-001", "demo-002", "demo-003"]


def test_a_directory_that_exists_is_refused_and_nothing_in_it_changes(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "config.yaml").write_text("precious")
    with pytest.raises(UserError, match=r"exists.*overwrite"):
        create_run_directory(tmp_path, "x", False)
    assert (tmp_path / "config.yaml").read_text() == "precious"


def test_overwrite_replaces_a_run(tmp_path):
    run = tmp_path / "run"
    (run / "rollouts").mkdir(parents=True)
    (run / "config.yaml").write_text("old")
    (run / "metrics.jsonl").write_text("old")
    assert list(create_run_directory(run, "x", True).iterdir()) == []


@pytest.mark.parametrize("name", ["thesis.txt", "config.yaml", "metrics.jsonl"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_overwrite_removes_nothing_but_a_run(tmp_path, name, overwrite):
    """A folder with a config.yaml alone may be anybody's."""
    (tmp_path / name).write_text("precious")
    with pytest.raises(UserError, match="is not a run"):
        create_run_directory(tmp_path, "x", overwrite)
    assert (tmp_path / name).read_text() == "precious"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_in_the_place_of_a_run_is_refused_and_kept(tmp_path, overwrite):
    file = tmp_path / "run"
    file.write_text("precious")
    with pytest.raises(UserError, match="run"):
        create_run_directory(file, "x", overwrite)
    assert file.read_text() == "precious"


def test_a_place_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be made"):
        create_run_directory(tmp_path / "file" / "run", "x", False)
