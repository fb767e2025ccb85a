"""`tether train`, `tether resume`, `tether check`: train and show it; go on; plan."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tether.cli.field_options import RecipeAndFields, one_word, parse_words
from tether.cli.terminal import ReadingLines, printable, table
from tether.dist.environment import launched_rank
from tether.errors import UserError

if TYPE_CHECKING:
    from tether.cli.display import Display
    from tether.train.loop import Result

AllowChanged = Annotated[
    bool,
    typer.Option("--allow-changed", help="Go on although config, data, model or torch changed."),
]


def resume(words: RecipeAndFields = None, allow_changed: AllowChanged = False) -> None:
    """Go on exactly where RUN stopped, to the same bits as if it had not.

    A run that is finished says so. Fields may be given where they change no number of what is
    done: --train.checkpoint_every, or more --train.iterations under a constant schedule.

    This runs RUN's recipe, with the reward and the tools that it names: code, as a recipe is.
    """
    plain, overrides = parse_words(words or [])
    run = Path(one_word(plain, "", "run"))
    if not plain:
        raise UserError("Which run? Write `tether resume RUN`; `tether runs` lists them.")
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run} is no run: there is no config.yaml in it.")
    from tether.config.load import load_config

    config = load_config(run / "config.yaml", overrides)
    say_loading()
    from tether import api
    from tether.cli.display import Display

    with Display(config) as display:
        result = api.resume(run, overrides, watch=display, allow_changed=allow_changed)
    conclude(display, result)


def say_loading() -> None:
    if launched_rank() == 0:
        print("loading    torch and the models …", flush=True)


def conclude(display: "Display", result: "Result") -> None:
    """The closing lines, and the exit code that says how it ended."""
    display.summary(result)
    if result.interrupted is not None:
        raise typer.Exit(128 + result.interrupted)


def train(
    words: RecipeAndFields = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run at run.dir, if there is one.")
    ] = False,
    allow_changed: AllowChanged = False,
) -> None:
    """Train a policy with PPO. RECIPE is a shipped name (default: arithmetic) or a YAML file."""
    from tether.config.load import load_config, read_recipe

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
    from tether.cli.display import train_all

    train_all(recipe, overrides)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def check(
    words: RecipeAndFields = None,
) -> None:
    """Validate config, data and model, and print the plan. Trains nothing, writes nothing."""
    from tether import api
    from tether.config.load import load_config

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
