"""The pages for people who come from elsewhere name only fields and metrics that exist."""

import re
from pathlib import Path

from helpers import table

from tether.config import walk_fields
from tether.config.stages import RewardModelConfig, SFTConfig
from tether.run.glossary import METRICS, TIMINGS

DOCS = Path(__file__).resolve().parent.parent / "docs"
OURS = ["from-verl.md", "from-trl.md", "zh/from-verl.md", "zh/from-trl.md"]

FIELDS = {name for schema in (None, SFTConfig, RewardModelConfig)
          for name, _ in (walk_fields(schema) if schema else walk_fields())}  # fmt: skip
SECTIONS = {name.rpartition(".")[0] for name in FIELDS}
ROOMS = {name.partition(".")[0] for name in FIELDS if "." in name}
WHOLE = {"reward.parts", "data.train", "data.heldout"}  # sections inside, or plain values
MAPPINGS = ("reward.arguments.", "data.columns.")  # whose keys are the user's own


def our_column(page: str) -> list[str]:
    """Cells of the second column of every table."""
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| ")]
    return [cells[2] for cells in rows]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def fields_in(text: str) -> set[str]:
    """Dotted names of config fields, without the value or the dashes beside them."""
    words = [word.strip("-:") for span in quoted(text) for word in span.split()]
    names = {w for w in words if re.fullmatch(r"\w+(\.\w+)+", w) and not w.startswith(MAPPINGS)}
    return {name for name in names if name.partition(".")[0] in ROOMS}


def metrics_in(text: str) -> set[str]:
    return {word for word in quoted(text) if re.fullmatch(r"[a-z]+/\w+", word)}


@table("name", OURS)
def test_what_a_name_of_another_system_is_here_exists(name):
    cells = "\n".join(our_column((DOCS / name).read_text(encoding="utf-8")))
    fields, metrics = fields_in(cells), metrics_in(cells)
    assert len(fields) > 20
    assert len(metrics) > 10
    assert fields - FIELDS - SECTIONS - WHOLE == set()
    assert metrics - {*METRICS, *TIMINGS} == set()


def test_troubleshooting_names_only_what_exists():
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    assert fields_in(page) - FIELDS - SECTIONS - WHOLE == set()
    assert metrics_in(page) - {*METRICS, *TIMINGS} == set()


def test_the_check_knows_a_wrong_name():
    row = "| `x` | `actor.lrr`, `actor/pg_los`; `--reward.kind score.py:f`; `kl.in_loss.coef: 0` |"
    [cell] = our_column(row)
    assert fields_in(cell) == {"actor.lrr", "reward.kind", "kl.in_loss.coef"}
    assert metrics_in(cell) == {"actor/pg_los"}


@table("name", ["from-verl.md", "from-trl.md"])
def test_the_chinese_page_has_the_same_tables(name):
    pages = [(DOCS / folder / name).read_text(encoding="utf-8") for folder in ("", "zh")]
    tables = [[sorted(metrics_in(c) | fields_in(c)) for c in our_column(page)] for page in pages]
    assert tables[0] == tables[1]
