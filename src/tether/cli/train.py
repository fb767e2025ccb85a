"""`tether train`: train, and show it."""

import typer

from tether.cli.overrides import CONTEXT, ConfigCommand, RecipeAndFields, one_word, parse_words

COMMAND = {"cls": ConfigCommand, "context_settings": CONTEXT}


def train(
    words: RecipeAndFields = None,
) -> None:
    """Train a policy with PPO. RECIPE is a shipped name (default: arithmetic) or a YAML file."""
    from tether.recipes import load_config

    plain, overrides = parse_words(words or [])
    config = load_config(one_word(plain, "arithmetic", "recipe"), overrides)

    print("loading    torch and the models …", flush=True)
    from tether import api
    from tether.cli.display import Display

    with Display(config) as display:
        result = api.train(config, watch=display)
    display.summary(result)
    if result.interrupted is not None:
        raise typer.Exit(128 + result.interrupted)
