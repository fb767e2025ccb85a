"""The networks of a run and their sizes, with weights or as mere shapes."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from tether.config import Config, LoraSection
from tether.models.adapters import learned, place_adapter
from tether.models.critic import Critic
from tether.models.forward import recompute_in_backward
from tether.models.loading import outline
from tether.models.reference import FrozenReference
from tether.rewards.learned import LearnedScorer
from tether.rewards.parts import learned_model
from tether.train.roles import Roles


@dataclass(frozen=True)
class Networks:
    """What each role adds: a critic on the actor's trunk is its head alone, and a reference that
    is the actor's base, or none, is nothing."""

    actor: PreTrainedModel
    critic: Critic | None
    reference: PreTrainedModel | None
    reward: nn.Module | None


@dataclass(frozen=True)
class Size:
    """Numbers in a role's weights and, of these, the ones that learn."""

    parameters: int = 0
    weight_bytes: int = 0
    learning: int = 0
    learning_bytes: int = 0
    linear_bytes: int = 0  # in the layers' matrices, which tensor parallelism divides
    linear_learning_bytes: int = 0
    layer_bytes: int = 0  # the largest layer
    outer_bytes: int = 0  # outside the layers: embedding, head, last norm
    largest_bytes: int = 0  # the largest tensor


def networks_of(config: Config, roles: Roles) -> Networks:
    reference = roles.reference
    return Networks(
        actor=roles.actor.model,
        critic=roles.critic if config.has_critic else None,
        reference=reference.policy.model if isinstance(reference, FrozenReference) else None,
        reward=roles.reward.reward.model if isinstance(roles.reward, LearnedScorer) else None,
    )


def outline_networks(config: Config) -> Networks:
    """The same as shapes alone, from the models' config.json files."""
    settings, hub = config.model, config.model.hub
    actor = outline(AutoModelForCausalLM, settings.actor, settings.dtype, hub)
    critic = reference = reward = None
    if config.has_critic and config.critic.shared_trunk:
        critic = Critic(actor, config.critic.microbatch_tokens)
    elif config.has_critic:
        name, dtype = settings.critic or settings.actor, settings.critic_dtype or settings.dtype
        trunk = outline(AutoModel, name, dtype, hub)
        _make_ready_to_learn(trunk, settings.critic_lora, config, "critic")
        critic = Critic(trunk, config.critic.microbatch_tokens)
    if config.kl.needs_reference and not settings.adapter_off_is_reference:
        name = settings.reference or settings.actor
        dtype = settings.reference_dtype or settings.dtype
        reference = outline(AutoModelForCausalLM, name, dtype, hub).requires_grad_(False)
    judge = learned_model(config.reward)
    if judge is not None:
        reward = outline(AutoModelForSequenceClassification, judge, settings.dtype)
        reward.requires_grad_(False)
    _make_ready_to_learn(actor, settings.lora, config, "actor")
    return Networks(actor, critic, reference, reward)


def _make_ready_to_learn(
    model: PreTrainedModel, lora: LoraSection | None, config: Config, role: str
) -> None:
    if lora is not None:
        place_adapter(model, lora, role)
    if config.model.gradient_checkpointing:
        recompute_in_backward(model)


def critic_size(config: Config, networks: Networks) -> Size:
    critic = networks.critic
    if critic is None:
        return Size()
    return size_of(critic.head if config.critic.shared_trunk else critic)


def size_of(module: nn.Module | None) -> Size:
    if module is None:
        return Size()
    layers = [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]
    weights, moved = list(module.parameters()), learned(module).values()
    inside = {id(weight): weight for layer in layers for weight in layer.parameters()}
    matrices = {id(weight) for weight in inside.values() if weight.ndim > 1}
    return Size(
        parameters=sum(weight.numel() for weight in weights),
        weight_bytes=_bytes(weights),
        learning=sum(weight.numel() for weight in moved),
        learning_bytes=_bytes(moved),
        linear_bytes=_bytes(w for w in weights if id(w) in matrices),
        linear_learning_bytes=_bytes(w for w in moved if id(w) in matrices),
        layer_bytes=max((_bytes(layer.parameters()) for layer in layers), default=0),
        outer_bytes=_bytes(w for w in weights if id(w) not in inside),
        largest_bytes=max((weight.nbytes for weight in weights), default=0),
    )


def _bytes(weights: Iterable[nn.Parameter]) -> int:
    return sum(weight.nbytes for weight in weights)
