"""scripts/measure_samplers.py: what is measured is kept, and the figure says what a run wrote."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPTS))
    try:
        spec = importlib.util.spec_from_file_location("samplers", SCRIPTS / "measure_samplers.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["samplers"] = module  # dataclasses look for it there
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(SCRIPTS))
        sys.modules.pop("samplers", None)


@pytest.fixture
def bench(script, tmp_path):
    def made(only_kept=False, sizes=script.TINY):
        store = script.Store(tmp_path / "results", tmp_path / "runs", only_kept)
        return script.Bench(store, sizes, seeds=2, threads=1)

    return made


def test_a_kill_that_is_kept_is_not_done_again_and_what_is_missing_is_no_success(
    script, bench, monkeypatch
):
    done = []
    monkeypatch.setattr(script, "train", lambda run, recipe, fields: run)
    monkeypatch.setattr(script, "hashes", lambda run: {"metrics.jsonl": "0"})

    def one_kill(bench, settings, run):
        if len(done) == 2:
            raise SystemExit("the machine went away")
        done.append((settings["kind"], settings["number"]))
        return {"equal": True, "moment": "after 1 iterations"}

    monkeypatch.setattr(script, "one_kill", one_kill)
    with pytest.raises(SystemExit):
        script.measure_kills(bench())
    part = script.measure_kills(bench(only_kept=True))
    assert ([*part["outcomes"]], part["holds"]) == (["sampler 0", "trainer 0"], False)
    done.pop()
    whole = script.measure_kills(bench())
    assert done == [("sampler", 0), ("both", 0)]
    assert whole["holds"]
    assert "both" in "\n".join(script.describe_kills(whole))


def test_each_learning_run_is_kept_by_itself(script, bench, monkeypatch):
    learnt = []

    def learn(recipe, fields, run):
        learnt.append((fields["rollout.lag"], fields["rollout.correction.kind"], fields["seed"]))
        return {"scores": [0.25, 0.5 + fields["seed"] / 4], "mismatch": 0.125}

    monkeypatch.setattr(script, "learn", learn)
    for _ in range(2):
        found = script.measure_lag(bench())
    assert learnt == [(lag, kind, seed) for lag, kind in ((0, "none"), (1, "token"), (1, "none"))
                      for seed in (0, 1)]  # fmt: skip
    assert "0.625" in script.describe_lag(found)[-1]
    with pytest.raises(script.NotThere):
        script.measure_lag(bench(only_kept=True, sizes=script.FULL))


@pytest.mark.parametrize("size", ["FULL", "TINY"])
def test_the_runs_of_every_part_are_valid_configs(script, size):
    sizes = getattr(script, size)
    apart = {"launch.samplers": 2}
    runs = [("arithmetic", {**sizes.small, **apart}), ("arithmetic", sizes.equal)]
    runs += [(recipe, {**sizes.learning, "rollout.lag": 1}) for recipe in sizes.recipes]
    runs += [(recipe, {**sizes.overlap, **apart}) for recipe in script.RECIPES]
    for recipe, fields in runs:
        script.load_config(recipe, fields)


def test_the_figure_has_a_block_for_each_chunk_and_each_stage(script):
    chunk = {"asked": 0, "rows": [0, 8], "version": 0, "lost": 0, "trains": True}
    lanes = [
        {
            "kind": "sampler",
            "name": "sampler <1>",
            "spans": [
                {**chunk, "from": 0, "to": 2, "iteration": 1},
                {**chunk, "from": 2, "to": 9, "iteration": None, "trains": False},
            ],
        },
        {"kind": "rewards", "name": "", "spans": [{"stage": "reward", "from": 1, "to": 2}]},
        {
            "kind": "trainer",
            "name": "",
            "spans": [
                {"stage": "rollout", "from": 0, "to": 1},
                {"stage": "between", "from": 3, "to": 4},
            ],
        },
    ]
    one = {"seconds": 4, "lanes": lanes}
    figure = script.draw_figure({"a & b": [one, one]})
    assert "a &amp; b: two iterations, 8.0 s" in figure
    assert "sampler &lt;1&gt;" in figure
    assert figure.count("1 · v0") == 2
    assert figure.count(">e</text>") == 2  # cut off at the iteration's end
    assert figure.count(f'fill="{script.STAGE_HUES["reward"]}"') == 2 + 1  # and in the legend
    assert figure.count("stroke-dasharray") == 2 + 1


def test_what_is_written_has_a_place_in_the_document(script):
    text = script.DOCUMENT.read_text(encoding="utf-8")
    for name in [*script.PARTS, "gantt"]:
        assert f"<!-- {script.MARKER.format(name)} -->" in text
