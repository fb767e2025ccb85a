"""docs/details.md: every detail of the two papers has a row, and every name in it exists."""

import importlib
from pathlib import Path

from test_names_in_docs import FIELDS, SECTIONS, WHOLE, fields_in, metrics_in, quoted

from tether.run.glossary import METRICS

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "details.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith(("| #", "| ---"))
]


def exists(name: str) -> bool:
    """Whether a dotted name is a module of tether, or something in one."""
    module, _, attribute = name.rpartition(".")
    try:
        return hasattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError:
        return False


def test_all_37_details_and_the_nine_of_engstrom_have_a_row():
    numbers = [row[0].removesuffix(", E") for row in ROWS]
    assert [int(n) for n in numbers if n.isdigit()] == list(range(1, 38))
    assert sum(row[0].endswith("E") for row in ROWS) == 9


def test_every_row_says_whether_and_why():
    for number, detail, has, where in ROWS:
        assert has in ("yes", "no", "–"), (number, detail)
        assert len(where) > 10, (number, detail)
        if has == "yes":
            named = quoted(where) or "row" in where
            assert named, (number, detail)


def test_every_field_and_metric_exists():
    fields = fields_in(PAGE)
    assert len(fields) > 25
    assert fields - FIELDS - SECTIONS - WHOLE == set()
    assert len(metrics_in(PAGE)) >= 6
    assert metrics_in(PAGE) - {*METRICS} - {"examples/classic_control"} == set()


def test_every_function_exists():
    names = {name for name in quoted(PAGE) if name.startswith("tether.")}
    assert len(names) > 12
    assert [name for name in names if not exists(name)] == []
    assert not exists("tether.algo.losses.clip_policy")


def test_what_is_said_of_numbers_is_so():
    """Rows 2, 3 and 11: the head starts at 0, AdamW keeps its epsilon, gradients stop at 1."""
    import torch

    from tether.config import ActorSection, CriticSection
    from tether.ppo.optimizer import Optimizer

    adam = Optimizer([torch.nn.Parameter(torch.zeros(1))], lr=1.0, max_grad_norm=1.0).adam
    assert adam.param_groups[0]["eps"] == 1e-8
    assert ActorSection().max_grad_norm == CriticSection().max_grad_norm == 1.0
    assert ActorSection().schedule == "constant"
    assert "eps: float = 1e-5" in (ROOT / "examples" / "classic_control.py").read_text("utf-8")
