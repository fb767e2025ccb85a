"""The reference pages say what the code says, and the glossary what a run writes."""

import importlib.util
import json
from pathlib import Path

import pytest

import tether
from tether.config import walk_fields
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
        (tmp_path / path.name).write_text(text, encoding="utf-8")
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
    assert [row.split("`")[1] for row in rows] == [name for name, _ in walk_fields()]
    assert (
        "| `actor.update.eps_low` | number | > 0, ≤ 1 | `0.2` "
        "| how far the ratio may fall before the objective is flat |" in rows
    )
    assert (
        "| `data.heldout` | string or null |  | `null` "
        "| path of the prompts that only evaluation sees |" in rows
    )


def test_the_glossary_names_exactly_what_a_run_writes_in_its_order(tiny_config):
    run = tether.train(tiny_config).run
    for metrics in lines(run, "metrics.jsonl"):
        assert list(metrics) == [*KEYS, *METRICS]
    for timings in lines(run, "timings.jsonl"):
        assert list(timings) == [*KEYS, *TIMINGS]
    named = {part for name in EVALS for part in name.split(", ")}
    for evaluation in lines(run, "evals.jsonl"):
        assert set(leaves(evaluation)) == {"schema", *named}
