"""Prompts that stay in a file: memory-mapped arrow, read and tokenised when they are drawn.

Opening one of ten million rows reads the places of its batches only. What a row is then worth
nobody knows before it is drawn: one that is broken or too long follows `data.on_bad_row` there, and
where it is skipped, the next row of the file that can be used takes its place.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tether.data.files import ArrowFile, BadRow, FileRow, unit_of
from tether.errors import UserError
from tether.types import Prompts

Encoded = list[int] | UserError | None  # of a row: ids, or why there are none


class RowCheck(Protocol):
    """Turns rows into prompts."""

    def add(
        self,
        found: Prompts,
        batch: list[FileRow],
        path: str,
        encoded: Sequence[Encoded] | None = None,
    ) -> Iterator[tuple[str, Exception]]:
        """Add the good rows of a batch; yield place and problem of each broken one."""
        ...


ROW, PLACE, IDS, PROBLEM = "row", "position", "ids", "problem"  # the columns of a cache
KEY = b"tether"  # of its metadata


@dataclass
class StoredPrompts:
    """The prompts of one file, by row."""

    path: str  # as the config names it
    file: ArrowFile
    check: RowCheck
    on_bad_row: Literal["refuse", "skip"]
    longest: int  # tokens of the longest prompt, as far as it may be drawn
    is_cache: bool = False  # written by `data/prompt_cache.py`: rows with their ids
    broken: dict[int, str] = field(default_factory=dict)  # rows met so far, and what is wrong
    told: int = 0  # of them

    def __len__(self) -> int:
        return len(self.file)

    @property
    def _unit(self) -> str:
        """What a position counts: of a cache, lines or rows of the file it was made from."""
        return "row" if not self.is_cache else unit_of(self.path)

    def newly_broken(self) -> list[str]:
        """Return what was skipped since this was last asked."""
        found, self.told = list(self.broken.values())[self.told :], len(self.broken)
        return found

    def pick(self, rows: Iterable[int]) -> Prompts:
        """Return prompts by row; for a broken one, those of the next row that is none."""
        rows = list(rows)
        known: dict[int, tuple[Prompts, int]] = {}
        while missing := [r for r in dict.fromkeys(map(self._usable, rows)) if r not in known]:
            self._read(missing, known)
        found = Prompts([], [], [], [], [], [])
        for row in rows:
            part, place = known[self._usable(row)]
            for name, column in vars(found).items():
                column.append(getattr(part, name)[place])
        return found

    def _usable(self, row: int) -> int:
        """Return the row that stands for this one, as far as broken ones are known."""
        if len(self.broken) == len(self):
            first = next(iter(self.broken.values()), "write one per line.")
            raise UserError(f"{self.path} has no rows that can be used; {first}")
        while row in self.broken:
            row = (row + 1) % len(self)
        return row

    def _read(self, rows: list[int], known: dict[int, tuple[Prompts, int]]) -> None:
        found = Prompts([], [], [], [], [], [])
        places = [self._place(row) for row in rows]
        batch, encoded = [row for row, _ in places], [ids for _, ids in places]
        at = {row.place: number for row, number in zip(batch, rows, strict=True)}
        problems = self.check.add(found, batch, self.path, encoded if self.is_cache else None)
        bad = {at[place]: f"{place}: {problem}" for place, problem in problems}
        if bad and self.on_bad_row == "refuse":
            raise UserError(next(iter(bad.values())))
        self.broken |= bad
        good = [row for row in rows if row not in bad]
        known |= {row: (found, number) for number, row in enumerate(good)}

    def _place(self, number: int) -> tuple[FileRow, Encoded]:
        """Return a row of the file; of a cache, the row that it was made from, and its ids."""
        found = self.file.row(number)
        if isinstance(found, BadRow):
            return FileRow(self.path, self._unit, number, {}, found), None
        if not self.is_cache:
            return FileRow(self.path, self._unit, number, found), None
        problem, position = found[PROBLEM], found[PLACE]
        if found[ROW] is None:
            return FileRow(self.path, self._unit, position, {}, BadRow(problem)), None
        row = FileRow(self.path, self._unit, position, json.loads(found[ROW]))
        return row, found[IDS] if problem is None else UserError(problem)
