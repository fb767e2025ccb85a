"""One sampler out of those of all processes: each samples a block of the rows."""

from collections.abc import Sequence

from torch import nn

from tether.data.collate import stack
from tether.dist.reduce import gather_results
from tether.dist.shard import whole
from tether.dist.share import block
from tether.rollout.episode import Draw, Episode, Greedy, Sampler
from tether.types import Rollout


class SpreadSampler:
    """Every process gets the whole rollout, in row order, as if one had sampled it."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def sync(self, weights: nn.Module, version: int) -> None:
        """No sampler knows of weights that lie in parts: it is given whole ones."""
        self.sampler.sync(whole(weights), version)

    def run(
        self,
        episodes: Sequence[Episode],
        choice: Draw | Greedy,
        numbers: Sequence[int] | None = None,
    ) -> Rollout:
        numbers = range(len(episodes)) if numbers is None else numbers
        mine = block(len(episodes))
        own, keys = episodes[mine.start : mine.stop], numbers[mine.start : mine.stop]
        parts = gather_results(lambda: self.sampler.run(own, choice, keys) if own else None)
        return stack([part for part in parts if part is not None])
