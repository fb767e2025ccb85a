"""From an iteration's rows to optimizer steps: epochs, minibatches, microbatches.

An update is a loop over `optimizer_steps`: one backward per microbatch, then `finish`:

    for step in optimizer_steps(experience, schedule, optimizer, report):
        for batch in step.microbatches():
            loss = ...
            loss.backward()
        step.finish()
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tether.algo.masked import cell_weights
from tether.algo.random import permutation
from tether.data.batching import Microbatch
from tether.data.loans import Loan, lend
from tether.data.shared_prompts import saved_tokens
from tether.dist.collectives import all_reduce_sum, any_process, gather
from tether.dist.fsdp import until_synced
from tether.ppo.optimizer import Optimizer
from tether.run.metrics import Event, Last, Mean, Meter
from tether.support.transfer import to_device
from tether.types import Experience, Minibatch


@dataclass
class UpdateReport:
    """Metrics and events of one role's update; of an update that was not due it is empty."""

    meter: Meter = field(default_factory=Meter)
    events: list[Event] = field(default_factory=list)
    new_log_probs: Tensor | None = None  # rows x response, each row's last training forward
    penalty_coef: float | None = None  # PPO-Penalty's coefficient for the next iteration
    attempted: bool = False  # an update was due, even if no row was left for it
    steps_taken: int = 0

    def event(self, kind: str, message: str) -> None:
        """Add an event that belongs to no single row."""
        self.events.append(Event(kind, message))

    def keep_log_probs(
        self, minibatch: Minibatch, new_log_probs: Float[Tensor, "rows response"]
    ) -> None:
        """Overwrite these rows' log-probs where their mask is True."""
        assert self.new_log_probs is not None
        rows = to_device(minibatch.rows, new_log_probs.device)
        mask, place = minibatch.response_mask, (rows, slice(new_log_probs.shape[1]))
        self.new_log_probs[place] = torch.where(mask, new_log_probs, self.new_log_probs[place])


def merged_meters(own: Meter) -> Meter:
    """Return the meters of all processes as one."""
    found, *others = gather(own.settled())
    for other in others:
        found.merge(other)
    return found


@dataclass(frozen=True)
class MinibatchSchedule:
    """How the rows of an iteration become optimizer steps; `role` also names the metrics."""

    role: str
    seed: int
    iteration: int
    epochs: int
    minibatch_rows: int
    microbatch_tokens: int
    aggregation: str
    max_response_tokens: int
    stop_kl: float | None = None
    max_cells: int | None = None  # response tokens per microbatch
    together: int = 1  # neighbouring rows that share every minibatch


@dataclass
class BorrowedColumns:
    """Numbers of borrowed rows, microbatch by microbatch, on their way back."""

    columns: Tensor | None = None  # borrowed rows x response
    part: Microbatch | None = None
    shape: tuple[int, int] = (0, 0)

    def at(self, part: Microbatch, borrowed: Minibatch) -> None:
        """Take note of which rows come next."""
        self.part, self.shape = part, (len(borrowed), borrowed.sequences.width)

    def keep(self, numbers: Float[Tensor, "rows response"]) -> None:
        """Keep the numbers of these rows."""
        assert self.part is not None
        if self.columns is None:
            self.columns = numbers.new_zeros(self.shape)
        rows = to_device(self.part.rows, numbers.device)
        if not self.part.idle:
            self.columns[rows, : numbers.shape[1]] = numbers

    def back(self, loan: Loan, minibatch: Minibatch) -> Float[Tensor, "minibatch response"] | None:
        """Return them for the minibatch's rows; None where nothing was kept."""
        if self.columns is None:
            return None
        (found,) = loan.back((self.columns,), minibatch.sequences.width)
        return found


@dataclass
class OptimizerStep:
    """One minibatch on its way to one optimizer step, with what its microbatches add up to."""

    number: int
    minibatch: Minibatch
    schedule: MinibatchSchedule
    optimizer: Optimizer
    report: UpdateReport
    loan: Loan  # of the minibatch's rows: who computes which
    losses: dict[str, Tensor] = field(default_factory=dict)  # by metric name, as minimised
    kl_from_old: Mean = field(default_factory=lambda: Mean(0.0, 0))
    stopped: bool = False  # the policy has gone further than stop_kl
    new_log_probs: BorrowedColumns = field(default_factory=BorrowedColumns)

    def microbatches(self) -> Iterator[Minibatch]:
        """Yield this process's share of the minibatch in pieces that fit in memory."""
        borrowed = self.loan.out(self.minibatch)
        pieces = split_minibatch(borrowed, self.loan)
        parts = zip(self.loan.microbatches, pieces, strict=True)
        for part, batch in until_synced(parts):
            self._record_shared(batch)
            self.new_log_probs.at(part, borrowed)
            yield batch

    def _record_shared(self, batch: Minibatch) -> None:
        """Add to the share of the tokens that were not computed, as another row had them."""
        sequences = batch.sequences
        if sequences.share_prompts:
            tokens = (sequences.prompt_lengths + sequences.response_lengths).sum()
            share = Mean(saved_tokens(sequences), tokens)
            self.report.meter.record(shared_tokens(self.schedule.role), share)

    def add_loss(self, name: str, share: Float[Tensor, ""]) -> None:
        """Add a microbatch's share to a term of the minibatch's loss."""
        known = self.losses.get(name, 0.0)  # 0.0 + -0.0 is 0.0
        self.losses[name] = known + share.detach()

    def finish(self) -> None:
        """Take the step, or drop it: if a loss or the gradient is not finite, or if the KL from
        the old policy exceeds `stop_kl`."""
        role, report = self.schedule.role, self.report
        found = self.new_log_probs.back(self.loan, self.minibatch)
        if found is not None:
            report.keep_log_probs(self.minibatch, found)
        totals, kl = _over_all_processes(self.losses, self.kl_from_old)
        losses = {name: float(total) for name, total in totals.items()}
        if not all(map(math.isfinite, losses.values())):
            self.optimizer.drop()
            report.event("non_finite_loss", f"{losses}; the {role}'s step was dropped")
            return
        stop_kl = self.schedule.stop_kl
        if stop_kl is not None and not kl.value() <= stop_kl:
            self.optimizer.drop()
            self.stopped = True
            report.meter.record(f"{role}/stopped_at_step", Last(self.number))
            return
        norm = self.optimizer.step()
        if not norm.isfinite():
            message = f"the {role}'s gradient norm was {float(norm)}; the step was dropped"
            report.event("non_finite_gradient", message)
            return
        report.steps_taken += 1
        report.meter.record(f"{role}/grad_norm", Mean(norm, 1))
        for name, total in totals.items():
            report.meter.record(name, Mean(total, 1))


def optimizer_steps(
    experience: Experience, schedule: MinibatchSchedule, optimizer: Optimizer, report: UpdateReport
) -> Iterator[OptimizerStep]:
    """Yield one step per minibatch, for the caller to fill and finish, until the epochs are over
    or a step has stopped. Then merge the report over all processes.

    A minibatch without a True cell is skipped and does not count as a step.
    """
    role = schedule.role
    report.attempted = True
    steps = 0
    for rows in row_slices(experience.rows.count(experience), schedule):
        minibatch = make_minibatch(
            experience, rows, schedule.aggregation, schedule.max_response_tokens
        )
        if not any_process(bool(minibatch.host_mask.any())):
            report.event("empty_minibatch", f"no token of {role} step {steps} counts; skipped")
            continue
        loan = lend(minibatch.sequences, schedule.microbatch_tokens, schedule.max_cells)
        step = OptimizerStep(steps, minibatch, schedule, optimizer, report, loan)
        yield step
        if step.stopped:
            break
        steps += 1
    report.meter = merged_meters(report.meter)
    shared = report.meter.metrics.get(shared_tokens(role))
    if shared is not None and shared.value() == 0:  # the rows had too little in common
        del report.meter.metrics[shared_tokens(role)]
    report.meter.record(f"{role}/lr", Last(optimizer.adam.param_groups[0]["lr"]))
    report.meter.record(f"{role}/steps", Last(steps))


def shared_tokens(role: str) -> str:
    """Return the name of the metric."""
    return f"{role}/shared_tokens"


def row_slices(rows: int, schedule: MinibatchSchedule) -> Iterator[Int[Tensor, " some"]]:
    """Yield the row numbers of each minibatch: slices of a fresh permutation per epoch.

    Every row is used once per epoch; the last slice of an epoch may be smaller. What is permuted
    are blocks of `schedule.together` rows.
    """
    together = schedule.together
    for epoch in range(schedule.epochs):
        blocks = rows // together
        order = permutation(blocks, schedule.seed, schedule.role, schedule.iteration, epoch)
        in_rows = (order[:, None] * together + torch.arange(together)).flatten()
        yield from in_rows.split(schedule.minibatch_rows)


def make_minibatch(
    experience: Experience,
    rows: Int[Tensor, " some"],
    aggregation: str,
    max_response_tokens: int,
) -> Minibatch:
    """Select the rows here that are among these of all rows, and compute the weight of each of
    their cells in the minibatch's loss."""
    e, mask = experience, experience.response_mask
    everything = Minibatch(
        rows=torch.arange(len(e)),
        sequences=e.sequences,
        weights=e.old_log_probs.new_zeros(()).expand_as(mask),
        response_mask=mask,
        host_mask=mask.cpu(),
        old_log_probs=e.old_log_probs,
        ref_log_probs=e.ref_log_probs,
        values=e.values,
        returns=e.returns,
        policy_advantages=e.policy_advantages,
        correction_weights=e.correction_weights,
    )
    own = everything.select(e.rows.here(rows))
    dtype = e.old_log_probs.dtype
    weights = cell_weights(aggregation, own.response_mask, max_response_tokens, dtype, e.rows)
    return replace(own, weights=weights)


def split_minibatch(borrowed: Minibatch, loan: Loan) -> Iterator[Minibatch]:
    """Yield this process's microbatches; their weights stay those of the whole minibatch."""
    for part in loan.microbatches:
        batch = borrowed.select(part.rows)
        yield batch.as_idle() if part.idle else batch


def _over_all_processes(losses: Mapping[str, Tensor], kl: Mean) -> tuple[dict[str, Tensor], Mean]:
    """Add up what each process's microbatches contributed, in one all-reduce."""
    parts = [*losses.values(), torch.as_tensor(kl.total), torch.as_tensor(kl.count)]
    device = parts[0].device
    *totals, moved, tokens = all_reduce_sum(
        torch.stack([part.to(device).double() for part in parts])
    )
    return dict(zip(losses, totals, strict=True)), Mean(moved, tokens)
