"""`tether eval`: score a model on held-out prompts."""

from typing import Annotated

import typer

from tether.cli.overrides import CONTEXT, ConfigCommand, one_word, parse_words
from tether.cli.text import score_text, table

COMMAND = {"cls": ConfigCommand, "context_settings": CONTEXT}


def evaluate(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL [--section.field VALUE]...", hidden=True)
    ] = None,
    recipe: Annotated[
        str, typer.Option(help="Whose data and reward to use; a run brings its own.")
    ] = "arithmetic",
) -> None:
    """Score a model on held-out prompts.

    MODEL is a run, a model directory or tether:starter.
    """
    from tether import api

    plain, overrides = parse_words(words or [])
    model = one_word(plain, "tether:starter", "model")
    evaluation = api.evaluate(model, recipe, overrides)
    rows = [["held-out", "mean score", "95% interval", "prompts"]]
    for name, part in (("greedy", evaluation.greedy), ("sampled", evaluation.sampled)):
        mean, low, high = (score_text(x, part.binary) for x in (part.mean, part.low, part.high))
        rows.append([name, mean, f"{low} – {high}", str(part.count)])
    print(table(rows))
    if evaluation.kl is not None:
        print(f"  KL to the reference: {evaluation.kl:.4f} nats a sampled response")
