"""Rows stay with the process that sampled them: tokens and text are there alone."""

from collections import Counter
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from helpers import changed, configured, sequences_of
from torch import Tensor

from dist.processes import run_processes
from dist.test_runs import assert_same, at, letters, ragged, train  # noqa: F401
from tether.algo.advantages import ESTIMATORS, AdvantageInputs, WeightedReward, estimate_advantages
from tether.algo.importance import effective_share
from tether.algo.masked import cell_weights, explained_variance, masked_moments
from tether.config import AdvantageSection
from tether.data.loans import lend
from tether.dist.collectives import exchange, gather_sharing
from tether.dist.rows import SpreadRows, of_rows, spread
from tether.dist.world import entered, world
from tether.models.vocabulary import Vocabulary
from tether.ppo.iteration import run_iteration
from tether.ppo.result import first_controls
from tether.ppo.roles import build_roles
from tether.rewards.scorers import Batch, score_across_processes
from tether.types import ALL_HERE


def tensors_of(value: Any) -> dict[str, Tensor]:
    """Every tensor of a dataclass and of those in it, by its name."""
    found = {}
    for field in fields(value):
        inner = getattr(value, field.name)
        if isinstance(inner, Tensor):
            found[field.name] = inner
        elif is_dataclass(inner):
            found |= {f"{field.name}.{name}": x for name, x in tensors_of(inner).items()}
    return found


def iterate(config: dict) -> dict[str, Any]:
    """One iteration: which rows are here, the sizes of all that is kept, what was decoded."""
    with entered("cpu", 1, 60.0):
        settings = configured(config)
        roles = build_roles(settings, letters)
        decoded, decode = [], Vocabulary.decode
        Vocabulary.decode = lambda self, ids: decoded.append(tuple(ids)) or decode(self, ids)
        outcome = run_iteration(0, first_controls(settings), roles, settings)
        kept = tensors_of(outcome.rollout) | tensors_of(outcome.experience)
        kept |= tensors_of(outcome.scores) | {"new_log_probs": outcome.actor.new_log_probs}
        rows, rollout = outcome.experience.rows, outcome.rollout
        lengths = rollout.response_lengths.tolist()
        ids = [row[:n] for row, n in zip(rollout.response_ids.tolist(), lengths, strict=True)]
        return {
            "numbers": of_rows(rows, range(15)),
            "sizes": {name: tuple(x.shape) for name, x in kept.items()},
            "cells": sum(x.numel() for x in kept.values()),
            "decoded": decoded,
            "responses": [tuple(row) for row in ids],
            "prompts": len(outcome.prompts),
        }


def test_tokens_and_numbers_are_with_their_owner_alone_and_text_is_decoded_once(ragged):  # noqa: F811
    """15 rows on two processes: 7 here, 8 there, and five prompts, of which the third is cut."""
    [alone] = run_processes(1, iterate, ragged)
    found = run_processes(2, iterate, ragged)
    assert [one["numbers"] for one in found] == [[*range(7)], [*range(7, 15)]]
    for one in found:
        assert {name: shape[0] for name, shape in one["sizes"].items()} == {
            name: len(one["numbers"]) for name in [*alone["sizes"], "rows.numbers"]
        }
        assert one["prompts"] == len(one["numbers"])
    assert sum(one["cells"] for one in found) <= alone["cells"] + 2 * 15  # and the numbers
    responses = [row for one in found for row in one["responses"]]
    assert responses == alone["responses"]
    decoded = Counter(ids for one in found for ids in one["decoded"])
    assert decoded == Counter(responses) == Counter(alone["decoded"])


GENERATOR = torch.Generator().manual_seed(3)
SAMPLES, ALL = 3, 12
MASK = torch.arange(6) < torch.randint(0, 7, (ALL, 1), generator=GENERATOR)
DRAWN = torch.randn(4, ALL, 6, generator=GENERATOR, dtype=torch.float64) * MASK
NUMBERS = torch.randn(3, ALL, generator=GENERATOR, dtype=torch.float64)


def numbers_of(rows: Any) -> dict[str, Tensor]:
    """All that compares a row with others, for the rows here: by estimator or name."""
    mask, (rewards, values, returns, kl) = rows.own(MASK), (rows.own(x) for x in DRAWN)
    scores, greedy, final = (rows.own(x) for x in NUMBERS)
    parts = [WeightedReward(1.0, scores), WeightedReward(0.5, greedy)]
    found = {}
    for name in ESTIMATORS:
        inputs = AdvantageInputs(
            rewards, values, final, scores, greedy, mask, SAMPLES, parts, kl, rows
        )
        section = AdvantageSection(estimator=name)
        found[name] = estimate_advantages(section, inputs)
    for mode in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum"):
        found[mode] = cell_weights(mode, mask, 6, torch.float64, rows)
    moments = masked_moments(rewards, mask, rows)
    found |= {"mean": moments.mean, "variance": moments.variance, "count": moments.count}
    found["explained"] = explained_variance(values, returns, mask, rows)
    found["share"] = effective_share(values, mask, rows)
    found["share of rows"] = effective_share(values.sum(dim=1), mask.any(dim=1), rows)
    return found


def spread_numbers(blocks: list[list[int]]) -> dict[str, Any]:
    """The same for the rows of a process, then those of all where they are of rows."""
    with entered("cpu", 1, 60.0):
        rows = SpreadRows(torch.tensor(blocks[world().rank], dtype=torch.long), ALL)
        found = numbers_of(rows)
        return {name: (rows.everyone(x) if x.ndim else x).tolist() for name, x in found.items()}


@pytest.mark.parametrize("blocks", [[[*range(5)], [*range(5, 12)], []]])
def test_rows_are_compared_with_those_of_other_processes(blocks):
    """Groups of three, cut between their first and second process; the third has no row."""
    expected = numbers_of(ALL_HERE)
    for found in run_processes(3, spread_numbers, blocks):
        for name, x in expected.items():
            same = torch.tensor(found[name], dtype=x.dtype)
            torch.testing.assert_close(same, x, rtol=0, atol=1e-12, msg=name)


ROWS = [([1] * p, [2 + i] * r) for i, (p, r) in enumerate([(2, 9), (1, 1), (3, 3), (2, 2), (4, 7)])]
HELD = [[0, 1], [], [2, 3, 4]]


def lent() -> dict[str, Any]:
    """Pass rows through a loan; what comes back is the sum of each row's ids."""
    with entered("cpu", 1, 60.0):
        whole = sequences_of(ROWS)
        own = whole.select(torch.tensor(HELD[world().rank], dtype=torch.long))
        loan = lend(own, max_tokens=12)
        borrowed = loan.out(own)
        ids = borrowed.ids
        sums = torch.full((len(ids),), -1)
        for part in loan.microbatches:
            if not part.idle:
                sums[part.rows] = borrowed.select(part.rows).ids.sum(dim=1)
        returned, columns = loan.back((sums, ids), 16)
        parts = exchange([f"{world().rank} to {rank}" for rank in range(3)])
        counted = [len(part.rows) for part in loan.microbatches if not part.idle]
        return {
            "sums": returned.tolist(),
            "columns": columns.sum(dim=1).tolist(),
            "tokens": sum(map(int, (borrowed.prompt_lengths + borrowed.response_lengths))),
            "counted": sum(counted),
            "microbatches": len(loan.microbatches),
            "given": parts,
            "sharing": gather_sharing(world().rank),
        }


def test_borrowed_rows_are_balanced_and_what_is_found_comes_back():
    """34 tokens in all: at most 12 for each, and a row of 2 to be idle with. One has no row."""
    found = run_processes(3, lent)
    for rank, one in enumerate(found):
        expected = [sum(ROWS[row][0]) + sum(ROWS[row][1]) for row in HELD[rank]]
        assert one["sums"] == one["columns"] == expected
        assert one["given"] == [f"{other} to {rank}" for other in range(3)]
        assert one["sharing"] == [rank]
    assert sum(one["counted"] for one in found) == len(ROWS)
    assert len({one["microbatches"] for one in found}) == 1
    assert max(one["tokens"] for one in found) <= 13


def scored(fails: bool = False) -> Any:
    """Verdicts of seven rows, three of a prompt; each names the prompt's rows it was given with."""
    with entered("cpu", 1, 60.0):
        rows = spread(7)
        numbers = of_rows(rows, range(7))

        def score(given: Any, batch: Batch) -> list[str]:
            if fails and world().rank == 1:
                raise ValueError("no such thing")
            prompts = [[given[i]["text"] for i in places] for places in batch.prompts()]
            return [f"{world().rank}: {' '.join(p)}" for p in prompts for _ in p]

        asked = [{"text": f"row {number}"} for number in numbers]
        try:
            return score_across_processes(asked, Batch(numbers, 0, 3), score)
        except ValueError as error:
            return str(error)


def test_the_rows_of_a_prompt_are_scored_together_by_the_first_that_has_one():
    first, second = run_processes(2, scored)
    a, b, c = "0: row 0 row 1 row 2", "1: row 3 row 4 row 5", "1: row 6"
    assert (first, second) == ([a] * 3, [b] * 3 + [c])
    one, two, three = run_processes(3, scored)  # rows 0 1, 2 3 and 4 5 6
    assert (one, two, three) == ([a] * 2, [a, b], [b, b, "2: row 6"])
    assert run_processes(2, scored, True) == ["no such thing"] * 2


MORE = {
    "dynamic sampling": {
        "advantage__estimator": "grpo",
        "critic": {},
        "rollout__dynamic_sampling": {"max_rounds": 3},
        "kl__in_reward": {"controller": "adaptive"},
    },
    "value pretraining": {
        "critic__pretrain": {"prompts": 8, "max_epochs": 2, "explained_variance": None}
    },
    "curriculum": {
        "data__curriculum": {"by": "difficulty"},
        "advantage__estimator": "rloo",
        "critic": {},
    },
    "correction by rows": {"rollout__correction": {"kind": "sequence"}},
    "masked": {"advantage__truncation": "mask"},
    "bootstrapped, shared prompts": {"advantage__truncation": "bootstrap"},
    "shared layers": {"launch": {"weights": "sharded", "tensor_parallel": 2}},
}


@pytest.mark.long
@pytest.mark.parametrize("change", MORE)
def test_what_needs_all_rows_is_the_same_on_several_processes(ragged, change):  # noqa: F811
    config = changed(ragged, **MORE[change])
    [one] = run_processes(1, train, at(changed(config, launch={}), "one"))
    several, *_ = run_processes(4 if change == "shared layers" else 3, train, at(config, "several"))
    assert_same(one, several, 1e-9)
