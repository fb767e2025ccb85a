"""Answers about responses: the held-out ones, and those to one prompt over the iterations.

Imports no torch.
"""

from typing import Any

from tether.view.api import Body, NotFound
from tether.view.growing_file import Unreadable, open_inside, parse_object
from tether.view.rollout_rows import mapping, summary
from tether.view.run_reader import MAX_ROWS_BYTES, Run

DECODINGS = ("greedy", "sampled")
BYTES_PER_LOOK = 24 << 20  # of rollouts searched for one prompt in one answer


def read_heldout(run: Run, iteration: int) -> Body:
    """Return every held-out prompt with its responses after so many iterations."""
    if iteration not in run.heldout_iterations():
        raise NotFound(f"{run.id} kept no held-out responses after iteration {iteration}.")
    rows = run.read_heldout(iteration)
    lines = [_heldout_line(number, row) for number, row in rows.by_number.items()]
    return {"iteration": iteration, "rows": lines, "problems": rows.problems}


def _heldout_line(number: int, row: dict[str, Any]) -> Body:
    return {
        "row": number,
        "prompt": row.get("prompt"),
        "columns": mapping(row, "columns"),
        **{name: _said(mapping(row, name)) for name in DECODINGS},
    }


def _said(answer: dict[str, Any]) -> Body:
    names = ("response", "score", "finish_reason", "score_parts", "score_extras")
    return {name: answer.get(name) for name in names}


def read_history(run: Run, file: str | None, line: int, since: int = 0) -> Body:
    """Return the rows of one prompt, a line of a data file, in the iterations from `since` on.

    One answer searches at most BYTES_PER_LOOK; `next` is the iteration to ask on from, None at the
    end. A line is parsed only if its bytes name the prompt's line of data.
    """
    found: list[Body] = []
    problems: list[str] = []
    room = BYTES_PER_LOOK
    for iteration in run.rollout_iterations():
        if iteration < since:
            continue
        if room <= 0:
            return {"rows": found, "next": iteration, "problems": problems}
        try:
            with open_inside(run.root, run.rollout_path(iteration)) as rollout:
                data = rollout.read(MAX_ROWS_BYTES)
        except Unreadable as problem:
            problems.append(str(problem))
            continue
        room -= len(data)
        for text in _lines_with(data, b'"data_line": %d,' % line):
            row = parse_object(text.decode("utf-8", "replace"))
            if row is not None and row.get("data_line") == line and file in (None, _file(row)):
                number = row.get("row")
                made = summary(number if type(number) is int else -1, row)
                found.append({**made, "iteration": iteration})
    return {"rows": found, "next": None, "problems": problems}


def _file(row: dict[str, Any]) -> str | None:
    name = row.get("data_file")
    return name if isinstance(name, str) else None


def _lines_with(data: bytes, needle: bytes) -> list[bytes]:
    """Return the lines that hold the needle, without splitting the others."""
    found, at = [], data.find(needle)
    while at >= 0:
        start, end = data.rfind(b"\n", 0, at) + 1, data.find(b"\n", at)
        end = len(data) if end < 0 else end
        found.append(data[start:end])
        at = data.find(needle, end)
    return found
