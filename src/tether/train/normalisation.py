"""A learned reward for PPO, its scores measured against the reference's own responses."""

import torch

from tether.config import Config
from tether.data.prompts import PromptSet
from tether.models.critic import Critic
from tether.models.loading import find_model, load_causal_lm, load_vocabulary
from tether.models.reward_model import load_reward_model, read_head
from tether.rewards.learned import LearnedScorer, Scale, measure_scale
from tether.rollout.episode import Draw
from tether.rollout.local import LocalSampler
from tether.rollout.tools.build import build_turns
from tether.types import Prompts, Rollout

NUM_RESPONSES = 256  # of the reference: the mean is then known to a sixteenth of a deviation


def build_learned_scorer(
    config: Config, name: str, prompts: PromptSet, device: torch.device
) -> LearnedScorer:
    """The reward model and its scale. The scale follows from the config and its files alone; a
    checkpoint keeps it all the same, so that a resumed run has it whatever has changed."""
    tokens = config.actor.microbatch_tokens
    reward = load_reward_model(name, config.model.dtype, device, tokens)
    scorer = LearnedScorer(reward, config.data.system_prompt, Scale())
    asked = prompts.take(0, NUM_RESPONSES, config.seed, config.data.shuffle)
    rows = _reference_responses(config, asked, device)
    scorer.scale = measure_scale([x for x in scorer.raw_scores(rows) if isinstance(x, float)])
    return scorer


def start_value_head(critic: Critic, config: Config, scale: Scale) -> None:
    """A critic on a reward model's trunk takes over its head as well, in the units of the score:
    the value of a state is then what the response so far would have earned."""
    if config.model.critic is None or scale.std == 0:
        return
    weight = read_head(find_model(config.model.critic), critic.head.in_features)
    if weight is None:
        return
    with torch.no_grad():
        critic.head.weight.copy_(weight.to(critic.head.weight.dtype) / scale.std)
        critic.head.bias.fill_(-scale.mean / scale.std)


def _reference_responses(
    config: Config, prompts: Prompts, device: torch.device
) -> list[dict[str, object]]:
    """Rows for the reward, one response a prompt; the model is loaded for this alone."""
    settings, rollout = config.model, config.rollout
    name = settings.reference or settings.actor
    dtype = settings.reference_dtype or settings.dtype
    model = load_causal_lm(name, dtype, device, settings.hub)
    vocabulary = load_vocabulary(name, model, settings.hub)
    sampler = LocalSampler(vocabulary.eos_ids, rollout.max_response_tokens, rollout.temperature)
    sampler.sync(model, 0)
    episodes = build_turns(rollout, vocabulary).episodes(prompts)
    sampled: Rollout = sampler.run(episodes, Draw(config.seed, "normalise", 0))
    ids, lengths = sampled.response_ids.tolist(), sampled.response_lengths.tolist()
    return [
        {
            "prompt": prompts.messages[row] or prompts.texts[row],
            "response": vocabulary.decode(ids[row][: lengths[row]]),
            "finished": sampled.finish_reasons[row] != "length",
        }
        for row in range(len(prompts))
    ]
