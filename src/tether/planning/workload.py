"""The work of each process of a run: its share of the rows, in batches of at most which size."""

import math
from collections.abc import Iterable, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast

from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from tether.config import Config, LoraSection
from tether.data.shared_prompts import TokenCount
from tether.dist.fsdp import outer_modules
from tether.models.critic import Critic
from tether.models.forward import layer_stack, output_head, recompute_in_backward, trunk
from tether.models.frozen_layers import upper_copy
from tether.models.loading import load_on_meta
from tether.models.lora import insert_adapter
from tether.models.precision import compute_type, planning_for
from tether.models.token_log_probs import max_cached_cells
from tether.models.weights import trainable_parameters
from tether.planning.dry_run import Batch
from tether.ppo.roles import let_layers_learn
from tether.rewards.functions import learned_model


@dataclass(frozen=True)
class Networks:
    """The network that each role adds, as shapes without weights.

    A reference that is the actor's base adds none. The first `lower_layers` layers of the actor are
    frozen, and run once per iteration.
    """

    actor: PreTrainedModel
    critic: Critic | None
    reference: PreTrainedModel | None
    reward: PreTrainedModel | None
    lower_layers: int = 0


@dataclass(frozen=True)
class Size:
    """Numbers and bytes of a role's weights and, of these, the ones that learn.

    Frozen weights that are the actor's are not counted again, but are passed through.
    """

    parameters: int = 0
    passed: int = 0  # that a training pass goes through
    weight_bytes: int = 0
    learning: int = 0
    learning_bytes: int = 0
    linear_bytes: int = 0  # in the layers' matrices, which tensor parallelism divides
    linear_learning_bytes: int = 0
    layer_bytes: int = 0  # the largest layer
    outer_bytes: int = 0  # outside the layers: embedding, head, last norm
    unit_bytes: int = 0  # embedding or head where FSDP gathers each for itself
    kept_bytes: int = 0  # outside the layers and these
    largest_bytes: int = 0  # the largest tensor


def outline_networks(config: Config) -> Networks:
    """Build the networks as shapes without weights, from the models' config.json files."""
    settings = config.model
    shared = settings.hub, settings.compute
    actor = load_on_meta(AutoModelForCausalLM, settings.actor, settings.dtype, *shared)
    layers = let_layers_learn(actor, settings.actor, config)
    lower_layers = layers[0] if layers else 0
    critic = reference = reward = None
    if config.has_critic and config.critic.shared_trunk:
        critic = Critic(actor, config.critic.microbatch_tokens, shared_trunk=True)
    elif config.has_critic:
        name, dtype = settings.critic or settings.actor, settings.critic_dtype or settings.dtype
        same = (name, dtype) == (settings.actor, settings.dtype)
        if same and layers is not None:
            network, its_layers = upper_copy(trunk(actor), lower_layers), layers
        else:
            network = load_on_meta(AutoModel, name, dtype, *shared)
            its_layers = let_layers_learn(network, name, config)
        _make_ready_to_learn(network, settings.critic_lora, config, "critic", its_layers)
        critic = Critic(network, config.critic.microbatch_tokens, reads_lower_states=same)
    if config.kl.needs_reference and not settings.adapter_off_is_reference:
        name = settings.reference or settings.actor
        dtype = settings.reference_dtype or settings.dtype
        if layers is not None and (name, dtype) == (settings.actor, settings.dtype):
            reference = upper_copy(actor, lower_layers)
        else:
            reference = load_on_meta(AutoModelForCausalLM, name, dtype, *shared)
        reference.requires_grad_(False)
    judge = learned_model(config.reward)
    if judge is not None:
        auto = AutoModelForSequenceClassification
        reward = load_on_meta(auto, judge, settings.dtype, compute=settings.compute)
        reward.requires_grad_(False)
    _make_ready_to_learn(actor, settings.lora, config, "actor", layers)
    return Networks(actor, critic, reference, reward, lower_layers)


def _make_ready_to_learn(
    model: PreTrainedModel,
    lora: LoraSection | None,
    config: Config,
    role: str,
    layers: range | None,
) -> None:
    if lora is not None:
        insert_adapter(model, lora, role, layers)
    if config.model.gradient_checkpointing:
        recompute_in_backward(model)


def size_of(
    module: nn.Module | None, lower_layers: int = 0, shared: Set[int] = frozenset()
) -> Size:
    """Count a module's weights; all is 0 for None.

    `lower_layers` are run apart from it; `shared` are the ids of weights that are counted already.
    """
    if module is None:
        return Size()
    layers = [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]
    every, moved = list(module.parameters()), trainable_parameters(module).values()
    weights = [weight for weight in every if id(weight) not in shared]
    inside = {id(weight): weight for layer in layers for weight in layer.parameters()}
    matrices = {id(weight) for weight in inside.values() if weight.ndim > 1}
    network = module.trunk if isinstance(module, Critic) else getattr(module, "base_model", None)
    units = [_bytes(unit.parameters()) for unit in outer_modules(module, network)]
    outer = _bytes(w for w in weights if id(w) not in inside)
    return Size(
        parameters=sum(weight.numel() for weight in weights),
        passed=sum(weight.numel() for weight in every) - _apart(module, lower_layers),
        weight_bytes=_bytes(weights),
        learning=sum(weight.numel() for weight in moved),
        learning_bytes=_bytes(moved),
        linear_bytes=_bytes(w for w in weights if id(w) in matrices),
        linear_learning_bytes=_bytes(w for w in moved if id(w) in matrices),
        layer_bytes=max((_bytes(layer.parameters()) for layer in layers), default=0),
        outer_bytes=outer,
        unit_bytes=max(units, default=0),
        kept_bytes=max(0, outer - sum(units)),
        largest_bytes=max((weight.nbytes for weight in weights), default=0),
    )


def _apart(module: nn.Module, lower_layers: int) -> int:
    """Count the weights of the lower layers, and of the embedding unless it is the head as well."""
    if lower_layers == 0:
        return 0
    model = cast(PreTrainedModel, module)
    lower = layer_stack(model)[:lower_layers]
    embedding, head = model.get_input_embeddings().weight, output_head(model).weight
    own = 0 if head is embedding else cast(Tensor, embedding).numel()
    return sum(weight.numel() for weight in lower.parameters()) + own


def _bytes(weights: Iterable[nn.Parameter]) -> int:
    return sum(weight.nbytes for weight in weights)


Learner = Literal["actor", "critic"]


@dataclass(frozen=True)
class Demand:
    """The work of a process, with every row at its greatest length."""

    config: Config
    networks: Networks
    longest_prompt: int
    workers: int  # processes
    device: str  # its kind
    share_prompts: bool = False  # where that saves enough

    @cached_property
    def actor(self) -> Size:
        """Size of the actor."""
        return size_of(self.networks.actor, self.networks.lower_layers)

    @cached_property
    def shared(self) -> Set[int]:
        """Ids of the actor's weights, which copies share; sharding gives each its own shards."""
        if self.shards > 1:
            return frozenset()
        return {id(weight) for weight in self.networks.actor.parameters()}

    @cached_property
    def critic(self) -> Size:
        """Size of what the critic adds: the head alone where the trunk is the actor's."""
        critic = self.networks.critic
        module = None if critic is None else critic.networks()[0].module
        return size_of(module, shared=self.shared)

    @cached_property
    def reference(self) -> Size:
        """Size of the reference."""
        return size_of(self.networks.reference, shared=self.shared)

    @cached_property
    def reward(self) -> Size:
        """Size of the reward model."""
        return size_of(self.networks.reward)

    @property
    def roles(self) -> dict[str, Size]:
        """Sizes of the roles that have weights of their own."""
        names = ("actor", "critic", "reference", "reward")
        sizes = {name: getattr(self, name) for name in names}
        return {name: size for name, size in sizes.items() if size.parameters}

    @property
    def learners(self) -> dict[Learner, Size]:
        """Sizes of roles with an optimizer; a shared trunk's value head is in the actor's."""
        own = self.config.has_critic and not self.config.critic.shared_trunk
        return {"actor": self.actor, **({"critic": self.critic} if own else {})}

    @property
    def layer_ways(self) -> int:
        """Processes that divide each layer."""
        return self.config.launch.tensor_parallel

    @property
    def replicas(self) -> int:
        """Processes, or groups of them, that train on rows of their own."""
        return self.workers // self.layer_ways

    @property
    def shards(self) -> int:
        """Shards of weights, gradients and moments."""
        return self.replicas if self.config.launch.weights == "sharded" else 1

    def gathered(self, stored: int) -> int:
        """Return the bytes of layers as FSDP gathers them: in the format of products."""
        actor = self.networks.actor
        return stored * compute_type(actor).itemsize // max(1, actor.dtype.itemsize)

    def keeps_gradients_whole(self, role: Learner) -> bool:
        """Return whether sharded gradients wait, whole, for the last microbatch of a step."""
        by_step = self.config.launch.gradient_sync == "step"
        return self.shards > 1 and by_step and self.microbatches(role) > 1

    def held(self, whole: int, linear: int) -> int:
        """Return a process's share of so many bytes, `linear` of them in the layers' matrices."""
        return math.ceil((whole - linear + linear / self.layer_ways) / self.shards)

    @property
    def held_rows(self) -> int:
        """Return the rows of an iteration that a process holds."""
        return math.ceil(self.config.rows / self.replicas)

    @property
    def longest_row(self) -> int:
        """Greatest length of a row, prompt and response."""
        return self.longest_prompt + self.config.rollout.max_response_tokens

    @property
    def tokens(self) -> int:
        """Tokens of an iteration, prompts and responses."""
        return self.config.rows * self.longest_row

    def step_rows(self, role: Learner) -> int:
        """Return the rows of one optimizer step."""
        c = self.config
        if role == "critic":
            return c.critic_minibatch_rows
        return c.rows if c.actor.update.kind == "trpo" else c.actor.minibatch_rows

    def steps(self, role: Learner) -> int:
        """Return the optimizer steps of an iteration."""
        c = self.config
        if role == "actor" and c.actor.update.kind == "trpo":
            return 1
        epochs = c.actor.epochs if role == "actor" else c.critic_epochs
        return epochs * math.ceil(c.rows / self.step_rows(role))

    def microbatch(self, role: Learner) -> Batch:
        """Return a process's largest microbatch, as `data.batching.microbatches` makes them."""
        c = self.config
        whole = self.step_rows(role) >= c.rows  # all rows are in every minibatch
        samples = c.rollout.samples_per_prompt
        return self._microbatch(role, samples if whole else c.rows_together(role))

    def packed_microbatch(self, role: Learner) -> Batch:
        """Return the same for a minibatch in which all rows of its prompts are by chance."""
        return self._microbatch(role, self.config.rollout.samples_per_prompt)

    def _microbatch(self, role: Learner, together: int) -> Batch:
        c = self.config
        rows = math.ceil(self.step_rows(role) / self.replicas)
        if role == "critic":
            return self._batch(rows, c.critic.microbatch_tokens, together)
        with planning_for(self.device):
            cells = max_cached_cells(output_head(self.networks.actor))
        rows = min(rows, max(1, cells // c.rollout.max_response_tokens))
        return self._batch(rows, c.actor.microbatch_tokens, together)

    def microbatches(self, role: Learner) -> int:
        """Return the backward passes of a process before a step."""
        rows = math.ceil(self.step_rows(role) / self.replicas)
        return math.ceil(rows / self.microbatch(role).rows)

    @property
    def forward_batch(self) -> Batch:
        """The largest batch of a forward pass without gradients."""
        c = self.config
        rows = math.ceil(c.rows / self.replicas)
        return self._batch(rows, c.actor.microbatch_tokens, c.rollout.samples_per_prompt)

    @property
    def forward_batches(self) -> int:
        """Batches of such a pass over a process's rows."""
        return math.ceil(math.ceil(self.config.rows / self.replicas) / self.forward_batch.rows)

    def _batch(self, rows: int, tokens: int, together: int) -> Batch:
        """Return the largest batch, given how many rows of a prompt are side by side."""
        longest, response = self.longest_row, self.config.rollout.max_response_tokens
        plain = Batch(max(1, min(rows, tokens // longest)), longest, response)
        if not self.share_prompts:
            return plain
        room = (tokens - self.longest_prompt) // response  # for responses to one prompt
        together = max(1, min(together, rows, room))
        each = self.longest_prompt + together * response
        prompts = max(1, min(rows // together, tokens // each))
        count = TokenCount()
        for row in range(prompts * together):
            count = count.with_row(row // together, self.longest_prompt, response)
        return Batch(count.rows, longest, response, prompts) if count.is_packed else plain

    def computed_tokens(self, batch: Batch) -> int:
        """Return the tokens of a pass over an iteration's rows in such batches."""
        return self.tokens * batch.tokens // (batch.rows * batch.length)

    @property
    def sampled_rows(self) -> int:
        """Rows that a process samples."""
        return math.ceil(self.config.rows / self.workers)

    @property
    def slots(self) -> int:
        """Rows that a process samples at once."""
        room = self.config.rollout.cache_tokens // self.longest_row
        return max(1, min(self.sampled_rows, room))


def lower_state_bytes(d: Demand) -> int:
    """Return the bytes of the states below the layers that learn, of all rows."""
    actor = d.networks.actor
    return d.tokens * actor.config.hidden_size * actor.dtype.itemsize
