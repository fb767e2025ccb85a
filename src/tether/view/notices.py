"""What the doctor says of a run, by what the page has read of it already. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tether.run.doctor.diagnosis import FEWEST, diagnose
from tether.run.doctor.evidence import Evidence, Point
from tether.view.api import Body
from tether.view.growing_file import signature
from tether.view.metric_table import Table
from tether.view.run_reader import Run

MAX_ROWS_BYTES = 8 << 20  # of a file; a larger one is left to `tether doctor`


def read_notices(run: Run) -> Body:
    """Return every finding, and the rules that could not judge, by what the files hold now."""
    problems = run.read_series() + run.read_evals() + run.read_events()
    diagnosis = diagnose(_evidence(run)).as_dict()
    return {
        "findings": diagnosis["findings"],
        "judged": len(diagnosis["judged"]),
        "rules": len(diagnosis["judged"]) + len(diagnosis["not_judged"]),
        "begun": len(run.metrics) < FEWEST,
        "fewest": FEWEST,
        "problems": problems,
    }


def _evidence(run: Run) -> "_ReadByPage":
    return _ReadByPage(
        metrics=(),
        table=run.metrics,
        evals=run.evals,
        events=run.events,
        config=run.read_config()[1],
        rows=_first_and_last_rows(run),
    )


def _first_and_last_rows(run: Run) -> Mapping[int, Sequence[Mapping[str, Any]]]:
    iterations = run.rollout_iterations()
    found = {}
    for iteration in dict.fromkeys([*iterations[:1], *iterations[-1:]]):
        size = signature(run.rollout_path(iteration))
        if size is not None and size[2] <= MAX_ROWS_BYTES:
            found[iteration] = list(run.read_rollout(iteration).by_number.values())
    return found


@dataclass(frozen=True)
class _ReadByPage(Evidence):
    """Evidence whose numbers are columns, of which only those that a rule asks for are read."""

    table: Table = field(default_factory=Table)
    known: dict[str, list[Point]] = field(default_factory=dict)

    @property
    def iterations(self) -> int:
        return len(self.table)

    def series(self, name: str) -> list[Point]:
        if name not in self.known:
            column = self.table.columns.get(name, ())
            pairs = zip(self.table.iterations, column, strict=False)
            self.known[name] = [Point(at, value) for at, value in pairs if value == value]
        return self.known[name]
