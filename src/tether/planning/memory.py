"""The memory of one process: what lies in it, and how much of that at once."""

from dataclasses import dataclass
from functools import partial

from tether.config import PenaltyUpdate, TrpoUpdate
from tether.models.cpu_matmul import packed_bytes
from tether.models.forward import trunk
from tether.models.lora import merged_bytes
from tether.models.token_log_probs import max_cached_cells
from tether.planning.dry_run import Batch, Reader, peak_of_learning, peak_of_reading
from tether.planning.workload import Demand, Learner
from tether.rollout.local import PREFILL_TOKENS
from tether.support.units import byte_text, si

# Numbers a response token in a Rollout, an Experience and the update's report, and its bytes of
# ids and masks there; and what a token sampled costs in lists of Python objects.
FLOATS_A_TOKEN, REST_A_TOKEN, OBJECTS_A_TOKEN = 12, 10, 80

# Modules imported late, the tokenizer, the prompts: measured once the models are loaded.
LIBRARIES = 26 * 2**20

# Float32 numbers a token of the vocabulary when one is drawn: logits, probabilities, padded ones.
DRAWN = 3


@dataclass(frozen=True)
class Part:
    """Something that lies in memory, whole or for a while."""

    what: str
    size: int
    because: str


@dataclass(frozen=True)
class Moment:
    """What lies in memory at the same time, at the worst of a stretch of the iteration."""

    when: str
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


@dataclass(frozen=True)
class Memory:
    standing: Moment  # what every moment but that of loading begins with
    moments: list[Moment]

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.size)

    @property
    def parts(self) -> list[Part]:
        """Each once, in the order in which they come to lie there."""
        found = {part.what: part for moment in self.moments for part in moment.parts}
        return list(found.values())


def plan_memory(d: Demand) -> Memory:
    """Every stretch of an iteration on top of what always lies there."""
    libraries = Part("libraries", LIBRARIES, "imported on the way, and their buffers")
    always = (libraries, _weights(d), _moments(d), *_gathered(d))
    standing = Moment("standing", always)
    found = [
        *_loading(d),
        Moment("sampling", (*always, *_room(d), *_sampling(d))),
        Moment("forward passes", (*always, *_room(d), *_whole_layers(d), _reading(d), _rows(d))),
    ]
    for role in reversed(d.learners):
        learning = _learning(d, role)
        room = _room(d) if role == "critic" else []  # the actor's activations have it in them
        found.append(Moment(f"{role} update", (*always, *room, *learning, _rows(d))))
        if d.replicas > 1 and d.shards == 1:
            step = (*always, learning[0], _summed(d, role), _rows(d))
            found.append(Moment(f"{role} step", step))
    found.append(Moment("checkpoint", (*always, *_room(d), *_saving(d))))
    return Memory(standing, found)


def _loading(d: Demand) -> list[Moment]:
    """Every process reads all models whole before it keeps its part of them."""
    if d.shards * d.layer_ways == 1:
        return []
    size = sum(role.weight_bytes for role in d.roles.values())
    whole = Part("whole models", size, "before they are divided")
    return [Moment("loading", (whole, _weights(d)))]


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
    """The plain copy that a sampler decodes on where the weights themselves are cut up."""
    if d.shards * d.layer_ways == 1:
        return []
    return [Part("sampler's copy", d.actor.weight_bytes, "the actor whole, on every process")]


def _room(d: Demand) -> list[Part]:
    """What `models.heads` keeps on a CPU from one actor's microbatch to the next."""
    if d.device != "cpu":
        return []
    head, batch = d.networks.actor.get_output_embeddings(), d.microbatch("actor")
    cells = min(batch.rows * batch.response, max_cached_cells(head))
    size = cells * head.out_features * _float_bytes(d)
    return [Part("room for probabilities", size, f"{cells} x {head.out_features} of the actor's")]


def _rows(d: Demand) -> Part:
    c = d.config
    a_token = FLOATS_A_TOKEN * _float_bytes(d) + REST_A_TOKEN
    size = c.rows * (c.rollout.max_response_tokens * a_token + 16 * d.longest_row)
    return Part("rows", size, f"{c.rows} rows, {a_token} bytes a response token")


def _sampling(d: Demand) -> list[Part]:
    c, model = d.config, d.networks.actor
    found = []
    objects = d.sampled_rows * c.rollout.max_response_tokens * OBJECTS_A_TOKEN
    if c.rollout.sampler == "vllm":
        return [Part("sampled tokens", objects, "vLLM's own weights and cache are not counted")]
    if c.model.lora is not None:
        size = merged_bytes(model, d.device)
        found.append(Part("merged adapter", size, "the layers that it is on, with it in them"))
    packed = packed_bytes(model, d.device)
    if packed:
        found.append(Part("packed weights", packed, "in the order in which the sampler reads them"))
    capacity = d.longest_row + 1
    cache = d.slots * capacity * _cache_bytes(d)
    found.append(Part("key-value cache", cache, f"{d.slots} rows of {capacity} tokens"))
    length = min(d.longest_prompt, PREFILL_TOKENS)
    batch = Batch(max(1, min(d.sampled_rows, PREFILL_TOKENS // length)), length, 0)
    prompts = peak_of_reading(Reader(trunk(model), d.device), batch)
    logits = d.slots * model.config.vocab_size * DRAWN * 4
    step = Part("sampling a token", objects + max(prompts, logits), "prompts read, or logits")
    return [*found, step]


def _reading(d: Demand) -> Part:
    """The largest of the passes; they follow each other."""
    n, batch = d.networks, d.reading
    readers = [Reader(trunk(n.actor), d.device, policy=n.actor.get_output_embeddings())]
    if n.critic is not None:
        readers.append(Reader(n.critic.trunk, d.device, value=n.critic.head))
    if n.reference is not None:
        readers.append(Reader(trunk(n.reference), d.device, n.reference.get_output_embeddings()))
    if n.reward is not None:
        readers.append(Reader(trunk(n.reward), d.device))
    peak = max(peak_of_reading(reader, batch) for reader in readers)
    return Part("reading", peak, f"{batch.rows} rows of {batch.length} tokens")


def _learning(d: Demand, role: Learner) -> list[Part]:
    """Gradients, and what else is there at the worst moment of the backward passes."""
    size, batch, backwards = d.learners[role], d.microbatch(role), d.microbatches(role)
    whole = d.shards * d.layer_ways == 1
    rehearse = partial(peak_of_learning, _learner(d, role), batch, backwards)
    # Gradients of whole weights appear as activations go, so their peak is found together;
    # those of sharded ones are sent off layer by layer.
    gradients = d.held(size.learning_bytes, size.linear_learning_bytes)
    activations = rehearse(keep=True) - gradients if whole else rehearse(keep=False)
    because = f"{batch.rows} rows of {batch.length} tokens, {backwards} a step"
    return [
        Part(f"{role}'s gradients", gradients, f"{si(size.learning)} that learn{_divided(d)}"),
        *_whole_layers(d, learn=True),
        Part(f"{role}'s activations", activations, because),
        *(_of_update(d, activations) if role == "actor" else []),
    ]


def _of_update(d: Demand, activations: int) -> list[Part]:
    """What some kinds of update hold beside the gradients."""
    match d.config.actor.update:
        case PenaltyUpdate(estimator="full"):
            return [Part("old policy", d.actor.weight_bytes, "for the KL over the vocabulary")]
        case TrpoUpdate():
            # Weights before the step, gradient, step, and four vectors of conjugate gradients; a
            # second derivative keeps the first one's graph as well.
            size = 7 * d.actor.learning_bytes + 2 * activations
            return [Part("trust region", size, "7 x what learns, 2 x activations; estimated")]
    return []


def _learner(d: Demand, role: Learner) -> Reader:
    n = d.networks
    if role == "critic":
        return Reader(n.critic.trunk, d.device, value=n.critic.head)
    head = n.actor.get_output_embeddings()
    value = n.critic.head if d.config.critic.shared_trunk and n.critic is not None else None
    return Reader(trunk(n.actor), d.device, policy=head, value=value)


def _whole_layers(d: Demand, learn: bool = False) -> list[Part]:
    """FSDP gathers the layer at hand and the one after it, and for the whole of a pass what lies
    outside the layers; gradients are whole until they are sent off."""
    if d.shards == 1:
        return []
    largest = max(d.roles.values(), key=lambda role: role.layer_bytes)
    layer = largest.layer_bytes // d.layer_ways
    size = 2 * layer + largest.outer_bytes
    if learn and d.actor.learning == d.actor.parameters:
        size += layer + largest.outer_bytes
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


def _cache_bytes(d: Demand) -> int:
    """Keys and values of a token in all layers."""
    model = d.networks.actor
    c = model.config
    heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return 2 * c.num_hidden_layers * heads * width * model.dtype.itemsize


def _float_bytes(d: Demand) -> int:
    """Of log-probs and all that is made from them: float32 at least."""
    return max(4, d.networks.actor.dtype.itemsize)


def _divided(d: Demand) -> str:
    ways = [f", layers / {d.layer_ways}"] if d.layer_ways > 1 else []
    return "".join([*ways, f", / {d.shards}"] if d.shards > 1 else ways)
