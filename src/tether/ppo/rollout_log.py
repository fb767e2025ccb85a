"""The rows that rollouts/NNNNNN.jsonl holds of an iteration: every number of every token."""

from collections.abc import Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from tether.config import Config
from tether.models.vocabulary import Vocabulary
from tether.ppo.result import Outcome
from tether.ppo.scoring import row_turns, score_record, turn_ends
from tether.run.columns import WRITTEN
from tether.run.writer import shortest_floats, shown_columns


def rollout_rows(
    outcome: Outcome, vocabulary: Vocabulary, config: Config, rows: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """Return rows with the columns of `run/columns.py`: those of these numbers, or the ones that a
    file holds, at most `run.rollouts_rows`. Of several processes each returns its own of them."""
    e, rollout, moments = outcome.experience, outcome.rollout, outcome.moments
    per_token = {
        column.name: _tensor(outcome, column.name)
        for column in WRITTEN
        if column.only_with is None or attrgetter(column.only_with)(config)
    }
    whitening = {
        "mean": _number(moments.mean),
        "variance": _number(moments.variance),
        "count": int(moments.count),
    }
    if rows is None:
        count, samples = e.rows.count(e), config.rollout.samples_per_prompt
        rows = logged_rows(count, samples, config.run.rollouts_rows)
    records = []
    for row in e.rows.here(torch.tensor(rows, dtype=torch.long)).tolist():
        length = int(rollout.response_lengths[row])
        prompt_start = rollout.prompt_ids.shape[1] - int(rollout.prompt_lengths[row])
        response_ids = rollout.response_ids[row, :length].tolist()
        records.append(
            {
                "iteration": outcome.iteration,
                "row": e.rows.number(row),
                "data_file": outcome.prompts.files[row],
                "data_line": outcome.prompts.positions[row] + 1,
                "prompt": outcome.prompts.texts[row],
                "columns": shown_columns(outcome.prompts.columns[row]),
                "response": vocabulary.decode(response_ids),
                "finish_reason": rollout.finish_reasons[row],
                **score_record(outcome.scores, row),
                "usable": bool(outcome.scores.usable[row]),
                "greedy_score": _number(outcome.greedy_scores[row]),
                "beta": outcome.controls.beta,
                "whitening": whitening,
                "final_value": _number(e.final_values[row]),
                "prompt_ids": rollout.prompt_ids[row, prompt_start:].tolist(),
                "response_ids": response_ids,
                "response_tokens": vocabulary.pieces(response_ids),
                "response_mask": rollout.response_mask[row, :length].tolist(),
                **{name: shortest_floats(x[row, :length]) for name, x in per_token.items()},
                **(_turns(outcome, vocabulary, row) if config.rollout.is_multi_turn else {}),
            }
        )
    return records


def _tensor(outcome: Outcome, name: str) -> Float[Tensor, "rows response"]:
    """Return the tensor behind a column: a field of the experience, with two exceptions."""
    match name:
        case "rollout_log_probs":
            return outcome.rollout.rollout_log_probs
        case "new_log_probs":
            return cast(Tensor, outcome.actor.new_log_probs)  # None in a critic's report only
        case _:
            return getattr(outcome.experience, name)


def _turns(outcome: Outcome, vocabulary: Vocabulary, row: int) -> dict[str, Any]:
    """Return the turns of a multi-turn row and its tool calls."""
    rollout = outcome.rollout
    turns = row_turns(rollout, row, vocabulary)
    calls = rollout.calls[row] if rollout.calls else ()
    by_turn = outcome.scores.token_values is not None
    rewards = iter(_turn_rewards(outcome, row))
    return {
        "turns": [
            {"policy": own, "text": text, **({"reward": next(rewards)} if own and by_turn else {})}
            for own, text in turns
        ],
        # Without the seconds: a file of a run repeats byte for byte. Their sum is in timings.
        "calls": [{k: v for k, v in asdict(c).items() if k != "seconds"} for c in calls],
    }


def _turn_rewards(outcome: Outcome, row: int) -> list[float]:
    """Return what each turn of the policy was given: the sum over its tokens, before the KL."""
    scores = outcome.experience.token_level_scores[row]
    sampled = outcome.rollout.response_mask[row].nonzero().squeeze(1).tolist()
    found, first = [], 0
    for last in turn_ends(sampled):
        found.append(_number(scores[first : last + 1].sum()))
        first = last + 1
    return found


def logged_rows(rows: int, samples: int, max_rows: int) -> list[int]:
    """Return the numbers of the rows to write: all, or evenly spaced whole groups.

    From whole groups a group's baseline can be computed again. Single rows only where not even one
    group fits.
    """
    if rows <= max_rows:
        return list(range(rows))
    size = samples if samples <= max_rows else 1
    groups, wanted = rows // size, max_rows // size
    first_rows = [i * groups // wanted * size for i in range(wanted)]
    return [first + offset for first in first_rows for offset in range(size)]


def _number(x: Tensor) -> float:
    return shortest_floats(x[None])[0]
