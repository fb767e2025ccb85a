"""`tether reward-model`: a reward model from preferences."""

from typing import TYPE_CHECKING

from tether.cli.overrides import CONTEXT, ConfigCommand, RecipeAndFields, read_stage

if TYPE_CHECKING:
    from tether.stages import RewardModelConfig


class RewardModelCommand(ConfigCommand):
    def schema(self) -> "type[RewardModelConfig]":
        from tether.stages import RewardModelConfig

        return RewardModelConfig


COMMAND = {"cls": RewardModelCommand, "context_settings": CONTEXT}


def reward_model(words: RecipeAndFields = None) -> None:
    """Learn from pairs which response people prefer. RECIPE is a YAML file, or left out."""
    from tether.stages import RewardModelConfig

    config = read_stage(words or [], RewardModelConfig)
    print("loading    torch and the model …", flush=True)
    from tether import api
    from tether.cli.stage import StageDisplay

    with StageDisplay() as display:
        display.conclude(api.reward_model(config, display), "reward")
