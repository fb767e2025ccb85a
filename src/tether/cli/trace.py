"""`tether trace`: one prompt through every stage, every number of every token."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from tether.cli.overrides import CONTEXT, ConfigCommand, TrustRun, parse_words
from tether.cli.sections import print_sections, write_text
from tether.errors import UserError

COMMAND = {"cls": ConfigCommand, "context_settings": CONTEXT}


def trace(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT [--section.field VALUE]...", hidden=True)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A run, a recipe, a model directory; default: the newest run."),
    ] = None,
    response: Annotated[
        str | None, typer.Option(help="Trace this response instead of sampling one.")
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="What the reward wants to know; repeatable."),
    ] = None,
    lang: Annotated[Literal["en", "zh"], typer.Option(help="English or Chinese.")] = "en",
    explain: Annotated[bool, typer.Option("--explain", help="Add plain words.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write every number there.")
    ] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a static page there.")
    ] = None,
    trust_run: TrustRun = False,
) -> None:
    """Send one prompt through every stage of training, for real, and print every number.

    It is answered, read by reference and critic, scored, and learnt from, on copies that are
    never saved. Fields of the recipe are set as in `tether train`; another --seed (here 1 unless
    given) gives another sample.
    """
    plain, overrides = parse_words(words or [])
    if len(plain) != 1:
        problem = "is missing" if not plain else "must be one word: put it in quotes"
        raise UserError(f"PROMPT {problem}, as in tether trace '1+1=?'.")
    columns = _columns(column or [])
    for path in filter(None, (json_file, html_file)):
        if not path.parent.is_dir():
            raise UserError(f"{path} cannot be written: {path.parent} is no directory.")

    from tether import api
    from tether.explain.page import to_html
    from tether.explain.story import tell

    record = api.trace(plain[0], model, response, columns, overrides, trust_run=trust_run)
    sections = tell(record, lang, explain)
    print_sections(sections)
    if record["printed"]:
        print(f"\nThe reward printed:\n{record['printed'].rstrip()}")
    if json_file is not None:
        write_text(
            json_file, json.dumps(record, ensure_ascii=False, indent=1, allow_nan=False) + "\n"
        )
    if html_file is not None:
        write_text(html_file, to_html(sections, lang))


def _columns(pairs: list[str]) -> dict[str, str]:
    columns = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UserError(f"--column {pair!r} has no name and value; write --column answer=2.")
        columns[name] = value
    return columns
