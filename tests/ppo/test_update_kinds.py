"""Every kind of update, aggregation and KL term, against loops over cells; then whole runs."""

import json
import math
from dataclasses import fields, replace

import pytest
import torch
from helpers import (
    PLAIN_ESTIMATORS,
    captured_gradients,
    changed,
    configured,
    distinct_letters,
    logits_before,
    made_experience,
    read_jsonl,
    slow_log_probs,
    tiny_recipe,
)

import tether
from tether.config import ESTIMATORS
from tether.models.critic import Critic, NoCritic
from tether.models.policy import FrozenReference, NoReference
from tether.ppo import roles as roles_module
from tether.ppo.iteration import run_iteration
from tether.ppo.result import Controls, first_controls
from tether.ppo.roles import build_roles
from tether.ppo.rollout_log import rollout_rows
from tether.ppo.updates import minibatches
from tether.ppo.updates.actor import actor_objective, exact_kl, update_actor
from tether.types import Sequences

WHOLE = {
    "model__dtype": "float64",
    **{"actor__epochs": 1, "actor__minibatch_rows": 7, "actor__entropy_coef": 0.0},
}
ROW_TOKENS = 1  # one row a microbatch
FEW_TOKENS = 24  # two or three rows a microbatch
PENALTY = 0.7

KINDS = {
    "clip": {"kind": "clip", "eps_low": 0.1, "eps_high": 0.2},
    "dual clip": {"kind": "clip", "eps_low": 0.1, "eps_high": 0.2, "dual_clip": 1.1},
    "penalty": {"kind": "penalty", "coef": PENALTY},
    "cpi": {"kind": "cpi"},
    "reinforce": {"kind": "reinforce"},
    "gspo": {"kind": "gspo", "eps_low": 0.1, "eps_high": 0.1},
    "cispo": {"kind": "cispo", "eps_low": 0.2, "eps_high": 0.1},
    "dppo": {"kind": "dppo", "max_divergence": 1e-3},
    "dppo by kl": {"kind": "dppo", "divergence": "kl", "max_divergence": 1e-4},
}
AGGREGATIONS = (
    *("token_mean", "seq_mean_token_mean"),
    *("seq_mean_token_sum", "seq_mean_token_sum_norm"),
)


def true_cells(experience) -> dict[int, tuple[list[int], list[int], list[int]]]:
    """Prompt, response and True columns of every row that has some."""
    s, found = experience.sequences, {}
    for row, ids in enumerate(s.ids.tolist()):
        p, r = int(s.prompt_lengths[row]), int(s.response_lengths[row])
        columns = [t for t in range(r) if experience.response_mask[row, t]]
        if columns:
            found[row] = ids[:p], ids[p : p + r], columns
    return found


def slow_policy_loss(name: str, new, old: float, advantage: float, row_mean: float):
    """One token's loss as written in ALGORITHMS.md; `new` carries the gradient."""
    ratio = torch.exp(new - old)
    number = float(ratio.detach())
    match name:
        case "clip" | "dual clip":
            held = min(max(number, 0.9), 1.2)
            flat = -held * advantage > -number * advantage
            loss = torch.zeros_like(new) - held * advantage if flat else -ratio * advantage
            if name == "dual clip" and advantage < 0 and float(loss.detach()) > -1.1 * advantage:
                return torch.zeros_like(new) - 1.1 * advantage
            return loss
        case "penalty":
            return -ratio * advantage + PENALTY * (ratio - (new - old) - 1)
        case "cpi":
            return -ratio * advantage
        case "reinforce":
            return -advantage * new
        case "gspo":
            number = math.exp(row_mean)
            ratio = number * torch.exp(new - float(new.detach()))
            held = min(max(number, 0.9), 1.1)
            flat = -held * advantage > -number * advantage
            return torch.zeros_like(new) - held * advantage if flat else -ratio * advantage
        case "cispo":
            return -min(max(number, 0.8), 1.1) * advantage * new
        case "dppo" | "dppo by kl":
            p, q = math.exp(old), math.exp(float(new.detach()))
            tv, kl = abs(p - q), p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
            far = tv > 1e-3 if name == "dppo" else kl > 1e-4
            dropped = far and (number - 1) * advantage > 0
            return torch.zeros_like(new) if dropped else -ratio * advantage


def slow_kl(estimator: str, new, ref: float, old: float):
    """One token's KL term, weighted by the ratio where that is right; the + forms as k2."""
    q = new - ref
    match estimator:
        case "k2" | "k1+" | "k3+":
            return q**2 / 2
        case "k1":
            return torch.exp(new - old) * q
        case "k3":
            return torch.exp(new - old) * (torch.exp(-q) - 1 + q)


def weight_of(aggregation: str, rows: dict, row: int) -> float:
    tokens = {r: len(columns) for r, (_, _, columns) in rows.items()}
    return {
        "token_mean": 1 / sum(tokens.values()),
        "seq_mean_token_mean": 1 / len(tokens) / tokens[row],
        "seq_mean_token_sum": 1 / len(tokens),
        "seq_mean_token_sum_norm": 1 / len(tokens) / 12,  # rollout.max_response_tokens
    }[aggregation]


def slow_gradients(
    roles, experience, name, aggregations, entropy_coef=0.0, kl=None
) -> list[torch.Tensor]:
    """Gradient of policy loss - entropy bonus + 0.3 x KL, cell by cell, for each aggregation."""
    rows, totals = true_cells(experience), [0.0] * len(aggregations)
    for row, (prompt, response, columns) in rows.items():
        log_p = torch.log_softmax(logits_before(roles.actor.model, prompt, response), dim=-1)
        if kl == "full":
            logits = logits_before(roles.reference.policy.model, prompt, response)
            log_ref = torch.log_softmax(logits, dim=-1).detach()
        old = experience.old_log_probs[row].tolist()
        gaps = [float(log_p[t, response[t]].detach()) - old[t] for t in columns]
        for t in columns:
            new, advantage = log_p[t, response[t]], float(experience.policy_advantages[row, t])
            loss = slow_policy_loss(name, new, old[t], advantage, sum(gaps) / len(gaps))
            loss = float(experience.correction_weights[row, t]) * loss
            loss = loss + entropy_coef * (log_p[t].exp() * log_p[t]).sum()
            if kl == "full":
                loss = loss + 0.3 * (log_p[t].exp() * (log_p[t] - log_ref[t])).sum()
            elif kl:
                loss = loss + 0.3 * slow_kl(
                    kl, new, float(experience.ref_log_probs[row, t]), old[t]
                )
            for i, aggregation in enumerate(aggregations):
                totals[i] = totals[i] + weight_of(aggregation, rows, row) * loss
    learning = roles.actor_optimizer.parameters
    return [flat(torch.autograd.grad(total, learning, retain_graph=True)) for total in totals]


def flat(tensors) -> torch.Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def padded(experience, columns: int = 3):
    """The same rows in wider rectangles; what stands in the new cells must not matter."""
    s = experience.sequences
    ids = torch.nn.functional.pad(s.ids, (0, columns), value=7)
    wider = {
        f.name: torch.nn.functional.pad(getattr(experience, f.name), (0, columns))
        for f in fields(experience)
        if f.name not in ("sequences", "rows") and getattr(experience, f.name).ndim == 2
    }
    sequences = Sequences(ids, s.prompt_lengths, s.response_lengths)
    return replace(experience, sequences=sequences, **wider)


def gradients_of_all_splits(roles, scored_config, experience, monkeypatch, **dotted):
    """The one step's gradient: whole, a row a microbatch, two or three, and with more padding."""
    steps = captured_gradients(roles.actor_optimizer, monkeypatch)
    for rows, tokens in (
        (experience, 16_384),
        (experience, ROW_TOKENS),
        (experience, FEW_TOKENS),
        (padded(experience), 16_384),
        (padded(experience), FEW_TOKENS),
    ):
        config = configured(scored_config, **{**WHOLE, **dotted}, actor__microbatch_tokens=tokens)
        update_actor(rows, roles, config, 0, first_controls(config))
    assert len(steps) == 5
    return [flat(step) for step in steps]


def assert_all_equal(found, expected) -> None:
    assert float(expected.norm()) > 1e-3
    for gradient in found:
        assert float((gradient - expected).norm() / expected.norm()) < 1e-6


@pytest.fixture(scope="module")
def unmoved(tiny_model_dir, tiny_data, tmp_path_factory):
    """Roles whose weights these tests only read: a reference that is not the actor, too."""
    recipe = tiny_recipe(tiny_model_dir, tiny_data, tmp_path_factory.mktemp("unmoved"))
    config = configured(recipe, **WHOLE, kl__in_loss={"coef": 0.3})
    roles = build_roles(config, distinct_letters)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in roles.reference.policy.model.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=generator).double()
    return roles


@pytest.mark.usefixtures("float64_norms")
@pytest.mark.parametrize("name", KINDS)
def test_the_gradient_is_that_of_a_loop_however_rows_are_split_and_padded(
    unmoved, scored_config, monkeypatch, name
):
    """Trap 12 for every kind and aggregation, and for rows that another engine sampled."""
    experience = made_experience(unmoved, unscored=(4,))
    cells = torch.linspace(0.2, 2.0, experience.response_mask.numel()).double()
    weights = cells.view_as(experience.response_mask)
    experience = replace(experience, correction_weights=weights)
    expected = slow_gradients(unmoved, experience, name, AGGREGATIONS)
    for aggregation, gradient in zip(AGGREGATIONS, expected, strict=True):
        dotted = {"actor__update": KINDS[name], "actor__aggregation": aggregation}
        found = gradients_of_all_splits(unmoved, scored_config, experience, monkeypatch, **dotted)
        assert_all_equal(found, gradient)


@pytest.mark.usefixtures("float64_norms")
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "full", "k1+", "k3+"])
def test_kl_and_entropy_in_the_loss_add_the_gradient_of_a_loop_however_rows_are_split(
    unmoved, scored_config, monkeypatch, estimator
):
    """Trap 12; the values of the KL and the entropy are logged apart, before their weights."""
    experience = made_experience(unmoved)
    ref = unmoved.reference.policy.log_probs(experience.sequences, experience.response_mask)
    experience = replace(experience, ref_log_probs=ref)
    aggregations = ["token_mean", "seq_mean_token_sum_norm"]
    expected = slow_gradients(unmoved, experience, "clip", aggregations, 0.2, estimator)
    without = slow_gradients(unmoved, experience, "clip", aggregations, 0.2)
    for i, aggregation in enumerate(aggregations):
        assert float((expected[i] - without[i]).norm()) > 1e-3
        dotted = {
            "actor__update": KINDS["clip"],
            "actor__aggregation": aggregation,
            "actor__entropy_coef": 0.2,
            "kl__in_loss": {"coef": 0.3, "estimator": estimator},
        }
        found = gradients_of_all_splits(unmoved, scored_config, experience, monkeypatch, **dotted)
        assert_all_equal(found, expected[i])


def on_policy(experience, roles):
    now = roles.actor.log_probs(experience.sequences, experience.response_mask)
    return replace(experience, old_log_probs=now)


def actor_vector(roles) -> torch.Tensor:
    return flat(p.detach().clone() for p in roles.actor.model.parameters())


def slow_gaps(roles, experience, rows) -> list[float]:
    """log new - log old of every True cell of these rows, where the weights are now."""
    found = []
    with torch.no_grad():
        for row, (prompt, response, columns) in true_cells(experience).items():
            if row in rows:
                new = slow_log_probs(roles.actor.model, prompt, response).tolist()
                found += [new[t] - float(experience.old_log_probs[row, t]) for t in columns]
    return found


def mean_kl(gaps: list[float]) -> float:
    """KL(old || new) from the old policy's samples."""
    return sum(math.exp(d) - d - 1 for d in gaps) / len(gaps)


def mean_kl_backwards(gaps: list[float]) -> float:
    return sum(math.exp(-d) + d - 1 for d in gaps) / len(gaps)


STOPPING = {
    "actor__minibatch_rows": 2,
    "actor__epochs": 3,
    "actor__lr": 0.02,
    "actor__max_grad_norm": 100.0,
}


def walked(build, monkeypatch, **dotted):
    """One update; for every minibatch it looked at the gaps and the weights it found there."""
    roles, config = build(**{**WHOLE, **STOPPING, **dotted})
    experience = on_policy(made_experience(roles), roles)
    gaps, weights, make = [], [], minibatches.make_minibatch

    def recorded(given, rows, *rest):
        gaps.append(slow_gaps(roles, given, rows.tolist()))
        weights.append(actor_vector(roles))
        return make(given, rows, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(minibatches, "make_minibatch", recorded)
        report = update_actor(experience, roles, config, 0, first_controls(config))
    return gaps, weights, report.meter.values(), roles


@pytest.mark.usefixtures("float64_norms")
@pytest.mark.parametrize("kind", ["clip", "penalty", "reinforce"])
def test_steps_end_once_the_kl_from_the_old_policy_exceeds_its_bound(build, monkeypatch, kind):
    """The mean of e^D - D - 1 over the minibatch; e^-D + D - 1 would stop at another step."""
    dotted = {"actor__update__kind": kind}
    gaps, weights, free, _ = walked(build, monkeypatch, **dotted)
    assert len(gaps) == free["actor/steps"] == 12
    assert "actor/stopped_at_step" not in free
    right, wrong = [mean_kl(g) for g in gaps], [mean_kl_backwards(g) for g in gaps]

    def stop(values: list[float], bound: float) -> int:
        return next((i for i, x in enumerate(values) if x > bound), len(values))

    bounds = [x * f for x in (*right, *wrong) for f in (0.999, 1.001) if x > 0]
    told_apart = [b for b in bounds if 0 < stop(right, b) < 12 and stop(right, b) != stop(wrong, b)]
    assert told_apart
    bound = told_apart[0]
    at = stop(right, bound)
    for microbatch_tokens in (16_384, ROW_TOKENS):
        split = {"actor__stop_kl": bound, "actor__microbatch_tokens": microbatch_tokens}
        seen, _, held, roles = walked(build, monkeypatch, **dotted, **split)
        assert held["actor/stopped_at_step"] == held["actor/steps"] == at
        assert len(seen) == at + 1  # it looked at one more minibatch and dropped its step
        torch.testing.assert_close(actor_vector(roles), weights[at], rtol=0, atol=1e-9)
        assert all(p.grad is None for p in roles.actor.model.parameters())
        assert {int(s["step"]) for s in roles.actor_optimizer.adam.state.values()} == {at}


def test_a_bound_that_is_exceeded_at_once_moves_no_byte(build):
    """Old log-probs that are not the actor's: the first minibatch is too far away already."""
    roles, config = build(**WHOLE, actor__stop_kl=1e-3)
    before = actor_vector(roles)
    experience = made_experience(roles)
    metrics = update_actor(experience, roles, config, 0, first_controls(config)).meter.values()
    assert metrics["actor/stopped_at_step"] == metrics["actor/steps"] == 0
    assert torch.equal(actor_vector(roles), before)


def test_the_critic_goes_on_when_the_actor_stops(build):
    roles, config = build(actor__stop_kl=1e-12, actor__lr=0.01)
    outcome = run_iteration(0, first_controls(config), roles, config)
    metrics = outcome.metrics(config)
    assert metrics["actor/steps"] < metrics["critic/steps"] == 6


def test_rows_that_a_stop_never_reached_keep_their_old_log_probs(build):
    roles, config = build(**{**WHOLE, "actor__minibatch_rows": 2}, actor__stop_kl=1e-12)
    outcome = run_iteration(0, first_controls(config), roles, config)
    assert outcome.metrics(config)["actor/steps"] == 1
    old, new = outcome.experience.old_log_probs, outcome.actor.new_log_probs
    assert torch.equal(new[new.sum(1) == 0], old[old.sum(1) == 0])
    assert sum(torch.equal(a, b) for a, b in zip(new, old, strict=True)) >= len(old) - 4


# A value head on the actor's trunk.

SHARED = {**WHOLE, "critic": {"shared_trunk": True, "coef": 0.25}}


@pytest.mark.usefixtures("float64_norms")
@pytest.mark.parametrize("microbatch_tokens", [16_384, ROW_TOKENS])
def test_the_joint_gradient_is_the_policys_plus_coef_times_the_values(
    build, monkeypatch, microbatch_tokens
):
    """Trap 14 too: both parts are logged as they stand, the value loss without its weight."""
    roles, config = build(
        **SHARED, actor__update=KINDS["clip"], actor__microbatch_tokens=microbatch_tokens
    )
    torch.nn.init.normal_(roles.critic.head.weight, generator=torch.Generator().manual_seed(1))
    experience = made_experience(roles)
    rows, policy, value = true_cells(experience), 0.0, 0.0
    weight = weight_of("token_mean", rows, 0)
    for row, (prompt, response, columns) in rows.items():
        ids = torch.tensor([prompt + response])
        hidden = roles.actor.model.model(input_ids=ids).last_hidden_state[0]
        for t in columns:
            state = hidden[len(prompt) + t - 1]
            log_p = torch.log_softmax(roles.actor.model.lm_head(state), dim=-1)[response[t]]
            old, advantage = (
                float(x[row, t]) for x in (experience.old_log_probs, experience.policy_advantages)
            )
            policy = policy + weight * slow_policy_loss("clip", log_p, old, advantage, 0.0)
            new = roles.critic.head(state)[0]
            before, target = (float(x[row, t]) for x in (experience.values, experience.returns))
            held = torch.clamp(new, before - 0.2, before + 0.2)
            worse = torch.maximum((new - target) ** 2, (held - target) ** 2)
            value = value + weight * 0.5 * worse
    parameters = roles.actor_optimizer.parameters
    expected = flat(torch.autograd.grad(policy + 0.25 * value, parameters))
    steps = captured_gradients(roles.actor_optimizer, monkeypatch)
    logged = update_actor(experience, roles, config, 0, first_controls(config)).meter.values()
    [found] = steps
    assert float((flat(found) - expected).norm() / expected.norm()) < 1e-6
    assert logged["actor/pg_loss"] == pytest.approx(float(policy.detach()), abs=1e-9)
    assert logged["critic/vf_loss"] == pytest.approx(float(value.detach()), abs=1e-9)


def test_a_shared_trunk_has_one_optimizer_that_moves_both_heads(build):
    roles, config = build(**SHARED)
    assert roles.critic_optimizer is None
    assert roles.critic.trunk is roles.actor.model.model
    held = {id(p) for p in roles.actor_optimizer.parameters}
    everything = [*roles.actor.model.parameters(), *roles.critic.head.parameters()]
    assert held == {id(p) for p in everything}
    assert len(roles.actor_optimizer.parameters) == len(held)
    before = [p.detach().clone() for p in everything]
    outcome = run_iteration(0, first_controls(config), roles, config)
    assert not any(torch.equal(a, b) for a, b in zip(before, everything, strict=True))
    assert outcome.critic.meter.values() == {}


def test_while_the_critic_warms_up_no_byte_of_the_actor_changes(build):
    roles, config = build(critic__warmup_iterations=2)
    start, critic = actor_vector(roles), flat(p.detach().clone() for p in roles.critic.parameters())
    for iteration in range(2):
        outcome = run_iteration(iteration, first_controls(config), roles, config)
        assert actor_vector(roles).numpy().tobytes() == start.numpy().tobytes()
        assert torch.equal(outcome.actor.new_log_probs, outcome.experience.old_log_probs)
        assert not roles.actor_optimizer.adam.state
        moved = flat(p.detach().clone() for p in roles.critic.parameters())
        assert not torch.equal(moved, critic)
        critic = moved
    run_iteration(2, first_controls(config), roles, config)
    assert not torch.equal(actor_vector(roles), start)


# PPO-Penalty's weight.


@pytest.mark.usefixtures("float64_norms")
def test_the_penalty_is_steered_by_the_kl_after_the_last_step(build):
    """The mean of e^D - D - 1 over all cells, at the weights where the update ended."""
    kind = {"kind": "penalty", "coef": 0.8}
    roles, config = build(**{**WHOLE, **STOPPING}, actor__update=kind)
    experience = on_policy(made_experience(roles), roles)
    update_actor(experience, roles, config, 0, first_controls(config))
    gaps = slow_gaps(roles, experience, range(7))
    assert mean_kl(gaps) != pytest.approx(mean_kl_backwards(gaps), rel=0.02)
    for target_by_kl, factor in [(1.51, 0.5), (1.49, 1.0), (1 / 1.49, 1.0), (1 / 1.51, 2.0)]:
        kind["target"] = mean_kl(gaps) * target_by_kl
        roles, config = build(**{**WHOLE, **STOPPING}, actor__update=kind)
        report = update_actor(experience, roles, config, 0, first_controls(config))
        assert report.penalty_coef == pytest.approx(0.8 * factor), target_by_kl


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ({"target": 1e6}, [2.0, 1.0, 0.5]),
        ({"target": 1e-12}, [2.0, 4.0, 8.0]),
        ({"target": 1e-12, "controller": "fixed"}, [2.0, 2.0, 2.0]),
    ],
)
def test_a_run_halves_and_doubles_its_penalty(tiny_config, kind, expected):
    config = changed(
        tiny_config,
        data__heldout=None,
        train__iterations=3,
        actor__update={"kind": "penalty", "coef": 2.0, **kind},
    )
    run = tether.train(config, reward=distinct_letters).run
    metrics = read_jsonl(run / "metrics.jsonl")
    assert [line["actor/penalty_coef"] for line in metrics] == expected
    state = json.loads((run / "checkpoints" / "000003" / "state.json").read_text())
    assert state["controls"]["penalty_coef"] == {0.5: 0.25, 8.0: 16.0, 2.0: 2.0}[expected[-1]]


# Who is loaded, and when the reference moves.


def test_a_refreshed_reference_is_the_actor_again(tiny_config):
    config = changed(
        tiny_config,
        data__heldout=None,
        train__iterations=4,
        actor__lr=0.01,
        kl__refresh_reference_every=2,
    )
    run = tether.train(config, reward=distinct_letters).run
    kl = [line["kl/token_mean"] for line in read_jsonl(run / "metrics.jsonl")]
    assert [abs(x) < 1e-5 for x in kl] == [True, False, True, False]


@pytest.mark.parametrize(
    ("dotted", "reference", "critic", "models"),
    [
        ({}, FrozenReference, Critic, 3),
        ({"kl__in_reward__coef": 0.0}, NoReference, Critic, 2),
        ({"kl__in_reward__coef": 0.0, "kl__in_loss__coef": 0.1}, FrozenReference, Critic, 3),
        ({"advantage__estimator": "grpo"}, FrozenReference, NoCritic, 2),
        ({"advantage__estimator": "remax"}, FrozenReference, NoCritic, 2),
        ({"advantage__estimator": "grpo", "kl__in_reward__coef": 0.0}, NoReference, NoCritic, 1),
        ({"critic": {"shared_trunk": True}}, FrozenReference, Critic, 2),
    ],
)
def test_only_the_models_that_are_needed_are_held_and_one_file_is_read_once(
    build, monkeypatch, dotted, reference, critic, models
):
    loaded, load = [], roles_module.load_causal_lm
    monkeypatch.setattr(
        roles_module, "load_causal_lm", lambda *given: loaded.append(given) or load(*given)
    )
    roles, config = build(**dotted)
    assert len(loaded) == 1
    holders = [roles.actor.model, getattr(roles.critic, "trunk", None)]
    holders += [roles.reference.policy.model] if reference is FrozenReference else []
    embeddings = [held.get_input_embeddings().weight for held in holders if held is not None]
    assert len({weight.data_ptr() for weight in embeddings}) == models
    assert type(roles.reference) is reference
    assert type(roles.critic) is critic
    assert (roles.critic_optimizer is None) == (critic is NoCritic or config.critic.shared_trunk)
    outcome = run_iteration(0, first_controls(config), roles, config)
    assert ("kl/token_mean" in outcome.metrics(config)) == (reference is FrozenReference)
    if reference is NoReference:
        assert not outcome.experience.kl.any()
    if critic is NoCritic:
        assert not outcome.experience.values.any()
        assert outcome.critic.meter.values() == {}


# Estimators without a critic, from rollout to advantage.

NO_TETHER = Controls(beta=0.0, penalty_coef=0.0)


def slow_greedy(roles, prompt: list[int], limit: int) -> str:
    """The likeliest token again and again, by transformers' forward on the bare row."""
    ids: list[int] = []
    while len(ids) < limit and (not ids or ids[-1] not in roles.vocabulary.eos_ids):
        logits = roles.actor.model(input_ids=torch.tensor([prompt + ids])).logits[0, -1]
        ids.append(int(logits.argmax()))
    return roles.vocabulary.decode(ids)


@torch.no_grad()
def test_remax_takes_off_what_the_greedy_response_to_the_same_prompt_scored(build):
    def reward(response: str) -> float:
        return 0.1 * len(response) + (ord(response[0]) % 7 if response else 0)

    roles, config = build(reward, advantage__estimator="remax", kl__in_reward__coef=0.0)
    prompts = roles.train_prompts.for_iteration(0, 6, config.seed, config.data.shuffle)
    baselines = [reward(slow_greedy(roles, ids, 12)) for ids in prompts.ids]
    assert len(set(baselines)) > 1
    with torch.enable_grad():
        outcome = run_iteration(0, NO_TETHER, roles, config)
    e = outcome.experience
    for row in range(12):
        expected = float(outcome.scores.values[row]) - baselines[row // 2]
        cells = e.advantages[row][e.response_mask[row]].tolist()
        assert cells == pytest.approx([expected] * len(cells), abs=1e-5)


GROUP_ESTIMATORS = [name for name in PLAIN_ESTIMATORS if ESTIMATORS[name].by_group]


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_a_row_left_alone_in_its_group_leaves_with_an_event(build, estimator):
    """Rows 1, 4 and 5 cannot be scored: row 0 is alone then, and group 4, 5 is gone."""
    scores = [1.0, None, 0.5, 0.25, None, None, 1.0, 0.0, 0.0, 1.0, 0.5, 0.0]
    calls = iter(scores)
    roles, config = build(
        lambda: next(calls), advantage__estimator=estimator, reward__max_failed_share=1.0
    )
    outcome = run_iteration(0, NO_TETHER, roles, config)
    kinds = {event.row: event.kind for event in outcome.events if event.row is not None}
    assert kinds == {0: "lonely_row", 1: "unscorable", 4: "unscorable", 5: "unscorable"}
    kept = outcome.experience.response_mask.any(dim=1).nonzero().squeeze(1).tolist()
    assert kept == [2, 3, 6, 7, 8, 9, 10, 11]
    metrics = outcome.metrics(config)
    assert metrics["score/mean"] == pytest.approx((0.5 + 0.25 + 1.0 + 1.0 + 0.5) / 8)
    assert all(math.isfinite(x) for x in metrics.values())
    assert not outcome.experience.policy_advantages[[0, 1, 4, 5]].any()
    assert rollout_rows(outcome, roles.vocabulary, config)[0]["score"] is None


@pytest.mark.parametrize("estimator", [n for n in PLAIN_ESTIMATORS if n not in GROUP_ESTIMATORS])
def test_where_there_are_no_groups_no_row_is_lonely(build, estimator):
    calls = iter([1.0, None, *[0.5] * 1000])
    roles, config = build(
        lambda: next(calls), advantage__estimator=estimator, reward__max_failed_share=1.0
    )
    outcome = run_iteration(0, NO_TETHER, roles, config)
    assert [e.row for e in outcome.events if e.kind != "empty_minibatch"] == [1]
    assert outcome.experience.response_mask[0].any()


RUNS = {
    **{name: {"actor__update": kind} for name, kind in KINDS.items()},
    "trpo": {"actor__update": {"kind": "trpo"}},
    **{name: {"advantage__estimator": name} for name in PLAIN_ESTIMATORS},
    "trpo without a critic": {
        "actor__update": {"kind": "trpo"},
        "advantage__estimator": "rloo",
    },
    "grpo as published": {
        "advantage__estimator": "grpo",
        "actor__aggregation": "seq_mean_token_mean",
        "kl__in_loss__coef": 0.1,
        "kl__in_reward__coef": 0.0,
    },
    "shared trunk": {"critic": {"shared_trunk": True}},
}


@pytest.mark.parametrize("name", RUNS)
def test_two_iterations_run_from_end_to_end_with_finite_metrics(tiny_config, name):
    short = {"actor__epochs": 1, "critic__epochs": 1, "rollout__max_response_tokens": 6}
    config = changed(tiny_config, data__heldout=None, **short, **RUNS[name])
    result = tether.train(config, reward=distinct_letters)
    metrics = read_jsonl(result.run / "metrics.jsonl")
    assert [line["iteration"] for line in metrics] == [0, 1]
    for line in metrics:
        assert all(isinstance(x, int | float) and math.isfinite(x) for x in line.values())
        assert line["actor/grad_norm"] > 0
    assert read_jsonl(result.run / "events.jsonl") == []


def test_gdpo_runs_from_end_to_end_with_several_rewards(tiny_config):
    parts = [
        {"name": "short", "kind": "length", "arguments": {"at_most": 4}},
        {"name": "right", "kind": "exact_answer"},
    ]
    fields = {"advantage__estimator": "gdpo", "kl__in_reward__coef": 0.0, "data__heldout": None}
    run = tether.train(changed(tiny_config, reward={"parts": parts}, **fields)).run
    for line in read_jsonl(run / "metrics.jsonl"):
        assert all(isinstance(x, int | float) and math.isfinite(x) for x in line.values())
        assert {name.rpartition("/")[2] for name in line} >= {"short", "right"}


def test_the_exact_penalty_is_the_kl_from_the_old_policy_over_the_vocabulary(build):
    roles, config = build(**WHOLE, actor__update={"kind": "penalty", "estimator": "full"})
    experience = run_iteration(0, first_controls(config), roles, config).experience
    old_policy = actor_objective(roles, config, first_controls(config)).old_policy
    with torch.no_grad():
        for weight in roles.actor.model.parameters():
            weight.mul_(1.05)
    rows = torch.arange(len(experience))
    batch = minibatches.make_minibatch(experience, rows, "token_mean", 12)
    states = roles.actor.states(batch.sequences)
    found = exact_kl(old_policy, roles.actor, states, batch)

    slow = torch.zeros_like(found)
    for row, (prompt, response, columns) in true_cells(experience).items():
        old = torch.log_softmax(logits_before(old_policy.model, prompt, response), dim=-1)
        new = torch.log_softmax(logits_before(roles.actor.model, prompt, response), dim=-1)
        old, new = old.tolist(), new.tolist()
        for t in columns:
            slow[row, t] = sum(math.exp(p) * (p - q) for p, q in zip(old[t], new[t], strict=True))
    assert slow.max() > 1e-4
    torch.testing.assert_close(found, slow, atol=1e-6, rtol=1e-5)


def test_a_sampled_penalty_keeps_no_second_copy_of_the_actor(build):
    roles, config = build(**WHOLE, actor__update={"kind": "penalty"})
    assert actor_objective(roles, config, first_controls(config)).old_policy is None
