"""`tether sft` and `tether reward-model`: the stages before PPO."""

from typing import TYPE_CHECKING

from tether.cli.field_options import CONTEXT, ConfigCommand, RecipeAndFields, read_stage

if TYPE_CHECKING:
    from tether.config.stages import SFTConfig


class SFTCommand(ConfigCommand):
    def schema(self) -> "type[SFTConfig]":
        from tether.config.stages import SFTConfig

        return SFTConfig


SFT = {"cls": SFTCommand, "context_settings": CONTEXT}


def sft(words: RecipeAndFields = None) -> None:
    """Learn to respond as the responses of a data file do. RECIPE is a YAML file, or left out."""
    from tether.config.stages import SFTConfig

    config = read_stage(words or [], SFTConfig)
    print("loading    torch and the model …", flush=True)
    from tether import api
    from tether.cli.display import StageDisplay

    with StageDisplay() as display:
        display.conclude(api.sft(config, display), "actor")


if TYPE_CHECKING:
    from tether.config.stages import RewardModelConfig


class RewardModelCommand(ConfigCommand):
    def schema(self) -> "type[RewardModelConfig]":
        from tether.config.stages import RewardModelConfig

        return RewardModelConfig


REWARD_MODEL = {"cls": RewardModelCommand, "context_settings": CONTEXT}


def reward_model(words: RecipeAndFields = None) -> None:
    """Learn from pairs which response people prefer. RECIPE is a YAML file, or left out."""
    from tether.config.stages import RewardModelConfig

    config = read_stage(words or [], RewardModelConfig)
    print("loading    torch and the model …", flush=True)
    from tether import api
    from tether.cli.display import StageDisplay

    with StageDisplay() as display:
        display.conclude(api.reward_model(config, display), "reward")
