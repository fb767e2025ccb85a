"""The numbers that controllers move from iteration to iteration: all the state beside weights."""

from collections.abc import Mapping
from dataclasses import dataclass

from tether.algo.controllers import adaptive_beta
from tether.config import Config, PenaltyUpdate


@dataclass(frozen=True)
class Controls:
    beta: float  # weight of the KL to the reference in the reward
    penalty_coef: float  # weight of the KL to the old policy in PPO-Penalty's loss


def first_controls(config: Config) -> Controls:
    update = config.actor.update
    penalty_coef = update.coef if isinstance(update, PenaltyUpdate) else 0.0
    return Controls(beta=config.kl.in_reward.coef, penalty_coef=penalty_coef)


def next_beta(beta: float, metrics: Mapping[str, float], rows: int, config: Config) -> float:
    """Beta after an iteration whose rewards were made with `beta`."""
    kl = config.kl.in_reward
    if kl.controller == "fixed" or not config.kl.needs_reference:
        return beta
    return adaptive_beta(beta, metrics[f"kl/{kl.unit}_mean"], kl.target, rows, kl.horizon)
