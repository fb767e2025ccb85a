"""The four roles and what serves them, built once a run."""

from dataclasses import dataclass

import torch

from tether.config import Config
from tether.data.prompts import PromptSet, load_prompts
from tether.errors import UserError
from tether.models.critic import Critic
from tether.models.loading import Vocabulary, load_causal_lm, load_vocabulary
from tether.models.policy import Policy
from tether.rewards.function import Reward, check_arguments, load_reward
from tether.rewards.scorers import ChildScorer, InProcessScorer, Scorer
from tether.rollout.episode import Sampler
from tether.rollout.local import LocalSampler
from tether.train.optimizer import Optimizer


@dataclass(frozen=True)
class Roles:
    """Who takes part in an iteration."""

    vocabulary: Vocabulary
    train_prompts: PromptSet
    heldout_prompts: PromptSet | None
    sampler: Sampler
    actor: Policy
    critic: Critic
    reference: Policy
    reward: Scorer
    actor_optimizer: Optimizer
    critic_optimizer: Optimizer


def build_roles(config: Config, reward: Reward | None = None) -> Roles:
    """Load and check everything that a run needs; nothing is trained yet."""
    device = pick_device(config.device)
    function = reward or load_reward(config.reward.kind)

    model, rollout = config.model, config.rollout
    actor = load_causal_lm(model.actor, model.dtype, device)
    reference = load_causal_lm(model.reference or model.actor, model.dtype, device)
    reference.requires_grad_(False)
    critic_trunk = load_causal_lm(model.critic or model.actor, model.dtype, device)
    critic = Critic(critic_trunk, config.critic.microbatch_tokens)

    vocabulary = load_vocabulary(model.actor, actor)
    train_prompts = load_prompts(config.data.train, config.data, vocabulary.tokenizer)
    heldout = config.data.heldout
    heldout_prompts = heldout and load_prompts(heldout, config.data, vocabulary.tokenizer)
    check_arguments(function, train_prompts.prompts.columns[0])
    _check_context(config, actor.config, train_prompts)

    return Roles(
        vocabulary=vocabulary,
        train_prompts=train_prompts,
        heldout_prompts=heldout_prompts,
        sampler=LocalSampler(vocabulary.eos_ids, rollout.max_response_tokens, rollout.temperature),
        actor=Policy(actor, rollout.temperature, config.actor.microbatch_tokens),
        critic=critic,
        reference=Policy(reference, rollout.temperature, config.actor.microbatch_tokens),
        reward=build_scorer(config, reward),
        actor_optimizer=Optimizer(actor.parameters(), config.actor.lr, config.actor.max_grad_norm),
        critic_optimizer=Optimizer(
            critic.parameters(), config.critic.lr, config.critic.max_grad_norm
        ),
    )


def build_scorer(config: Config, reward: Reward | None) -> Scorer:
    """A function handed over in Python stays in this process; one named in the config does not."""
    if reward is not None:
        return InProcessScorer(reward)
    return ChildScorer(config.reward.kind, config.reward.timeout_seconds)


def pick_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError):
        raise UserError(f"device {name!r} is not there; write cpu, cuda or auto.") from None


def _check_context(config: Config, model_config: object, prompts: PromptSet) -> None:
    """Refuse, before training, what would not fit the model's positions."""
    context = getattr(model_config, "max_position_embeddings", None)
    longest = max(len(ids) for ids in prompts.prompts.ids)
    needed = longest + config.rollout.max_response_tokens
    if context is not None and needed > context:
        row = max(range(len(prompts)), key=lambda i: len(prompts.prompts.ids[i]))
        raise UserError(
            f"{config.data.train}, line {row + 1}: {longest} prompt tokens and "
            f"rollout.max_response_tokens = {config.rollout.max_response_tokens} make {needed}, "
            f"more than the {context} positions of {config.model.actor}."
        )
