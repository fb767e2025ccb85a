"""`tether train`: train, and show it."""

from typing import Annotated, Any

import typer

from tether.cli.overrides import CONTEXT, ConfigCommand, RecipeAndFields, one_word, parse_words
from tether.cli.resume import AllowChanged, conclude, say_loading
from tether.errors import UserError

COMMAND = {"cls": ConfigCommand, "context_settings": CONTEXT}


def train(
    words: RecipeAndFields = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run at run.dir, if there is one.")
    ] = False,
    allow_changed: AllowChanged = False,
) -> None:
    """Train a policy with PPO. RECIPE is a shipped name (default: arithmetic) or a YAML file."""
    from tether.recipes import load_config, read_recipe

    plain, overrides = parse_words(words or [])
    recipe = one_word(plain, "arithmetic", "recipe")
    if read_recipe(recipe).get("stage") == "rlhf":
        return _train_all(recipe, overrides, resume)
    config = load_config(recipe, overrides)

    say_loading()
    from tether import api
    from tether.cli.display import Display

    with Display(config) as display:
        result = api.train(config, watch=display, resume=resume, allow_changed=allow_changed)
    conclude(display, result)


def _train_all(recipe: str, overrides: dict[str, Any], resume: bool) -> None:
    if resume:
        raise UserError("A recipe of three stages is not resumed; `tether resume RUN/ppo` is.")
    print("loading    torch and the models …", flush=True)
    from tether.cli.pipeline import train_all

    train_all(recipe, overrides)
