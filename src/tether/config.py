"""Every setting of a run: one frozen section a component, in data-flow order. Imports no torch.

The whole is validated once; unknown keys are errors, and nothing is changed after that. How a
recipe's YAML becomes a Config is in `recipes`.
"""

from __future__ import annotations

import copy
import datetime
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    Tag,
    ValidationError,
    model_validator,
)

SCHEMA = 1

# What other systems call the same KL estimators.
KL_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "kl+": "k1+", "low_var_kl+": "k3+"}

Share = Annotated[float, Field(ge=0, le=1)]
WITH_TOOLS = 384  # default of rollout.max_response_tokens where observations count as well


def cores() -> int:
    """The CPU cores that this process may use: its share, where torchrun started several."""
    affinity = getattr(os, "sched_getaffinity", None)
    here = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, here // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def refuse_userinfo(field: str, url: str, instead: str) -> None:
    """A user and password in an address would be written into the run's files and shown."""
    authority = url.partition("://")[2] or url
    if "@" in re.split(r"[/?#\\]", authority, maxsplit=1)[0]:
        raise ValueError(
            f"{field} holds a user or password before the @, which would be written into the "
            f"run's files; leave it out, and {instead}"
        )


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class RunSection(Section):
    """Where a run writes, and how much of its rollouts it keeps."""

    dir: Path | None = None
    """the run directory itself; without it runs/NAME-001, -002, …"""
    name: Annotated[str, Field(pattern=r"^[^/\\.][^/\\]*$")] = "run"
    """the NAME in runs/NAME-001"""
    overwrite: bool = False
    """replace an earlier run at `run.dir`"""
    rollouts_every: NonNegativeInt = 10
    """write rollouts/ every so many iterations, besides the first and the last; 0 = never"""
    rollouts_rows: PositiveInt = 64
    """rows kept of each written iteration: whole groups, evenly spaced"""
    trackers: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = []
    """who gets a copy of the numbers, each by a process that only reads the run's files"""


Dtype = Literal["float32", "float64", "bfloat16"]
# Its 8 bits hold no small step: at a learning rate of 1e-6, 99 of 100 weights would never move.
TOO_COARSE_TO_LEARN = "bfloat16"


class LoraSection(Section):
    """LoRA: the base stays as it is, and only a pair of thin matrices beside its layers learns."""

    rank: PositiveInt = 16
    """the thin side of the matrices"""
    alpha: PositiveFloat = 32.0
    """the adapter's output is multiplied by alpha / rank"""
    targets: Annotated[list[str], Field(min_length=1)] | None = None
    """names of the linear layers that get one, such as q_proj; default: all below the head"""


class ModelSection(Section):
    """The networks behind the roles."""

    actor: str
    """a local Hugging Face directory, a `.gguf` file, `tether:starter`, or see `hub`"""
    reference: str | None = None
    """the frozen policy that KL is measured against; default: the actor's starting weights"""
    critic: str | None = None
    """where the critic starts: a trunk under a zero head, or a reward model; default: the actor"""
    hub: bool = False
    """let a name that is no directory be fetched from the Hugging Face hub"""
    dtype: Dtype = "float32"
    """number format of all weights without one below; bfloat16 only for those that do not learn"""
    reference_dtype: Dtype | None = None
    """number format of the reference's weights"""
    critic_dtype: Dtype | None = None
    """number format of the critic's weights"""
    gradient_checkpointing: bool = False
    """keep one state a layer for the backward pass and compute the rest again: slower, smaller"""
    lora: LoraSection | None = None
    """train an adapter on the actor; its base, the adapter off, is then the reference"""
    critic_lora: LoraSection | None = None
    """train an adapter and the value head, not the critic's whole trunk"""

    @property
    def adapter_off_is_reference(self) -> bool:
        """The actor's base serves as the reference, so there is no second copy of it."""
        return self.lora is not None and self.reference in (None, self.actor)


class DataFile(Section):
    """One of several files of prompts that are mixed."""

    path: str
    """a `.jsonl`, `.csv` or `.parquet` file"""
    weight: PositiveFloat = 1.0
    """how often its turn comes, relative to the other files"""


def _path_or_files(value: Any) -> Any:
    """One sentence for whatever is neither, as a union would give one for each of its members."""
    if isinstance(value, str):
        return value
    try:
        files = [DataFile.model_validate(item) for item in value]
    except (TypeError, ValidationError):
        files = []
    if not files:
        raise ValueError("write a path, or a list of {path: FILE, weight: NUMBER above 0}")
    return files


DataFiles = Annotated[list[DataFile], Field(min_length=1)]


class DataSection(Section):
    """Prompts: rows of JSON lines, CSV or parquet; other columns go to the reward."""

    train: Annotated[str | DataFiles, BeforeValidator(_path_or_files)]
    """path of the training prompts (`tether:NAME` ships), or a list of {path, weight}"""
    heldout: Annotated[
        str | DataFiles | None,
        BeforeValidator(lambda value: None if value is None else _path_or_files(value)),
    ] = None
    """path of the prompts that only evaluation sees, or a list of {path, weight}"""
    prompt_column: str = "prompt"
    """the column that holds the prompt: text, or a list of messages"""
    columns: dict[str, str] = {}
    """second names for columns: {name that the reward asks for: column, or column.field}"""
    system_prompt: str | None = None
    """a system turn before every prompt that has none; needs a chat template"""
    date: datetime.date | None = None
    """the day that a chat template is told, YYYY-MM-DD; default: that on which the run starts"""
    max_prompt_tokens: PositiveInt = 512
    """a longer prompt is refused before training, by row"""
    shuffle: bool = True
    """a fresh order each data pass; without it, file order"""
    on_bad_row: Literal["refuse", "skip"] = "refuse"
    """what a broken row does: stop before training, with its line, or be left out and named"""

    def files(self, split: Literal["train", "heldout"]) -> list[DataFile]:
        """The files of a split; a path alone is a list of one."""
        given = self.train if split == "train" else self.heldout
        return [DataFile(path=given)] if isinstance(given, str) else given or []


class ToolSection(Section):
    """What every tool has."""

    timeout_seconds: PositiveFloat = 10.0
    """time one call may take before it counts as failed"""


class SearchTool(ToolSection):
    """`<search>query</search>`: documents of a corpus here, or of a server elsewhere."""

    kind: Literal["search"]
    """retrieval"""
    corpus: str | None = None
    """JSON lines of {"id": …, "contents": "title\\ntext"}, searched by BM25 in this process"""
    url: str | None = None
    """a server of Search-R1's protocol instead: http://HOST:PORT/retrieve"""
    key_variable: Annotated[str, Field(pattern=r"^\w+$")] | None = None
    """the environment variable that holds the server's API key, sent as a bearer token"""
    topk: PositiveInt = 3
    """documents a query gets"""
    on_bad_row: Literal["refuse", "skip"] = "refuse"
    """what a broken line of the corpus does: stop before training, or be left out and named"""
    retries: NonNegativeInt = 2
    """times a request to the server is made again, within timeout_seconds for all of them"""
    max_bytes: PositiveInt = 1_000_000
    """a server's answer that is larger is refused"""

    @model_validator(mode="after")
    def _one_source(self) -> SearchTool:
        if (self.corpus is None) == (self.url is None):
            raise ValueError("search needs either a corpus or a url, and not both")
        if self.url is not None:
            refuse_userinfo("url", self.url, "name the variable with the key by key_variable")
            if not self.url.startswith(("http://", "https://")):
                raise ValueError(f"url is {self.url!r}; write http://HOST:PORT/retrieve")
        if self.key_variable is not None and self.url is None:
            raise ValueError("key_variable goes with a url; a corpus needs no key")
        return self


class CalculatorTool(ToolSection):
    """`<calculate>1 + 2 * 3</calculate>`: exact arithmetic."""

    kind: Literal["calculator"]
    """arithmetic"""


# path/file.py:name, or the name of a module that can be imported: package.module:name
OwnCode = Annotated[str, Field(pattern=r"^(.*\.py|[A-Za-z_]\w*(\.\w+)*):\w+$")]


class OwnTool(ToolSection):
    """A function of one's own, or an object with a name, a pattern and a call."""

    kind: OwnCode
    """path/file.py:function or package.module:function"""


def _tool_kind(value: Any) -> str:
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return kind if kind in ("search", "calculator") else "own"


TOOL_TAGS = ("search", "calculator", "own")
AnyTool = Annotated[
    Annotated[SearchTool, Tag("search")]
    | Annotated[CalculatorTool, Tag("calculator")]
    | Annotated[OwnTool, Tag("own")],
    Discriminator(_tool_kind),
    BeforeValidator(lambda value: {"kind": value} if isinstance(value, str) else value),
]


class VllmSection(Section):
    """vLLM as the sampler, where rollout.sampler says so."""

    colocated: bool = False
    """run it inside the training process; else in a process of its own beside it"""
    cache_gigabytes: PositiveFloat = 1.0
    """memory for its key-value cache; rows beyond that wait for a place"""


class CorrectionSection(Section):
    """Rollout correction: what a token's policy loss is weighed by when another engine sampled."""

    kind: Literal["none", "token", "sequence"] = "token"
    """the trainer's probability over the sampler's: of each token, or of the row as a whole"""
    cap: Annotated[float, Field(ge=1)] = 2.0
    """the largest weight"""


class RolloutSection(Section):
    """How responses are sampled."""

    prompts: PositiveInt = 64
    """prompts an iteration"""
    samples_per_prompt: PositiveInt = 4
    """responses sampled for each prompt"""
    max_response_tokens: PositiveInt = 128
    """a response that has not ended by then is truncated; with tools the default is 384"""
    temperature: PositiveFloat = 1.0
    """divides the logits, in sampling and in every log-prob alike"""
    sampler: Literal["local", "vllm"] = "local"
    """who samples: the training process with its own weights, or vLLM with a copy of them"""
    cache_tokens: PositiveInt = 16_384
    """tokens that the local sampler's key-value cache holds; rows beyond that wait for a place"""
    vllm: VllmSection = VllmSection()
    """settings of vLLM"""
    correction: CorrectionSection | None = None
    """weights for rows of another engine; default: token with cap 2 for vllm, none for local"""
    reuse_log_probs: bool = False
    """take the sampler's log-probs for the old ones and save a pass; ratios start at 1 ± 1e-4"""
    tools: list[AnyTool] = []
    """what the policy may call: `calculator`, {kind: search, corpus: FILE}, path/file.py:name"""
    environment: OwnCode | None = None
    """path/file.py:make; what it makes for each row, with `reset` and `step`, answers the policy"""
    max_turns: PositiveInt = 4
    """times the policy may write in an episode; a call that ends its last turn is not made"""
    max_observation_tokens: PositiveInt = 128
    """what a tool or environment says is cut to so many tokens, visibly"""
    max_failed_share: Share = 0.5
    """stop the run when more than this share of an iteration's calls failed; 1 = never"""
    state_masking: bool = True
    """keep observations out of the loss; false is an ablation that trains on them as well"""

    @property
    def is_multi_turn(self) -> bool:
        return bool(self.tools) or self.environment is not None

    @property
    def corrected_by(self) -> CorrectionSection:
        """The correction, resolved."""
        usual = CorrectionSection(kind="none" if self.sampler == "local" else "token")
        return usual if self.correction is None else self.correction

    @property
    def may_mismatch(self) -> bool:
        """The sampler's log-probs are worth measuring against the trainer's."""
        return self.sampler != "local" or self.corrected_by.kind != "none"

    @model_validator(mode="before")
    @classmethod
    def _room_for_observations(cls, given: Any) -> Any:
        """What tools say counts as part of a response, so it needs more room than one without."""
        if not isinstance(given, dict) or "max_response_tokens" in given:
            return given
        talks = given.get("tools") or given.get("environment") is not None
        return {**given, "max_response_tokens": WITH_TOOLS} if talks else given

    @model_validator(mode="after")
    def _sampler_fits(self) -> RolloutSection:
        if self.reuse_log_probs and self.may_mismatch:
            what = "sampler vllm" if self.sampler == "vllm" else "correction"
            raise ValueError(
                f"reuse_log_probs does not go with rollout.{what}, which needs the trainer's own "
                f"log-probs beside the sampler's; leave it out"
            )
        if self.sampler == "vllm" and self.temperature < 0.01:
            raise ValueError(
                f"temperature is {self.temperature:g}, but vLLM samples at no less than 0.01; "
                f"raise it"
            )
        return self

    @model_validator(mode="after")
    def _turns_fit(self) -> RolloutSection:
        if self.tools and self.environment is not None:
            raise ValueError("tools and environment exclude each other; let `step` call the tools")
        if self.is_multi_turn and self.max_observation_tokens >= self.max_response_tokens:
            raise ValueError(
                f"max_response_tokens is {self.max_response_tokens} and counts observations too, "
                f"so it must be more than max_observation_tokens = {self.max_observation_tokens}"
            )
        if not self.is_multi_turn and not self.state_masking:
            raise ValueError("state_masking: false needs tools or an environment; leave it out")
        return self


class RewardPart(Section):
    """One of several rewards that are summed."""

    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
    """what it is called in metrics and rollouts"""
    kind: str
    """a rule that ships, `path/file.py:function` or `package.module:function`"""
    weight: float = 1.0
    """what its number is multiplied by before it is added to the score"""
    arguments: dict[str, Any] = {}
    """constants for the function, by the names of its parameters"""


RewardParts = Annotated[list[RewardPart], Field(min_length=1)]


class RewardSection(Section):
    """What turns a response into a score: one reward by `kind`, or several by `parts`."""

    kind: str | None = None
    """a rule that ships, `path/file.py:function`, `package.module:function`, or `model:PATH`"""
    arguments: dict[str, Any] = {}
    """constants for the function, by the names of its parameters"""
    parts: RewardParts | None = None
    """rewards that are summed: a list of {name, kind, weight, arguments}"""
    timeout_seconds: PositiveFloat = 10.0
    """time one row may take before its score counts as failed"""
    import_timeout_seconds: PositiveFloat = 120.0
    """time that importing the function may take, at the start and after a row that hung"""
    max_failed_share: Share = 0.1
    """stop the run when more than this share of an iteration's rows could not be scored"""

    @model_validator(mode="after")
    def _one_or_several(self) -> RewardSection:
        if self.kind is None and self.parts is None:
            raise ValueError("kind is missing; name a rule, write path/file.py:function, or parts")
        if self.parts and (self.kind is not None or self.arguments):
            raise ValueError("kind and parts exclude each other; write one more part instead")
        names = [part.name for part in self.parts or ()]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ValueError(f"two parts are called {twice[0]!r}; give each a name of its own")
        return self

    @property
    def label(self) -> str:
        """In a few words: the kind, or the weighted sum."""
        parts = self.parts or ()
        return self.kind or " + ".join(f"{part.weight:g} x {part.name}" for part in parts)


KlEstimator = Annotated[
    Literal["k1", "abs", "k2", "k3", "full", "k1+", "k3+"],
    BeforeValidator(lambda name: KL_ALIASES.get(name, name)),
]


class KlInRewardSection(Section):
    """The tether: beta times the KL to the reference, taken off every token's reward."""

    coef: NonNegativeFloat = 0.02
    """beta at the start; 0 = none"""
    estimator: KlEstimator = "k1"
    """k1 (verl's `kl`) is right here; any other only as an ablation"""
    ablation: bool = False
    """allow an estimator that is known to be wrong in this place"""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """keep beta, or steer it so that the KL stays near `target`"""
    target: PositiveFloat = 6.0
    """the KL that the adaptive controller steers to"""
    horizon: PositiveInt = 10_000
    """rows over which the adaptive controller may change beta by a fifth"""
    unit: Literal["token", "sequence"] = "sequence"
    """the KL that `target` speaks of: `kl/token_mean` or `kl/sequence_mean`"""

    @model_validator(mode="after")
    def _right_here(self) -> KlInRewardSection:
        if self.estimator == "full":
            raise ValueError(
                "estimator full is the same for every token one could have sampled, so as a "
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
    """k1 and k3 are weighted by the ratio, k2, full, k1+ and k3+ stand plain"""
    weighting: Literal["auto", "plain", "ratio"] = "auto"
    """multiply the estimate by the differentiated ratio or not; auto does what is right"""
    ablation: bool = False
    """allow a combination that is known to be wrong in this place"""

    @property
    def by_ratio(self) -> bool:
        if self.weighting == "auto":
            return self.estimator in ("k1", "k3")
        return self.weighting == "ratio"

    @model_validator(mode="after")
    def _right_here(self) -> KlInLossSection:
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
    """make the reference a copy of the actor every so many iterations; 0 = never"""

    @property
    def needs_reference(self) -> bool:
        return self.in_reward.coef > 0 or self.in_loss.coef > 0

    @property
    def ablations(self) -> list[str]:
        """Sections that were allowed to use an estimator known to be wrong there."""
        sections = {"kl.in_reward": self.in_reward, "kl.in_loss": self.in_loss}
        return [name for name, section in sections.items() if section.ablation]


GROUP_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "opo")
WHITENED = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


class AdvantageSection(Section):
    """From rewards and values to advantages."""

    estimator: Literal[
        "gae",
        "grpo",
        "dr_grpo",
        "rloo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
        "opo",
    ] = "gae"
    """what an advantage is measured against; only gae needs a critic"""
    gamma: Share = 1.0
    """discount a token"""
    lam: Share = 0.95
    """lambda of GAE: 1 trusts the rewards, 0 trusts the critic"""
    whiten: bool | None = None
    """advantages of mean 0 and variance 1 for the policy loss; default: as the estimator does"""
    truncation: Literal["zero", "bootstrap"] = "zero"
    """what follows a truncated response: nothing, or the critic's value (it is then not scored)"""

    @property
    def whitens(self) -> bool:
        return self.estimator in WHITENED if self.whiten is None else self.whiten

    @property
    def needs_critic(self) -> bool:
        return self.estimator == "gae"

    @property
    def by_group(self) -> bool:
        return self.estimator in GROUP_ESTIMATORS


class CriticSection(Section):
    """The value update; without a critic (see advantage.estimator) it does not apply."""

    lr: PositiveFloat | None = None
    """learning rate; default: the actor's"""
    epochs: PositiveInt | None = None
    """passes over the rows of an iteration; default: the actor's"""
    minibatch_rows: PositiveInt | None = None
    """rows of one optimizer step; default: the actor's"""
    microbatch_tokens: PositiveInt = 4096
    """padded tokens of one backward; changes memory, and no number beyond rounding"""
    clip: PositiveFloat | None = 0.2
    """how far a value may move from the old one before its loss is flat; null = no clip"""
    max_grad_norm: PositiveFloat = 1.0
    """the gradient is scaled down to this norm"""
    warmup_iterations: NonNegativeInt = 0
    """iterations in which only the critic learns, before the actor moves"""
    shared_trunk: bool = False
    """a value head on the actor's own trunk: one optimizer, one joint loss"""
    coef: PositiveFloat = 0.5
    """weight of the value loss in the joint loss of a shared trunk"""


class ClipUpdate(Section):
    """PPO-Clip: the ratio new/old earns nothing beyond 1 - eps_low and 1 + eps_high."""

    kind: Literal["clip"] = "clip"
    """PPO-Clip"""
    eps_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """how far the ratio may fall before the objective is flat"""
    eps_high: PositiveFloat = 0.2
    """how far the ratio may rise before the objective is flat"""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """for negative advantages, the largest loss in units of the advantage; null = none"""


class PenaltyUpdate(Section):
    """PPO-Penalty: the KL from the old to the new policy, times a coefficient, in the loss."""

    kind: Literal["penalty"]
    """PPO-Penalty"""
    coef: PositiveFloat = 1.0
    """weight of the KL to the old policy at the start"""
    estimator: Literal["k3", "full"] = "k3"
    """the KL in the loss: from the sampled tokens, or exact over the vocabulary"""
    controller: Literal["fixed", "adaptive"] = "adaptive"
    """keep the weight, or halve and double it so that the KL stays near `target`"""
    target: PositiveFloat = 0.01
    """mean KL a token from the old to the new policy, in nats"""


class TrpoUpdate(Section):
    """TRPO: one natural-gradient step on all rows, no longer than a KL of `max_kl`."""

    kind: Literal["trpo"]
    """trust region with a hard constraint"""
    max_kl: PositiveFloat = 0.01
    """delta: the largest mean KL a token from the old to the new policy, exact, in nats"""
    cg_iterations: PositiveInt = 10
    """conjugate-gradient iterations; each reads all rows, forward and backward"""
    damping: PositiveFloat = 0.1
    """added to the Fisher matrix's diagonal while solving"""
    backtracks: NonNegativeInt = 10
    """times the step may be shortened before it is refused"""
    backtrack_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.7
    """what each shortening leaves of it"""


class CpiUpdate(Section):
    """The bare surrogate, ratio x advantage: no trust region at all."""

    kind: Literal["cpi"]
    """conservative policy iteration's surrogate, unconstrained"""


class ReinforceUpdate(Section):
    """The plain policy gradient, advantage x log-prob."""

    kind: Literal["reinforce"]
    """no ratio, no trust region: meant for one epoch"""


class GspoUpdate(Section):
    """GSPO: one ratio a response, clipped as a whole."""

    kind: Literal["gspo"]
    """sequence-level clip; the paper's loss weighs every response alike"""
    eps_low: Annotated[float, Field(gt=0, le=1)] = 3e-4
    """how far a response's ratio may fall before the objective is flat"""
    eps_high: PositiveFloat = 4e-4
    """how far it may rise"""


class CispoUpdate(Section):
    """CISPO: the clipped ratio only weighs a token's gradient, so no token loses it."""

    kind: Literal["cispo"]
    """clipped importance weights"""
    eps_low: Annotated[float, Field(gt=0, le=1)] = 1.0
    """how far a weight may fall below 1; 1 = no lower bound"""
    eps_high: PositiveFloat = 0.28
    """how far a weight may rise above 1"""


AnyUpdate = (
    ClipUpdate | PenaltyUpdate | TrpoUpdate | CpiUpdate | ReinforceUpdate | GspoUpdate | CispoUpdate
)
UPDATE_KINDS = [get_args(cls.model_fields["kind"].annotation)[0] for cls in get_args(AnyUpdate)]
Update = Annotated[
    AnyUpdate,
    Field(discriminator="kind"),
    BeforeValidator(lambda x: {"kind": "clip", **x} if isinstance(x, dict) else x),
]


Aggregation = Literal[
    "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"
]


class ActorSection(Section):
    """The policy update."""

    lr: PositiveFloat = 1e-6
    """learning rate"""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """how both learning rates fall over train.iterations: not at all, or to zero"""
    epochs: PositiveInt = 1
    """passes over the rows of an iteration"""
    minibatch_rows: PositiveInt = 64
    """rows of one optimizer step"""
    microbatch_tokens: PositiveInt = 4096
    """padded tokens of one backward; changes memory, and no number beyond rounding"""
    entropy_coef: NonNegativeFloat = 0.0
    """weight of the entropy bonus"""
    max_grad_norm: PositiveFloat = 1.0
    """the gradient is scaled down to this norm"""
    aggregation: Aggregation | None = None
    """how token losses become one number; default: that of the update's and estimator's paper"""
    stop_kl: PositiveFloat | None = None
    """drop the rest of an iteration's steps once the KL from the old policy exceeds this"""
    update: Update = ClipUpdate()
    """the trust region and its own fields"""


class TrainSection(Section):
    """How long, and how often the rest happens."""

    iterations: PositiveInt = 100
    """rollout batches to train on"""
    eval_every: NonNegativeInt = 0
    """evaluate every so many iterations, besides before and after; 0 = never"""
    eval_prompts: PositiveInt = 512
    """held-out prompts an evaluation uses, from the top of the file"""
    checkpoint_every: NonNegativeInt = 10
    """save every so many iterations, besides at the end and on a signal; 0 = never"""
    keep_last: PositiveInt = 2
    """newest checkpoints kept"""
    keep_best: NonNegativeInt = 1
    """checkpoints kept besides for their held-out score, among those that were evaluated"""


class LaunchSection(Section):
    """Who starts the processes, and how the weights lie over them."""

    kind: Literal["local", "ray"] = "local"
    """local: this process, or those that torchrun started; ray: workers that Ray Train places"""
    num_workers: PositiveInt | None = None
    """processes; default: as many as torchrun started, else 1"""
    address: str | None = None
    """of the Ray cluster, such as ray://head:10001; default: one of this machine's own"""
    max_restarts: NonNegativeInt = 2
    """times that Ray starts lost workers anew; they go on from the newest checkpoint"""
    weights: Literal["replicated", "sharded"] = "replicated"
    """whole on every process, or a part on each, by FSDP2"""
    tensor_parallel: PositiveInt = 1
    """processes that share the layers of one copy of a model"""
    timeout_seconds: PositiveFloat = 600.0
    """a process that keeps the others waiting for longer ends the run, by name"""
    teraflops: PositiveFloat | None = None
    """what a device computes, in 1e12 operations a second, for the times of `tether check`"""
    link_gigabytes: PositiveFloat | None = None
    """what a device sends and receives, in 1e9 bytes a second, for the same"""

    @model_validator(mode="after")
    def _address_has_no_secret(self) -> LaunchSection:
        if self.address is not None:
            refuse_userinfo("address", self.address, "set RAY_AUTH_TOKEN in the environment")
        return self

    @model_validator(mode="after")
    def _mesh_fits(self) -> LaunchSection:
        workers = self.num_workers
        if workers is not None and workers % self.tensor_parallel:
            raise ValueError(
                f"tensor_parallel is {self.tensor_parallel}, which does not divide num_workers = "
                f"{workers}"
            )
        if self.tensor_parallel > 1 and self.weights == "replicated":
            raise ValueError(
                f"tensor_parallel = {self.tensor_parallel} divides the weights, so it needs "
                f"weights: sharded"
            )
        return self


class RunConfig(Section):
    """What every kind of run has: of PPO, and of the stages before it."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    schema_version: Annotated[Literal[1], Field(alias="schema")] = SCHEMA
    """version of this file's layout"""
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    """every random number is computed from it"""
    device: str = "auto"
    """cpu, cuda, or auto: cuda if there is one"""
    threads: Annotated[int, Field(gt=0, le=1024)] = Field(default_factory=cores)
    """CPU threads; the same number gives the same bits (default: the cores at hand)"""

    def to_dict(self) -> dict[str, Any]:
        """The resolved config; `run.dir` is left out, as it is where the file itself lies."""
        return self.model_dump(mode="json", by_alias=True, exclude={"run": {"dir"}})

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)


class Config(RunConfig):
    """One run. Sections stand in the order in which data flows through them."""

    run: RunSection = RunSection()
    model: ModelSection
    data: DataSection
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection
    kl: KlSection = KlSection()
    advantage: AdvantageSection = AdvantageSection()
    critic: CriticSection = CriticSection()
    actor: ActorSection = ActorSection()
    train: TrainSection = TrainSection()
    launch: LaunchSection = LaunchSection()
    _as_written: dict[str, str] = PrivateAttr(default_factory=dict)

    def written_as(self, paths: Mapping[str, str]) -> Config:
        """Remember how paths that were made absolute stand in the file that they came from."""
        self._as_written.update(paths)
        return self

    @property
    def paths_as_written(self) -> dict[str, str]:
        return dict(self._as_written)

    def to_dict(self) -> dict[str, Any]:
        """Return the resolved config, with paths as they were written: a run that goes on in
        another folder stays the same run."""
        return map_paths(super().to_dict(), lambda path: self._as_written.get(path, path))

    @model_validator(mode="before")
    @classmethod
    def _workers_share_the_cores(cls, given: Any) -> Any:
        """As torchrun's do, which `cores` knows of; those that Ray places are yet to start."""
        launch = given.get("launch") if isinstance(given, dict) else None
        if not isinstance(launch, dict) or launch.get("kind") != "ray" or "threads" in given:
            return given
        workers = launch.get("num_workers")
        share = cores() // workers if isinstance(workers, int) and workers > 0 else cores()
        return {**given, "threads": max(1, share)}

    @cached_property
    def rows(self) -> int:
        """Sampled responses an iteration."""
        return self.rollout.prompts * self.rollout.samples_per_prompt

    @cached_property
    def has_critic(self) -> bool:
        return self.advantage.needs_critic

    @cached_property
    def refreshes_reference(self) -> bool:
        return self.kl.needs_reference and self.kl.refresh_reference_every > 0

    @cached_property
    def papers_aggregation(self) -> Aggregation:
        """The one without which the loss is not that of the update's or the estimator's paper."""
        if self.actor.update.kind == "gspo":
            return "seq_mean_token_mean"
        if self.advantage.estimator == "dr_grpo":
            return "seq_mean_token_sum_norm"
        return "token_mean"

    @cached_property
    def aggregation(self) -> Aggregation:
        return self.actor.aggregation or self.papers_aggregation

    @property
    def departures(self) -> list[str]:
        """Settings that make the run another algorithm than the one it names."""
        if self.aggregation == self.papers_aggregation or self.papers_aggregation == "token_mean":
            return []
        kind = self.actor.update.kind
        name = kind if kind == "gspo" else self.advantage.estimator
        return [
            f"actor.aggregation is {self.aggregation}, but {name} is its paper's loss only with "
            f"{self.papers_aggregation}; leave the field out"
        ]

    @cached_property
    def critic_lr(self) -> float:
        return self.critic.lr or self.actor.lr

    @cached_property
    def critic_epochs(self) -> int:
        return self.critic.epochs or self.actor.epochs

    @cached_property
    def critic_minibatch_rows(self) -> int:
        return self.critic.minibatch_rows or self.actor.minibatch_rows

    @model_validator(mode="after")
    def _minibatches_fit(self) -> Config:
        for name, section in (("critic", self.critic), ("actor", self.actor)):
            if (section.minibatch_rows or 0) > self.rows:
                raise ValueError(
                    f"{name}.minibatch_rows is {section.minibatch_rows}, but an iteration has only "
                    f"{self.rollout.prompts} prompts x {self.rollout.samples_per_prompt} samples "
                    f"= {self.rows} rows; write at most {self.rows}"
                )
        return self

    @model_validator(mode="after")
    def _groups_have_rows(self) -> Config:
        if self.advantage.by_group and self.rollout.samples_per_prompt < 2:
            raise ValueError(
                f"advantage.estimator {self.advantage.estimator} compares the responses to one "
                f"prompt, so rollout.samples_per_prompt must be 2 or more"
            )
        return self

    @model_validator(mode="after")
    def _critic_fits(self) -> Config:
        critic, estimator = self.critic, self.advantage.estimator
        if not self.has_critic and (critic.shared_trunk or critic.warmup_iterations):
            field = "shared_trunk" if critic.shared_trunk else "warmup_iterations"
            raise ValueError(f"critic.{field} needs a critic, and {estimator} has none; use gae")
        if not self.has_critic and self.advantage.truncation == "bootstrap":
            raise ValueError(
                f"advantage.truncation bootstrap needs a critic, and {estimator} has none; "
                f"write zero"
            )
        for field in ("lr", "epochs", "minibatch_rows", "warmup_iterations"):
            if critic.shared_trunk and getattr(critic, field):
                raise ValueError(
                    f"critic.{field} does not apply with critic.shared_trunk, where one optimizer "
                    f"moves both; leave it out or write null"
                )
        return self

    @model_validator(mode="after")
    def _adapters_fit(self) -> Config:
        model = self.model
        if model.lora is not None and self.kl.refresh_reference_every:
            raise ValueError(
                "kl.refresh_reference_every does not go with model.lora, whose base never "
                "changes; leave it out or write 0"
            )
        if model.adapter_off_is_reference and model.reference_dtype not in (None, model.dtype):
            raise ValueError(
                "model.reference_dtype does not apply with model.lora, where the reference is the "
                "actor's own base; leave it out, or name another model.reference"
            )
        if model.critic_lora is not None and not self.has_critic:
            raise ValueError(
                f"model.critic_lora needs a critic, and {self.advantage.estimator} has none; "
                f"leave it out"
            )
        if model.critic_lora is not None and self.critic.shared_trunk:
            raise ValueError(
                "model.critic_lora does not apply with critic.shared_trunk, where the critic "
                "reads the actor's states; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _what_learns_is_fine_enough(self) -> Config:
        model = self.model
        learns = {"dtype": (model.dtype, model.lora)}
        if self.has_critic and not self.critic.shared_trunk:
            learns["critic_dtype"] = (model.critic_dtype or model.dtype, model.critic_lora)
        for field, (dtype, adapter) in learns.items():
            if dtype == TOO_COARSE_TO_LEARN and adapter is None:
                lora = "lora" if field == "dtype" else "critic_lora"
                raise ValueError(
                    f"model.{field} is bfloat16, in which a weight that learns loses most steps to "
                    f"rounding (at a learning rate of 1e-6, 99 of 100 never move); write "
                    f"model.{field}: float32, or train an adapter, which is float32 on a bfloat16 "
                    f"base, by model.{lora}.rank"
                )
        return self

    @model_validator(mode="after")
    def _vllm_fits(self) -> Config:
        if self.rollout.sampler != "vllm":
            return self
        if self.model.dtype == "float64":
            raise ValueError(
                "model.dtype float64 does not go with rollout.sampler vllm, which has none; "
                "write float32"
            )
        if self.rollout.vllm.colocated and (self.launch.num_workers or 1) > 1:
            raise ValueError(
                "rollout.vllm.colocated does not go with several launch.num_workers, as vLLM "
                "would take their process group for its own; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _trpo_stands_alone(self) -> Config:
        if self.actor.update.kind != "trpo":
            return self
        refused = {
            "actor.entropy_coef": self.actor.entropy_coef > 0,
            "kl.in_loss.coef": self.kl.in_loss.coef > 0,
            "critic.shared_trunk": self.critic.shared_trunk,
            "actor.stop_kl": self.actor.stop_kl is not None,
        }
        for field, given in refused.items():
            if given:
                raise ValueError(
                    f"{field} does not go with actor.update.kind trpo, whose one step maximises "
                    f"the surrogate alone; leave it out"
                )
        if self.model.dtype == TOO_COARSE_TO_LEARN:
            raise ValueError(
                "model.dtype bfloat16 does not go with actor.update.kind trpo, whose Fisher "
                "products are differences that it rounds away; write float32"
            )
        if self.rows < 2:
            raise ValueError(
                "actor.update.kind trpo needs at least 2 rows an iteration; raise rollout.prompts"
            )
        return self

    @model_validator(mode="after")
    def _spreads(self) -> Config:
        launch, update = self.launch, self.actor.update
        if launch.num_workers is not None and launch.num_workers > self.rows:
            raise ValueError(
                f"launch.num_workers is {launch.num_workers}, but an iteration has only "
                f"{self.rows} rows to share out; raise rollout.prompts or write at most {self.rows}"
            )
        adapted = self.model.lora is not None or self.model.critic_lora is not None
        if launch.tensor_parallel > 1 and adapted:
            raise ValueError(
                f"launch.tensor_parallel = {launch.tensor_parallel} does not split layers under an "
                f"adapter; write 1, or leave model.lora and model.critic_lora out"
            )
        if launch.weights == "sharded" and update.kind == "trpo":
            raise ValueError(
                "actor.update.kind trpo needs all weights on every process, so it does not go with "
                "launch.weights sharded; write replicated"
            )
        if launch.weights == "sharded" and update.kind == "penalty" and update.estimator == "full":
            raise ValueError(
                "actor.update.estimator full needs a second copy of the actor, so it does not go "
                "with launch.weights sharded; write k3, or replicated weights"
            )
        return self

    @model_validator(mode="after")
    def _adaptive_step_is_stable(self) -> Config:
        kl = self.kl.in_reward
        if kl.controller == "adaptive" and self.rows >= 5 * kl.horizon:
            raise ValueError(
                f"kl.in_reward.horizon is {kl.horizon}, too short for {self.rows} rows an "
                f"iteration: beta could reach zero in one step; write more than {self.rows // 5}"
            )
        return self


def map_paths(mapping: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Return a copy of a config's mapping with the path of every file and model changed.

    It need not be valid: what is not there, or is not what it should be, stays as it is.
    """
    found = copy.deepcopy(dict(mapping))

    def put(section: Any, *names: str, change: Callable[[str], str] = change) -> None:
        for name in names if isinstance(section, dict) else ():
            if isinstance(section.get(name), str):
                section[name] = change(section[name])

    def kind(value: str) -> str:
        """Of `path/file.py:name` and `model:PATH`; a rule that ships has no path."""
        if value.startswith("model:"):
            return f"model:{change(value.removeprefix('model:'))}"
        path, colon, name = value.rpartition(":")
        return f"{change(path)}:{name}" if colon and path.endswith(".py") else value

    def items(section: Any, name: str) -> list[Any]:
        value = section.get(name) if isinstance(section, dict) else None
        return value if isinstance(value, list) else []

    model, data, rollout, reward = (found.get(n) for n in ("model", "data", "rollout", "reward"))
    put(model, "actor", "reference", "critic", "start")
    put(data, "train", "heldout")
    for file in [*items(data, "train"), *items(data, "heldout")]:
        put(file, "path")
    put(rollout, "environment", change=kind)
    for number, tool in enumerate(items(rollout, "tools")):
        if isinstance(tool, str):
            rollout["tools"][number] = kind(tool)
        put(tool, "kind", change=kind)
        put(tool, "corpus")
    put(reward, "kind", change=kind)
    for part in items(reward, "parts"):
        put(part, "kind", change=kind)
    return found


def walk_fields(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf field as (dotted name, pydantic FieldInfo), in order."""
    for name, info in section.model_fields.items():
        dotted = f"{prefix}{info.alias or name}"
        sections = [
            part
            for part in (info.annotation, *get_args(info.annotation))
            if isinstance(part, type) and issubclass(part, BaseModel)
        ]
        for part in sections:
            yield from walk_fields(part, f"{dotted}.")
        if not sections:
            yield dotted, info


def count_values(value: Any, limit: int) -> int:
    """Count the values of a YAML file as JSON would write them, up to `limit`: its aliases can
    stand for many. One that holds itself is a RecursionError."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    total = 1
    for item in inner:
        if total >= limit:
            break
        total += count_values(item, limit - total)
    return total
