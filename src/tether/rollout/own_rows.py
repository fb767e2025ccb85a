"""The rows of a batch that this process samples, and keeps."""

from dataclasses import dataclass, replace

from tether.data.batching import concat_rollouts, concat_scores
from tether.dist.collectives import all_or_error, gather_replicas
from tether.dist.rows import of_rows, spread
from tether.rollout.environments.episodes import told_prompts
from tether.rollout.sampler import Draw, Episodes, Greedy, Sampler, Sampling, begin
from tether.types import ALL_HERE, Prompts, Rollout, Rows, Scores


@dataclass(frozen=True)
class OwnRows:
    """Rows of this process that are being sampled."""

    prompts: Prompts  # with the texts that environments gave
    sampling: Sampling
    rows: Rows

    def result(self) -> Rollout:
        """Wait for the responses."""
        return replace(self.sampling.result(), rows=self.rows)


def begin_own(
    sampler: Sampler, episodes: Episodes, prompts: Prompts, choice: Draw | Greedy
) -> OwnRows:
    """Begin to sample a response to each prompt; of several processes each to a block of them."""
    rows, numbers = spread(len(prompts)), None
    if rows is not ALL_HERE:
        numbers = of_rows(rows, range(len(prompts)))
        prompts = prompts.select(numbers)
    played = all_or_error(lambda: episodes(prompts))
    return OwnRows(told_prompts(prompts, played), begin(sampler, played, choice, numbers), rows)


def sample_own(
    sampler: Sampler, episodes: Episodes, prompts: Prompts, choice: Draw | Greedy
) -> tuple[Prompts, Rollout]:
    """Sample a response to each of this process's prompts, and return both."""
    own = begin_own(sampler, episodes, prompts, choice)
    return own.prompts, own.result()


def everywhere(rollout: Rollout) -> Rollout:
    """Return the rows of all processes, where there are few."""
    if rollout.rows is ALL_HERE:
        return rollout
    device = rollout.response_ids.device
    whole = concat_rollouts(gather_replicas(rollout)).to(device)
    return replace(whole, rows=ALL_HERE)


def scores_everywhere(scores: Scores, rollout: Rollout) -> Scores:
    """Return the scores of the rows of all processes."""
    if rollout.rows is ALL_HERE:
        return scores
    found = gather_replicas((scores, rollout.response_mask))
    return concat_scores([one for one, _ in found], [mask for _, mask in found])
