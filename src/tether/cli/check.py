"""`tether check`: the plan of a run, without training."""

import sys

from tether.cli.overrides import CONTEXT, ConfigCommand, RecipeAndFields, one_word, parse_words
from tether.cli.text import ReadingLines, printable, table

COMMAND = {"cls": ConfigCommand, "context_settings": CONTEXT}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def check(
    words: RecipeAndFields = None,
) -> None:
    """Validate config, data and model, and print the plan. Trains nothing, writes nothing."""
    from tether import api
    from tether.recipes import load_config

    plain, overrides = parse_words(words or [])
    recipe = one_word(plain, "arithmetic", "recipe")
    plan = api.check(load_config(recipe, overrides), reading=ReadingLines(_say))
    sections = {
        f"plan of {recipe}": plan.lines(),
        "reward, tried on a few rows": _printable(plan.reward_lines()),
        "memory of a process": plan.memory_lines(),
        "sent by a process, an iteration": plan.sent_lines(),
        "time of an iteration, estimated": plan.time_lines(),
    }
    tables = [
        table([[title, "", "because"], *map(list, lines)], numbers_from=3)
        for title, lines in sections.items()
        if lines
    ]
    print("\n\n".join(tables))
    notes = [*plan.notes]
    if plan.does_not_fit:
        notes.append(
            "this does not fit into the memory that is free here; lower actor.microbatch_tokens, "
            "critic.microbatch_tokens or rollout.cache_tokens, use model.lora, or run it elsewhere"
        )
    for note in notes:
        print(f"\nnote: {printable(note)}.")


def _printable(lines: list[tuple[str, str, str]]) -> list[list[str]]:
    """Texts of data rows and of rewards, which may hold anything."""
    return [[printable(cell) for cell in line] for line in lines]
