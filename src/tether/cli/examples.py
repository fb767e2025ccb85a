"""`tether examples`: worked examples of PPO, recomputed."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from tether.cli.sections import print_sections, write_text


def examples(
    lang: Annotated[Literal["en", "zh"], typer.Option(help="English or Chinese.")] = "en",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write every number there.")
    ] = None,
) -> None:
    """Recompute worked examples of KL, PPO's rewards and its clip, beside the right answers.

    Exits with code 1 if a number is off by more than 1e-6.
    """
    from tether.explain.examples_story import failures, record, tell_examples

    print_sections(tell_examples(lang))
    if json_file is not None:
        write_text(json_file, json.dumps(record(lang), ensure_ascii=False, indent=1) + "\n")
    if failures():
        raise typer.Exit(1)
