"""Evaluation of a model that somebody else runs: prompts, tools and reward are here, its weights
are not, so there is no KL."""

from dataclasses import dataclass

from tether.config import Config
from tether.data.prompts import PromptSet, load_prompts
from tether.errors import UserError
from tether.models.loading import Vocabulary, load_vocabulary_alone
from tether.rewards.function import Reward
from tether.rewards.parts import columns_wanted
from tether.rewards.scorers import Scorer
from tether.rollout.endpoint import Endpoint
from tether.rollout.engine import EngineSampler
from tether.rollout.episode import Draw, Episodes, Greedy
from tether.rollout.tools.build import build_turns
from tether.train.evaluate import Evaluation, judge
from tether.train.roles import build_scorer, pick_device


@dataclass(frozen=True)
class Elsewhere:
    """What it takes to ask a model and to score its answers."""

    vocabulary: Vocabulary
    prompts: PromptSet
    episodes: Episodes
    reward: Scorer


def build_elsewhere(config: Config, reward: Reward | None = None) -> Elsewhere:
    """Held-out prompts in the words of `model.actor`'s tokenizer; its weights are not read."""
    if config.data.heldout is None:
        raise UserError("data.heldout is not set, so there is nothing to evaluate on.")
    vocabulary = load_vocabulary_alone(config.model.actor, config.model.hub)
    columns = columns_wanted(config.reward, reward)
    prompts = load_prompts(config.data.heldout, config.data, vocabulary.tokenizer, columns, None)
    scorer = build_scorer(config, reward, prompts, pick_device(config.device))
    return Elsewhere(vocabulary, prompts, build_turns(config.rollout, vocabulary).episodes, scorer)


def evaluate_elsewhere(endpoint: Endpoint, here: Elsewhere, config: Config) -> Evaluation:
    """One greedy and one sampled response a prompt, as `evaluate` does with the actor."""
    rollout, prompts = config.rollout, here.prompts.first(config.train.eval_prompts)
    limits = rollout.max_response_tokens, rollout.temperature
    sampler = EngineSampler(endpoint, here.vocabulary.eos_ids, *limits)
    greedy = sampler.run(here.episodes(prompts), Greedy())
    sampled = sampler.run(here.episodes(prompts), Draw(config.seed, "evaluate", 0))
    evaluation, _ = judge(0, prompts, greedy, sampled, None, here, config)
    return evaluation
