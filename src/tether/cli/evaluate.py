"""`tether eval`: score a model on held-out prompts."""

from typing import TYPE_CHECKING, Annotated

import typer

from tether.cli.overrides import CONTEXT, ConfigCommand, TrustRun, one_word, parse_words
from tether.cli.text import score_text, table
from tether.errors import UserError

if TYPE_CHECKING:
    from tether.train.evaluate import Evaluation

COMMAND = {"cls": ConfigCommand, "context_settings": CONTEXT}


def evaluate(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL [--section.field VALUE]...", hidden=True)
    ] = None,
    recipe: Annotated[
        str, typer.Option(help="Whose data and reward to use; a run brings its own.")
    ] = "arithmetic",
    endpoint: Annotated[
        str | None,
        typer.Option(help="Ask the OpenAI-compatible server here; MODEL is then a tokenizer's."),
    ] = None,
    endpoint_model: Annotated[
        str | None, typer.Option(help="What that server calls its model.")
    ] = None,
    endpoint_key: Annotated[
        str | None, typer.Option(help="The environment variable that holds the server's API key.")
    ] = None,
    trust_run: TrustRun = False,
) -> None:
    """Score a model on held-out prompts.

    MODEL is a run, a model directory or tether:starter.
    """
    from tether import api
    from tether.rollout.tools.http import key_in

    plain, overrides = parse_words(words or [])
    if endpoint is None:
        if endpoint_model or endpoint_key:
            raise UserError("--endpoint-model and --endpoint-key go with --endpoint URL.")
        model = one_word(plain, "tether:starter", "model")
        return _show(api.evaluate(model, recipe, overrides, trust_run=trust_run))
    if endpoint_model is None:
        raise UserError("--endpoint needs --endpoint-model NAME: what the server calls its model.")
    model = one_word(plain, "", "model") or None
    key = None if endpoint_key is None else key_in(endpoint_key, "--endpoint-key")
    _show(api.evaluate_endpoint(endpoint, endpoint_model, model, recipe, overrides, key=key))


def _show(evaluation: "Evaluation") -> None:
    rows = [["held-out", "mean score", "95% interval", "prompts"]]
    for name, part in (("greedy", evaluation.greedy), ("sampled", evaluation.sampled)):
        mean, low, high = (score_text(x, part.binary) for x in (part.mean, part.low, part.high))
        rows.append([name, mean, f"{low} – {high}", str(part.count)])
    print(table(rows))
    if evaluation.kl is not None:
        print(f"  KL to the reference: {evaluation.kl:.4f} nats a sampled response")
