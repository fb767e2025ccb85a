"""Supervised fine-tuning: raise the likelihood of demonstrated responses.

Rows are not packed. A training forward has no attention mask, so two documents in one row would
see each other; instead a step is cut into microbatches of rows of like length, which leaves little
padding.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tether.algo.masked import cell_weights, weighted_sum
from tether.config.stages import SFTConfig
from tether.data.batching import (
    Microbatch,
    join_pairs,
    microbatches,
    own_microbatches,
    pad_right,
)
from tether.data.dialogues import Conversation, encode_prompt_and_response, load_conversations
from tether.dist.fsdp import until_synced
from tether.dist.world import world
from tether.models.forward import Network, trunk
from tether.models.loading import load_causal_lm
from tether.models.policy import Policy
from tether.models.stored import weights_by_name
from tether.models.vocabulary import Vocabulary, load_vocabulary
from tether.ppo.optimizer import Optimizer
from tether.ppo.roles import loads_in_parts
from tether.stages.training import (
    Record,
    StageJob,
    fix_template_day,
    give_shards,
    rows_of_step,
    summed,
    warm_cosine,
)
from tether.types import Sequences


class SFTStage:
    """The loss is the mean of -log pi over the tokens of assistants; the rest is context."""

    role = "actor"

    def __init__(
        self,
        policy: Policy,
        vocabulary: Vocabulary,
        train: Sequence[Conversation],
        heldout: Sequence[Conversation],
        in_parts: bool = False,
    ) -> None:
        self.policy, self.vocabulary = policy, vocabulary
        self.in_parts = in_parts  # each process reads its shards of the weights from the files
        self.train, self.heldout = train, heldout
        self.model, self.tokenizer = policy.model, vocabulary.tokenizer
        self.num_rows, self.num_heldout = len(train), len(heldout)

    def backward(self, rows: list[int]) -> Record:
        """Compute the gradients of this process's share of the rows."""
        sequences, mask = collate([self.train[row] for row in rows], self.model.device)
        float_type = torch.promote_types(self.model.dtype, torch.float32)
        weights = cell_weights("token_mean", mask, 1, float_type)
        loss, cells = 0.0, 0
        for own in until_synced(own_parts(sequences, self.policy.microbatch_tokens)):
            some, part = own.rows, sequences.select(own.rows)
            learnt, counts = mask[some, : part.width], weights[some, : part.width]
            if own.idle:  # for a process that has run out of rows
                learnt, counts = torch.zeros_like(learnt), torch.zeros_like(counts)
            states = self.policy.states(part)
            log_probs, _ = self.policy.log_probs_and_entropies(states, part, learnt)
            share = -weighted_sum(log_probs, counts)
            share.backward()
            loss += float(share.detach())
            cells += 0 if own.idle else part.ids.numel()
        tokens = int((sequences.prompt_lengths + sequences.response_lengths).sum())
        loss, cells = summed(loss, cells)
        return {"loss": loss, "tokens": int(mask.sum()), "padding_share": 1 - tokens / cells}

    def evaluate(self) -> Record:
        """Return the mean loss per token over all held-out rows together."""
        sequences, mask = collate(self.heldout, self.model.device)
        log_probs = self.policy.log_probs(sequences, mask)
        count = int(mask.sum())
        loss = -float(log_probs.double().sum()) / count
        return {"loss": loss, "tokens": count, "rows": len(self.heldout)}

    def row_ids(self, row: int) -> list[int]:
        return [*self.train[row].prompt_ids, *self.train[row].response_ids]

    def read_weights(self, folder: Path) -> Mapping[str, Tensor]:
        source = str(folder), str(self.model.dtype).removeprefix("torch."), self.model.device
        return weights_by_name(load_causal_lm(*source, in_parts=self.in_parts))


def sft_job(config: SFTConfig) -> StageJob[SFTConfig]:
    """Return the job of `tether sft`."""
    return StageJob(config, build_sft)


def build_sft(config: SFTConfig, device: torch.device) -> SFTStage:
    """Load the model and every row; nothing is trained yet."""
    name, data, in_parts = config.model.start, config.data, loads_in_parts(config.launch)
    source = name, config.model.dtype, device, False, config.model.compute
    model = load_causal_lm(*source, in_parts=in_parts)
    vocabulary = load_vocabulary(name, model)
    fix_template_day(data.date, vocabulary.tokenizer)
    context = getattr(model.config, "max_position_embeddings", None)
    load = partial(load_conversations, data=data, tokenizer=vocabulary.tokenizer, context=context)
    heldout = [] if data.heldout is None else load(data.heldout)[: config.train.eval_rows]
    policy = Policy(model, temperature=1.0, microbatch_tokens=config.train.microbatch_tokens)
    train = load(data.train)
    give_shards(config, Network(model, trunk(model), trunk(model)), device)
    return SFTStage(policy, vocabulary, train, heldout, in_parts)


def collate(
    conversations: Sequence[Conversation], device: torch.device
) -> tuple[Sequences, Bool[Tensor, "rows response"]]:
    """Return the rows as a rectangle, and the mask of the tokens that are learnt."""
    joined = join_pairs([(c.prompt_ids, c.response_ids) for c in conversations])
    mask = pad_right([c.loss_mask for c in conversations], torch.bool)
    return joined.to(device), mask.to(device)


def own_parts(sequences: Sequences, max_tokens: int) -> list[Microbatch]:
    """Return this process's microbatches; alone it keeps rows in their order where they fit."""
    if world().replicas > 1:
        return own_microbatches(sequences, max_tokens)
    return [Microbatch(rows) for rows in like_lengths(sequences, max_tokens)]


def like_lengths(sequences: Sequences, max_tokens: int) -> list[Int[Tensor, " some"]]:
    """Return the row numbers of each backward: all in order if they fit, else groups of like
    length."""
    if sequences.ids.numel() <= max_tokens:
        return [torch.arange(len(sequences.ids))]
    return microbatches(sequences, max_tokens)


@dataclass(frozen=True)
class SFTSettings:
    """Steps and learning rate of one lesson, for scripts that build a model in several."""

    num_steps: int
    lr: float  # at the peak
    rows: int = 64  # of one step
    warmup_steps: int = 50  # linear rise to the peak, before the cosine fall to zero
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    seed: int = 0  # of the order of the rows


def train_sft(
    policy: Policy,
    vocabulary: Vocabulary,
    dialogues: Sequence[tuple[str, str]],
    settings: SFTSettings,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Train the policy in place on (prompt, response) pairs; `on_step` gets each step's loss."""
    encoded = [
        encode_prompt_and_response(vocabulary.tokenizer, *dialogue) for dialogue in dialogues
    ]
    train_conversations(policy, vocabulary, encoded, settings, on_step)


def train_conversations(
    policy: Policy,
    vocabulary: Vocabulary,
    conversations: Sequence[Conversation],
    settings: SFTSettings,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Train on conversations that are encoded already, whose mask may leave out tokens."""
    stage = SFTStage(policy, vocabulary, conversations, [])
    optimizer = Optimizer(
        policy.model.parameters(),
        settings.lr,
        settings.max_grad_norm,
        settings.weight_decay,
        betas=(0.9, 0.95),
    )
    for step in range(settings.num_steps):
        rows = rows_of_step(step, len(conversations), settings.rows, settings.seed)
        metrics = stage.backward(rows)
        optimizer.set_factor(warm_cosine(step, settings.num_steps, settings.warmup_steps))
        optimizer.step()
        on_step(step, metrics["loss"])
