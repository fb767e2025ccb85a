"""Trace one prompt through every stage of an iteration, on models that are never saved.

`trace_prompt` builds the roles of a run whose data is this one prompt and calls the trainer's own
`run_iteration` with one critic and one actor update. The record is plain data, ready for JSON:

    schema           1
    model, prompt    what was traced
    columns          what the reward was given beside prompt and response; columns_source says
                     where it came from: "typed", "sum" (worked out), or a data file and line
    settings         the numbers of the recipe that enter the formulas
    shapes           of every tensor, [rows, tokens]; all lists below are row 0
    prompt_ids, prompt_tokens
    response         its text; response_given: typed, not sampled; finish_reason: eos, stop, length,
                     truncated
    turns, calls     with tools: who said what, and what was asked of whom, as in rollouts/
    score            of the reward; null where the critic's value replaces it
    greedy_score     ReMax's baseline; final_value: value after the last token
    tokens           lists with one number per token: response_ids, response_tokens, response_mask,
                     rollout_log_probs (null if the response was given), old_log_probs,
                     ref_log_probs, kl, values, token_level_scores, token_level_rewards, deltas,
                     advantages, returns, policy_advantages
    group            every row's response, score, token_level_reward (the row's sum) and advantage
                     (its first token's)
    weights          of each token in the actor's loss
    before, after    the objective before and after one update: new_log_probs, ratio,
                     objective_ratio (in GSPO the response's), cpi_terms, clipped_terms (null
                     unless the objective is the smaller of two terms), objective_terms, verdicts,
                     and the weighted sums l_cpi and objective
    new_values       the critic's values after its update; null without a critic
    metrics          what the trainer logged of both updates
    events           what was unusual
    printed          what the reward printed
    notes            keys of `explain.words`: what to keep in mind about these numbers

Numbers of tensors are float32 in shortest round-trip form.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tether.algo.advantages import gae
from tether.config import Config
from tether.config.load import merge_overrides, validate_config
from tether.errors import RunStopped, UserError
from tether.explain.document import to_fragment
from tether.explain.objective import is_surrogate, objective, whole_batch
from tether.explain.trace_setup import (
    GivenFirst,
    Subject,
    encode_response,
    find_columns,
    find_subject,
    restore,
)
from tether.explain.trace_text import tell
from tether.ppo.iteration import run_iteration
from tether.ppo.result import Outcome
from tether.ppo.roles import Roles, build_roles
from tether.ppo.rollout_log import rollout_rows
from tether.ppo.updates.actor import actor_objective, loss_inputs
from tether.rewards.functions import Reward
from tether.run.columns import WRITTEN
from tether.run.directory import SCHEMA
from tether.run.trust import SECTIONS, refuse_untrusted
from tether.run.writer import shortest_floats
from tether.train.fingerprint import refuse_lost_reward
from tether.types import CUT_OFF


def find_notes(record: Mapping[str, Any], subject: Subject) -> list[str]:
    """Return the notes that apply, in the order of the data flow."""
    config, tokens = subject.config, record["tokens"]
    has_critic = record["new_values"] is not None
    kl = config.kl
    remarks = {
        "note_given": record["response_given"],
        "note_sampled": not record["response_given"],
        "note_masked": not all(tokens["response_mask"]),
        "note_truncated": record["finish_reason"] in CUT_OFF and record["score"] is not None,
        "note_bootstrap": record["finish_reason"] in CUT_OFF and record["score"] is None,
        "note_no_reference": not kl.needs_reference,
        "note_same_reference": kl.needs_reference
        and subject.checkpoint is None
        and config.model.reference in (None, config.model.actor),
        "note_no_critic": not has_critic,
        "note_zero_head": has_critic and not any(tokens["values"]),
        "note_group": record["settings"]["rows"] > 1,
        "note_no_signal": not any(tokens["policy_advantages"]),
        "note_whitening": config.advantage.whitens,
        "note_fresh_adam": subject.checkpoint is None and "actor/lr" in record["metrics"],
        "note_restored_adam": subject.checkpoint is not None and "actor/lr" in record["metrics"],
        "note_not_saved": True,
    }
    return [name for name, said in remarks.items() if said]


SEED = 1  # apart from the usual 0, whose draws belong to training


def trace_prompt(
    model: str,
    prompt: str,
    response: str | None = None,
    columns: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    reward: Reward | None = None,
    trust_run: bool = False,
) -> "Trace":
    """Run one iteration on this prompt and return its record (see the module's docstring)."""
    if not prompt.strip():
        raise UserError("The prompt is empty; write something to respond to.")
    subject = find_subject(model, {"seed": SEED, **(overrides or {})})
    if subject.checkpoint is not None and not trust_run:
        used = ("model", "rollout") if reward is not None else SECTIONS
        refuse_untrusted(Path(model), subject.config.to_dict(), used, typed=[*(overrides or {})])
    if subject.checkpoint is not None and reward is None:
        refuse_lost_reward(Path(model), overrides or {})
    found = find_columns(prompt, columns or {}, subject.config, reward)
    torch.set_num_threads(subject.config.threads)
    config, roles = _build(subject, prompt, found.values, reward)
    try:
        restore(subject, roles, config)
        if response is not None:
            limit = config.rollout.max_response_tokens
            ids = encode_response(response, roles.vocabulary, limit)
            roles = replace(roles, sampler=GivenFirst(roles.sampler, ids))
        measured = _measure(subject, config, roles, given=response is not None)
    except (RunStopped, UserError) as stop:
        printed = _printed(roles)
        stop.args = (f"{stop} It had printed:\n{printed}" if printed else str(stop),)
        raise
    finally:
        roles.reward.close()
    record = {
        "schema": SCHEMA,
        "model": subject.name,
        "prompt": prompt,
        "columns": found.values,
        "columns_source": found.source,
        "settings": _settings(subject, config, sum(measured["tokens"]["response_mask"])),
        **measured,
        "printed": _printed(roles),
    }
    return Trace({**record, "notes": find_notes(record, subject)})


class Trace(dict[str, Any]):
    """The record of a trace: plain data, which a notebook shows in sections."""

    def _repr_html_(self) -> str:
        return to_fragment(tell(self, "en", explain=True))


def _printed(roles: Roles) -> str:
    """Return what the reward printed, once its process has ended."""
    roles.reward.close()
    return roles.reward.printed()


def _build(
    subject: Subject, prompt: str, columns: Mapping[str, Any], reward: Reward | None
) -> tuple[Config, Roles]:
    """Build the roles of a run whose data file holds one row."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompt.jsonl"
        row = {**columns, subject.config.data.prompt_column: prompt}
        path.write_text(json.dumps(row) + "\n", encoding="utf-8")
        config = one_prompt_config(subject.config, str(path))
        try:
            return config, build_roles(config, reward)
        except UserError as error:
            raise UserError(str(error).replace(f"{path}, line 1", "PROMPT")) from None


def one_prompt_config(config: Config, data: str) -> Config:
    """Return the config for one prompt: one step of critic and actor on all its rows.

    Without whitening, as a single row has no batch's mean and spread. Groups and TRPO need more
    rows than one.
    """
    samples = config.rollout.samples_per_prompt
    rows = samples if config.advantage.traits.by_group else 1
    if config.actor.update.natural_gradient:
        rows = max(rows, 2)
    critic = {} if config.critic.shared_trunk else {"epochs": 1, "minibatch_rows": rows}
    mapping = config.to_dict()
    merge_overrides(
        mapping,
        {
            "data.train": data,
            "data.heldout": None,
            "data.columns": {},  # the row has them under the names that the reward asks for
            "rollout.prompts": 1,
            "rollout.samples_per_prompt": rows,
            "rollout.sampler": "local",  # its log-probs are the trainer's: nothing to correct
            "rollout.correction.kind": "none",
            "rollout.lag": 0,
            "reward.max_failed_share": 1.0,  # a row without a score is an error below
            "advantage.whiten": False,
            "actor.epochs": 1,
            "actor.minibatch_rows": rows,
            "critic.warmup_iterations": 0,
            **({"advantage.truncation": "zero"} if config.advantage.truncation == "mask" else {}),
            **{f"critic.{field}": value for field, value in critic.items()},
        },
    )
    return validate_config(mapping)


def _measure(subject: Subject, config: Config, roles: Roles, given: bool) -> dict[str, Any]:
    """Run the iteration, then one more forward pass of the updated actor and critic."""
    controls = subject.controls
    aim = actor_objective(roles, config, controls)
    outcome = run_iteration(0, controls, roles, config)
    if not outcome.scores.usable[0]:
        reasons = [event.message for event in outcome.events if event.row == 0]
        raise UserError(f"The response could not be scored: {'; '.join(reasons)}.")

    batch = whole_batch(outcome.experience, config)
    with torch.no_grad():
        states = roles.actor.states(batch.sequences)
        new_log_probs, _ = roles.actor.log_probs_and_entropies(
            states, batch.sequences, batch.response_mask
        )
    with torch.no_grad():
        before = loss_inputs(batch.old_log_probs, states, batch, roles.actor, old_policy=None)
        after = loss_inputs(new_log_probs, states, batch, roles.actor, aim.old_policy)
    return {
        **_row(outcome, roles, config, given),
        "weights": shortest_floats(batch.weights[0, : _length(outcome)]),
        "before": objective(aim.update, before, batch),
        "after": objective(aim.update, after, batch),
        "new_values": _new_values(outcome, roles, config),
        "metrics": {**outcome.critic.meter.values(), **outcome.actor.meter.values()},
        "events": [f"{event.kind}: {event.message}" for event in outcome.events],
    }


def _row(outcome: Outcome, roles: Roles, config: Config, given: bool) -> dict[str, Any]:
    """Return row 0 as a run's rollout file has it, with deltas, and the other rows in short."""
    e = outcome.experience
    rows = rollout_rows(outcome, roles.vocabulary, config)
    row = rows[0]
    tokens = {name: row[name] for name in ("response_ids", "response_tokens", "response_mask")}
    # new_log_probs are those of `before`; of what is written only at times, what is there.
    tokens |= {c.name: row[c.name] for c in WRITTEN if c.name in row and c.name != "new_log_probs"}
    if given:
        tokens["rollout_log_probs"] = None
    # GAE with lambda 0 is the one-step error, delta.
    gamma = config.advantage.gamma
    rewards = e.token_level_rewards
    deltas = gae(rewards, e.values, e.final_values, e.response_mask, gamma, lam=0.0)
    tokens["deltas"] = shortest_floats(deltas[0, : _length(outcome)])
    shapes = {
        "prompt_ids": outcome.rollout.prompt_ids,
        "response_ids": outcome.rollout.response_ids,
        "scores": outcome.scores.values,
        "final_values": e.final_values,
        "rows_by_tokens": e.old_log_probs,
    }
    return {
        "shapes": {name: list(x.shape) for name, x in shapes.items()},
        "prompt_ids": row["prompt_ids"],
        "prompt_tokens": roles.vocabulary.pieces(row["prompt_ids"]),
        "response": row["response"],
        "response_given": given,
        "finish_reason": row["finish_reason"],
        **{name: row[name] for name in ("turns", "calls", "score_extras") if name in row},
        "score": row["score"],
        "greedy_score": row["greedy_score"],
        "final_value": row["final_value"],
        "tokens": tokens,
        "group": [
            {
                "response": other["response"],
                "score": other["score"],
                "token_level_reward": shortest_floats(rewards[i].sum()[None])[0],
                "advantage": other["advantages"][0],
            }
            for i, other in enumerate(rows)
        ],
    }


def _new_values(outcome: Outcome, roles: Roles, config: Config) -> list[float] | None:
    if not config.has_critic:
        return None
    e = outcome.experience
    values, _ = roles.critic.values(e.sequences, e.response_mask)
    return shortest_floats(values[0, : _length(outcome)])


def _length(outcome: Outcome) -> int:
    return int(outcome.rollout.response_lengths[0])


def _settings(subject: Subject, config: Config, tokens: int) -> dict[str, Any]:
    """Return the numbers of the formulas, for a row of so many sampled tokens."""
    update = subject.controls.applied_to(config.actor.update)
    return {
        "seed": config.seed,
        "temperature": config.rollout.temperature,
        "rows": config.rows,
        "reward": config.reward.label,
        "beta": subject.controls.beta,
        "kl_estimator": config.kl.in_reward.estimator,
        "estimator": config.advantage.estimator,
        "gamma": config.advantage.gamma,
        "lam": config.advantage.row_lam(tokens),
        "critic_lam": config.critic.lam,
        "truncation": config.advantage.truncation,
        "whitens": subject.config.advantage.whitens,
        "update": update.kind,
        "update_fields": update.model_dump(mode="json", exclude={"kind"}),
        "formula": update.formula,
        "bound": update.bound,
        "surrogate": is_surrogate(update),
        "aggregation": config.aggregation,
        "entropy_coef": config.actor.entropy_coef,
        "kl_in_loss_coef": config.kl.in_loss.coef,
        "actor_lr": config.actor.lr,
        "critic_lr": config.critic_lr if config.has_critic else None,
        "value_clip": config.critic.clip if config.has_critic else None,
    }
