"""`tether train`: train, and show it."""

from typing import Annotated

import typer

from tether.cli.overrides import CONTEXT, ConfigCommand, RecipeAndFields, one_word, parse_words
from tether.cli.resume import AllowChanged, conclude

COMMAND = {"cls": ConfigCommand, "context_settings": CONTEXT}


def train(
    words: RecipeAndFields = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run at run.dir, if there is one.")
    ] = False,
    allow_changed: AllowChanged = False,
) -> None:
    """Train a policy with PPO. RECIPE is a shipped name (default: arithmetic) or a YAML file."""
    from tether.recipes import load_config

    plain, overrides = parse_words(words or [])
    config = load_config(one_word(plain, "arithmetic", "recipe"), overrides)

    print("loading    torch and the models …", flush=True)
    from tether import api
    from tether.cli.display import Display

    with Display(config) as display:
        result = api.train(config, watch=display, resume=resume, allow_changed=allow_changed)
    conclude(display, result)
