"""The walk over an iteration's rows: epochs, minibatches, microbatches, one step a minibatch."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tether.algo.masked import cell_weights
from tether.algo.random import permutation
from tether.data.batching import own_microbatches
from tether.dist.collectives import all_reduce_sum, gather
from tether.dist.world import world
from tether.ppo.optimizer import Optimizer
from tether.run.metrics import Event, Last, Mean, Meter
from tether.types import Experience, Minibatch


@dataclass
class Report:
    """Metrics and events of one role's update; an update that did not happen has none."""

    meter: Meter = field(default_factory=Meter)
    events: list[Event] = field(default_factory=list)
    new_log_probs: Tensor | None = None  # rows x response, each row's last training forward
    penalty_coef: float | None = None  # PPO-Penalty's weight for the next iteration
    tried: bool = False  # there was an update to make, even if no row was left for it
    taken: int = 0  # optimizer steps

    def gather(self, own: Bool[Tensor, " rows"]) -> None:
        """Metrics of all processes as one; each row's log-probs from whoever read it last."""
        meters = gather(self.meter.settled())
        self.meter = meters[0]
        for other in meters[1:]:
            self.meter.merge(other)
        if self.new_log_probs is not None:
            mine = own.to(self.new_log_probs.device)[:, None]
            self.new_log_probs = all_reduce_sum(torch.where(mine, self.new_log_probs, 0.0))

    def event(self, kind: str, message: str) -> None:
        self.events.append(Event(kind, message))


@dataclass(frozen=True)
class MinibatchSchedule:
    """How the rows are visited; `role` also names the metrics."""

    role: str
    seed: int
    iteration: int
    epochs: int
    minibatch_rows: int
    microbatch_tokens: int
    aggregation: str
    max_response_tokens: int
    stop_kl: float | None = None
    microbatch_cells: int | None = None  # response tokens of a microbatch, at most


@dataclass(frozen=True)
class LossTerms:
    """A microbatch's share of its minibatch's loss, whole and in parts, and its tokens' KL."""

    loss: Float[Tensor, ""]
    parts: Mapping[str, Float[Tensor, ""]]  # as minimised, by metric name
    kl_from_old: Mean = field(default_factory=lambda: Mean(0.0, 0))


def row_slices(rows: int, walk: MinibatchSchedule) -> Iterator[Int[Tensor, " some"]]:
    """Row numbers of each optimizer step: slices of a fresh permutation an epoch.

    Every row is used once an epoch; the last slice of an epoch may be smaller.
    """
    for epoch in range(walk.epochs):
        order = permutation(rows, walk.seed, walk.role, walk.iteration, epoch)
        yield from order.split(walk.minibatch_rows)


def make_minibatch(
    experience: Experience,
    rows: Int[Tensor, " some"],
    aggregation: str,
    max_response_tokens: int,
) -> Minibatch:
    """These rows, with the weight of each cell counted over all of them."""
    e, mask = experience, experience.response_mask
    rows = rows.to(mask.device)
    everything = Minibatch(
        rows=torch.arange(len(e), device=mask.device),
        sequences=e.sequences,
        weights=torch.zeros_like(e.old_log_probs),
        response_mask=mask,
        old_log_probs=e.old_log_probs,
        ref_log_probs=e.ref_log_probs,
        values=e.values,
        returns=e.returns,
        policy_advantages=e.policy_advantages,
        correction_weights=e.correction_weights,
    )
    everything.weights[rows] = cell_weights(
        aggregation, mask[rows], max_response_tokens, e.old_log_probs.dtype
    )
    return everything.select(rows)


def split(
    minibatch: Minibatch, max_tokens: int, max_cells: int | None = None
) -> Iterator[Minibatch]:
    """This process's microbatches; they keep the weights that were counted over the whole."""
    for part in own_microbatches(minibatch.sequences, max_tokens, max_cells):
        batch = minibatch.select(part.rows)
        yield batch.as_idle() if part.idle else batch


def walk_minibatches(
    experience: Experience,
    walk: MinibatchSchedule,
    optimizer: Optimizer,
    compute: Callable[[Minibatch], LossTerms],
    report: Report,
) -> None:
    """One backward a microbatch, one optimizer step a minibatch, until the walk is over or the
    policy has gone further than `stop_kl` from where the iteration began."""
    report.tried = True
    own = torch.full((len(experience),), world().replica == 0)  # rows that this process read last
    steps = 0
    for rows in row_slices(len(experience), walk):
        minibatch = make_minibatch(experience, rows, walk.aggregation, walk.max_response_tokens)
        if not minibatch.response_mask.any():
            report.event("empty_minibatch", f"no token of {walk.role} step {steps} counts; skipped")
            continue
        own[rows] = False
        totals: dict[str, Tensor | float] = {}
        kl = Mean(0.0, 0)
        for microbatch in split(minibatch, walk.microbatch_tokens, walk.microbatch_cells):
            own[microbatch.counted_rows.cpu()] = True
            terms = compute(microbatch)
            terms.loss.backward()
            for name, part in terms.parts.items():
                totals[name] = totals.get(name, 0.0) + part.detach()
            kl = kl.merge(terms.kl_from_old)
        totals, kl = _over_all_processes(totals, kl)
        losses = {name: float(part) for name, part in totals.items()}
        if not all(map(math.isfinite, losses.values())):
            optimizer.drop()
            steps += 1
            report.event("non_finite_loss", f"{losses}; the {walk.role}'s step was dropped")
            continue
        if walk.stop_kl is not None and not kl.value() <= walk.stop_kl:
            optimizer.drop()
            report.meter.record(f"{walk.role}/stopped_at_step", Last(steps))
            break
        steps += 1
        norm = optimizer.step()
        if not norm.isfinite():
            message = f"the {walk.role}'s gradient norm was {float(norm)}; the step was dropped"
            report.event("non_finite_gradient", message)
            continue
        report.taken += 1
        report.meter.record(f"{walk.role}/grad_norm", Mean(norm, 1))
        for name, loss in totals.items():
            report.meter.record(name, Mean(loss, 1))
    report.gather(own)
    report.meter.record(f"{walk.role}/lr", Last(optimizer.adam.param_groups[0]["lr"]))
    report.meter.record(f"{walk.role}/steps", Last(steps))


def _over_all_processes(totals: Mapping[str, Tensor], kl: Mean) -> tuple[dict[str, Tensor], Mean]:
    """Each process has its microbatches' part of the minibatch."""
    parts = [*totals.values(), torch.as_tensor(kl.total), torch.as_tensor(kl.count)]
    device = parts[0].device
    *losses, moved, tokens = all_reduce_sum(
        torch.stack([part.to(device).double() for part in parts])
    )
    return dict(zip(totals, losses, strict=True)), Mean(moved, tokens)
