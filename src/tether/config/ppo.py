"""The config of a PPO run: its sections in data-flow order, and the rules between them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, Literal, get_args

from pydantic import (
    BaseModel,
    model_validator,
)

from tether.config.algorithm import (
    ADAM_FIELDS,
    ActorSection,
    AdvantageSection,
    CriticSection,
    KlSection,
)
from tether.config.base import Aggregation
from tether.config.estimators import ESTIMATORS
from tether.config.rollout import CorrectionSection, RewardSection, RolloutSection
from tether.config.run import (
    TOO_COARSE_TO_LEARN,
    Compute,
    DataSection,
    LaunchSection,
    ModelSection,
    RunConfig,
    RunSection,
    TrainSection,
)

SAMPLER_CHUNK_TOKENS = 4096  # of a chunk that samplers apart are handed, by default


class Config(RunConfig):
    """One run. Sections are in the order in which data flows through them."""

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

    @cached_property
    def rows(self) -> int:
        """Return the number of sampled responses per iteration."""
        return self.rollout.prompts * self.rollout.samples_per_prompt

    @cached_property
    def shares_prompts(self) -> bool:
        """Return whether prompts have rows that may share them, if the models' layers allow it."""
        return self.model.share_prompts and self.rollout.samples_per_prompt > 1

    @cached_property
    def has_critic(self) -> bool:
        return self.advantage.traits.needs_critic

    @cached_property
    def refreshes_reference(self) -> bool:
        return self.kl.needs_reference and self.kl.refresh_reference_every > 0

    @cached_property
    def paper_aggregation(self) -> Aggregation:
        """Return the aggregation of the paper: the update's if it has one, else the estimator's."""
        return self.actor.update.paper_aggregation or self.advantage.traits.aggregation

    @cached_property
    def aggregation(self) -> Aggregation:
        return self.actor.aggregation or self.paper_aggregation

    @property
    def departures(self) -> list[str]:
        """List the settings that make the run another algorithm than the one it names."""
        return [*self._other_aggregation, *self._no_pull_back, *self._states_fixed]

    @property
    def _no_pull_back(self) -> list[str]:
        if self.rollout.dynamic_sampling is None or self.kl.in_reward.coef == 0:
            return []
        return [
            "rollout.dynamic_sampling leaves out groups whose scores are all equal, so solved "
            "prompts no longer pull back to the reference by kl.in_reward; DAPO has no KL"
        ]

    @property
    def _states_fixed(self) -> list[str]:
        in_loss = self.kl.in_loss
        if in_loss.coef == 0 or in_loss.level == "sequence" or in_loss.ablation:
            return []
        if self.rollout.max_response_tokens == 1:
            return []
        return [
            "kl.in_loss charges a token for its own KL, and not for the KL that follows from it: a "
            "partial gradient for responses of several tokens (docs/kl.md). kl.in_reward has the "
            "whole one, and so has kl.in_loss.level sequence"
        ]

    @property
    def _other_aggregation(self) -> list[str]:
        if self.aggregation == self.paper_aggregation or self.paper_aggregation == "token_mean":
            return []
        update = self.actor.update
        name = update.kind if update.paper_aggregation else self.advantage.estimator
        return [
            f"actor.aggregation is {self.aggregation}, but {name} is its paper's loss only with "
            f"{self.paper_aggregation}; leave the field out"
        ]

    @property
    def chunk_tokens(self) -> int | None:
        """Return the tokens of the rows that are sampled together; None: all of a batch."""
        usual = SAMPLER_CHUNK_TOKENS if self.launch.samplers else None
        return self.rollout.chunk_tokens or usual

    @cached_property
    def correction(self) -> CorrectionSection:
        """Return the rollout correction; by default one for samplers that differ from the trainer.

        Another engine does, and so does every sampler in bfloat16, by its rounding, and one that is
        `rollout.lag` iterations behind.
        """
        usual = CorrectionSection(kind="token" if self._sampler_differs else "none")
        return usual if self.rollout.correction is None else self.rollout.correction

    @cached_property
    def may_mismatch(self) -> bool:
        """Return whether the sampler's log-probs are to be compared with the trainer's."""
        return self._sampler_differs or self.correction.kind != "none"

    def may_compute_in(self, compute: Compute) -> bool:
        """Return whether this run could compute in that format instead."""
        formats = (self.model.dtype, self.model.reference_dtype, self.model.critic_dtype)
        refused = self.actor.update.kind == "trpo" or "float64" in formats
        return compute == "float32" or not refused

    @property
    def _sampler_differs(self) -> bool:
        rollout = self.rollout
        return rollout.sampler != "local" or rollout.lag > 0 or self.model.compute == "bfloat16"

    @cached_property
    def critic_lr(self) -> float:
        return self.critic.lr or self.actor.lr

    @cached_property
    def critic_lr_warmup_iterations(self) -> int:
        return self._critic_or_actor("lr_warmup_iterations")

    @cached_property
    def critic_betas(self) -> tuple[float, float]:
        return self._critic_or_actor("betas")

    @cached_property
    def critic_eps(self) -> float:
        return self._critic_or_actor("eps")

    @cached_property
    def critic_weight_decay(self) -> float:
        return self._critic_or_actor("weight_decay")

    def _critic_or_actor(self, field: str) -> Any:
        """Return the critic's setting, or the actor's where the critic has none (0 is one)."""
        own = getattr(self.critic, field)
        return getattr(self.actor, field) if own is None else own

    @cached_property
    def critic_epochs(self) -> int:
        return self.critic.epochs or self.actor.epochs

    @cached_property
    def critic_minibatch_rows(self) -> int:
        return self.critic.minibatch_rows or self.actor.minibatch_rows

    def rows_together(self, role: Literal["actor", "critic"]) -> int:
        """Return how many neighbouring rows always share a minibatch."""
        own = self.critic.shuffle if role == "critic" else None
        drawn = own or self.actor.shuffle
        return self.rollout.samples_per_prompt if drawn == "prompts" else 1

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
    def _minibatches_hold_whole_prompts(self) -> Config:
        sizes = {"actor": self.actor.minibatch_rows, "critic": self.critic_minibatch_rows}
        for role in ("actor", "critic"):
            together = self.rows_together(role)
            if sizes[role] % together and (role == "actor" or self.has_critic):
                raise ValueError(
                    f"{role}.minibatch_rows is {sizes[role]}, but {role}.shuffle prompts keeps the "
                    f"{together} rows of a prompt together; write a multiple of {together}"
                )
        return self

    @model_validator(mode="after")
    def _probe_has_evaluations(self) -> Config:
        if self.train.probe is not None and self.data.heldout is None:
            raise ValueError(
                "train.probe is run with the held-out evaluations, and data.heldout is not set; "
                "set it, or leave the probe to `tether probe`"
            )
        return self

    @model_validator(mode="after")
    def _price_has_a_reference(self) -> Config:
        if self.train.price_samples and (
            not self.kl.needs_reference or self.kl.refresh_reference_every
        ):
            raise ValueError(
                "train.price_samples needs the KL to a reference that stays: a KL term, and "
                "kl.refresh_reference_every 0"
            )
        return self

    @model_validator(mode="after")
    def _prompts_come_from_somewhere(self) -> Config:
        sources = [*self.data.files("train"), *self.data.files("heldout")]
        if any(file.is_environment for file in sources) and self.rollout.environment is None:
            raise ValueError(
                "data names the environment as its prompts, but rollout.environment is not set; "
                "write path/file.py:make there"
            )
        return self

    @model_validator(mode="after")
    def _one_thing_chooses_prompts(self) -> Config:
        if self.data.curriculum is not None and self.rollout.dynamic_sampling is not None:
            raise ValueError(
                "data.curriculum and rollout.dynamic_sampling both choose the prompts of an "
                "iteration; leave one out"
            )
        return self

    @model_validator(mode="after")
    def _groups_have_rows(self) -> Config:
        if self.advantage.traits.by_group and self.rollout.samples_per_prompt < 2:
            raise ValueError(
                f"advantage.estimator {self.advantage.estimator} compares the responses to one "
                f"prompt, so rollout.samples_per_prompt must be 2 or more"
            )
        return self

    @model_validator(mode="after")
    def _teacher_is_there(self) -> Config:
        estimator = self.advantage.estimator
        if not self.advantage.traits.needs_teacher:
            return self
        teacher = self.model.reference or self.model.reference_system_prompt
        if self.kl.in_reward.coef == 0 or teacher is None:
            raise ValueError(
                f"advantage.estimator {estimator} learns from the KL to a teacher alone; name the "
                f"teacher by model.reference, or its prompt by model.reference_system_prompt, and "
                f"write kl.in_reward.coef: 1"
            )
        if self.kl.refresh_reference_every or self.kl.in_reward.controller == "adaptive":
            raise ValueError(
                f"advantage.estimator {estimator} does not go with kl.refresh_reference_every or "
                f"an adaptive kl.in_reward.controller: the teacher stays, and so does its weight"
            )
        return self

    @model_validator(mode="after")
    def _reference_can_be_prompted(self) -> Config:
        if self.model.reference_system_prompt is None:
            return self
        sources = [*self.data.files("train"), *self.data.files("heldout")]
        refused = {
            "data.chat_template: false": not self.data.chat_template,
            "model.learn_layers": self.model.learn_layers is not None,
            "train.price_samples": self.train.price_samples > 0,
            "prompts of the environment": any(file.is_environment for file in sources),
            "a config without a KL term": not self.kl.needs_reference,
        }
        for field, is_set in refused.items():
            if is_set:
                raise ValueError(
                    f"model.reference_system_prompt does not go with {field}; leave one of them out"
                )
        return self

    @model_validator(mode="after")
    def _sequence_kl_is_per_row(self) -> Config:
        in_loss, summed = self.kl.in_loss, ("seq_mean_token_sum", "seq_mean_token_sum_norm")
        if in_loss.coef > 0 and in_loss.level == "sequence" and self.aggregation not in summed:
            raise ValueError(
                f"kl.in_loss.level sequence has one number per response, which a mean over tokens "
                f"would weigh by length; write actor.aggregation: {' or '.join(summed)}"
            )
        return self

    @model_validator(mode="after")
    def _parts_stand_alone(self) -> Config:
        estimator = self.advantage.estimator
        if not self.advantage.traits.needs_parts:
            return self
        if len(self.reward.parts or ()) < 2:
            raise ValueError(
                f"advantage.estimator {estimator} normalises several rewards apart, so "
                f"reward.parts must name 2 or more; write them there, or grpo"
            )
        refused = {
            "kl.in_reward.coef": self.kl.in_reward.coef > 0,
            "reward.overlong": self.reward.overlong is not None,
        }
        for field, is_set in refused.items():
            if is_set:
                raise ValueError(
                    f"{field} does not go with advantage.estimator {estimator}, which scales every "
                    f"reward to the same spread; write kl.in_loss.coef for a KL, a part of "
                    f"reward.parts for a length"
                )
        return self

    @model_validator(mode="after")
    def _overlong_fits(self) -> Config:
        overlong, most = self.reward.overlong, self.rollout.max_response_tokens
        if overlong is None:
            return self
        whole = most if overlong.max_tokens is None else overlong.max_tokens
        if whole > most:
            raise ValueError(
                f"reward.overlong.max_tokens is {whole}, but no response has more than "
                f"rollout.max_response_tokens = {most}; write at most {most}"
            )
        if overlong.buffer_tokens >= whole:
            raise ValueError(
                f"reward.overlong.buffer_tokens is {overlong.buffer_tokens}, so that even the "
                f"shortest response would be penalised; write less than {whole}"
            )
        return self

    @model_validator(mode="after")
    def _critic_fits(self) -> Config:
        critic, estimator = self.critic, self.advantage.estimator
        asked = {
            "critic.shared_trunk": critic.shared_trunk,
            "critic.warmup_iterations": critic.warmup_iterations,
            "critic.lam": critic.lam is not None,
            "critic.pretrain": critic.pretrain is not None,
            "advantage.lam_alpha": self.advantage.lam_alpha is not None,
        }
        for field, is_set in asked.items():
            if is_set and not self.has_critic:
                names = [name for name, traits in ESTIMATORS.items() if traits.needs_critic]
                raise ValueError(
                    f"{field} needs a critic, and {estimator} has none; use {' or '.join(names)}"
                )
        if not self.has_critic and self.advantage.truncation == "bootstrap":
            raise ValueError(
                f"advantage.truncation bootstrap needs a critic, and {estimator} has none; "
                f"write zero"
            )
        unset = CriticSection()
        own = ("lr", "epochs", "minibatch_rows", "warmup_iterations", "pretrain", *ADAM_FIELDS)
        for field in own:
            if critic.shared_trunk and getattr(critic, field) != getattr(unset, field):
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
            if dtype == TOO_COARSE_TO_LEARN and adapter is None and not model.ablation:
                lora = "lora" if field == "dtype" else "critic_lora"
                raise ValueError(
                    f"model.{field} is bfloat16, in which a weight that learns loses most steps to "
                    f"rounding (at a learning rate of 1e-6, 99 of 100 never move); write "
                    f"model.{field}: float32, with model.compute: bfloat16 for speed; or train an "
                    f"adapter, which is float32 on a bfloat16 base, by model.{lora}.rank; or "
                    f"model.ablation: true to see that for yourself"
                )
        return self

    @model_validator(mode="after")
    def _reused_log_probs_are_the_trainers(self) -> Config:
        if self.rollout.reuse_log_probs and self.may_mismatch:
            what = "rollout.correction"
            if self.rollout.lag:
                what = f"rollout.lag = {self.rollout.lag}"
            if self.model.compute == "bfloat16":
                what = "model.compute bfloat16"
            if self.rollout.sampler == "vllm":
                what = "rollout.sampler vllm"
            raise ValueError(
                f"rollout.reuse_log_probs does not go with {what}, which needs the trainer's own "
                f"log-probs beside the sampler's; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _rows_may_wait(self) -> Config:
        """Refuse, with `rollout.lag`, what needs rows of the newest weights."""
        rollout, update = self.rollout, self.actor.update
        refused = {
            "rollout.dynamic_sampling": rollout.dynamic_sampling is not None,
            "data.curriculum": self.data.curriculum is not None,
            "rollout.environment": rollout.environment is not None,
            f"actor.update.kind {update.kind}": update.natural_gradient,
            "several launch.num_workers": (self.launch.num_workers or 1) > 1,
        }
        for field, is_set in refused.items():
            if rollout.lag and is_set:
                raise ValueError(
                    f"{field} does not go with rollout.lag = {rollout.lag}; leave it out, or write "
                    f"rollout.lag: 0"
                )
        if rollout.lag and self.correction.kind == "none" and not update.has_ratio:
            raise ValueError(
                f"actor.update.kind {update.kind} has no ratio, so with rollout.lag = "
                f"{rollout.lag} and rollout.correction.kind none it takes rows of older weights "
                f"for its own; write rollout.correction.kind: token, or another update"
            )
        return self

    @model_validator(mode="after")
    def _samplers_may_be_apart(self) -> Config:
        launch, rollout = self.launch, self.rollout
        refused = {
            "launch.kind ray": launch.kind == "ray",
            "several launch.num_workers": (launch.num_workers or 1) > 1,
            "rollout.sampler vllm": rollout.sampler == "vllm",
            "rollout.environment": rollout.environment is not None,
        }
        for field, is_set in refused.items():
            if launch.samplers and is_set:
                raise ValueError(
                    f"{field} does not go with launch.samplers = {launch.samplers}, which serve "
                    f"one local training process with the local sampler and tools; leave one out"
                )
        if rollout.chunk_tokens is not None and rollout.sampler == "vllm":
            raise ValueError("rollout.chunk_tokens is of the local sampler; leave it out for vllm")
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
    def _natural_gradient_stands_alone(self) -> Config:
        update = self.actor.update
        if not update.natural_gradient:
            return self
        refused = {
            "actor.entropy_coef": self.actor.entropy_coef > 0,
            "kl.in_loss.coef": self.kl.in_loss.coef > 0,
            "critic.shared_trunk": self.critic.shared_trunk,
            "actor.stop_kl": self.actor.stop_kl is not None,
        }
        for field, is_set in refused.items():
            if is_set:
                raise ValueError(
                    f"{field} does not go with actor.update.kind {update.kind}, whose one step "
                    f"maximises the surrogate alone; leave it out"
                )
        unset = ActorSection()
        for field in ADAM_FIELDS:
            if getattr(self.actor, field) != getattr(unset, field):
                raise ValueError(
                    f"actor.{field} does not go with actor.update.kind {update.kind}, whose step "
                    f"is not Adam's; leave it out, or write critic.{field} for the critic"
                )
        for field in ("dtype", "compute"):
            if getattr(self.model, field) == TOO_COARSE_TO_LEARN:
                raise ValueError(
                    f"model.{field} bfloat16 does not go with actor.update.kind {update.kind}, "
                    f"whose Fisher products are differences that it rounds away; write float32"
                )
        if self.rows < 2:
            raise ValueError(
                f"actor.update.kind {update.kind} needs at least 2 rows per iteration; raise "
                f"rollout.prompts"
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
        if launch.tensor_parallel > 1 and self.model.learn_layers is not None:
            raise ValueError(
                f"launch.tensor_parallel = {launch.tensor_parallel} does not go with "
                f"model.learn_layers; write 1, or leave learn_layers out"
            )
        if launch.weights == "sharded" and update.natural_gradient:
            raise ValueError(
                f"actor.update.kind {update.kind} needs all weights on every process, so it does "
                f"not go with launch.weights sharded; write replicated"
            )
        if launch.weights == "sharded" and update.needs_old_policy:
            raise ValueError(
                "actor.update.estimator full needs a second copy of the actor, so it does not go "
                "with launch.weights sharded; write k3, or replicated weights"
            )
        return self

    @model_validator(mode="after")
    def _environment_rewards(self) -> Config:
        kinds = [self.reward.kind, *(part.kind for part in self.reward.parts or ())]
        if "environment" in kinds and self.rollout.environment is None:
            raise ValueError(
                "reward.kind environment takes the rewards of rollout.environment, which is not "
                "set; name one, or another reward"
            )
        return self

    @model_validator(mode="after")
    def _adaptive_step_is_stable(self) -> Config:
        kl = self.kl.in_reward
        if kl.controller == "adaptive" and self.rows >= 5 * kl.horizon:
            raise ValueError(
                f"kl.in_reward.horizon is {kl.horizon}, too short for {self.rows} rows per "
                f"iteration: beta could reach zero in one step; write more than {self.rows // 5}"
            )
        return self


def walk_fields(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf field as (dotted name, pydantic FieldInfo), in order."""
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
