"""`tether resume`: go on exactly where a run stopped."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tether.cli.overrides import CONTEXT, ConfigCommand, RecipeAndFields, one_word, parse_words
from tether.dist.environment import launched_rank
from tether.errors import UserError

if TYPE_CHECKING:
    from tether.cli.display import Display
    from tether.train.loop import Result

COMMAND = {"cls": ConfigCommand, "context_settings": CONTEXT}

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
    from tether.recipes import load_config

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
