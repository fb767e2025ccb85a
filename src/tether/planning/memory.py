"""The memory of one process: its parts, and which of them are held at the same time."""

import math
from dataclasses import dataclass
from functools import partial

from tether.config import TrpoUpdate
from tether.models.forward import output_head, trunk
from tether.models.frozen_layers import lacks_lower_layers
from tether.models.lora import merged_bytes
from tether.models.packed_weights import packed_bytes
from tether.models.precision import attention_type
from tether.models.token_log_probs import max_cached_cells
from tether.planning.dry_run import Batch, HeadedTrunk, backward_peak, forward_peak
from tether.planning.workload import Demand, Learner, lower_state_bytes
from tether.rollout.local import PREFILL_TOKENS
from tether.support.units import byte_text, si

# Of a response token: numbers in a Rollout, an Experience and the update's report; bytes of ids
# and masks there; and bytes of Python objects while it is sampled.
TOKEN_FLOATS, TOKEN_ID_BYTES, TOKEN_OBJECT_BYTES = 12, 10, 80
MINIBATCH_FLOATS = 8  # in a Minibatch, with the new log-probs that come back

# Modules imported late, the tokenizer, the prompts: measured once the models are loaded.
LIBRARIES = 26 * 2**20

# Float32 numbers per token of the vocabulary in sampling: logits, probabilities, padded ones.
VOCABULARY_FLOATS = 3


@dataclass(frozen=True)
class Part:
    """Something held in memory, and the arithmetic behind its size."""

    what: str
    size: int
    because: str


@dataclass(frozen=True)
class Phase:
    """What is held at the same time, at the peak of a phase of the iteration."""

    when: str
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(part.size for part in self.parts)


@dataclass(frozen=True)
class Memory:
    """The memory of a process by phase."""

    always: Phase  # memory held in every phase except loading
    phases: list[Phase]

    @property
    def peak(self) -> Phase:
        """The phase that takes the most."""
        return max(self.phases, key=lambda phase: phase.size)

    @property
    def parts(self) -> list[Part]:
        """Each part once, in the order in which they appear."""
        found = {part.what: part for phase in self.phases for part in phase.parts}
        return list(found.values())


def plan_memory(d: Demand) -> Memory:
    """Return the memory of every phase of an iteration."""
    libraries = Part("libraries", LIBRARIES, "imported on the way, and their buffers")
    always = (libraries, _weights(d), _moments(d), *_gathered(d))
    found = [
        *_loading(d),
        Phase("sampling", (*always, *_buffer(d), *_sampling(d))),
        Phase("forward passes", (*always, *_buffer(d), *_whole_layers(d), _forward(d), *_rows(d))),
    ]
    for role in reversed(d.learners):
        learning = _learning(d, role)
        buffer = _buffer(d) if role == "critic" else []  # the actor's activations contain it
        rows = *_rows(d), *_loan(d, role)
        found.append(Phase(f"{role} update", (*always, *buffer, *learning, *rows)))
        if d.replicas > 1 and d.shards == 1:
            step = (*always, learning[0], _summed(d, role), *rows)
            found.append(Phase(f"{role} step", step))
    found.append(Phase("checkpoint", (*always, *_buffer(d), *_saving(d))))
    return Memory(Phase("always", always), found)


def _loading(d: Demand) -> list[Phase]:
    """Each process reads its shards from the files; but the scale of a reward model's scores is
    measured while it is whole, on responses of a whole reference."""
    if d.shards * d.layer_ways == 1:
        return []
    largest = max(role.largest_bytes for role in d.roles.values()) // d.shards
    read = Part("tensor being read", largest, "this process's rows of the largest")
    found = [Phase("loading", (_weights(d), read))]
    if d.reward.parameters:
        size = d.reward.weight_bytes + (d.reference.weight_bytes or d.actor.weight_bytes)
        whole = Part("whole models", size, "the reward model, and a reference to measure it on")
        found.append(Phase("measuring the reward model", (whole,)))
    return found


def _weights(d: Demand) -> Part:
    size = sum(d.held(role.weight_bytes, role.linear_bytes) for role in d.roles.values())
    whose = " + ".join(f"{name} {si(role.parameters)}" for name, role in d.roles.items())
    return Part("weights", size, f"{whose}{_divided(d)}")


def _moments(d: Demand) -> Part:
    sizes = d.learners.values()
    size = sum(2 * d.held(s.learning_bytes, s.linear_learning_bytes) for s in sizes)
    learning = sum(s.learning for s in sizes)
    return Part("Adam's moments", size, f"2 x {si(learning)} that learn{_divided(d)}")


def _gathered(d: Demand) -> list[Part]:
    """The unsharded copy that a sampler decodes on where the weights are sharded."""
    if d.shards * d.layer_ways == 1:
        return []
    return [Part("sampler's copy", d.actor.weight_bytes, "the actor whole, on every process")]


def _buffer(d: Demand) -> list[Part]:
    """The `ProbabilityBuffer` that is kept on a CPU from one actor's microbatch to the next."""
    if d.device != "cpu":
        return []
    head, batch = output_head(d.networks.actor), d.packed_microbatch("actor")
    cells = min(batch.rows * batch.response, max_cached_cells(head))
    size = cells * head.out_features * _float_bytes(d)
    return [Part("probability buffer", size, f"{cells} x {head.out_features} of the actor's")]


def _rows(d: Demand) -> list[Part]:
    c = d.config
    token_bytes = TOKEN_FLOATS * _float_bytes(d) + TOKEN_ID_BYTES
    size = d.held_rows * (c.rollout.max_response_tokens * token_bytes + 16 * d.longest_row)
    rows = Part("rows", size, f"{d.held_rows} rows, {token_bytes} bytes per response token")
    return [rows, *_lower_states(d)]


def _loan(d: Demand, role: Learner) -> list[Part]:
    """The rows of a minibatch, as they are lent and as they are borrowed."""
    if d.replicas == 1:
        return []
    rows = math.ceil(d.step_rows(role) / d.replicas)
    token_bytes = MINIBATCH_FLOATS * _float_bytes(d) + TOKEN_ID_BYTES
    size = 2 * rows * d.config.rollout.max_response_tokens * token_bytes
    return [Part("rows on loan", size, f"2 x {rows} rows of a minibatch")]


def _lower_states(d: Demand) -> list[Part]:
    """The states below the layers that learn, of a process's rows."""
    if d.networks.lower_layers == 0:
        return []
    width = d.networks.actor.config.hidden_size
    because = f"{d.held_rows} rows of {d.longest_row} tokens, {width} wide"
    return [Part("lower states", math.ceil(lower_state_bytes(d) / d.replicas), because)]


def _sampling(d: Demand) -> list[Part]:
    c, model = d.config, d.networks.actor
    found = []
    objects = d.sampled_rows * c.rollout.max_response_tokens * TOKEN_OBJECT_BYTES
    if c.rollout.sampler == "vllm":
        return [Part("sampled tokens", objects, "vLLM's own weights and cache are not counted")]
    if c.model.lora is not None:
        size = merged_bytes(model, d.device)
        found.append(Part("merged adapter", size, "the layers that it is on, with it in them"))
    packed = packed_bytes(model, d.device)
    if packed:
        found.append(Part("packed weights", packed, "in the order in which the sampler reads them"))
    capacity = d.longest_row + 1
    cache = d.slots * capacity * cache_bytes(d)
    found.append(Part("key-value cache", cache, f"{d.slots} rows of {capacity} tokens"))
    length = min(d.longest_prompt, PREFILL_TOKENS)
    batch = Batch(max(1, min(d.sampled_rows, PREFILL_TOKENS // length)), length, 0)
    prompts = forward_peak(HeadedTrunk(trunk(model), d.device), batch)
    logits = d.slots * model.config.vocab_size * VOCABULARY_FLOATS * 4
    step = Part("sampling a token", objects + max(prompts, logits), "prefill, or logits")
    return [*found, step]


def _forward(d: Demand) -> Part:
    """The largest of the roles' forward passes, which follow each other."""
    n, batch = d.networks, d.forward_batch
    lower = n.lower_layers
    models = [HeadedTrunk(trunk(n.actor), d.device, output_head(n.actor), lower_layers=lower)]
    if n.critic is not None:
        its_lower = lower if n.critic.reads_lower_states else 0
        models.append(HeadedTrunk(n.critic.trunk, d.device, None, n.critic.head, its_lower))
    if n.reference is not None:
        network = trunk(n.reference)
        its_lower = lower if lacks_lower_layers(network) else 0
        head = output_head(n.reference)
        models.append(HeadedTrunk(network, d.device, head, lower_layers=its_lower))
    if n.reward is not None:
        models.append(HeadedTrunk(trunk(n.reward), d.device))
    peak = max(forward_peak(model, batch) for model in models)
    return Part("forward pass", peak, batch.text)


def _learning(d: Demand, role: Learner) -> list[Part]:
    """Gradients, and what else is held at the peak of the backward passes."""
    # Rows that are drawn one by one may meet all the same, and packed ones take more.
    size, batch, backwards = d.learners[role], d.packed_microbatch(role), d.microbatches(role)
    whole = d.shards * d.layer_ways == 1
    peak = partial(backward_peak, _learner(d, role), batch, backwards)
    # Gradients of whole weights grow while activations are freed, so their peak is found together;
    # those of sharded ones are reduced layer by layer.
    gradients = d.held(size.learning_bytes, size.linear_learning_bytes)
    held = f"{si(size.learning)} that learn{_divided(d)}"
    if d.keeps_gradients_whole(role):
        gradients *= d.shards
        held = f"{si(size.learning)} that learn, whole until they are summed (launch.gradient_sync)"
    activations = peak(keep_gradients=whole) - (gradients if whole else 0)
    because = f"{batch.text}, {backwards} per step"
    return [
        Part(f"{role}'s gradients", gradients, held),
        *_whole_layers(d, learn=True),
        Part(f"{role}'s activations", activations, because),
        *(_of_update(d, activations) if role == "actor" else []),
    ]


def _of_update(d: Demand, activations: int) -> list[Part]:
    """What some kinds of update hold beside gradients and activations."""
    match d.config.actor.update:
        case update if update.needs_old_policy:
            return [Part("old policy", d.actor.learning_bytes, "for the KL over the vocabulary")]
        case TrpoUpdate():
            # Weights before the step, gradient, step, and four vectors of conjugate gradients; a
            # second derivative keeps the first one's graph as well.
            size = 7 * d.actor.learning_bytes + 2 * activations
            return [Part("trust region", size, "7 x what learns, 2 x activations; estimated")]
    return []


def _learner(d: Demand, role: Learner) -> HeadedTrunk:
    actor, critic, lower = d.networks.actor, d.networks.critic, d.networks.lower_layers
    if role == "critic" and critic is not None:
        its_lower = lower if critic.reads_lower_states else 0
        return HeadedTrunk(critic.trunk, d.device, None, critic.head, its_lower)
    value = critic.head if critic is not None and critic.shared_trunk else None
    return HeadedTrunk(trunk(actor), d.device, output_head(actor), value, lower)


def _whole_layers(d: Demand, learn: bool = False) -> list[Part]:
    """FSDP gathers the current layer and the next one; embedding and head are such units too, where
    they are not one. What is outside all units is gathered for a whole pass.

    Gradients are whole until they are reduced.
    """
    if d.shards == 1:
        return []
    largest = max(d.roles.values(), key=lambda role: role.layer_bytes)
    layer = d.gathered(largest.layer_bytes) // d.layer_ways
    unit = max(layer, largest.unit_bytes)
    size = layer + unit + largest.kept_bytes
    if learn and d.config.model.lora is None:
        size += unit + largest.kept_bytes
        return [Part("whole layers, learning", size, "two, what is outside them, gradients of one")]
    return [Part("whole layers", size, "two, and what is outside them")]


def _summed(d: Demand, role: Learner) -> Part:
    size = d.learners[role]
    flat = 2 * d.held(size.learning_bytes, size.linear_learning_bytes)
    return Part(f"{role}'s gradients, flat", flat, f"own, and the sum over {d.replicas}")


def _saving(d: Demand) -> list[Part]:
    """Files are written from the tensors themselves; sharded ones are gathered by their writer."""
    if d.shards * d.layer_ways == 1:
        return []
    sizes = d.learners.values()
    saved = sum(3 * size.learning_bytes for size in sizes)
    largest = max(size.largest_bytes for size in sizes)
    because = f"{byte_text(saved)} / {d.workers}, and one tensor more"
    return [Part("checkpoint's share", saved // d.workers + largest, because)]


def cache_bytes(d: Demand) -> int:
    """Bytes of a token's keys and values in all layers."""
    model = d.networks.actor
    c = model.config
    heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return 2 * c.num_hidden_layers * heads * width * attention_type(model).itemsize


def _float_bytes(d: Demand) -> int:
    """Bytes of log-probs and all that is computed from them: float32 at least."""
    return max(4, d.networks.actor.dtype.itemsize)


def _divided(d: Demand) -> str:
    ways = [f", layers / {d.layer_ways}"] if d.layer_ways > 1 else []
    return "".join([*ways, f", / {d.shards}"] if d.shards > 1 else ways)
