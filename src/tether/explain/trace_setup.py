"""Find what is traced: a run's newest checkpoint, a recipe's model, or a model directory."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from tether.config import Config
from tether.config.load import load_config, read_recipe, shipped_recipes
from tether.data.batching import length_mask, pad_right
from tether.data.files import BadRow, read_file
from tether.data.generated import generated_rows
from tether.data.messages import parse_prompt, prompt_text, reward_columns
from tether.errors import UserError
from tether.models.locate import find_model
from tether.models.vocabulary import Vocabulary
from tether.ppo.result import Controls, first_controls
from tether.ppo.roles import Roles
from tether.rewards.functions import Reward, columns_for_reward
from tether.rollout.sampler import Draw, Episode, Greedy, Sampler
from tether.run.checkpoint_store import latest_checkpoint
from tether.run.directory import CONFIG, is_run
from tether.tasks.arithmetic import FORMS, make_problem
from tether.train.checkpoint import load_roles, read_controls, read_state
from tether.types import Rollout


@dataclass(frozen=True)
class Columns:
    """The columns that the reward is called with beside prompt and response."""

    values: dict[str, Any]
    source: str  # "typed", "sum", or the file and line; "" where there are none


def find_columns(
    prompt: str, typed: Mapping[str, str], config: Config, reward: Reward | None
) -> Columns:
    """Return the columns that the reward asks for: typed, from the prompt's row in a data file, or,
    if the prompt is a sum, computed."""
    wanted = columns_for_reward(config.reward, reward)
    if typed and set(wanted) <= set(typed):
        return Columns(dict(typed), "typed")
    found = _in_files(prompt, config) or _worked_out(prompt, config) or Columns({}, "")
    columns = Columns({**found.values, **typed}, "typed" if typed else found.source)
    missing = [name for name in wanted if name not in columns.values]
    if missing:
        raise UserError(
            f"The reward asks for {missing[0]!r}, and no row of the data has this prompt; give it "
            f"as --column {missing[0]}=VALUE."
        )
    return columns


def _in_files(prompt: str, config: Config) -> Columns | None:
    """Return the other columns of the first row with exactly this prompt."""
    column = config.data.prompt_column
    splits = [(file, False) for file in config.data.files("train")]
    splits += [(file, True) for file in config.data.files("heldout")]
    for file, heldout in splits:
        if file.is_environment:  # whose prompts nothing but a reset knows
            continue
        made = file.is_generated
        for row in generated_rows(file, column, heldout) if made else read_file(file.path):
            try:
                if prompt_text(parse_prompt(row.columns, column)) == prompt:
                    rest = reward_columns(row.columns, column, config.data.columns)
                    return Columns(rest, row.place)
            except BadRow:
                continue  # training refuses it or leaves it out; here the search goes on
    return None


def _worked_out(prompt: str, config: Config) -> Columns | None:
    """Return the answer if the prompt is a sum: one of the forms with its numbers put in."""
    if config.reward.kind != "exact_answer":
        return None
    numbers = [int(digits) for digits in re.findall(r"[0-9]+", prompt)]
    if len(numbers) not in (2, 3):
        return None
    a, b, claim = (*numbers, 0)[:3]
    problems = [make_problem(form, a, b, claim) for form in FORMS]
    answers = [problem.answer for problem in problems if problem.prompt == prompt]
    return Columns({"answer": answers[0]}, "sum") if answers else None


def encode_response(text: str, vocabulary: Vocabulary, limit: int) -> list[int]:
    """Return the ids of the text and EOS, as if the actor had sampled them."""
    end = vocabulary.tokenizer.eos_token_id
    ids = vocabulary.tokenizer(text, add_special_tokens=False).input_ids
    ids = [*ids, min(vocabulary.eos_ids) if end is None else end]
    if len(ids) > limit:
        raise UserError(
            f"--response has {len(ids)} tokens with its end, more than "
            f"rollout.max_response_tokens = {limit}; shorten it or add "
            f"--rollout.max_response_tokens {len(ids)}."
        )
    return ids


class GivenFirst:
    """A sampler that replaces row 0 by a given response.

    It was not sampled, so its `rollout_log_probs` are 0 and mean nothing. Greedy responses (ReMax's
    baseline) stay the model's own.
    """

    def __init__(self, sampler: Sampler, response_ids: list[int]) -> None:
        self.sampler = sampler
        self.given_ids = response_ids

    def sync(self, weights: PreTrainedModel, version: int) -> None:
        self.sampler.sync(weights, version)

    def run(
        self,
        episodes: Sequence[Episode],
        choice: Draw | Greedy,
        numbers: Sequence[int] | None = None,
    ) -> Rollout:
        rollout = self.sampler.run(episodes, choice)
        if isinstance(choice, Greedy):
            return rollout
        drawn, lengths = rollout.response_ids.tolist(), rollout.response_lengths.tolist()
        others = [ids[:n] for ids, n in zip(drawn, lengths, strict=True)][1:]
        log_probs = rollout.rollout_log_probs.tolist()
        other_log_probs = [row[:n] for row, n in zip(log_probs, lengths, strict=True)][1:]
        device = rollout.response_ids.device
        ids = pad_right([self.given_ids, *others], torch.long).to(device)
        counts = torch.tensor([len(self.given_ids), *lengths[1:]])
        return replace(
            rollout,
            response_ids=ids,
            response_lengths=counts,
            response_mask=length_mask(counts, ids.shape[1]).to(device),
            rollout_log_probs=pad_right(
                [[0.0] * len(self.given_ids), *other_log_probs], rollout.rollout_log_probs.dtype
            ).to(device),
            finish_reasons=("eos", *rollout.finish_reasons[1:]),
            calls=((), *rollout.calls[1:]) if rollout.calls else (),
            turn_rewards=((), *rollout.turn_rewards[1:]) if rollout.turn_rewards else (),
        )


RECIPE = "arithmetic"  # whose data and reward serve a bare model directory


@dataclass(frozen=True)
class Subject:
    """What is traced: a config, and of a run also its checkpoint and coefficients."""

    name: str
    config: Config
    controls: Controls
    checkpoint: Path | None  # of a run


def find_subject(name: str, overrides: Mapping[str, Any]) -> Subject:
    """Find what `name` means. A run has its own config, critic and beta; overrides come last."""
    path = Path(name)
    if is_ppo_run(path):
        config, checkpoint = load_config(path / CONFIG, overrides), latest_checkpoint(path)
        return Subject(name, config, _controls_of_run(checkpoint, config, overrides), checkpoint)
    if is_run(path):  # of a stage: weights, and neither data nor a reward for PPO
        name = str(latest_checkpoint(path) / "actor")
    if name in shipped_recipes() or path.suffix in (".yaml", ".yml"):
        config = load_config(name, overrides)
    else:
        config = load_config(RECIPE, {"model.actor": name, **overrides})
        find_model(config.model.actor, config.model.hub)  # before anything is asked of its data
    return Subject(name, config, first_controls(config), checkpoint=None)


def is_ppo_run(path: Path) -> bool:
    """Return whether it is a run of `tether train`, and not of a stage before it."""
    return is_run(path) and read_recipe(path / CONFIG).get("stage") is None


def _controls_of_run(checkpoint: Path, config: Config, overrides: Mapping[str, Any]) -> Controls:
    """Return the run's coefficients, or those that the command line gives."""
    typed = first_controls(config)
    try:
        controls = read_controls(read_state(checkpoint))
    except (KeyError, TypeError):
        raise UserError(f"{checkpoint} was written by another version of tether.") from None
    if "kl.in_reward.coef" in overrides:
        controls = replace(controls, beta=typed.beta)
    if any(field.startswith("actor.update.") for field in overrides):
        controls = replace(controls, penalty_coef=typed.penalty_coef)
    return controls


def restore(subject: Subject, roles: Roles, config: Config) -> None:
    """Load a run's weights and Adam moments into the roles."""
    if subject.checkpoint is None:
        return
    try:
        load_roles(subject.checkpoint, roles, config)
    except (OSError, SafetensorError, RuntimeError, IndexError) as error:
        reason = str(error).splitlines()[0].rstrip(".:")
        raise UserError(
            f"{subject.checkpoint} does not fit these fields: {reason}; leave out overrides that "
            f"change the models."
        ) from None
