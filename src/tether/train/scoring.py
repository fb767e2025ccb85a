"""Scores of a rollout: responses as text to the reward, numbers back, failures named."""

import torch

from tether.config import Config
from tether.errors import RunStopped
from tether.models.loading import Vocabulary
from tether.rewards.scorers import Verdict
from tether.run.events import Event
from tether.train.roles import Roles
from tether.types import Prompts, Rollout, Scores


def response_texts(rollout: Rollout, vocabulary: Vocabulary) -> list[str]:
    ids, lengths = rollout.response_ids.tolist(), rollout.response_lengths.tolist()
    return [vocabulary.decode(row[:length]) for row, length in zip(ids, lengths, strict=True)]


def score_rollout(
    prompts: Prompts, rollout: Rollout, roles: Roles, config: Config
) -> tuple[Scores, list[Event]]:
    """One score a row. A row that could not be scored is unusable and named in an event.

    Under `bootstrap` a truncated response is not shown to the reward: the critic's value stands
    for what it would have earned, and a score beside it would count twice.
    """
    bootstrapped = rollout.truncated & (config.advantage.truncation == "bootstrap")
    asked = (~bootstrapped).nonzero().squeeze(1).tolist()
    texts = response_texts(rollout, roles.vocabulary)
    verdicts = roles.reward.score(
        [
            {
                **prompts.columns[row],
                "prompt": prompts.texts[row],
                "response": texts[row],
                "finished": rollout.finish_reasons[row] == "eos",
            }
            for row in asked
        ]
    )
    failed = {row: v for row, v in zip(asked, verdicts, strict=True) if v.score is None}
    _stop_if_too_many(failed, len(prompts), config.reward.max_failed_share)

    values = torch.zeros(len(prompts), dtype=rollout.rollout_log_probs.dtype)
    values[asked] = torch.tensor([v.score or 0.0 for v in verdicts], dtype=values.dtype)
    usable = torch.ones(len(prompts), dtype=torch.bool)
    usable[list(failed)] = False
    events = [Event("unscorable", str(v.problem), row) for row, v in failed.items()]
    device = rollout.response_ids.device
    return Scores(values.to(device), usable.to(device)), events


def _stop_if_too_many(failed: dict[int, Verdict], rows: int, max_failed_share: float) -> None:
    if len(failed) > max_failed_share * rows:
        row, verdict = next(iter(failed.items()))
        raise RunStopped(
            f"{len(failed)} of {rows} rows could not be scored, more than reward.max_failed_share "
            f"= {max_failed_share:g}; row {row}: {verdict.problem}."
        )
