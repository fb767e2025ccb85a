"""What a notebook sees of the package: names, help, short answers, progress."""

import inspect
import pydoc
import sys
from types import SimpleNamespace

import pytest

import tether


def test_the_names_are_listed():
    assert {"train", "check", "evaluate", "generate", "load_config", "sft", "api"} <= set(
        dir(tether)
    )
    assert not {"Any", "TYPE_CHECKING"} & set(dir(tether))


@pytest.mark.parametrize("name", ["api", "errors", "sft", "reward_model", "export"])
def test_what_the_docs_name_is_there_after_one_import(name):
    """Asked as an import that has not happened yet would be."""
    assert tether.__getattr__(name) is not None


def test_help_of_train_begins_with_how_to_call_it():
    shown = pydoc.plain(pydoc.render_doc(tether.train))
    assert shown.splitlines()[2].startswith("train(config")
    assert "quiet          print nothing" in shown
    assert list(inspect.signature(tether.train).parameters) == [
        "config", "reward", "watch", "resume", "allow_changed", "quiet"
    ]  # fmt: skip


def test_a_plan_shows_itself_in_a_line(tiny_config):
    shown = repr(tether.check(tiny_config))
    assert len(shown) < 200
    assert "2 iterations of 12 rows" in shown


@pytest.mark.parametrize("where", ["terminal", "notebook"])
def test_training_shows_itself_where_a_person_looks_on(tiny_config, monkeypatch, capsys, where):
    if where == "terminal":
        monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True, raising=False)
    else:
        monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())
    tether.train({**tiny_config, "train": {"iterations": 1}})
    shown = capsys.readouterr().out
    assert "run  " in shown
    assert "1 of 1 iterations" in shown


def test_training_is_silent_when_asked_or_when_nobody_looks(tiny_config, monkeypatch, capsys):
    once = {**tiny_config, "train": {"iterations": 1}}
    tether.train(once)
    monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())
    run = {**once["run"], "dir": f"{once['run']['dir']}-quiet"}
    tether.train({**once, "run": run}, quiet=True)
    assert capsys.readouterr().out == ""


def test_an_sft_run_is_evaluated_on_a_recipe(tiny_model_dir, tmp_path, tiny_config):
    rows = tmp_path / "pairs.jsonl"
    rows.write_text('{"prompt": "1+1=?", "response": "2"}\n' * 4)
    sft = {
        "threads": 1,
        "run": {"dir": str(tmp_path / "sft")},
        "model": {"start": tiny_model_dir},
        "data": {"train": str(rows)},
        "train": {"minibatch_rows": 4},
    }
    tether.sft(sft)
    recipe = tmp_path / "task.yaml"
    recipe.write_text(tether.api.as_config(tiny_config).to_yaml())
    found = tether.evaluate(str(tmp_path / "sft"), recipe)
    assert found.greedy.count == 18
