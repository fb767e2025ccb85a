"""`tether trace`, `tether kl`, `tether examples`: PPO by concrete numbers."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tether.cli.field_options import TrustRun, parse_words
from tether.cli.terminal import print_sections, write_text
from tether.errors import UserError


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
            raise UserError(f"{path} cannot be written: {path.parent} is not a directory.")

    from tether import api
    from tether.explain.document import to_html
    from tether.explain.trace_text import tell

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


# A negative number is not an option.
KL: dict[str, Any] = {"context_settings": {"ignore_unknown_options": True}}


def kl(
    p: Annotated[str, typer.Argument(metavar="P", help="Probabilities, as in 0.8,0.2 or 1/6,5/6.")],
    q: Annotated[str, typer.Argument(metavar="Q", help="Those of the same outcomes.")],
    samples: Annotated[
        int | None,
        typer.Option(min=1, max=1_000_000, help="Also estimate from so many draws of P."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed, other draws.")] = 0,
    lang: Annotated[Literal["en", "zh"], typer.Option(help="English or Chinese.")] = "en",
) -> None:
    """Print KL(P‖Q) and KL(Q‖P), exact, in nats and bits, term by term."""
    from tether.explain.kl_table import parse_pair, tell_exact, tell_samples

    pair = parse_pair(p, q)
    sections = [tell_exact(*pair, lang)]
    if samples is not None:
        sections.append(tell_samples(*pair, samples, seed, lang))
    print_sections(sections)


def examples(
    lang: Annotated[Literal["en", "zh"], typer.Option(help="English or Chinese.")] = "en",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write every number there.")
    ] = None,
) -> None:
    """Recompute worked examples of KL, PPO's rewards and its clip, beside the right answers.

    Exits with code 1 if a number is off by more than 1e-6.
    """
    from tether.explain.examples_text import failures, record, tell_examples

    print_sections(tell_examples(lang))
    if json_file is not None:
        write_text(json_file, json.dumps(record(lang), ensure_ascii=False, indent=1) + "\n")
    if failures():
        raise typer.Exit(1)
