"""The reward of a config: one function, or several whose weighted sum is the score.

Imports no torch.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tether.config import RewardSection
from tether.errors import UserError
from tether.rewards.functions import Reward, load_reward, row_arguments, takes_all, wanted_columns
from tether.rewards.rules import check_constants

LEARNED = "model:"


@dataclass(frozen=True)
class Part:
    """A reward as the config names it."""

    kind: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    name: str | None = None  # only where `reward.parts` gives it one

    @property
    def model(self) -> str | None:
        """PATH of `model:PATH`, a learned reward."""
        return self.kind.removeprefix(LEARNED) if self.kind.startswith(LEARNED) else None


def parts_of(section: RewardSection) -> list[Part]:
    if section.parts is None:
        return [Part(section.kind, section.arguments)]
    return [Part(part.kind, part.arguments, part.weight, part.name) for part in section.parts]


def learned_model(section: RewardSection) -> str | None:
    """The reward model, where that is the whole reward."""
    parts = parts_of(section)
    if len(parts) == 1 and parts[0].name is None:
        return parts[0].model
    for part in parts:
        if part.model is not None:
            raise UserError(
                f"reward.parts, {part.name}: a reward model stands alone; write it as reward.kind."
            )
    return None


def load_part(part: Part) -> Reward:
    """Its function, once its constants have been found to fit."""
    where = "reward" if part.name is None else f"reward.parts, {part.name}"
    function = load_reward(part.kind, "reward.kind" if part.name is None else f"{where}: kind")
    given, names = row_arguments(function), inspect.signature(function).parameters
    for name in part.arguments:
        if name in given:
            raise UserError(f"{where}: arguments.{name} comes from the row; leave it out.")
        if name not in names and not takes_all(function):
            raise UserError(
                f"{where}: {part.kind} takes no argument {name!r}, only {', '.join(names)}."
            )
    try:
        check_constants(part.kind, part.arguments)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return function


def columns_wanted(section: RewardSection, reward: Reward | None) -> list[str]:
    """Columns that every data row must have for the sake of some part, or of a function that was
    handed over in Python."""
    if reward is not None:
        return wanted_columns(reward)
    if learned_model(section) is not None:
        return []
    wanted: dict[str, None] = {}
    for part in parts_of(section):
        wanted |= dict.fromkeys(wanted_columns(load_part(part), part.arguments))
    return list(wanted)
