"""What tools said enters no number of training: real iterations over rows with and without it.

The networks here have no attention, so a log-prob and a value depend on one token alone: the one
before. Observations that end with the very token that they follow then change no log-prob, and
whatever else differs from the row without them is an observation that leaked into the maths.
"""

from dataclasses import replace

import pytest
import torch
from helpers import PLAIN_ESTIMATORS
from transformers.models.llama.modeling_llama import LlamaAttention

from ppo.test_iteration import nudge
from tether.data.batching import join, pad_left, pad_right
from tether.ppo.experience import unmask_observations
from tether.ppo.iteration import run_iteration
from tether.ppo.result import Controls
from tether.types import Rollout

EOS = 256
CONTROLS = Controls(beta=0.3, penalty_coef=0.7)
KINDS = ["clip", "penalty", "trpo", "cpi", "reinforce", "gspo", "cispo", "dppo"]
AGGREGATIONS = [
    "token_mean",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
]


def letters_written(policy_turns: list[str]) -> float:
    """A reward of what the policy wrote alone."""
    return len(set("".join(policy_turns))) / 8


def turns_of(row: int) -> list[list[int]]:
    """What the policy wrote in this row, turn by turn; even rows end with EOS."""
    generator = torch.Generator().manual_seed(row)
    turns = [
        torch.randint(0, 250, (1 + (row + turn) % 4,), generator=generator).tolist()
        for turn in range(1 + row % 3)
    ]
    return turns if row % 2 else [*turns[:-1], [*turns[-1], EOS]]


def no_observations(row: int, turn: int) -> list[int]:
    return []


def short_observations(row: int, turn: int) -> list[int]:
    return [17]


def long_observations(row: int, turn: int) -> list[int]:
    generator = torch.Generator().manual_seed(100 * row + turn)
    return torch.randint(0, 260, (3 + 5 * row % 23,), generator=generator).tolist()


class Said:
    """A sampler that returns rows as if they had been sampled with these observations."""

    def __init__(self, actor, observation, at_the_end: bool) -> None:
        self.actor, self.observation, self.at_the_end = actor, observation, at_the_end

    def sync(self, weights, version) -> None:
        pass

    def run(self, episodes, choice, numbers=None) -> Rollout:
        ids, masks = zip(*(self.row(i) for i in range(len(episodes))), strict=True)
        prompts = [episode.prompt_ids for episode in episodes]
        rollout = Rollout(
            prompt_ids=pad_left(prompts),
            prompt_lengths=torch.tensor([len(p) for p in prompts]),
            response_ids=pad_right(ids, torch.long),
            response_lengths=torch.tensor([len(i) for i in ids]),
            response_mask=pad_right(masks, torch.bool),
            rollout_log_probs=pad_right(masks, torch.float64),
            finish_reasons=tuple("length" if i % 2 else "eos" for i in range(len(ids))),
        )
        log_probs = self.actor.log_probs(join(rollout), rollout.response_mask)
        return replace(rollout, rollout_log_probs=log_probs)

    def row(self, number: int) -> tuple[list[int], list[bool]]:
        """An observation between turns and, in truncated rows, after the last."""
        turns, ids, mask = turns_of(number), [], []
        for turn, written in enumerate(turns):
            ids += written
            mask += [True] * len(written)
            if turn + 1 < len(turns) or (self.at_the_end and number % 2):
                said = self.observation(number, turn)
                said = [*said, written[-1]] if said else []
                ids += said
                mask += [False] * len(said)
        return ids, mask


@pytest.fixture
def no_attention(monkeypatch):
    """Every layer reads its own token only; its attention's weights have gradients of 0."""

    def forward(layer, hidden_states, *args, **kwargs):
        projected = layer.q_proj, layer.k_proj, layer.v_proj
        return 0.0 * layer.o_proj(sum(f(hidden_states) for f in projected)), None

    monkeypatch.setattr(LlamaAttention, "forward", forward)


@pytest.fixture
def trained(build, float64_norms, no_attention):
    """A function: one whole iteration with these observations; its metrics and what it moved."""

    def run(observation, at_the_end: bool = True, **dotted):
        roles, config = build(
            letters_written, model__dtype="float64", rollout__max_response_tokens=60, **dotted
        )
        nudge(roles.reference.policy.model)
        if config.has_critic and not config.critic.shared_trunk:
            nudge(roles.critic, size=0.3)
        roles = replace(roles, sampler=Said(roles.actor, observation, at_the_end))
        outcome = run_iteration(0, CONTROLS, roles, config)
        return outcome, outcome.metrics(config), roles

    return run


def cells(outcome, name: str) -> torch.Tensor:
    """The True cells of a tensor, row after row."""
    return getattr(outcome.experience, name)[outcome.experience.response_mask]


def assert_same_training(with_tools, without) -> None:
    outcome, metrics, roles = with_tools
    plain, plain_metrics, plain_roles = without
    assert outcome.rollout.response_mask.sum() == plain.rollout.response_mask.sum()
    for name in (
        "old_log_probs",
        "ref_log_probs",
        "kl",
        "values",
        "token_level_scores",
        "token_level_rewards",
        "advantages",
        "returns",
        "policy_advantages",
    ):
        torch.testing.assert_close(cells(outcome, name), cells(plain, name), rtol=0, atol=1e-9)
        outside = getattr(outcome.experience, name)[~outcome.experience.response_mask]
        assert not outside.any(), name
    assert metrics == pytest.approx(plain_metrics, rel=1e-7, abs=1e-9)
    for name in ("actor", "critic"):
        models = [getattr(r, name) for r in (roles, plain_roles)]
        if not hasattr(models[0], "parameters"):
            models = [getattr(model, "model", torch.nn.Identity()) for model in models]
        for a, b in zip(*(model.parameters() for model in models), strict=True):
            # Adam divides by the root of a squared gradient: rounding of tiny ones is magnified.
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("observation", [short_observations, long_observations])
@pytest.mark.parametrize("truncation", ["zero", "bootstrap"])
def test_observations_change_no_number_of_gae_kl_whitening_losses_and_metrics(
    trained, observation, truncation
):
    """Trap 11. The value before a token that follows tool output is read at the output's last
    token, as is the value after a truncated row."""
    fields = {"advantage__truncation": truncation, "advantage__gamma": 0.9}
    assert_same_training(trained(observation, **fields), trained(no_observations, **fields))


def test_the_observations_of_these_tests_are_there(trained):
    outcome, _, _ = trained(long_observations)
    rollout = outcome.rollout
    assert int(rollout.response_lengths.sum()) > 3 * int(rollout.response_mask.sum())
    assert any(rollout.response_mask[row, 0] for row in range(12))


@pytest.mark.parametrize("kind", KINDS)
def test_no_update_learns_from_observations(trained, kind):
    fields = {"actor__update": {"kind": kind}}
    if kind == "trpo":  # its one step maximises the surrogate alone
        fields["actor__entropy_coef"] = 0.0
    else:
        fields |= {"kl__in_loss__coef": 0.1, "actor__stop_kl": 50.0}
    assert_same_training(trained(long_observations, **fields), trained(no_observations, **fields))


@pytest.mark.parametrize("estimator", PLAIN_ESTIMATORS)
def test_no_estimator_counts_observations(trained, estimator):
    fields = {"advantage__estimator": estimator, "advantage__gamma": 0.9}
    assert_same_training(trained(long_observations, **fields), trained(no_observations, **fields))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_no_aggregation_counts_observations(trained, aggregation):
    fields = {"actor__aggregation": aggregation}
    assert_same_training(trained(long_observations, **fields), trained(no_observations, **fields))


def test_a_value_head_on_the_actors_trunk_does_not_learn_from_observations(trained):
    fields = {
        "critic": {"shared_trunk": True},
    }
    assert_same_training(trained(long_observations, **fields), trained(no_observations, **fields))


def test_the_score_lands_on_the_last_token_that_the_policy_wrote(trained):
    """Trap 9: though an observation follows it."""
    outcome, _, _ = trained(long_observations)
    for row in range(1, 12, 2):
        placed = outcome.experience.token_level_scores[row].nonzero().squeeze(1).tolist()
        written = outcome.rollout.response_mask[row].nonzero().squeeze(1).tolist()
        assert placed == [written[-1]]
        assert written[-1] < int(outcome.rollout.response_lengths[row]) - 1


UNMASKED = {
    "rollout__tools": ["calculator"],
    "rollout__max_observation_tokens": 40,
    "rollout__state_masking": False,
}


def test_without_state_masking_every_number_changes(trained):
    """The ablation, and the proof that the comparisons above can fail."""
    masked, unmasked = trained(long_observations), trained(long_observations, **UNMASKED)
    lengths = unmasked[0].rollout.response_lengths
    assert unmasked[0].experience.response_mask.sum() == lengths.sum()
    for name in ("advantage/std", "kl/token_mean", "actor/pg_loss", "critic/vf_loss"):
        assert masked[1][name] != pytest.approx(unmasked[1][name], rel=1e-3), name


def test_unmasked_tokens_get_the_training_forwards_log_probs(trained):
    """Nobody sampled them. What the policy wrote keeps the sampler's."""
    masked, unmasked = trained(long_observations)[0], trained(long_observations, **UNMASKED)[0]
    written = masked.rollout.response_mask
    before, after = masked.rollout.rollout_log_probs, unmasked.rollout.rollout_log_probs
    assert torch.equal(before[written], after[written])
    gap = after - unmasked.experience.old_log_probs
    torch.testing.assert_close(gap, torch.zeros_like(gap), rtol=0, atol=1e-9)
    assert (after[unmasked.rollout.response_mask] < 0).all()


def test_only_unmasking_makes_observed_tokens_count(trained):
    outcome, _, roles = trained(long_observations)
    rollout, unmasked = outcome.rollout, unmask_observations(outcome.rollout, roles.actor)
    assert rollout.response_mask.sum() < rollout.response_lengths.sum()
    assert unmasked.response_mask.sum() == rollout.response_lengths.sum()
