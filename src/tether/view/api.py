"""The body of every answer, as plain dicts: the server sends them, an export writes them down.

Paths and shapes are the page's interface to the data; nothing here knows of HTTP.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tether.run.columns import COLUMNS
from tether.run.directory import EVALS, EVENTS, METRICS
from tether.run.glossary import METRICS as METRIC_WORDS
from tether.run.glossary import TIMINGS as TIMING_WORDS
from tether.view.metric_table import as_number, thin
from tether.view.rollout_rows import length, numbers, sampled, scalars, summary, tokens
from tether.view.run_reader import Folder, Rows, Run
from tether.view.settings import (
    Settings,
    controls_for_page,
    inside,
    own_settings,
    read_settings,
    samples_per_prompt,
)
from tether.view.timeline import draw_timeline, timeline_iterations

Body = dict[str, Any]
WORDS = {**METRIC_WORDS, **TIMING_WORDS}
MAX_EVENTS = 1000
WHATIF_COLUMNS = tuple(column.name for column in COLUMNS if column.moves)
# What the table of runs shows of the last iteration.
TABLE_METRICS = (
    "score/mean",
    "kl/sequence_mean",
    "actor/entropy",
    "response/length_mean",
)
ENDS = ("stopped", "failed", "interrupted")  # kinds of events that end an attempt


class NotFound(Exception):
    """There is no such run, iteration or row; the message is a sentence."""


def list_runs(folder: Folder, demo: bool) -> Body:
    """Return a line for every run."""
    runs = folder.runs().values()
    return {"runs": [_line(run) for run in runs], "demo": demo, "problems": folder.problems}


def _line(run: Run) -> Body:
    _, _, problems = run.read_config()
    metrics, evaluation = run.read_last(METRICS) or {}, run.read_last(EVALS) or {}
    last, planned = metrics.get("iteration"), run.planned_iterations()
    done = last + 1 if type(last) is int else 0
    state, reason = _state(run, done, planned)
    config = run.read_config()[1]
    return {
        "id": run.id,
        "iterations": done,
        "planned": planned,
        "state": state,
        "reason": reason,
        "stage": _text(config.get("stage")) or "ppo",
        "seed": config["seed"] if type(config.get("seed")) is int else None,
        "twins": run.config_without_seed(),
        "last": {name: _null(as_number(metrics.get(name))) for name in TABLE_METRICS},
        "modified": run.modified(),
        "score": _null(as_number(metrics.get("score/mean"))),
        "heldout": _null(as_number(inside(evaluation, "sampled", "mean"))),
        "problem": problems[0] if problems else None,
    }


def _state(run: Run, done: int, planned: int | None) -> tuple[str, str | None]:
    """Return running, finished, or how the last attempt ended, with the run's own words for it."""
    if run.is_running():
        return "running", None
    if planned is not None and done >= planned:
        return "finished", None
    event = run.read_last(EVENTS) or {}
    at = event.get("iteration")
    if event.get("kind") in ENDS and type(at) is int and at >= done:  # not of an earlier attempt
        return str(event["kind"]), _text(event.get("message"))
    return "stopped", None


def describe_run(run: Run) -> Body:
    """Return a run's config, the names of its metrics and columns with what they mean."""
    text, config, problems = run.read_config()
    problems = problems + run.read_series()
    present = {**run.metrics.columns, **run.timings.columns}
    names = [name for name in METRIC_WORDS if name in present]
    names += [name for name in present if name not in WORDS]
    names += [name for name in TIMING_WORDS if name in present]
    return {
        "id": run.id,
        "config": config,
        "config_text": text,
        "names": names,
        "glossary": {name: WORDS[name]._asdict() for name in names if name in WORDS},
        "columns": {c.name: {"en": c.english, "zh": c.chinese} for c in COLUMNS},
        "rollouts": run.rollout_iterations(),
        "heldout": run.heldout_iterations(),
        "samples": samples_per_prompt(config),
        "problems": problems,
    }


def read_series(run: Run, names: Sequence[str], since: int, generation: int | None) -> Body:
    """Return the rows from `since` on, or all of them when the file was replaced in between.

    A page that sends back the `generation` it was given learns of that even if another page was
    told first.
    """
    known = run.generation
    problems = run.read_series()
    metrics, timings = run.metrics, run.timings
    asked = known if generation is None else generation
    reset = since > 0 and (asked != run.generation or since > len(metrics))
    start = 0 if reset else since

    def column(name: str) -> Callable[[int], float]:
        if name in metrics.columns or name not in timings.columns:
            return lambda row: metrics.at(name, row)
        return lambda row: timings.at(name, timings.row_of.get(metrics.iterations[row]))

    values = {name: [column(name)(row) for row in range(start, len(metrics))] for name in names}
    rows = range(len(metrics) - start)
    chosen = thin(values.values(), len(rows)) if start == 0 else rows
    return {
        "reset": reset,
        "iteration": [metrics.iterations[start + i] for i in chosen],
        "values": {name: [_null(cells[i]) for i in chosen] for name, cells in values.items()},
        "next": len(metrics),
        "generation": run.generation,
        "problems": problems,
    }


def read_evals(run: Run) -> Body:
    """Return every evaluation."""
    problems = run.read_evals()
    return {"evals": run.evals, "problems": problems}


def read_events(run: Run, offset: int = 0, limit: int = 100) -> Body:
    """Return a page of events, newest first."""
    problems = run.read_events()
    newest = run.events[::-1][offset : offset + min(limit, MAX_EVENTS)]
    return {"events": newest, "total": len(run.events), "problems": problems}


def list_timelines(run: Run) -> Body:
    """Return the iterations that have a timeline."""
    problems = run.read_series()
    iterations = timeline_iterations(run.sampler_lines, run.timings)
    return {"iterations": iterations, "problems": problems + run.sampler_lines.problems}


def read_timeline(run: Run, iteration: int) -> Body:
    """Return who did what in an iteration, and when."""
    run.read_series()
    run.sampler_lines.refresh()
    found = draw_timeline(iteration, run.sampler_lines, run.timings)
    if found is None:
        raise NotFound(f"{run.id} has no times of iteration {iteration}.")
    return {**found, "problems": run.sampler_lines.problems}


def list_rows(run: Run, iteration: int) -> Body:
    """Return a line for every row of an iteration."""
    rows = rows_of(run, iteration)
    lines = [summary(number, row) for number, row in rows.by_number.items()]
    return {"iteration": iteration, "rows": lines, "problems": rows.problems}


def describe_row(run: Run, iteration: int, number: int) -> Body:
    """Return every number of every token, the computed ones at the run's own settings."""
    rows = rows_of(run, iteration)
    row, config = _row(rows, number), run.read_config()[1]
    from tether.view.whatif import logged_journey  # loads torch

    own = settings_of(run, iteration, row)
    journey = logged_journey(rows, number, own, samples_per_prompt(config))
    return {
        "row": scalars(number, row),
        "tokens": tokens(row),
        "ids": row.get("response_ids") if length(row) else [],
        "mask": sampled(row),
        "columns": _nulls(
            {
                c.name: journey.columns[c.name] if c.computed else numbers(row, c.name)
                for c in COLUMNS
            }
        ),
        "clip": journey.clip,
        "outside": journey.outside,
        "settings": own.for_page(),
        "problems": rows.problems,
    }


def what_if(run: Run, iteration: int, number: int, query: Mapping[str, str]) -> Body:
    """Return the row before and after other settings; one that cannot be is a UserError."""
    rows = rows_of(run, iteration)
    row, config = _row(rows, number), run.read_config()[1]
    own = settings_of(run, iteration, row)
    settings = read_settings(query, config, own)
    from tether.view.whatif import recompute

    before, after, note = recompute(rows, number, own, settings, samples_per_prompt(config))
    return {
        "controls": controls_for_page(own, config),
        "own": settings == own,
        "before": _nulls({name: before.columns[name] for name in WHATIF_COLUMNS}),
        "after": _nulls({name: after.columns[name] for name in WHATIF_COLUMNS}),
        "clip_before": before.clip,
        "clip_after": after.clip,
        "totals": {"before": before.totals(), "after": after.totals()},
        "note": note,
        "problems": rows.problems,
    }


def settings_of(run: Run, iteration: int, row: Mapping[str, Any]) -> Settings:
    """Return the settings of the iteration that made the row."""
    run.read_series()
    metrics = run.metrics
    coef = metrics.at("actor/penalty_coef", metrics.row_of.get(iteration))
    return own_settings(run.read_config()[1], row, penalty_coef=coef)


def to_json(body: Body | str) -> str:
    """Return ASCII, so that no text can be taken for anything else, and without NaN."""
    try:
        return json.dumps(body, allow_nan=False)
    except (ValueError, TypeError):
        return json.dumps(_plain(body), allow_nan=False)


def rows_of(run: Run, iteration: int) -> Rows:
    """Return the rows of an iteration that wrote some."""
    if iteration not in run.rollout_iterations():
        raise NotFound(f"{run.id} has no rows of iteration {iteration}.")
    return run.read_rollout(iteration)


def _row(rows: Rows, number: int) -> dict[str, Any]:
    if number not in rows.by_number:
        raise NotFound(f"Row {number} was not written.")
    return rows.by_number[number]


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _null(x: float) -> float | None:
    return x if math.isfinite(x) else None


def _nulls(columns: Mapping[str, Sequence[float] | None]) -> Body:
    return {name: x if x is None else [_null(cell) for cell in x] for name, x in columns.items()}


def _plain(value: Any) -> Any:
    """Return the same in JSON's own types: null for a number that is not finite, else text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, str | int) else str(value)
