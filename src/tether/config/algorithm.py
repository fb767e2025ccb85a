"""The sections of the algorithm: KL, advantages, critic, actor and its update."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from tether.config.base import Aggregation, Decay, Section, Share
from tether.config.estimators import ESTIMATORS, EstimatorName, EstimatorTraits

# What other systems call the same KL estimators.
KL_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "kl+": "k1+", "low_var_kl+": "k3+"}
KlEstimator = Annotated[
    Literal["k1", "abs", "k2", "k3", "full", "k1+", "k3+"],
    BeforeValidator(lambda name: KL_ALIASES.get(name, name)),
]


class KlInRewardSection(Section):
    """The KL penalty: beta times the KL to the reference, subtracted from every token's reward."""

    coef: NonNegativeFloat = 0.02
    """beta at the start; 0 = none"""
    estimator: KlEstimator = "k1"
    """k1 or k1+ (verl's `kl`, `kl+`); the others are wrong here and need `ablation`"""
    ablation: bool = False
    """allow an estimator that is known to be wrong in this place"""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """keep beta, or steer it so that the KL stays near `target`"""
    target: PositiveFloat = 6.0
    """the KL that the adaptive controller steers to"""
    horizon: PositiveInt = 10_000
    """rows over which the adaptive controller may change beta by a fifth"""
    unit: Literal["token", "sequence"] = "sequence"
    """which KL `target` is about: `kl/token_mean` or `kl/sequence_mean`"""

    @model_validator(mode="after")
    def _right_here(self) -> KlInRewardSection:
        if self.estimator == "full":
            raise ValueError(
                "estimator full is the same for every token that could have been sampled, so as a "
                "reward it teaches nothing; write k1"
            )
        if self.estimator not in ("k1", "k1+") and not self.ablation:
            raise ValueError(
                f"estimator {self.estimator} in the reward leads to a wrong policy (docs/kl.md); "
                f"write k1, or ablation: true beside it to see that for yourself"
            )
        return self


class KlInLossSection(Section):
    """A KL to the reference as a term of the actor's loss."""

    coef: NonNegativeFloat = 0.0
    """weight of the term; 0 = none"""
    estimator: KlEstimator = "k3"
    """k1 and k3 are weighted by the ratio; k2, full, k1+ and k3+ are not"""
    level: Literal["token", "sequence"] = "token"
    """the KL of each token with its state fixed, or that of whole responses (estimator k2)"""
    weighting: Literal["auto", "plain", "ratio"] = "auto"
    """multiply the estimate by the differentiated ratio or not; auto does what is right"""
    ablation: bool = False
    """allow a combination that is known to be wrong in this place"""

    @property
    def by_ratio(self) -> bool:
        """Return whether the estimate is multiplied by the ratio new/old."""
        if self.weighting == "auto":
            return self.estimator in ("k1", "k3")
        return self.weighting == "ratio"

    @model_validator(mode="after")
    def _right_here(self) -> KlInLossSection:
        if self.level == "sequence" and (self.estimator, self.weighting) != ("k2", "auto"):
            raise ValueError(
                "level sequence has one form, half the square of a response's summed log-ratio; "
                "write estimator: k2, and leave weighting out"
            )
        right = ("k1", "k3") if self.by_ratio else ("k2", "full", "k1+", "k3+")
        if self.estimator == "full" and self.by_ratio:
            raise ValueError("estimator full has no ratio to weigh it by; write weighting: plain")
        if self.estimator not in right and not self.ablation:
            how = "weighted by the ratio" if self.by_ratio else "plain"
            raise ValueError(
                f"estimator {self.estimator} {how} in the loss leads to a wrong policy "
                f"(docs/kl.md); write one of {', '.join(right)}, or ablation: true to see that "
                f"for yourself"
            )
        return self


class KlSection(Section):
    """Where the KL to the reference enters: in the reward, in the loss, in both, in neither."""

    in_reward: KlInRewardSection = KlInRewardSection()
    """the KL penalty in the reward"""
    in_loss: KlInLossSection = KlInLossSection()
    """the KL term in the actor's loss"""
    refresh_reference_every: NonNegativeInt = 0
    """copy the actor into the reference every so many iterations; 0 = never"""

    @property
    def needs_reference(self) -> bool:
        return self.in_reward.coef > 0 or self.in_loss.coef > 0

    @property
    def ablations(self) -> list[str]:
        """List the sections that are allowed to use an estimator known to be wrong there."""
        sections = {"kl.in_reward": self.in_reward, "kl.in_loss": self.in_loss}
        return [name for name, section in sections.items() if section.ablation]


class AdvantageSection(Section):
    """From rewards and values to advantages."""

    estimator: EstimatorName = "gae"
    """what an advantage is measured against; docs/config.md has the formulas"""
    gamma: Share = 1.0
    """discount per token"""
    lam: Share = 0.95
    """lambda of GAE: 1 trusts the rewards, 0 trusts the critic"""
    lam_alpha: PositiveFloat | None = None
    """lambda by length in place of lam: 1 - 1/max(1, lam_alpha x tokens); VAPO's is 0.05"""
    whiten: bool | None = None
    """scale advantages to mean 0, variance 1 for the policy loss; default: as the estimator does"""
    truncation: Literal["zero", "bootstrap", "mask"] = "zero"
    """after a truncated response: value 0, or the critic's (no score); mask: leave it out"""

    @property
    def traits(self) -> EstimatorTraits:
        return ESTIMATORS[self.estimator]

    @property
    def whitens(self) -> bool:
        return self.traits.whitens if self.whiten is None else self.whiten

    def row_lam(self, tokens: int) -> float:
        """Return the lambda of a row with so many sampled tokens."""
        if self.lam_alpha is None:
            return self.lam
        return 1 - 1 / max(1.0, self.lam_alpha * tokens)


class PretrainSection(Section):
    """Value pretraining: the critic alone, on responses of the starting policy, before iteration 0.

    It learns the returns with lambda 1, unclipped, for as many epochs as it needs.
    """

    prompts: Annotated[int, Field(ge=2)] = 256
    """prompts that are sampled once, with samples_per_prompt responses each"""
    heldback: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """share of these prompts that the critic does not learn from, but is measured on"""
    explained_variance: Annotated[float, Field(gt=0, lt=1)] | None = 0.5
    """stop once it explains this share of the variance of held-back returns; null = all epochs"""
    max_epochs: PositiveInt = 20
    """passes over the rows at most"""


class CriticSection(Section):
    """The value update; without a critic (see advantage.estimator) it does not apply."""

    lr: PositiveFloat | None = None
    """learning rate; default: the actor's"""
    lam: Share | None = None
    """lambda of the returns that the critic learns; default: that of the advantages"""
    lr_warmup_iterations: NonNegativeInt | None = None
    """iterations in which its learning rate rises to the schedule's; default: the actor's"""
    betas: tuple[Decay, Decay] | None = None
    """Adam's decay rates; default: the actor's"""
    eps: PositiveFloat | None = None
    """Adam's smallest denominator; default: the actor's"""
    weight_decay: NonNegativeFloat | None = None
    """AdamW's weight decay; default: the actor's"""
    epochs: PositiveInt | None = None
    """passes over the rows of an iteration; default: the actor's"""
    minibatch_rows: PositiveInt | None = None
    """rows of one optimizer step; default: the actor's"""
    shuffle: Literal["rows", "prompts"] | None = None
    """minibatches of any rows, or of prompts with all their rows; default: as the actor"""
    microbatch_tokens: PositiveInt = 4096
    """tokens per backward pass, with padding; changes memory, and results only by rounding"""
    clip: PositiveFloat | None = 0.2
    """how far a value may move from the old one before its loss is flat; null = no clip"""
    max_grad_norm: PositiveFloat = 1.0
    """the gradient is clipped to this norm"""
    warmup_iterations: NonNegativeInt = 0
    """iterations in which only the critic learns, before the actor moves"""
    pretrain: PretrainSection | None = None
    """value pretraining before the first iteration; null = none"""
    shared_trunk: bool = False
    """a value head on the actor's own trunk: one optimizer, one joint loss"""
    coef: PositiveFloat = 0.5
    """weight of the value loss in the joint loss of a shared trunk"""


# Adam's fields, which TRPO does not read and which a critic on the actor's trunk has none of.
ADAM_FIELDS = ("lr_warmup_iterations", "betas", "eps", "weight_decay")


class UpdateSection(Section):
    """What trainer, trace and page ask every kind of update, besides its fields.

    The loss itself is in the table of `algo/losses.py`, under the same kind.
    """

    # Fields that the loss of a token does not read: the page's what-if offers all others.
    beside_the_loss: ClassVar[tuple[str, ...]] = ()
    # One natural-gradient step on all rows, of the surrogate alone, in place of minibatches.
    natural_gradient: ClassVar[bool] = False
    # Whether the loss weighs a token by what became of its probability since the old policy.
    has_ratio: ClassVar[bool] = True

    @property
    def formula(self) -> str:
        """Return the per-token objective with this section's numbers.

        r is the ratio new/old, A the advantage, sg(x) the number x without its gradient, [x] 1 if
        x is true and 0 if not. Symbols alone: the trace shows it in every language.
        """
        raise NotImplementedError

    @property
    def bound(self) -> str | None:
        """Return when a token is inside the trust region; None for a kind without such a bound."""
        return None

    @property
    def paper_aggregation(self) -> Aggregation | None:
        """Return the aggregation that is part of this update's paper; None = the estimator's."""
        return None

    @property
    def needs_old_policy(self) -> bool:
        """Return whether the loss needs the old policy's full distribution: a copy of the actor."""
        return False


class ClipUpdate(UpdateSection):
    """PPO-Clip: the ratio new/old earns nothing beyond 1 - eps_low and 1 + eps_high."""

    kind: Literal["clip"] = "clip"
    """PPO-Clip"""
    eps_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """how far the ratio may fall before the objective is flat"""
    eps_high: PositiveFloat = 0.2
    """how far the ratio may rise before the objective is flat"""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """for negative advantages, the largest loss in units of the advantage; null = none"""

    @property
    def formula(self) -> str:
        clipped = f"min(r·A, clip(r, {1 - self.eps_low:g}, {1 + self.eps_high:g})·A)"
        if self.dual_clip is None:
            return clipped
        return f"max({clipped}, {self.dual_clip:g}·min(A, 0))"

    @property
    def bound(self) -> str:
        return f"{1 - self.eps_low:g} ≤ r ≤ {1 + self.eps_high:g}"


class PenaltyUpdate(UpdateSection):
    """PPO-Penalty: the KL from the old to the new policy, times a coefficient, in the loss."""

    beside_the_loss = ("estimator", "controller", "target")

    kind: Literal["penalty"]
    """PPO-Penalty"""
    coef: PositiveFloat = 1.0
    """weight of the KL to the old policy at the start"""
    estimator: Literal["k3", "full"] = "k3"
    """the KL in the loss: from the sampled tokens, or exact over the vocabulary"""
    controller: Literal["fixed", "adaptive"] = "adaptive"
    """keep the weight, or halve and double it so that the KL stays near `target`"""
    target: PositiveFloat = 0.01
    """mean KL per token from the old to the new policy, in nats"""

    @property
    def formula(self) -> str:
        return f"r·A − {self.coef:g}·KL(old‖new)"

    @property
    def needs_old_policy(self) -> bool:
        return self.estimator == "full"


class TrpoUpdate(UpdateSection):
    """TRPO: one natural-gradient step on all rows, no longer than a KL of `max_kl`."""

    beside_the_loss = ("max_kl", "cg_iterations", "damping", "backtracks", "backtrack_ratio")
    natural_gradient = True

    kind: Literal["trpo"]
    """trust region with a hard constraint"""
    max_kl: PositiveFloat = 0.01
    """delta: the largest mean KL per token from the old to the new policy, exact, in nats"""
    cg_iterations: PositiveInt = 10
    """conjugate-gradient iterations; each runs all rows forward and backward"""
    damping: PositiveFloat = 0.1
    """added to the Fisher matrix's diagonal while solving"""
    backtracks: NonNegativeInt = 10
    """times the step may be shortened before it is rejected"""
    backtrack_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.7
    """factor by which each of these shortens it"""

    @property
    def formula(self) -> str:
        return f"r·A,  mean KL(old‖new) ≤ {self.max_kl:g}"


class CpiUpdate(UpdateSection):
    """The bare surrogate, ratio x advantage: no trust region at all."""

    kind: Literal["cpi"]
    """conservative policy iteration's surrogate, unconstrained"""

    @property
    def formula(self) -> str:
        return "r·A"


class ReinforceUpdate(UpdateSection):
    """The plain policy gradient, advantage x log-prob."""

    has_ratio = False

    kind: Literal["reinforce"]
    """no ratio, no trust region: meant for one epoch"""

    @property
    def formula(self) -> str:
        return "A·log π_new"


class GspoUpdate(UpdateSection):
    """GSPO: one ratio per response, clipped as a whole."""

    kind: Literal["gspo"]
    """sequence-level clip; the paper's loss weighs every response alike"""
    eps_low: Annotated[float, Field(gt=0, le=1)] = 3e-4
    """how far a response's ratio may fall before the objective is flat"""
    eps_high: PositiveFloat = 4e-4
    """how far it may rise"""

    @property
    def formula(self) -> str:
        bounds = f"{1 - self.eps_low:g}, {1 + self.eps_high:g}"
        return f"min(s·A, clip(s, {bounds})·A), s = exp(mean log r)"

    @property
    def paper_aggregation(self) -> Aggregation:
        return "seq_mean_token_mean"

    @property
    def bound(self) -> str:
        return f"{1 - self.eps_low:g} ≤ s ≤ {1 + self.eps_high:g}"


class CispoUpdate(UpdateSection):
    """CISPO: the clipped ratio only scales a token's gradient, so every token has one."""

    kind: Literal["cispo"]
    """clipped importance weights"""
    eps_low: Annotated[float, Field(gt=0, le=1)] = 1.0
    """how far a weight may fall below 1; 1 = no lower bound"""
    eps_high: PositiveFloat = 0.28
    """how far a weight may rise above 1"""

    @property
    def formula(self) -> str:
        return f"sg(clip(r, {1 - self.eps_low:g}, {1 + self.eps_high:g}))·A·log π_new"

    @property
    def bound(self) -> str:
        return f"{1 - self.eps_low:g} ≤ r ≤ {1 + self.eps_high:g}"


class DppoUpdate(UpdateSection):
    """DPPO: no gradient for a token whose probability has moved too far, the way A pushes it."""

    kind: Literal["dppo"]
    """divergence mask in place of the clip"""
    divergence: Literal["tv", "kl"] = "tv"
    """how far a token has moved, sampled token against all others: total variation, or KL"""
    max_divergence: PositiveFloat = 0.15
    """the largest divergence; the paper's are 0.15 for tv, 0.05 for kl"""

    @property
    def formula(self) -> str:
        far = f"{self.divergence.upper()}(old, new) > {self.max_divergence:g}"
        return f"m·r·A,  m = 1 − [{far} ∧ (r − 1)·A > 0]"

    @property
    def bound(self) -> str:
        return f"{self.divergence.upper()}(old, new) ≤ {self.max_divergence:g}"


AnyUpdate = (
    ClipUpdate
    | PenaltyUpdate
    | TrpoUpdate
    | CpiUpdate
    | ReinforceUpdate
    | GspoUpdate
    | CispoUpdate
    | DppoUpdate
)
UPDATE_KINDS = [get_args(cls.model_fields["kind"].annotation)[0] for cls in get_args(AnyUpdate)]
Update = Annotated[
    AnyUpdate,
    Field(discriminator="kind"),
    BeforeValidator(lambda x: {"kind": "clip", **x} if isinstance(x, dict) else x),
]


class ActorSection(Section):
    """The policy update."""

    lr: PositiveFloat = 1e-6
    """learning rate"""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """how both learning rates fall over train.iterations: not at all, or to zero"""
    lr_warmup_iterations: NonNegativeInt = 0
    """iterations from its first update on in which the learning rate rises to the schedule's"""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Adam's decay rates: of the mean gradient, and of its mean square"""
    eps: PositiveFloat = 1e-8
    """Adam's smallest denominator"""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's weight decay: the share of a weight that a step takes off, in units of lr"""
    epochs: PositiveInt = 1
    """passes over the rows of an iteration"""
    minibatch_rows: PositiveInt = 64
    """rows of one optimizer step"""
    shuffle: Literal["rows", "prompts"] = "rows"
    """minibatches of any rows, or of prompts with all their rows, which then share the prompt"""
    microbatch_tokens: PositiveInt = 4096
    """tokens per backward pass, with padding; changes memory, and results only by rounding"""
    entropy_coef: NonNegativeFloat = 0.0
    """weight of the entropy bonus"""
    max_grad_norm: PositiveFloat = 1.0
    """the gradient is clipped to this norm"""
    aggregation: Aggregation | None = None
    """how per-token losses are averaged; default: as in the update's or the estimator's paper"""
    stop_kl: PositiveFloat | None = None
    """skip the rest of an iteration's steps once the KL from the old policy exceeds this"""
    update: Update = ClipUpdate()
    """the trust region and its own fields"""
