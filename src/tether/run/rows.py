"""One sampled response with every number of every token: a line of rollouts/NNNNNN.jsonl."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tether.errors import UserError
from tether.run.columns import WRITTEN
from tether.run.directory import ROLLOUTS
from tether.run.reader import read_lines
from tether.support import html

# Read by eye, from left to right: how likely, how far from the reference, what it earned.
SHOWN = ("old_log_probs", "ref_log_probs", "kl", "values", "token_level_rewards", "advantages")


class Row(dict[str, Any]):
    """A row of a run: plain data, with the keys of its line. A notebook shows it as a table of
    tokens, each number coloured by its size within its column."""

    @property
    def tokens(self) -> list[str]:
        """The text of each response token."""
        return list(self["response_tokens"])

    def column(self, name: str) -> list[float]:
        """Return one number per response token; `run/columns.py` lists the names."""
        if name not in self or not isinstance(self[name], list):
            known = ", ".join(column.name for column in WRITTEN if column.name in self)
            raise UserError(f"The row has no column {name!r}; it has {known}.")
        return list(self[name])

    def _repr_html_(self) -> str:
        shown = [name for name in SHOWN if isinstance(self.get(name), list)]
        numbers = [self.column(name) for name in shown]
        colours = [html.tints(column) for column in numbers]
        rows, tints = [["token", *shown]], []
        for t, token in enumerate(self.get("response_tokens", ())):
            rows.append([html.visible(str(token)), *(html.number(column[t]) for column in numbers)])
            tints.append([0.0, *(column[t] for column in colours)])
        score = self.get("score")
        told = "not scored" if score is None else f"score {html.number(score)}"
        where = f"iteration {self.get('iteration')}, row {self.get('row')}: {told}"
        head = [f"{where}, ended by {self.get('finish_reason')}", f"prompt: {self.get('prompt')}"]
        return "".join(map(html.paragraph, head)) + html.table(rows, tints=tints)


def logged_iterations(run: Path) -> list[int]:
    """Return the iterations whose rows a run holds, in order; none without rollouts."""
    names = [path.stem for path in (run / ROLLOUTS).glob("*.jsonl")]
    return sorted(int(name) for name in names if name.isdigit())


def read_rows(run: Path, iteration: int | None = None) -> Sequence[Row]:
    """Return the rows that a run holds of an iteration; by default of the newest that it has."""
    known = logged_iterations(run)
    if not known:
        raise UserError(
            f"{run} holds no rows: there is nothing in {ROLLOUTS}/. Its metrics are there without "
            f"them; to keep rows, train with run.rollouts_every above 0."
        )
    wanted = known[-1] if iteration is None else iteration
    if wanted not in known:
        listed = ", ".join(map(str, known[:8])) + (", …" if len(known) > 8 else "")
        raise UserError(f"{run} holds no rows of iteration {wanted}; it has those of {listed}.")
    return [Row(line) for line in read_lines(run / ROLLOUTS / f"{wanted:06d}.jsonl")]
