"""`tether doctor`: what is wrong with a run, by its own numbers, and what to change."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tether.cli.terminal import print_wrapped, printable, terminal_width, write_text
from tether.errors import UserError
from tether.run.directory import RUNS

if TYPE_CHECKING:
    from tether.run.doctor.findings import Diagnosis, Finding

Lang = Literal["en", "zh"]
LABELS = {
    "en": ("evidence", "change", "fields", "more", "it says"),
    "zh": ("依据", "怎么改", "字段", "更多", "原话"),
}
FOUND, CALM = 1, 0  # exit codes


def doctor(
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="A run; default: the newest in runs/.")
    ] = None,
    lang: Annotated[Lang, typer.Option(help="English or Chinese.")] = "en",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all of it there as JSON.")
    ] = None,
) -> None:
    """Say what is wrong with a run and what to change, with the numbers that show it.

    It reads only the run's files, also while it trains. Exits with 1 if it found something.
    """
    from tether.run.doctor.diagnosis import examine
    from tether.run.reader import newest_run

    run = run or newest_run(RUNS)
    if run is None:
        raise UserError(f"There is no run in {RUNS}/ yet; name one, or make one by `tether train`.")
    if not run.is_dir():
        raise UserError(f"{run} is not a folder; name a run, `tether runs` lists them.")
    diagnosis = examine(run)
    _print(run, diagnosis, lang)
    if json_file is not None:
        record = {"run": str(run), **diagnosis.as_dict()}
        write_text(json_file, json.dumps(record, ensure_ascii=False, indent=1) + "\n")
    raise typer.Exit(FOUND if diagnosis.findings else CALM)


def _print(run: Path, diagnosis: "Diagnosis", lang: Lang) -> None:
    width = terminal_width()
    print(printable(str(run)))
    for number, finding in enumerate(diagnosis.findings, start=1):
        print()
        _print_finding(number, finding, lang, width)
    if diagnosis.findings:
        print()
    print_wrapped(summary(diagnosis), width)
    if diagnosis.not_judged:
        print("\n  not judged:")
        for name, reason in diagnosis.not_judged.items():
            print_wrapped(f"  {name}: {reason}", width)
    for note in diagnosis.notes:
        print_wrapped(f"note: {note}", width)


def closing_line(run: Path) -> str:
    """Return what a run says about itself when it ends."""
    from tether.run.doctor.diagnosis import examine

    diagnosis = examine(run)
    what = summary(diagnosis)
    return f"{what} See: tether doctor {run}" if diagnosis.findings else what


def summary(diagnosis: "Diagnosis") -> str:
    """Return in one sentence how many rules found something."""
    judged, found = len(diagnosis.judged), len(diagnosis.findings)
    every = judged + len(diagnosis.not_judged)
    if not found:
        return f"Nothing found by {judged} of {every} rules."
    names = ", ".join(finding.rule for finding in diagnosis.findings)
    return f"{found} found by {judged} of {every} rules: {names}."


def _print_finding(number: int, finding: "Finding", lang: Lang, width: int) -> None:
    evidence, change, fields, more, says = LABELS[lang]
    print_wrapped(f"{number}. {getattr(finding.what, lang)}", width)
    for reading in finding.readings:
        print_wrapped(f"   {evidence}: {reading}", width)
    if finding.message is not None:
        print_wrapped(f"   {says}: {finding.message}", width)
    print_wrapped(f"   {change}: {getattr(finding.change, lang)}", width)
    if finding.fields:
        print_wrapped(f"   {fields}: {', '.join(finding.fields)}", width)
    print_wrapped(f"   {more}: {finding.link}", width)
