"""Reward modelling: of two responses to one prompt, score the chosen one higher."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from tether.algo.preferences import bradley_terry_losses
from tether.data.collate import microbatches
from tether.data.preferences import Pair, load_pairs
from tether.models.reward_model import RewardModel, start_reward_model, whole_rows
from tether.stages import RewardModelConfig
from tether.train.calibration import reliability
from tether.train.stage import Record


class RewardModelStage:
    """The loss is the mean over pairs of -log sigmoid(score of chosen - score of rejected)."""

    def __init__(self, reward: RewardModel, train: Sequence[Pair], heldout: Sequence[Pair]) -> None:
        self.reward = reward
        self.train, self.heldout = train, heldout
        self.model = reward.model
        self.num_rows = len(train)

    def backward(self, rows: list[int]) -> Record:
        pairs = [self.train[row] for row in rows]
        chosen, rejected = [], []
        loss = 0.0
        for part in self._parts(pairs):
            ours, theirs = self._read_pairs(part)
            share = bradley_terry_losses(ours, theirs).sum() / len(pairs)
            share.backward()
            loss += float(share.detach())
            chosen.append(ours.detach())
            rejected.append(theirs.detach())
        accuracy = reliability(torch.cat(chosen), torch.cat(rejected)).accuracy
        return {"loss": loss, "accuracy": accuracy}

    def evaluate(self) -> Record | None:
        if not self.heldout:
            return None
        dialogues = [ids for pair in self.heldout for ids in (pair.chosen, pair.rejected)]
        chosen, rejected = self.reward.scores(dialogues).view(-1, 2).unbind(1)
        loss = float(bradley_terry_losses(chosen, rejected).double().mean())
        return {"loss": loss, "pairs": len(self.heldout), **asdict(reliability(chosen, rejected))}

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder / "reward")
        self.reward.tokenizer.save_pretrained(folder / "reward")

    def _read_pairs(
        self, pairs: Sequence[Pair]
    ) -> tuple[Float[Tensor, " pairs"], Float[Tensor, " pairs"]]:
        """Both sides in one pass, so that nothing differs between them but the ids."""
        dialogues = [ids for pair in pairs for ids in (pair.chosen, pair.rejected)]
        chosen, rejected = self.reward.read(dialogues).view(-1, 2).unbind(1)
        return chosen, rejected

    def _parts(self, pairs: Sequence[Pair]) -> list[list[Pair]]:
        """Pairs of like length together, as many as one backward may hold."""
        longest = [max(pair.chosen, pair.rejected, key=len) for pair in pairs]
        groups = microbatches(
            whole_rows(longest, torch.device("cpu")), max(1, self.reward.microbatch_tokens // 2)
        )
        return [[pairs[i] for i in group.tolist()] for group in groups]


def build_reward_model(config: RewardModelConfig, device: torch.device) -> RewardModelStage:
    """Load the model and every pair; nothing is trained yet."""
    model, data, train = config.model, config.data, config.train
    reward = start_reward_model(model.start, model.dtype, device, train.microbatch_tokens)
    load = partial(load_pairs, data=data, tokenizer=reward.tokenizer, context=reward.max_tokens)
    heldout = [] if data.heldout is None else load(data.heldout)[: train.eval_rows]
    return RewardModelStage(reward, load(data.train), heldout)
