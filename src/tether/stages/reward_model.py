"""Reward modelling: of two responses to one prompt, score the chosen one higher."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from tether.algo.losses import bradley_terry_losses
from tether.config.stages import RewardModelConfig
from tether.data.batching import Microbatch, own_microbatches
from tether.data.dialogues import PreferencePair, load_pairs
from tether.dist.collectives import all_reduce_sum
from tether.dist.fsdp import until_synced
from tether.models.reward_model import (
    RewardModel,
    dialogues_as_sequences,
    load_reward_model,
    start_reward_model,
)
from tether.stages.training import (
    Record,
    StageJob,
    fix_template_day,
    give_shards,
    summed,
)

BINS = 10  # of confidence, between a coin's 0.5 and 1


@dataclass(frozen=True)
class Bin:
    """Pairs that the model was about equally sure of."""

    confidence: float  # mean predicted probability of the side it prefers
    accuracy: float  # how often that side was the chosen one
    count: int


@dataclass(frozen=True)
class Reliability:
    accuracy: float
    calibration_error: float  # expected: |confidence - accuracy| over bins, weighted by count
    bins: list[Bin]


def reliability(chosen: Float[Tensor, " pairs"], rejected: Float[Tensor, " pairs"]) -> Reliability:
    """Return accuracy and calibration; a tie is half right, at a confidence of 0.5."""
    difference = (chosen - rejected).double()
    confidence = torch.sigmoid(difference.abs())
    right = (difference > 0).double() + 0.5 * (difference == 0).double()
    places = ((confidence - 0.5) * 2 * BINS).long().clamp(max=BINS - 1)
    bins = [
        Bin(float(confidence[inside].mean()), float(right[inside].mean()), int(inside.sum()))
        for inside in (places == place for place in range(BINS))
        if bool(inside.any())
    ]
    gaps = sum(one.count * abs(one.confidence - one.accuracy) for one in bins)
    return Reliability(float(right.mean()), gaps / len(difference), bins)


class RewardModelStage:
    """The loss is the mean over pairs of -log sigmoid(score of chosen - score of rejected)
    (Bradley and Terry, 1952)."""

    role = "reward"

    def __init__(
        self,
        reward: RewardModel,
        train: Sequence[PreferencePair],
        heldout: Sequence[PreferencePair],
    ) -> None:
        self.reward = reward
        self.train, self.heldout = train, heldout
        self.model, self.tokenizer = reward.model, reward.tokenizer
        self.num_rows, self.num_heldout = len(train), len(heldout)

    def backward(self, rows: list[int]) -> Record:
        """Compute the gradients of this process's share of the pairs."""
        pairs = [self.train[row] for row in rows]
        chosen, rejected = torch.zeros(2, len(pairs), dtype=self.reward.float_type)
        loss = 0.0
        for own in until_synced(self._parts(pairs)):
            ours, theirs = self._read_pairs([pairs[place] for place in own.rows.tolist()])
            share = bradley_terry_losses(ours, theirs).sum() / len(pairs)
            if own.idle:  # for a process that has run out of pairs
                share = 0 * share
            share.backward()
            loss += float(share.detach())
            if not own.idle:
                chosen[own.rows] = ours.detach().cpu()
                rejected[own.rows] = theirs.detach().cpu()
        found = reliability(all_reduce_sum(chosen), all_reduce_sum(rejected))
        return {"loss": summed(loss)[0], "accuracy": found.accuracy}

    def evaluate(self) -> Record:
        dialogues = [ids for pair in self.heldout for ids in (pair.chosen, pair.rejected)]
        chosen, rejected = self.reward.scores(dialogues).view(-1, 2).unbind(1)
        loss = float(bradley_terry_losses(chosen, rejected).double().mean())
        return {"loss": loss, "pairs": len(self.heldout), **asdict(reliability(chosen, rejected))}

    def row_ids(self, row: int) -> list[int]:
        return [*self.train[row].chosen, *self.train[row].rejected]

    def read_weights(self, folder: Path) -> Mapping[str, Tensor]:
        dtype = str(self.model.dtype).removeprefix("torch.")
        tokens = self.reward.microbatch_tokens
        return load_reward_model(str(folder), dtype, self.model.device, tokens).model.state_dict()

    def _read_pairs(
        self, pairs: Sequence[PreferencePair]
    ) -> tuple[Float[Tensor, " pairs"], Float[Tensor, " pairs"]]:
        """Score both sides in one pass, so that nothing differs between them but the ids."""
        dialogues = [ids for pair in pairs for ids in (pair.chosen, pair.rejected)]
        chosen, rejected = self.reward.scores_with_gradients(dialogues).view(-1, 2).unbind(1)
        return chosen, rejected

    def _parts(self, pairs: Sequence[PreferencePair]) -> list[Microbatch]:
        """Return this process's groups of pairs of like length, one for each backward."""
        longest = [max(pair.chosen, pair.rejected, key=len) for pair in pairs]
        return own_microbatches(
            dialogues_as_sequences(longest, torch.device("cpu")),
            max(1, self.reward.microbatch_tokens // 2),
        )


def reward_model_job(config: RewardModelConfig) -> StageJob[RewardModelConfig]:
    """Return the job of `tether reward-model`."""
    return StageJob(config, build_reward_model)


def build_reward_model(config: RewardModelConfig, device: torch.device) -> RewardModelStage:
    """Load the model and every pair; nothing is trained yet."""
    model, data, train = config.model, config.data, config.train
    tokens = train.microbatch_tokens
    reward = start_reward_model(model.start, model.dtype, device, tokens, model.compute)
    fix_template_day(data.date, reward.tokenizer)
    load = partial(load_pairs, data=data, tokenizer=reward.tokenizer, context=reward.max_tokens)
    heldout = [] if data.heldout is None else load(data.heldout)[: train.eval_rows]
    pairs = load(data.train)
    give_shards(config, reward.network(), device)
    return RewardModelStage(reward, pairs, heldout)
