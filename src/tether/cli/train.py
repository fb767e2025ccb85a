"""`tether train`, `tether resume`, `tether check`: train and show it; go on; plan."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tether.cli.field_options import (
    AllowChanged,
    RecipeAndFields,
    Resume,
    one_word,
    parse_words,
)
from tether.cli.terminal import ReadingLines, complain, printable, table
from tether.dist.environment import launched_rank
from tether.errors import UserError

if TYPE_CHECKING:
    from tether.cli.display import Display
    from tether.config.stages import PipelineConfig
    from tether.ppo.evaluate import Evaluation
    from tether.train.training import Result


def train(
    words: RecipeAndFields = None, resume: Resume = False, allow_changed: AllowChanged = False
) -> None:
    """Train a policy with PPO. RECIPE is a shipped name (default: arithmetic) or a YAML file."""
    from tether.config.load import load_config, read_recipe
    from tether.config.stages import PipelineConfig

    plain, overrides = parse_words(words or [])
    recipe = one_word(plain, "arithmetic", "recipe")
    if read_recipe(recipe).get("stage") == "rlhf":
        config = load_config(recipe, overrides, PipelineConfig)
        return _train_rlhf(config, resume, allow_changed)
    config = load_config(recipe, overrides)
    say_loading()
    from tether import api
    from tether.cli.display import Display

    with Display(config) as display:
        result = api.train(config, watch=display, resume=resume, allow_changed=allow_changed)
    conclude(display, result)


def say_loading() -> None:
    if launched_rank() == 0:
        print("loading    torch and the models …", flush=True)


def conclude(display: "Display", result: "Result[Evaluation]") -> None:
    """Print the closing lines and exit with the code that says how the run ended."""
    display.summary(result)
    if result.interrupted is not None:
        raise typer.Exit(128 + result.interrupted)


def _train_rlhf(config: "PipelineConfig", resume: bool, allow_changed: bool) -> None:
    say_loading()
    from tether import api
    from tether.cli.display import PipelineDisplay
    from tether.stages.rlhf import PipelineInterrupted

    display = PipelineDisplay()
    try:
        report = api.rlhf(config, display, resume, allow_changed)
    except PipelineInterrupted as stop:
        complain(str(stop))
        raise typer.Exit(128 + stop.signal) from None
    display.summary(report)


def resume(words: RecipeAndFields = None, allow_changed: AllowChanged = False) -> None:
    """Go on exactly where RUN stopped, to the same bits as if it had not.

    RUN is of any kind: PPO, SFT, a reward model, or all three stages. One that is finished says
    so. Fields may be given where they change no number of what is done: --train.checkpoint_every,
    or more --train.iterations under a constant schedule.

    This runs RUN's recipe, with the reward and the tools that it names: code, as a recipe is.
    """
    plain, overrides = parse_words(words or [])
    run = Path(one_word(plain, "", "run"))
    if not plain:
        raise UserError("Which run? Write `tether resume RUN`; `tether runs` lists them.")
    from tether.cli import stages
    from tether.config.load import load_config, read_recipe
    from tether.config.stages import PipelineConfig, RewardModelConfig, SFTConfig
    from tether.run.directory import CONFIG, RECIPE, is_pipeline, is_run

    if not is_run(run) and not is_pipeline(run):
        raise UserError(f"{run} is not a run: there is no {CONFIG} in it.")
    recipe = run / (RECIPE if is_pipeline(run) else CONFIG)
    overrides = {**overrides, "run.dir": str(run)}
    match read_recipe(recipe).get("stage"):
        case "sft":
            stages.train_sft(load_config(recipe, overrides, SFTConfig), True, allow_changed)
        case "reward-model":
            config = load_config(recipe, overrides, RewardModelConfig)
            stages.train_reward_model(config, True, allow_changed)
        case "rlhf":
            _train_rlhf(load_config(recipe, overrides, PipelineConfig), True, allow_changed)
        case _:
            config = load_config(recipe, overrides)
            say_loading()
            from tether import api
            from tether.cli.display import Display

            with Display(config) as display:
                result = api.train(config, None, display, True, allow_changed)
            conclude(display, result)


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
        "sent per process, per iteration": plan.sent_lines(),
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
