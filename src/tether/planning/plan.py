"""What a run will do and take, worked out before it starts."""

import math
import shutil
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from tether.config import Config
from tether.dist.environment import launched_size
from tether.dist.tensor_parallel import refuse_unshareable
from tether.errors import UserError
from tether.models.forward import attends_to_whole_rows
from tether.planning.cost import Cost, memory_bandwidth, operations, sent
from tether.planning.machine import UNKNOWN, Machine
from tether.planning.memory import Memory, Part, Phase, plan_memory
from tether.planning.workload import Demand, Networks, Size, outline_networks
from tether.ppo.roles import Roles, pick_device
from tether.ppo.scoring import Trial
from tether.support.units import byte_text, si, time_text

Line = tuple[str, str, str]  # what, how much, and the arithmetic behind it


@dataclass(frozen=True)
class Plan:
    """What a run will do, and what it takes of memory, disk and time."""

    config: Config
    networks: Networks
    longest_prompt: int
    train_prompts: int | None = None  # unknown where there is no tokenizer to read them with
    heldout_prompts: int = 0
    evaluated_prompts: int = 0  # of them
    notes: tuple[str, ...] = ()  # what could not be checked; departures from a paper
    tried: tuple[Trial, ...] = ()  # what the reward gave for a few rows
    machine: Machine | None = None  # the one that `tether check` runs on
    share_prompts: bool | None = None  # whether the loaded models can; None where none are

    def __repr__(self) -> str:
        """The run in a line; the rest is in `lines()`, `memory_lines()` and `time_lines()`."""
        c, peak = self.config, self.memory.peak
        return (
            f"<Plan of {c.run.name}: {c.train.iterations} iterations of {c.rows} rows, actor "
            f"{si(self.actor.parameters)}, memory {byte_text(peak.size)} in {peak.when}, "
            f"checkpoints {byte_text(self.disk_bytes)}>"
        )

    @cached_property
    def demand(self) -> Demand:
        """The work of one process."""
        device = self.config.device
        return Demand(
            config=self.config,
            networks=self.networks,
            longest_prompt=self.longest_prompt,
            workers=self.config.launch.num_workers or launched_size(),
            device=pick_device(device).type if device == "auto" else device.partition(":")[0],
            share_prompts=self._can_share_prompts(),
        )

    def _can_share_prompts(self) -> bool:
        """Tell whether rows may share prompts: as the loaded models do, else from their configs."""
        if self.share_prompts is not None or not self.config.shares_prompts:
            return bool(self.share_prompts)
        n = self.networks
        models = [n.actor, n.reference, None if n.critic is None else n.critic.trunk]
        longest = self.longest_prompt + self.config.rollout.max_response_tokens
        return all(attends_to_whole_rows(model, longest) for model in models if model is not None)

    @property
    def actor(self) -> Size:
        """Size of the actor."""
        return self.demand.actor

    @property
    def critic(self) -> Size:
        """Size of the critic."""
        return self.demand.critic

    @property
    def reference(self) -> Size:
        """Size of the reference."""
        return self.demand.reference

    @property
    def state_bytes(self) -> int:
        """All weights; gradients and two Adam moments of what learns."""
        weights = sum(role.weight_bytes for role in self.demand.roles.values())
        return weights + 3 * self.learning_bytes

    @property
    def learning_bytes(self) -> int:
        """Bytes of the weights that learn."""
        return self.actor.learning_bytes + self.critic.learning_bytes

    @cached_property
    def memory(self) -> Memory:
        """The memory of one process, found from shapes alone."""
        return plan_memory(self.demand)

    @property
    def checkpoint_bytes(self) -> int:
        """Weights and two moments of what learns, and the reference where it is refreshed."""
        refreshed = self.reference.weight_bytes if self.config.refreshes_reference else 0
        return 3 * self.learning_bytes + refreshed

    @property
    def checkpoints_kept(self) -> int:
        """Checkpoints on disk at the same time, without the one being written."""
        return self.config.train.keep_last + self.config.train.keep_best

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk of all checkpoints."""
        return (self.checkpoints_kept + 1) * self.checkpoint_bytes

    def lines(self) -> list[Line]:
        """Return the arithmetic of the run."""
        c = self.config
        prompts, samples, longest = (
            c.rollout.prompts,
            c.rollout.samples_per_prompt,
            c.rollout.max_response_tokens,
        )
        checkpoint = byte_text(self.checkpoint_bytes)
        return [
            ("rows per iteration", f"{c.rows}", f"{prompts} prompts x {samples} samples"),
            ("actor steps per iteration", *_actor_steps(c)),
            ("critic steps per iteration", *_critic_steps(c)),
            ("iterations", f"{c.train.iterations}", self._passes()),
            (
                "response tokens",
                si(c.train.iterations * c.rows * longest),
                f"at most: {longest} per row",
            ),
            (
                "longest row",
                f"{self.demand.longest_row}",
                f"{self.longest_prompt} prompt + {longest} response",
            ),
            *self._turns(),
            *self._shared_prompts(),
            ("held-out prompts", f"{self.evaluated_prompts}", self._evaluated()),
            ("parameters", si(self.actor.parameters), self._roles()),
            ("compute", c.model.compute, self._gain()),
            (
                "disk for checkpoints",
                byte_text(self.disk_bytes),
                f"{self.checkpoints_kept} kept and one being written, {checkpoint} each",
            ),
        ]

    def _evaluated(self) -> str:
        """Say of how many prompts, in how many sets, and how many samples each is given."""
        sets, samples = len(self.config.data.heldout_sets), self.config.train.eval_samples
        return "".join(
            [
                f"of {self.heldout_prompts}",
                f", in {sets} sets" if sets > 1 else "",
                f", {samples} samples each" if samples > 1 else "",
            ]
        )

    def reward_lines(self) -> list[Line]:
        """Return what the reward gave for a few rows."""
        return [(trial.where, trial.result, trial.why) for trial in self.tried]

    def memory_lines(self) -> list[Line]:
        """Return the parts of a process's memory, then its sum in each phase."""
        memory = self.memory
        parts = [(part.what, byte_text(part.size), part.because) for part in memory.parts]
        phases = [_phase(memory.always, ())]
        phases += [_phase(phase, memory.always.parts) for phase in memory.phases]
        peak = ("peak", byte_text(memory.peak.size), f"in {memory.peak.when}")
        return [*parts, *phases, peak, *self._peak_otherwise(), *self._room_here()]

    def _peak_otherwise(self) -> list[Line]:
        """Return the peak with the other format of products, where the config allows it."""
        model = self.config.model
        other = "float32" if model.compute == "bfloat16" else "bfloat16"
        if not self.config.may_compute_in(other):
            return []
        settings = model.model_copy(update={"compute": other})
        config = self.config.model_copy(update={"model": settings})
        demand = replace(self.demand, config=config, networks=outline_networks(config))
        size = byte_text(plan_memory(demand).peak.size)
        return [(f"peak in {other}", size, f"with model.compute: {other}")]

    def _gain(self) -> str:
        """Tell what products in bfloat16 gain on this machine."""
        if self.machine is None:
            return "weights that learn are stored in " + self.config.model.dtype
        name, gain = self.machine.capability, self.machine.bfloat16_gain
        if gain <= 1:
            return f"{name}: bfloat16 gains memory here, and no time"
        return f"{name}: products in bfloat16 are {gain:.1f} x as fast here as in float32"

    def _room_here(self) -> list[Line]:
        """Tell whether the processes fit this machine; Ray's may run on others."""
        if self.machine is None or self.machine.free_bytes == UNKNOWN:
            return []
        processes = 1 if self.config.launch.kind == "ray" else self.demand.workers
        free, wanted = self.machine.free_bytes, processes * self.memory.peak.size
        whose = "the peak" if processes == 1 else f"the peaks of {processes} processes"
        verdict = f"{whose} fits" if processes == 1 else f"{whose} fit"
        if wanted > free:
            verdict = f"too little: {whose} would take {byte_text(wanted)}"
        return [("free here", byte_text(free), verdict)]

    @property
    def does_not_fit(self) -> bool:
        """Whether this machine has less free memory than the plan takes."""
        return any(because.startswith("too little") for _, _, because in self._room_here())

    def sent_lines(self) -> list[Line]:
        """Return what a process sends in an iteration; nothing if it is alone."""
        found = sent(self.demand)
        total = sum(cost.amount for cost in found)
        lines = [(cost.what, byte_text(cost.amount), cost.because) for cost in found]
        return [*lines, ("in all", byte_text(total), "by each process")] if lines else []

    def time_lines(self) -> list[Line]:
        """Return the time of an iteration at the rates of `launch`, or at this machine's own."""
        launch, d = self.config.launch, self.demand
        teraflops, whence = launch.teraflops, "one after the other"
        if teraflops is None and self.machine is not None and d.workers == 1:
            teraflops = self.machine.teraflops
            whence = (
                f"rough: at {1000 * teraflops:.0f} GFLOP/s, measured here; rows at their longest"
            )
        lines: list[Line] = []
        seconds = 0.0
        if teraflops is not None:
            rate = d.workers * teraflops * 1e12
            costs = operations(d)
            lines += [(c.what, time_text(c.amount / rate), _operations(c)) for c in costs]
            seconds += sum(cost.amount for cost in costs) / rate
            if launch.samplers:
                apart, seconds = self._apart(costs[0].amount / rate, seconds)
                return [*lines, *apart, ("in all", time_text(seconds), whence)]
            bound = memory_bandwidth(d, costs[0].amount / rate)
            if bound >= 1e9:
                slow = f"bound by memory below {bound / 1e9:.0f} GB/s"
                lines[0] = (*lines[0][:2], f"{lines[0][2]}; {slow}")
        if launch.link_gigabytes is not None and d.workers > 1:
            amount = sum(cost.amount for cost in sent(d))
            rate = launch.link_gigabytes * 1e9
            because = f"{byte_text(amount)} at {launch.link_gigabytes:g} GB/s"
            lines.append(("sending", time_text(amount / rate), because))
            seconds += amount / rate
        return [*lines, ("in all", time_text(seconds), whence)] if lines else []

    def _apart(self, sampling: float, together: float) -> tuple[list[Line], float]:
        """Return what samplers apart and the trainer take of an iteration, and its seconds. Each
        sampler is taken to be as fast as the trainer."""
        samplers, lag = self.config.launch.samplers, self.config.rollout.lag
        apart, training = sampling / samplers, together - sampling
        overlapped = max(apart, training)
        seconds = overlapped if lag else apart + training
        how = f"rollout.lag = {lag} overlaps them"
        if not lag:
            how = f"in turn; with rollout.lag: 1 an iteration takes {time_text(overlapped)}"
        lines = [
            ("samplers apart", time_text(apart), f"{samplers}, idle {1 - apart / seconds:.0%}"),
            ("trainer", time_text(training), f"idle {1 - training / seconds:.0%}; {how}"),
        ]
        return lines, seconds

    def _passes(self) -> str:
        if self.train_prompts is None:
            return "over prompts that were not read"
        passes = self.config.train.iterations * self.config.rollout.prompts / self.train_prompts
        return f"{passes:.1f} passes over {self.train_prompts} prompts"

    def _turns(self) -> list[Line]:
        rollout = self.config.rollout
        if not rollout.is_multi_turn:
            return []
        environment = rollout.environment
        tools = ", ".join(tool.kind for tool in rollout.tools)
        who = tools if environment is None else environment.kind
        most = f"with {who}; at most {rollout.max_observation_tokens} tokens per observation"
        return [("turns per row", f"{rollout.max_turns}", most)]

    def _shared_prompts(self) -> list[Line]:
        """Tell in which passes a prompt is computed once for all of its rows."""
        d = self.demand
        batches = {"forward passes": d.forward_batch}
        batches |= {f"{role} update": d.microbatch(role) for role in d.learners}
        saved = {
            when: f"{1 - batch.tokens / (batch.rows * batch.length):.0%}"
            for when, batch in batches.items()
            if batch.prompts is not None
        }
        if not saved:
            return []
        samples = self.config.rollout.samples_per_prompt
        where = ", ".join(f"{when} {share}" for when, share in saved.items())
        return [("prompts computed once", f"for {samples} rows", f"tokens saved: {where}")]

    def _roles(self) -> str:
        actor, critic, reference = self.actor, self.critic, self.reference
        whose = "actor"
        if actor.learning < actor.parameters:
            whose += f", of which {si(actor.learning)} learn"
        whose += f"; critic {si(critic.parameters)}"
        if critic.learning < critic.parameters:
            whose += f", of which {si(critic.learning)} learn"
        return f"{whose}; reference {si(reference.parameters)}"


def make_plan(config: Config, roles: Roles) -> Plan:
    """Plan a run whose models and prompts are loaded."""
    heldout = roles.heldout_prompts
    plan = Plan(
        config=config,
        networks=outline_networks(config),
        longest_prompt=roles.train_prompts.longest,
        train_prompts=len(roles.train_prompts),
        heldout_prompts=len(heldout) if heldout else 0,
        evaluated_prompts=heldout.evaluated(config.train.eval_prompts) if heldout else 0,
        notes=tuple(config.departures),
        share_prompts=roles.share_prompts,
    )
    check_layers_divide(config, plan.networks)
    return plan


def check_disk(
    checkpoint_bytes: int, checkpoints_kept: int, folder: Path, own_bytes: int = 0
) -> None:
    """Refuse, before training, a run whose checkpoints would not fit.

    `own_bytes` is what checkpoints of the run take already: they make room for newer ones, but
    only once the next one has been written beside them.
    """
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    needed = max(checkpoint_bytes, (checkpoints_kept + 1) * checkpoint_bytes - own_bytes)
    if free < needed:
        there = f" beside the {byte_text(own_bytes)} that they take now" if own_bytes else ""
        raise UserError(
            f"{folder} has {byte_text(free)} free, but checkpoints need {byte_text(needed)}"
            f"{there}: {checkpoints_kept} kept and one being written; "
            f"make room, set run.dir, or keep fewer of them (train.keep_last)."
        )


def check_layers_divide(config: Config, networks: Networks) -> None:
    """Refuse a tensor parallelism that the models' layers cannot be divided by."""
    ways = config.launch.tensor_parallel
    critic = networks.critic.trunk if networks.critic is not None else None
    for model in (networks.actor, critic, networks.reference):
        if ways > 1 and model is not None:
            refuse_unshareable(model.config, ways)


def _phase(phase: Phase, always: tuple[Part, ...]) -> Line:
    begins = always and phase.parts[: len(always)] == always
    rest = phase.parts[len(always) :] if begins else phase.parts
    names = [*(["always"] if begins else []), *(part.what for part in rest)]
    return f"= {phase.when}", byte_text(phase.size), " + ".join(names)


def _operations(cost: Cost) -> str:
    amount = cost.amount / 1e12
    what = f"{si(amount)} TFLOP" if amount >= 1 else f"{1000 * amount:.3g} GFLOP"
    return f"{what}: {cost.because}"


def _actor_steps(c: Config) -> tuple[str, str]:
    if c.actor.update.kind == "trpo":
        return "1", f"one step on all {c.rows} rows, or none"
    return _steps(c.rows, c.actor.minibatch_rows, c.actor.epochs)


def _critic_steps(c: Config) -> tuple[str, str]:
    if not c.has_critic:
        return "0", f"{c.advantage.estimator} needs no critic"
    if c.critic.shared_trunk:
        return "0", "its head learns in the actor's steps"
    return _steps(c.rows, c.critic_minibatch_rows, c.critic_epochs)


def _steps(rows: int, minibatch_rows: int, epochs: int) -> tuple[str, str]:
    minibatches = math.ceil(rows / minibatch_rows)
    return (
        str(epochs * minibatches),
        f"epochs {epochs} x minibatches {minibatches} of {minibatch_rows} rows",
    )
