"""Which advantage estimator the config names, and what it is given."""

from jaxtyping import Bool, Float
from torch import Tensor

from tether.algo.advantages import gae, group_advantages, remax, reward_to_go
from tether.config import Config
from tether.types import Scores


def estimate_advantages(
    rewards: Float[Tensor, "rows response"],
    values: Float[Tensor, "rows response"],
    final_values: Float[Tensor, " rows"],
    scores: Scores,
    greedy_scores: Float[Tensor, " rows"],
    mask: Bool[Tensor, "rows response"],
    config: Config,
) -> Float[Tensor, "rows response"]:
    """Raw advantages; whitening, where it belongs to an estimator, is the iteration's own line."""
    settings = config.advantage
    match settings.estimator:
        case "gae":
            return gae(rewards, values, final_values, mask, settings.gamma, settings.lam)
        case "reinforce_plus_plus":
            return reward_to_go(rewards, mask, settings.gamma)
        case "remax":
            return remax(rewards, greedy_scores, mask, settings.gamma)
    samples = config.rollout.samples_per_prompt
    return group_advantages(settings.estimator, rewards, scores.values, mask, samples)
