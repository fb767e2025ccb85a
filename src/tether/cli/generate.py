"""`tether generate`: talk to a model."""

import math
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from tether.cli.overrides import TrustRun
from tether.cli.text import printable
from tether.errors import UserError


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="What to say; without it, one prompt a line is read.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A run, a model directory or tether:starter; default: the newest run."),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, help="Responses a prompt, sampled if above 1.")
    ] = 1,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="0 takes the likeliest token; default 0, or 1 with --samples."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Longest response, in tokens; default 64, or as its tools need."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed, other samples.")] = 0,
    trust_run: TrustRun = False,
) -> None:
    """Talk to a model.

    Prints its response to PROMPT: the likeliest, or sampled with --samples or --temperature.
    """
    from tether import api

    if temperature is not None and not math.isfinite(temperature):
        raise UserError("--temperature must be a finite number.")
    if temperature is None:
        temperature = 1.0 if samples > 1 else 0.0
    picked = api.pick_model(model)
    if model is None:
        print(f"model: {picked}", file=sys.stderr)
    talker = api.Talker(picked, max_tokens, trust_run=trust_run)
    for line in [prompt] if prompt is not None else _lines():
        for response, finished in talker.respond(line, samples, temperature, seed):
            print(printable(response) + ("" if finished else " … (cut at --max-tokens)"))


def _lines() -> Iterator[str]:
    sys.stdin.reconfigure(errors="replace")
    interactive = sys.stdin.isatty()
    while True:
        if interactive:
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")
