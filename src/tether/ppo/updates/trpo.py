"""TRPO: one natural-gradient step on all rows, within a hard bound on the exact KL, or no step.

Schulman et al. 2015, arXiv 1502.05477.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tether.algo.losses import LossInputs, policy_loss
from tether.algo.masked import weighted_sum
from tether.algo.trust_region import (
    LineSearchResult,
    conjugate_gradient,
    line_search,
    longest_step,
)
from tether.config import Config, TrpoUpdate
from tether.data.loans import lend
from tether.dist.collectives import all_reduce_sum
from tether.models.policy import Policy
from tether.ppo.roles import Roles
from tether.ppo.updates.minibatches import UpdateReport, make_minibatch, split_minibatch
from tether.run.metrics import Last
from tether.support.transfer import to_device
from tether.types import Experience, Minibatch

# Length of the finite difference in a Fisher product, relative to the length of the weights: large
# enough to rise above float32's rounding, small enough for the KL's gradient to be nearly linear.
NUDGE = 2e-5


def update_trpo(experience: Experience, roles: Roles, config: Config) -> UpdateReport:
    """Maximise mean(r A) subject to mean KL(old || new) <= max_kl, by one accepted step or none."""
    update = config.actor.update
    assert isinstance(update, TrpoUpdate)
    region = TrustRegion(experience, roles.actor, config)
    report = UpdateReport(new_log_probs=experience.old_log_probs, attempted=True)
    gradient = region.surrogate_gradient()
    norm = gradient.norm()
    if not (norm.isfinite() and norm > 0):
        kind = "trpo_refused" if norm == 0 else "non_finite_gradient"
        report.event(kind, f"the surrogate's gradient norm is {float(norm)}; no step")
        return _finish(report, region, LineSearchResult(share=0.0, tries=0))

    direction = conjugate_gradient(
        lambda v: region.fisher_product(v) + update.damping * v, gradient, update.cg_iterations
    )
    # The step's length obeys the undamped KL; damping only steadies the direction.
    step = longest_step(direction, region.fisher_product(direction), update.max_kl)
    if not bool(step.isfinite().all()):
        report.event("non_finite_step", "the step is not finite; no step")
        return _finish(report, region, LineSearchResult(share=0.0, tries=0))

    def measure(share: float) -> tuple[float, float]:
        region.move(share, step)
        return region.measure()

    found = line_search(measure, update.max_kl, update.backtracks, update.backtrack_ratio)
    region.move(found.share, step)
    report.steps_taken = int(found.share > 0)
    if found.share == 0:
        report.event("trpo_refused", f"no step within KL {update.max_kl:g} improved; no step")
    report.meter.record("actor/grad_norm", Last(norm))
    return _finish(report, region, found)


def _finish(report: UpdateReport, region: "TrustRegion", found: LineSearchResult) -> UpdateReport:
    """Measure where the weights are now, and record it."""
    surrogate, kl = region.measure()
    report.new_log_probs = region.new_log_probs()
    ratio = torch.where(region.mask, (report.new_log_probs - region.old_log_probs).exp(), 1.0)
    highest, lowest = (region.rows.everyone(x) for x in (ratio.amax(dim=1), ratio.amin(dim=1)))
    record = report.meter.record
    record("actor/pg_loss", Last(-surrogate))
    record("actor/exact_kl", Last(kl))
    record("actor/entropy", Last(region.entropy))
    record("actor/ratio_max", Last(highest.max()))
    record("actor/ratio_min", Last(lowest.min()))
    record("actor/line_search_tries", Last(found.tries))
    record("actor/step_share", Last(found.share))
    return report


@dataclass
class _Microbatch:
    """A microbatch, with the old policy's states from before the weights moved."""

    batch: Minibatch
    token_weights: Float[Tensor, "rows response"]  # 1 / tokens of all rows
    old_states: Float[Tensor, "rows response width"]


class TrustRegion:
    """The surrogate and the exact KL as functions of the actor's flattened weights."""

    def __init__(self, experience: Experience, actor: Policy, config: Config) -> None:
        self.actor, self.update = actor, config.actor.update
        self.mask, self.old_log_probs = experience.response_mask, experience.old_log_probs
        self.parameters = [p for p in actor.model.parameters() if p.requires_grad]
        self.start = [p.detach().clone() for p in self.parameters]
        self.old_head = _frozen_copy(actor.head)
        self.rows = experience.rows
        self.entropy = 0.0
        self.minibatch = _all_rows(experience, config)
        self.loan = lend(self.minibatch.sequences, config.actor.microbatch_tokens)
        borrowed = self.loan.out(self.minibatch)
        self.borrowed = borrowed.old_log_probs.clone()  # their new log-probs
        self.microbatches = list(self._microbatches(borrowed))
        size = torch.stack([p.norm() for p in self.start]).norm()
        self.nudge = NUDGE * max(float(size), 1.0)

    def new_log_probs(self) -> Float[Tensor, "rows response"]:
        """Return the log-probs of the last `measure` of this process's rows."""
        old = self.old_log_probs
        (found,) = self.loan.back((self.borrowed,), old.shape[1])
        return torch.where(self.mask, found, old)

    def _microbatches(self, borrowed: Minibatch) -> Iterator[_Microbatch]:
        tokens = self.rows.sum(self.minibatch.response_mask.sum()).clamp(min=1)
        for batch in split_minibatch(borrowed, self.loan):
            with torch.no_grad():
                states = self.actor.states(batch.sequences)
            yield _Microbatch(batch, batch.response_mask / tokens, states)

    def move(self, share: float, step: Float[Tensor, " n"]) -> None:
        """Set the weights to start + share x step; share 0 restores them bit for bit."""
        pieces = self._pieces(step)
        with torch.no_grad():
            for parameter, start, piece in zip(self.parameters, self.start, pieces, strict=True):
                parameter.copy_(start if share == 0 else start + share * piece)

    @torch.no_grad()
    def measure(self) -> tuple[float, float]:
        """Return (surrogate, mean KL(old || new)) at the present weights."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.mask.device)
        for place, part in zip(self.loan.microbatches, self.microbatches, strict=True):
            states = self.actor.states(part.batch.sequences)
            new_log_probs, entropies = self.actor.log_probs_and_entropies(
                states, part.batch.sequences, part.batch.host_mask
            )
            means = (
                self._surrogate(new_log_probs, part),
                self._kl(states, part),
                weighted_sum(entropies, part.token_weights),
            )
            sums += torch.stack([mean.double() for mean in means])
            rows = to_device(place.rows, self.mask.device)
            if not place.idle:
                self.borrowed[rows, : new_log_probs.shape[1]] = new_log_probs
        surrogate, kl, self.entropy = all_reduce_sum(sums).tolist()
        return surrogate, kl

    def surrogate_gradient(self) -> Float[Tensor, " n"]:
        """Return the gradient of the surrogate over all rows, by the flattened weights."""
        numbers = sum(p.numel() for p in self.parameters)
        gradient = torch.zeros(numbers, dtype=self.actor.model.dtype, device=self.mask.device)
        for part in self.microbatches:
            states = self.actor.states(part.batch.sequences)
            new_log_probs, _ = self.actor.log_probs_and_entropies(
                states, part.batch.sequences, part.batch.host_mask
            )
            surrogate = self._surrogate(new_log_probs, part)
            gradient = gradient + _flat(torch.autograd.grad(surrogate, self.parameters))
        return all_reduce_sum(gradient)

    def fisher_product(self, vector: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Return F v over all rows: the KL's gradient a short way along v, divided by that way.

        At the old weights that gradient is 0, so one forward and one backward pass are enough: no
        second derivative, and no graph that outlives the call.
        """
        length = float(vector.norm())
        if not length > 0:
            return torch.zeros_like(vector)
        share = self.nudge / length
        self.move(share, vector)
        gradient = torch.zeros_like(vector)
        for part in self.microbatches:
            kl = self._kl(self.actor.states(part.batch.sequences), part)
            gradient = gradient + _flat(torch.autograd.grad(kl, self.parameters))
        self.move(0.0, vector)
        return all_reduce_sum(gradient) / share

    def _pieces(self, vector: Float[Tensor, " n"]) -> list[Tensor]:
        """The vector in the shapes of the parameters."""
        pieces = vector.split([p.numel() for p in self.parameters])
        return [x.view_as(p) for x, p in zip(pieces, self.parameters, strict=True)]

    def _kl(self, states: Float[Tensor, "rows response width"], part: _Microbatch) -> Tensor:
        per_token = self.actor.full_kl(
            self.old_head, part.old_states, self.actor.head, states, part.batch.host_mask
        )
        return weighted_sum(per_token, part.token_weights)

    def _surrogate(
        self, new_log_probs: Float[Tensor, "rows response"], part: _Microbatch
    ) -> Tensor:
        batch = part.batch
        inputs = LossInputs(
            new_log_probs, batch.old_log_probs, batch.policy_advantages, batch.response_mask
        )
        loss = policy_loss(self.update, inputs).per_token
        return weighted_sum(-loss * batch.correction_weights, batch.weights)


def _all_rows(experience: Experience, config: Config) -> Minibatch:
    """Return all rows as one minibatch: of it those that are here."""
    rows = torch.arange(experience.rows.count(experience))
    longest = config.rollout.max_response_tokens
    return make_minibatch(experience, rows, config.aggregation, longest)


def _frozen_copy(head: nn.Linear) -> nn.Linear:
    """Copy the output head as it is before the weights move."""
    copy = nn.Linear(head.in_features, head.out_features, head.bias is not None, device="meta")
    tensors = {name: tensor.detach().clone() for name, tensor in head.state_dict().items()}
    copy.load_state_dict(tensors, assign=True)
    return copy.requires_grad_(False)


def _flat(tensors: tuple[Tensor, ...]) -> Float[Tensor, " n"]:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
