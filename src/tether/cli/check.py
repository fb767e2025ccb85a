"""`tether check`: the plan of a run, without training."""

from tether.cli.overrides import CONTEXT, ConfigCommand, RecipeAndFields, one_word, parse_words
from tether.cli.text import table

COMMAND = {"cls": ConfigCommand, "context_settings": CONTEXT}


def check(
    words: RecipeAndFields = None,
) -> None:
    """Validate config, data and model, and print the plan. Trains nothing, writes nothing."""
    from tether import api
    from tether.recipes import load_config

    plain, overrides = parse_words(words or [])
    recipe = one_word(plain, "arithmetic", "recipe")
    plan = api.check(load_config(recipe, overrides))
    print(table([["plan of " + recipe, "", "because"], *map(list, plan.lines())], numbers_from=3))
