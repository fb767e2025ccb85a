"""`tether sft` and `tether reward-model`: the stages before PPO."""

from typing import TYPE_CHECKING, Any

import typer

from tether.cli.field_options import (
    CONTEXT,
    AllowChanged,
    ConfigCommand,
    RecipeAndFields,
    Resume,
    read_stage,
)
from tether.dist.environment import launched_rank

if TYPE_CHECKING:
    from tether.cli.display import StageDisplay
    from tether.config.stages import RewardModelConfig, SFTConfig
    from tether.stages.training import Record
    from tether.train.training import Result


class SFTCommand(ConfigCommand):
    def schema(self) -> "type[SFTConfig]":
        from tether.config.stages import SFTConfig

        return SFTConfig


class RewardModelCommand(ConfigCommand):
    def schema(self) -> "type[RewardModelConfig]":
        from tether.config.stages import RewardModelConfig

        return RewardModelConfig


SFT: dict[str, Any] = {"cls": SFTCommand, "context_settings": CONTEXT}
REWARD_MODEL: dict[str, Any] = {"cls": RewardModelCommand, "context_settings": CONTEXT}


def sft(
    words: RecipeAndFields = None, resume: Resume = False, allow_changed: AllowChanged = False
) -> None:
    """Learn to respond as the responses of a data file do. RECIPE is a YAML file, or left out."""
    from tether.config.stages import SFTConfig

    train_sft(read_stage(words or [], SFTConfig), resume, allow_changed)


def train_sft(config: "SFTConfig", resume: bool, allow_changed: bool) -> None:
    """Train and show it."""
    say_loading()
    from tether import api
    from tether.cli.display import StageDisplay

    with StageDisplay() as display:
        result = api.sft(config, display, resume, allow_changed)
    conclude(display, result)


def reward_model(
    words: RecipeAndFields = None, resume: Resume = False, allow_changed: AllowChanged = False
) -> None:
    """Learn from pairs which response people prefer. RECIPE is a YAML file, or left out."""
    from tether.config.stages import RewardModelConfig

    train_reward_model(read_stage(words or [], RewardModelConfig), resume, allow_changed)


def train_reward_model(config: "RewardModelConfig", resume: bool, allow_changed: bool) -> None:
    """Train and show it."""
    say_loading()
    from tether import api
    from tether.cli.display import StageDisplay

    with StageDisplay() as display:
        result = api.reward_model(config, display, resume, allow_changed)
    conclude(display, result)


def say_loading() -> None:
    if launched_rank() == 0:
        print("loading    torch and the model …", flush=True)


def conclude(display: "StageDisplay", result: "Result[Record]") -> None:
    """Print the closing lines and exit with the code that says how the stage ended."""
    display.summary(result)
    if result.interrupted is not None:
        raise typer.Exit(128 + result.interrupted)
