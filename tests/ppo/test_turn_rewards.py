"""Rewards of turns and of tokens: where they land, and what GAE makes of them."""

import math
from dataclasses import fields, replace

import pytest
import torch
from helpers import configured, f64, table

import tether
from ppo.test_state_masking import CONTROLS, Said, letters_written, nudge
from tether.algo.advantages import AdvantageInputs, estimate_advantages, place_scores, shape_rewards
from tether.config import AdvantageSection
from tether.data.batching import concat_rollouts
from tether.ppo.iteration import run_iteration
from tether.ppo.scoring import score_rollout, try_reward, turn_ends
from tether.rewards.functions import RewardPart
from tether.rewards.scorers import EnvironmentScorer, InProcessScorer
from tether.types import Prompts, Rollout

# Row 0: turns of 2, 1 and 2 tokens with observations of 1 and 2 tokens between them.
# Row 1: one turn of 3 tokens, and an observation after it.
MASK = torch.tensor(
    [
        [True, True, False, True, False, False, True, True],
        [True, True, True, False, False, False, False, False],
    ]
)
LENGTHS = torch.tensor([8, 4])


class Context:
    def __init__(self, vocabulary, reward):
        self.vocabulary, self.reward = vocabulary, reward


def a_rollout(**fields) -> Rollout:
    ids = torch.arange(97, 97 + 16).view(2, 8)
    return Rollout(
        prompt_ids=torch.ones(2, 1, dtype=torch.long),
        prompt_lengths=torch.tensor([1, 1]),
        response_ids=ids,
        response_lengths=LENGTHS,
        response_mask=MASK,
        rollout_log_probs=torch.zeros(2, 8),
        **{"finish_reasons": ("stop", "length"), **fields},
    )


def prompts() -> Prompts:
    return Prompts(["?"] * 2, [[1]] * 2, [{}] * 2, [0, 1], ["f"] * 2, [None] * 2)


@pytest.fixture
def score(scored_config, vocabulary):
    """A function: score the two rows by a reward function, or by what their environment gave."""

    def run(reward=None, truncation="zero", **fields):
        scorer = (
            EnvironmentScorer(RewardPart("environment"))
            if reward is None
            else InProcessScorer(reward)
        )
        config = configured(
            scored_config, advantage__truncation=truncation, reward__max_failed_share=1.0
        )
        return score_rollout(prompts(), a_rollout(**fields), Context(vocabulary, scorer), config)

    return run


def by_turn(policy_turns):
    return tether.TurnRewards([0.5, -0.25, 2.0][: len(policy_turns)])


def test_a_turns_reward_lands_on_the_turns_last_sampled_token(score):
    scores, events = score(by_turn)
    assert scores.token_values.tolist() == [[0, 0.5, 0, -0.25, 0, 0, 0, 2.0], [0, 0, 0.5] + [0] * 5]
    assert scores.values.tolist() == [2.25, 0.5]
    assert events == []


def test_a_tokens_reward_lands_on_the_token(score):
    scores, _ = score(lambda policy_tokens: tether.TokenRewards(range(1, len(policy_tokens) + 1)))
    assert scores.token_values.tolist() == [[1, 2, 0, 3, 0, 0, 4, 5], [1, 2, 3, 0, 0, 0, 0, 0]]
    assert scores.values.tolist() == [15, 6]


def test_the_forms_may_differ_by_row_and_be_named_parts(score):
    def reward(response, policy_turns, policy_tokens):
        if len(policy_turns) == 1:
            return 3.0
        return {
            "whole": 10.0,
            "by_turn": tether.TurnRewards([1, 2, 3]),
            "by_token": {"tokens": [0.5] * 5},
        }

    scores, _ = score(reward)
    assert scores.token_values.tolist() == [
        [0.5, 1.5, 0, 2.5, 0, 0, 0.5, 13.5],
        [0, 0, 3] + [0] * 5,
    ]
    assert scores.values.tolist() == [18.5, 3]
    assert {name: x.tolist() for name, x in scores.parts.items()} == {
        "whole": [10, 0], "by_turn": [6, 0], "by_token": [2.5, 0]
    }  # fmt: skip


def test_a_number_for_the_response_needs_no_placing(score):
    scores, _ = score(lambda response: 1.5)
    assert scores.token_values is None
    assert scores.values.tolist() == [1.5, 1.5]


@table(
    ("said", "reason"),
    [
        (tether.TurnRewards([1.0, 2.0]), "gave 2 turns a number, but the row has 3"),
        (tether.TurnRewards([1.0] * 4), "gave 4 turns a number, but the row has 3"),
        (tether.TokenRewards([1.0] * 8), "gave 8 tokens a number, but the policy sampled 5"),
        (tether.TurnRewards([1.0, math.nan, 2.0]), "turn 2: the reward returned nan"),
        (tether.TurnRewards([1.0, None, 2.0]), "turn 2: the reward returned NoneType"),
        (tether.TokenRewards([1.0, math.inf]), "token 2: the reward returned inf"),
        (tether.TurnRewards([]), "list is empty"),
        (tether.TurnRewards("123"), "str, not a number per turn"),
        (tether.TurnRewards(3.0), "float, not a number per turn"),
        (tether.TurnRewards([1e15, 1e15, 0]), "sum to 2e+15"),
        ([1.0, 2.0, 3.0], r"list for one row; write tether.TurnRewards"),
        ({"turns": [1, 2, 3], "tokens": [1] * 5}, "with both in it"),
        ({"turns": [1, 2, 3], "style": 1.0}, "also 'style' in it; neither is the name of a part"),
        ({"style": [1.0]}, "part 'style': the reward returned a list"),
        ({"style": "good"}, "part 'style': the reward returned str"),
        ({}, "mapping without parts"),
        ({1: 2.0}, "named a part 1"),
        ({"a": 1.0, "b": None}, "returned None"),
        (
            {"a": tether.TurnRewards([1, 2]), "b": tether.TurnRewards([1, 2, 3])},
            "gave 2 and 3 numbers",
        ),
        (None, "returned None"),
    ],
    ids=str,
)
def test_what_does_not_fit_a_row_costs_that_row_and_is_named(score, said, reason):
    scores, [event, *_] = score(lambda policy_turns: said if len(policy_turns) > 1 else 1.0)
    assert event.row == 0
    assert event.kind == "unscorable"
    assert reason in event.message, event.message
    assert scores.usable.tolist() == [False, True]
    assert scores.values.tolist() == [0, 1]


def test_an_environments_rewards_are_the_score(score):
    scores, events = score(turn_rewards=((0.5, None, 2.0), (-1.0,)))
    assert scores.token_values.tolist() == [[0, 0.5, 0, 0, 0, 0, 0, 2.0], [0, 0, -1.0] + [0] * 5]
    assert scores.values.tolist() == [2.5, -1]
    assert events == []


def test_what_was_earned_before_a_truncation_counts_also_under_bootstrap(score):
    """A function scores a whole response: it is not asked about a row that was cut off."""
    given = ((0.5, None, 2.0), (-1.0,))
    for reason in ("length", "truncated"):
        scores, _ = score(
            truncation="bootstrap", turn_rewards=given, finish_reasons=("stop", reason)
        )
        assert scores.values.tolist() == [2.5, -1]
        assert scores.scored.tolist() == [True, True]
    scores, _ = score(by_turn, "bootstrap", finish_reasons=("truncated", "stop"))
    assert scores.values.tolist() == [0, 0.5]
    assert scores.scored.tolist() == [False, True]
    assert scores.usable.tolist() == [True, True]


@table(
    ("given", "reason"),
    [
        ((), "the environment failed"),
        ((1.0, 2.0), "gave 2 turns a number, but the row has 3"),
        ((1.0, math.nan, 0.0), "gave nan for turn 2"),
        ((1.0, 0.0, -math.inf), "gave -inf for turn 3"),
    ],
)
def test_an_environment_that_failed_costs_its_row(score, given, reason):
    scores, [event] = score(turn_rewards=(given, (1.0,)))
    assert reason in event.message
    assert scores.usable.tolist() == [False, True]


def test_turns_end_where_a_run_of_sampled_tokens_ends():
    assert turn_ends([0, 1, 3, 6, 7]) == [1, 3, 7]
    assert turn_ends([4]) == [4]
    assert turn_ends([]) == []


def test_rollouts_of_several_processes_keep_their_turn_rewards():
    one, other = a_rollout(turn_rewards=((1.0,), ())), a_rollout()
    assert concat_rollouts([one, other]).turn_rewards == ((1.0,), (), (), ())
    assert concat_rollouts([other, other]).turn_rewards == ()


# gamma 0.9, lambda 0.5, so gamma x lambda = 0.45; beta 0.1. The five sampled tokens of row 0, as if
# the masked columns were not there:
#   scores   0     0.5   -0.25  0     2          KL   0.1   0.2   0.1   0     0.5
#   rewards  -0.01 0.48  -0.26  0     1.95       V    1     2     0.5   1     1.5
# delta_t = r_t + 0.9 V_(t+1) - V_t, A_t = delta_t + 0.45 A_(t+1):
#   deltas   0.79  -1.07 0.14   0.35  0.45 + 0.9 x final
KL = f64([[0.1, 0.2, 0, 0.1, 0, 0, 0, 0.5]])
VALUES = f64([[1, 2, 0, 0.5, 0, 0, 1, 1.5]])


@table(
    ("final", "expected"),
    [
        # A_5 = 0.45; A_4 = 0.35 + 0.2025; A_3 = 0.14 + 0.248625; A_2 = -1.07 + 0.17488125;
        # A_1 = 0.79 - 0.4028034375
        (0.0, [0.3871965625, -0.89511875, 0, 0.388625, 0, 0, 0.5525, 0.45]),
        # truncated under bootstrap, V = 2 after the last token: 0.45 + 1.8 = 2.25 is A_5;
        # A_4 = 0.35 + 1.0125; A_3 = 0.14 + 0.613125; A_2 = -1.07 + 0.33890625;
        # A_1 = 0.79 - 0.3289921875
        (2.0, [0.4610078125, -0.73109375, 0, 0.753125, 0, 0, 1.3625, 2.25]),
    ],
)
def test_gae_over_the_turns_of_a_dialogue(final, expected):
    placed = f64([[0, 0.5, 0, -0.25, 0, 0, 0, 2.0]])
    mask = MASK[:1]
    rewards = shape_rewards(place_scores(f64([2.25]), mask, placed), KL, 0.1)
    assert rewards[0].tolist() == pytest.approx([-0.01, 0.48, 0, -0.26, 0, 0, 0, 1.95])
    section = AdvantageSection(gamma=0.9, lam=0.5)
    inputs = AdvantageInputs(rewards, VALUES, f64([final]), f64([2.25]), f64([0.0]), mask, 1)
    assert estimate_advantages(section, inputs)[0].tolist() == pytest.approx(expected)


def test_gae_over_token_rewards():
    """The same row with rewards 1 to 5 and no KL, lambda 1: sums of what follows, minus V.

    A_5 = 5 - 1.5; A_4 = 4 + 0.9 x 5 - 1; A_3 = 3 + 0.9 x 8.5 - 0.5; A_2 = 2 + 0.9 x 10.65 - 2;
    A_1 = 1 + 0.9 x 11.585 - 1
    """
    placed, mask = f64([[1, 2, 0, 3, 0, 0, 4, 5]]), MASK[:1]
    inputs = AdvantageInputs(
        place_scores(f64([15.0]), mask, placed),
        VALUES,
        f64([0.0]),
        f64([15.0]),
        f64([0.0]),
        mask,
        1,
    )
    found = estimate_advantages(AdvantageSection(gamma=0.9, lam=1.0), inputs)[0].tolist()
    assert found == pytest.approx([10.4265, 9.585, 0, 10.15, 0, 0, 7.5, 3.5])


@table("estimator", ["grpo", "dr_grpo", "rloo", "opo"])
def test_a_group_is_compared_by_the_sums_of_its_rows(estimator):
    """Where in a row its rewards are does not matter to an estimator of whole rows."""
    mask = torch.ones(2, 3, dtype=torch.bool)
    scores, nothing = f64([2.0, 5.0]), f64([0.0, 0.0])

    def advantages(placed):
        rewards = place_scores(scores, mask, placed)
        inputs = AdvantageInputs(rewards, 0 * rewards, nothing, scores, nothing, mask, 2)
        return estimate_advantages(AdvantageSection(estimator=estimator), inputs)

    spread = advantages(f64([[1, 1, 0], [3, 0, 2]]))
    assert torch.allclose(spread, advantages(None), atol=1e-12)
    assert spread[0, 0] < 0 < spread[1, 0]


def only_the_last_turn(policy_turns):
    return tether.TurnRewards([0.0] * (len(policy_turns) - 1) + [letters_written(policy_turns)])


def observed(row: int, turn: int) -> list[int]:
    return [7, 8, 9][: 1 + (row + turn) % 3]


@table("settings", [{}, {"advantage__truncation": "bootstrap"}, {"advantage__estimator": "grpo"}])
def test_zero_for_all_turns_but_the_last_is_a_number_for_the_response(build, settings):
    """Row by row, and every weight after the updates, bit for bit."""

    def iterated(reward):
        roles, config = build(reward, rollout__max_response_tokens=60, **settings)
        nudge(roles.reference.policy.model)
        roles = replace(roles, sampler=Said(roles.actor, observed, at_the_end=True))
        outcome = run_iteration(0, CONTROLS, roles, config)
        return outcome, outcome.metrics(config), list(roles.actor.model.parameters())

    (plain, metrics, weights), (turns, same, moved) = map(
        iterated, (letters_written, only_the_last_turn)
    )
    assert plain.scores.token_values is None
    assert turns.scores.token_values is not None
    assert metrics == same
    assert all(map(torch.equal, weights, moved))
    assert plain.experience.rows is turns.experience.rows
    names = {f.name for f in fields(plain.experience)} - {"sequences", "rows"}
    for name in names:
        assert torch.equal(getattr(plain.experience, name), getattr(turns.experience, name)), name


def test_an_environment_is_not_tried_on_responses_that_nobody_played(scored_config):
    prompts = Prompts(["1+1=?"], [[1]], [{"answer": "2"}], [0], ["rows.jsonl"], [None])
    assert (
        try_reward(EnvironmentScorer(RewardPart("environment")), prompts, configured(scored_config))
        == []
    )
