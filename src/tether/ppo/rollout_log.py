"""The rows of an iteration as rollouts/NNNNNN.jsonl keeps them: every number of every token."""

from dataclasses import asdict
from typing import Any

from torch import Tensor

from tether.config import Config
from tether.models.vocabulary import Vocabulary
from tether.ppo.result import Outcome
from tether.ppo.scoring import row_turns, score_record
from tether.run.writer import shortest_floats


def rollout_rows(outcome: Outcome, vocabulary: Vocabulary, config: Config) -> list[dict[str, Any]]:
    """At most `run.rollouts_rows` rows, with a list a token for every tensor."""
    e, rollout, moments = outcome.experience, outcome.rollout, outcome.moments
    per_token = {
        "rollout_log_probs": rollout.rollout_log_probs,
        "old_log_probs": e.old_log_probs,
        "ref_log_probs": e.ref_log_probs,
        "new_log_probs": outcome.actor.new_log_probs,
        "kl": e.kl,
        "values": e.values,
        "token_level_scores": e.token_level_scores,
        "token_level_rewards": e.token_level_rewards,
        "advantages": e.advantages,
        "returns": e.returns,
        "policy_advantages": e.policy_advantages,
    }
    if config.rollout.may_mismatch:
        per_token["correction_weights"] = e.correction_weights
    whitening = {
        "mean": _number(moments.mean),
        "variance": _number(moments.variance),
        "count": int(moments.count),
    }
    records = []
    for row in kept_rows(len(e), config.rollout.samples_per_prompt, config.run.rollouts_rows):
        length = int(rollout.response_lengths[row])
        prompt_start = rollout.prompt_ids.shape[1] - int(rollout.prompt_lengths[row])
        response_ids = rollout.response_ids[row, :length].tolist()
        records.append(
            {
                "iteration": outcome.iteration,
                "row": row,
                "data_file": outcome.prompts.files[row],
                "data_line": outcome.prompts.positions[row] + 1,
                "prompt": outcome.prompts.texts[row],
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


def _turns(outcome: Outcome, vocabulary: Vocabulary, row: int) -> dict[str, Any]:
    """Who said what, and what was asked of whom."""
    rollout = outcome.rollout
    turns = row_turns(rollout, row, vocabulary)
    calls = rollout.calls[row] if rollout.calls else ()
    return {
        "turns": [{"policy": own, "text": text} for own, text in turns],
        # Without the seconds: a file of a run repeats byte for byte. Their sum is in timings.
        "calls": [{k: v for k, v in asdict(c).items() if k != "seconds"} for c in calls],
    }


def kept_rows(rows: int, samples: int, max_rows: int) -> list[int]:
    """Evenly spaced and whole groups, so that a group's baseline can be computed again from the
    file; single rows only where not even one group fits."""
    if rows <= max_rows:
        return list(range(rows))
    size = samples if samples <= max_rows else 1
    groups, wanted = rows // size, max_rows // size
    first_rows = [i * groups // wanted * size for i in range(wanted)]
    return [first + offset for first in first_rows for offset in range(size)]


def _number(x: Tensor) -> float:
    return shortest_floats(x[None])[0]
