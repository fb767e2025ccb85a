"""The cost of an iteration: operations, steps of decoding, bytes sent between processes."""

import math
from dataclasses import dataclass

from tether.config import TrpoUpdate
from tether.models.forward import layer_stack, trunk
from tether.models.precision import compute_type
from tether.planning.memory import cache_bytes
from tether.planning.workload import Demand, Learner, Size, lower_state_bytes
from tether.support.units import byte_text, si

# Operations per parameter and token: a product and a sum forward, twice that backward, of which
# one half is for the weights' gradients. Attention over earlier tokens is left out.
FORWARD, BACKWARD, BACKWARD_OF_STATES = 2, 4, 2

# Of a response token on loan, beside its id: a mask and a log-prob; or what a Minibatch has of it.
READ_BYTES, LEARNT_BYTES = 1 + 4, 2 + 8 * 4


@dataclass(frozen=True)
class Cost:
    """Operations of all processes together, or bytes that one of them sends."""

    what: str
    amount: float | int
    because: str


def operations(d: Demand) -> list[Cost]:
    """Return the operations of an iteration by stage, in their order."""
    c, size = d.config, d.actor
    greedy = c.rollout.prompts if c.advantage.traits.needs_greedy else 0
    prompts = (c.rollout.prompts + greedy) * d.longest_prompt
    sampled = prompts + (c.rows + greedy) * c.rollout.max_response_tokens
    found = [
        Cost("sampling", FORWARD * size.parameters * sampled, f"2 x {si(size.parameters)} x "
             f"{si(sampled)} tokens"),
    ]  # fmt: skip
    read = sum(size.passed for size in _forward_roles(d)) + _lower(d)
    tokens = d.computed_tokens(d.forward_batch)
    because = f"2 x {si(read)} x {si(tokens)} tokens"
    found.append(Cost("forward passes", FORWARD * read * tokens, because))
    for role in reversed(d.learners):
        passes, tokens = _passes(d, role), d.computed_tokens(d.microbatch(role))
        again = FORWARD if d.config.model.gradient_checkpointing else 0
        per_token, because = _operations_of_learning(d, d.learners[role], again)
        because = f"{because} x {si(tokens)} tokens x {passes:g}"
        found.append(Cost(f"{role} update", per_token * tokens * passes, because))
    return found


def model_operations(d: Demand, tokens: int, response_tokens: int) -> float:
    """Return the operations that an iteration on rows of so many tokens needs: as `operations`,
    without layers that are computed again to save memory."""
    prompts = (tokens - response_tokens) / d.config.rollout.samples_per_prompt
    needed = FORWARD * d.actor.parameters * (response_tokens + prompts)
    needed += FORWARD * sum(size.passed for size in _forward_roles(d)) * tokens
    for role, size in d.learners.items():
        per_token, _ = _operations_of_learning(d, size, again=0)
        needed += per_token * tokens * _passes(d, role)
    return needed


def _lower(d: Demand) -> int:
    """Return the actor's frozen lower weights, which every row passes once per iteration."""
    lower = layer_stack(trunk(d.networks.actor))[: d.networks.lower_layers]
    return sum(weight.numel() for weight in lower.parameters())


def memory_bandwidth(d: Demand, seconds: float) -> float:
    """Return the bytes per second below which sampling is bound by memory, not by operations.

    Every step reads all weights for one token per row.
    """
    steps = d.config.rollout.max_response_tokens * d.sampled_rows / d.slots
    return steps * d.actor.weight_bytes / seconds


# Of the local sampler on the pretend device of the tests: operations of a step, in all and per
# layer. A GPU's host starts one in some 6 microseconds.
STEP_LAUNCHES, LAYER_LAUNCHES = 82, 85
LAUNCH_SECONDS = 6e-6


@dataclass(frozen=True)
class Decoding:
    """The steps in which a process samples its rows, one token of each live row per step."""

    steps: int
    step_bytes: int  # read from memory: all weights, and the cache of the live rows
    step_operations: int
    launches: int  # kernels that the host starts one after the other; 0 where that is not counted

    def seconds(self, teraflops: float, bandwidth: float) -> tuple[float, str]:
        """Return the time, and what it is bound by: the slowest of the three."""
        bounds = {
            "products": self.step_operations / (teraflops * 1e12),
            "memory": self.step_bytes / bandwidth,
            "the host, which starts its kernels": self.launches * LAUNCH_SECONDS,
        }
        slowest = max(bounds, key=lambda name: bounds[name])
        return self.steps * bounds[slowest], slowest


def decoding(d: Demand) -> Decoding:
    """Return the steps of sampling all rows of a process at their greatest length, in waves of as
    many as its cache holds."""
    rollout = d.config.rollout
    slots, response = d.slots, rollout.max_response_tokens
    if rollout.sampler == "vllm":
        room = int(rollout.vllm.cache_gigabytes * 1e9) // (d.longest_row * cache_bytes(d))
        slots = max(1, min(d.sampled_rows, room))
    length = d.longest_prompt + response // 2  # of a live row, on average
    layers = d.networks.actor.config.num_hidden_layers
    counted = d.device != "cpu" and rollout.sampler == "local"
    return Decoding(
        steps=math.ceil(d.sampled_rows / slots) * response,
        step_bytes=d.gathered(d.actor.weight_bytes) + slots * length * cache_bytes(d),
        step_operations=FORWARD * d.actor.parameters * slots,
        launches=STEP_LAUNCHES + LAYER_LAUNCHES * layers if counted else 0,
    )


def reading_prompts(d: Demand) -> int:
    """Return the operations of all processes before their first tokens."""
    greedy = d.config.rollout.prompts if d.config.advantage.traits.needs_greedy else 0
    return FORWARD * d.actor.parameters * (d.config.rollout.prompts + greedy) * d.longest_prompt


def sent(d: Demand) -> list[Cost]:
    """Return the bytes that each process sends in an iteration.

    An all-reduce among n sends 2 (n - 1) / n of what is summed, all-gather and reduce-scatter half
    of that.
    """
    found = []
    share = (d.replicas - 1) / d.replicas
    if d.shards > 1:
        found += _gathered_and_scattered(d, share)
    elif d.replicas > 1:
        for role, size in d.learners.items():
            whole = d.held(size.learning_bytes, size.linear_learning_bytes)
            because = f"2 x {d.replicas - 1}/{d.replicas} x {byte_text(whole)} x {d.steps(role)}"
            amount = 2 * share * whole * d.steps(role)
            found.append(Cost(f"{role}'s gradients", amount, f"{because} steps"))
    if d.networks.lower_layers and d.replicas > 1:
        passes = len(_forward_roles(d)) + sum(_loans(d, role) for role in d.learners)
        because = f"of {d.held_rows} rows, lent in {passes} passes"
        amount = passes * share * lower_state_bytes(d) / d.replicas
        found.append(Cost("lower states", amount, because))
    if d.layer_ways > 1:
        found.append(_states(d))
    if d.shards * d.layer_ways > 1:
        amount = (d.workers - 1) / d.workers * d.actor.weight_bytes
        found.append(Cost("sampler's copy", amount, "the actor, gathered once"))
    if d.replicas > 1:
        forward, updates = len(_forward_roles(d)), sum(_loans(d, role) for role in d.learners)
        ids, response = 8 * d.longest_row, d.config.rollout.max_response_tokens
        read, learnt = ids + READ_BYTES * response, ids + LEARNT_BYTES * response
        amount = share * d.held_rows * (forward * read + updates * learnt)
        because = f"{d.held_rows} rows, lent in {forward + updates} passes"
        found.append(Cost("rows", amount, because))
    return found


def _loans(d: Demand, role: Learner) -> int:
    """Return how often an update lends every row to the process that computes it."""
    update = d.config.actor.update
    if role == "critic":
        return d.config.critic_epochs
    return 1 if isinstance(update, TrpoUpdate) else d.config.actor.epochs


def _gathered_and_scattered(d: Demand, share: float) -> list[Cost]:
    """Return FSDP's share: weights are gathered for forward and backward, gradients scattered."""

    def layers(size: Size) -> int:
        """Return the bytes of all shards together, on one of the processes that divide layers."""
        whole = d.shards * d.held(size.weight_bytes, size.linear_bytes)
        outside = min(whole, size.outer_bytes)
        return outside + d.gathered(whole - outside)

    read = sum(layers(size) for size in _forward_roles(d))
    because = f"{d.forward_batches} batches of a forward pass each"
    found = [Cost("weights, to read", share * read * d.forward_batches, because)]
    for role, size in d.learners.items():
        backwards = d.microbatches(role) * d.steps(role)
        gradients = d.shards * d.held(size.learning_bytes, size.linear_learning_bytes)
        sums, because = backwards, f"2 x weights + gradients, in {backwards} microbatches"
        if d.keeps_gradients_whole(role):
            sums = d.steps(role)
            because = f"2 x weights in {backwards} microbatches, gradients in {sums} steps"
        amount = share * (2 * layers(size) * backwards + gradients * sums)
        found.append(Cost(f"{role}'s weights, to learn", amount, because))
    return found


def _states(d: Demand) -> Cost:
    """Return tensor parallelism's share: sums after attention and MLP of every layer."""
    model = d.networks.actor.config
    tokens, ways = d.tokens / d.replicas, d.layer_ways
    width = model.hidden_size * compute_type(d.networks.actor).itemsize
    once = tokens * model.num_hidden_layers * width
    recomputed = d.config.model.gradient_checkpointing
    passes = len(_forward_roles(d)) + sum(
        (3 if recomputed else 2) * _passes(d, r) for r in d.learners
    )
    amount = 2 * once * passes * 2 * (ways - 1) / ways
    return Cost("states of layers", amount, f"twice per layer in {passes:g} passes, by {ways}")


def _forward_roles(d: Demand) -> list[Size]:
    """Return the roles whose networks see every row before the updates."""
    c = d.config
    found = [] if c.rollout.reuse_log_probs else [d.actor]
    if c.model.adapter_off_is_reference and c.kl.needs_reference:
        found.append(d.actor)
    critic = [] if c.critic.shared_trunk else [d.critic]
    return found + [size for size in (d.reference, *critic, d.reward) if size.parameters]


def _passes(d: Demand, role: Learner) -> float | int:
    """Return how often an update passes over all rows, forward and backward."""
    update = d.config.actor.update
    if role == "critic":
        return d.config.critic_epochs
    if not isinstance(update, TrpoUpdate):
        return d.config.actor.epochs
    # A gradient, as many for the products, one for the step's length; the line search.
    return 1 + update.cg_iterations + 1 + 1


def _operations_of_learning(d: Demand, size: Size, again: int) -> tuple[int, str]:
    """Return the operations per token of one forward and backward pass, with `again` per weight for
    layers that are computed twice, and their arithmetic."""
    if d.networks.lower_layers:
        through, learnt = FORWARD + BACKWARD_OF_STATES + again, BACKWARD - BACKWARD_OF_STATES
        amount = through * size.passed + learnt * size.learning
        return amount, f"({through} x {si(size.passed)} + {learnt} x {si(size.learning)})"
    adapter = size.learning < size.parameters / 2
    per_weight = FORWARD + (BACKWARD_OF_STATES if adapter else BACKWARD) + again
    return per_weight * size.parameters, f"{per_weight} x {si(size.parameters)}"
