"""The reference pages say what the code says, and the glossary what a run writes."""

import importlib.util
import json
from collections import Counter
from pathlib import Path

import pytest
from helpers import changed, distinct_letters

import tether
from tether.config import ESTIMATORS, walk_fields
from tether.run.glossary import EVALS, METRICS, TIMINGS

ROOT = Path(__file__).resolve().parent.parent
KEYS = ["schema", "iteration"]  # in every line, besides the numbers


@pytest.fixture
def script():
    path = ROOT / "scripts" / "build_reference.py"
    spec = importlib.util.spec_from_file_location("build_reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines(run: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text(encoding="utf-8").splitlines()]


def leaves(record: dict, prefix: str = "") -> list[str]:
    """Dotted names of the plain values in nested objects."""
    return [
        name
        for key, value in record.items()
        for name in (
            leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]
        )
    ]


def test_the_pages_on_disk_are_what_the_code_would_write(script):
    assert script.stale() == [], "run `make docs`"


def test_a_page_with_one_changed_character_is_stale(script, monkeypatch, tmp_path):
    for path, text in script.build().items():
        copy = tmp_path / path.relative_to(script.DOCS)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(text, encoding="utf-8")
    monkeypatch.setattr(script, "DOCS", tmp_path)
    assert script.stale() == []
    page = tmp_path / "config.md"
    page.write_text(page.read_text(encoding="utf-8").replace("beta", "Beta", 1), encoding="utf-8")
    assert script.stale() == [page]
    (tmp_path / "metrics.md").unlink()
    assert script.stale() == [page, tmp_path / "metrics.md"]


def test_every_config_field_has_one_row_with_its_type_range_and_default(script):
    page = script.config_page()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    found = [row.split("`")[1] for row in rows]
    assert [name for name in found if name in ESTIMATORS] == list(ESTIMATORS)
    names = [name for name in found if name not in ESTIMATORS]
    walked = [name for name, _ in walk_fields()]
    # A section's own fields stand together, so those after a section inside it come before that.
    assert Counter(names) == Counter(walked)
    for section in {name.rpartition(".")[0] for name in walked}:
        own = [[n for n in some if n.rpartition(".")[0] == section] for some in (names, walked)]
        assert own[0] == own[1]
    assert "| `actor.update.kind` | string | `trpo` | required " in page
    assert (
        "| `actor.update.eps_low` | number | > 0, ≤ 1 | `0.2` "
        "| how far the ratio may fall before the objective is flat |" in rows
    )
    assert (
        "| `data.heldout` | string or list or mapping or null |  | `null` "
        "| prompts for evaluation only, written as `train`, or several sets as {NAME: FILE, …} |"
        in rows
    )


# Short runs that between them write every number there is; a warm-up has an iteration after it.
RUNS = {
    "clip": {"actor__entropy_coef": 0.01},
    "trpo": {"actor__update": {"kind": "trpo"}},
    "penalty": {"actor__update": {"kind": "penalty"}, "actor__stop_kl": 1e-6},
    "grpo": {"advantage__estimator": "grpo", "kl__in_loss__coef": 0.1},
    "warm-up": {
        "critic__warmup_iterations": 1,
        "critic__pretrain": {"prompts": 4, "max_epochs": 1},
        "train__iterations": 2,
    },
    "dynamic": {"advantage__estimator": "grpo", "rollout__dynamic_sampling": {"max_rounds": 2}},
    "curriculum": {"data__curriculum": {"by": "staleness"}},
    "shared trunk": {"critic": {"shared_trunk": True}},
    "corrected": {"rollout__correction": {"kind": "sequence"}},
    "lag": {"rollout__lag": 1},
    "tools": {
        "rollout__tools": ["calculator"],
        "rollout__max_response_tokens": 40,
        "rollout__max_observation_tokens": 30,
    },
}


def test_the_glossary_names_exactly_what_runs_write(tiny_config, tmp_path):
    written = {}
    for number, (name, dotted) in enumerate(RUNS.items()):
        directory = str(tmp_path / f"run-{number}")
        small = changed(tiny_config, run__dir=directory, data__heldout=None, train__iterations=1)
        config = changed(small, **dotted)
        run = tether.train(config, reward=distinct_letters).run
        written[name] = [list(metrics) for metrics in lines(run, "metrics.jsonl")]
    parts = [{"name": "NAME", "kind": "length", "arguments": {"at_most": 4}}]
    config = changed(tiny_config, run__dir=str(tmp_path / "parts"), reward={"parts": parts})
    written["parts"] = [list(m) for m in lines(tether.train(config).run, "metrics.jsonl")]
    everything = {key for run in written.values() for keys in run for key in keys}
    # The prompts of these runs are too short to be shared: tests/ppo/test_shared_prompts.py.
    shared = {"actor/shared_tokens", "critic/shared_tokens"}
    assert everything == {*KEYS, *METRICS} - shared
    # In the order of the glossary, where there is but one: trpo and joint updates work otherwise.
    for name in ("clip", "penalty", "grpo", "warm-up", "corrected", "lag", "tools", "parts"):
        for keys in written[name]:
            assert keys == [key for key in [*KEYS, *METRICS] if key in keys]
    assert not any(key.startswith("actor/") for key in written["warm-up"][0])
    assert not any(key.startswith(("critic/", "value/")) for key in written["grpo"][0])


SOMETIMES = ("time/tools", "time/collectives", "throughput/mfu")


def test_the_glossary_names_exactly_the_timings_and_evaluations_of_a_run(tiny_config):
    run = tether.train(tiny_config).run
    # Those of samplers apart are in tests/train/test_samplers.py.
    usual = [n for n in TIMINGS if n not in SOMETIMES and not n.startswith("samplers/")]
    for timings in lines(run, "timings.jsonl"):
        assert list(timings) == [*KEYS, *usual]
    named = {part for name in EVALS for part in name.split(", ")}
    for evaluation in lines(run, "evals.jsonl"):
        assert set(leaves(evaluation)) == {"schema", *named}
