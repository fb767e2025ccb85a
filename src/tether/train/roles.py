"""The four roles and what serves them, built once a run."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from tether.config import Config
from tether.data.prompts import PromptSet, load_prompts
from tether.errors import UserError
from tether.models.critic import Critic, NoCritic
from tether.models.loading import Vocabulary, load_causal_lm, load_vocabulary
from tether.models.policy import Policy
from tether.models.reference import FrozenReference, NoReference
from tether.rewards.function import Reward, load_reward, wanted_columns
from tether.rewards.scorers import ChildScorer, InProcessScorer, Scorer
from tether.rollout.episode import Sampler
from tether.rollout.local import LocalSampler
from tether.train.inputs import fingerprint
from tether.train.optimizer import Optimizer


@dataclass(frozen=True)
class Roles:
    """Who takes part in an iteration."""

    vocabulary: Vocabulary
    train_prompts: PromptSet
    heldout_prompts: PromptSet | None
    sampler: Sampler
    actor: Policy
    critic: Critic | NoCritic
    reference: FrozenReference | NoReference
    reward: Scorer
    actor_optimizer: Optimizer
    critic_optimizer: Optimizer | None
    inputs: dict[str, str]  # hashes of the files that all this was made from


def build_roles(config: Config, reward: Reward | None = None) -> Roles:
    """Load and check everything that a run needs; nothing is trained yet."""
    device = pick_device(config.device)
    function = load_reward(config.reward.kind) if reward is None else reward

    rollout = config.rollout
    model = load_causal_lm(config.model.actor, config.model.dtype, device)
    vocabulary = load_vocabulary(config.model.actor, model)

    def load(path: str) -> PromptSet:
        columns, context = wanted_columns(function), _room_for_prompts(config, model.config)
        return load_prompts(path, config.data, vocabulary.tokenizer, columns, context)

    critic = _build_critic(config, model, device)
    actor_weights = [*model.parameters()]
    if config.critic.shared_trunk:
        actor_weights += critic.head.parameters()
    return Roles(
        vocabulary=vocabulary,
        train_prompts=load(config.data.train),
        heldout_prompts=None if config.data.heldout is None else load(config.data.heldout),
        sampler=LocalSampler(vocabulary.eos_ids, rollout.max_response_tokens, rollout.temperature),
        actor=Policy(model, rollout.temperature, config.actor.microbatch_tokens),
        critic=critic,
        reference=_build_reference(config, device),
        reward=build_scorer(config, reward),
        actor_optimizer=Optimizer(actor_weights, config.actor.lr, config.actor.max_grad_norm),
        critic_optimizer=_build_critic_optimizer(config, critic),
        inputs=fingerprint(config),
    )


def broken_rows(roles: Roles) -> list[str]:
    """What was left out of the data under `on_bad_row: skip`."""
    heldout = roles.heldout_prompts.broken if roles.heldout_prompts else []
    return [*roles.train_prompts.broken, *heldout]


def _build_reference(config: Config, device: torch.device) -> FrozenReference | NoReference:
    if not config.kl.needs_reference:
        return NoReference()
    model = load_causal_lm(config.model.reference or config.model.actor, config.model.dtype, device)
    return FrozenReference(model, config.rollout.temperature, config.actor.microbatch_tokens)


def _build_critic(
    config: Config, actor_model: PreTrainedModel, device: torch.device
) -> Critic | NoCritic:
    if not config.has_critic:
        return NoCritic()
    if config.critic.shared_trunk:
        return Critic(actor_model, config.critic.microbatch_tokens)
    model = load_causal_lm(config.model.critic or config.model.actor, config.model.dtype, device)
    return Critic(model, config.critic.microbatch_tokens)


def _build_critic_optimizer(config: Config, critic: Critic | NoCritic) -> Optimizer | None:
    if not config.has_critic or config.critic.shared_trunk:
        return None
    return Optimizer(critic.parameters(), config.critic_lr, config.critic.max_grad_norm)


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
        raise UserError(f"device {name!r} is not there; write cpu or auto.") from None


def _room_for_prompts(config: Config, model_config: object) -> int | None:
    """Tokens that the model's positions leave for a prompt, if they are limited."""
    positions = getattr(model_config, "max_position_embeddings", None)
    if positions is None:
        return None
    room = positions - config.rollout.max_response_tokens
    if room < 1:
        raise UserError(
            f"rollout.max_response_tokens = {config.rollout.max_response_tokens} fills the "
            f"{positions} positions of {config.model.actor}; lower it."
        )
    return room
