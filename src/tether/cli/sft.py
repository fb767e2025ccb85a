"""`tether sft`: supervised training on conversations."""

from typing import TYPE_CHECKING

from tether.cli.overrides import CONTEXT, ConfigCommand, RecipeAndFields, read_stage

if TYPE_CHECKING:
    from tether.stages import SFTConfig


class SFTCommand(ConfigCommand):
    def schema(self) -> "type[SFTConfig]":
        from tether.stages import SFTConfig

        return SFTConfig


COMMAND = {"cls": SFTCommand, "context_settings": CONTEXT}


def sft(words: RecipeAndFields = None) -> None:
    """Learn to respond as the responses of a data file do. RECIPE is a YAML file, or left out."""
    from tether.stages import SFTConfig

    config = read_stage(words or [], SFTConfig)
    print("loading    torch and the model …", flush=True)
    from tether import api
    from tether.cli.stage import StageDisplay

    with StageDisplay() as display:
        display.conclude(api.sft(config, display), "actor")
