"""Actor and critic updates on made rows, against losses written as loops over cells."""

import math
from collections import Counter

import pytest
import torch
from helpers import captured_gradients, logits_before, made_experience, only_rows
from hypothesis import given
from hypothesis import strategies as st

from tether.ppo.result import first_controls
from tether.ppo.updates import actor, minibatches
from tether.ppo.updates.critic import update_critic
from tether.ppo.updates.minibatches import MinibatchSchedule, row_slices

WHOLE = {
    "model__dtype": "float64",
    **{"actor__epochs": 1, "actor__minibatch_rows": 7},
    **{"critic__epochs": 1, "critic__minibatch_rows": 7},
}


def update_actor(experience, roles, config, iteration):
    return actor.update_actor(experience, roles, config, iteration, first_controls(config))


UPDATES = {"actor": update_actor, "critic": update_critic}


@pytest.fixture
def build_whole(build):
    """Roles in float64 whose one optimizer step an iteration takes all seven made rows."""

    def built(**dotted):
        roles, config = build(**{**WHOLE, **dotted})
        torch.nn.init.normal_(roles.critic.head.weight, generator=torch.Generator().manual_seed(1))
        return roles, config

    return built


def optimizer_of(roles, role):
    return getattr(roles, f"{role}_optimizer")


def cells_of(experience, rows):
    """(row, prompt, response, True columns) of each of these rows that has some."""
    s = experience.sequences
    for row, ids in enumerate(s.ids.tolist()):
        p, r = int(s.prompt_lengths[row]), int(s.response_lengths[row])
        columns = [t for t in range(r) if experience.response_mask[row, t]]
        if columns and row in rows:
            yield row, ids[:p], ids[p : p + r], columns


def slow_actor(roles, config, experience, rows=range(7)):
    """Sums over cells of the clip loss and of the entropy, and how many cells there are."""
    update, pg_loss, entropy, count, clipped = config.actor.update, 0.0, 0.0, 0, 0
    for row, prompt, response, columns in cells_of(experience, rows):
        logits = logits_before(roles.actor.model, prompt, response) / config.rollout.temperature
        for t in columns:
            log_p = torch.log_softmax(logits[t], 0)
            ratio = torch.exp(log_p[response[t]] - experience.old_log_probs[row, t])
            advantage = float(experience.policy_advantages[row, t])
            held = min(max(float(ratio.detach()), 1 - update.eps_low), 1 + update.eps_high)
            flat = held * advantage < float(ratio.detach()) * advantage
            pg_loss = pg_loss - (held * advantage if flat else ratio * advantage)
            entropy = entropy - (log_p.exp() * log_p).sum()
            count, clipped = count + 1, clipped + flat
    return pg_loss, entropy, count, clipped


def slow_critic(roles, config, experience, rows=range(7)):
    """Sum over cells of half the larger squared error, and how many cells there are."""
    loss, count = 0.0, 0
    for row, prompt, response, columns in cells_of(experience, rows):
        hidden = roles.critic.trunk(input_ids=torch.tensor([prompt + response])).last_hidden_state
        for t in columns:
            new = roles.critic.head(hidden[0, len(prompt) + t - 1])[0]
            old, target = (float(x[row, t]) for x in (experience.values, experience.returns))
            held = torch.clamp(new, old - config.critic.clip, old + config.critic.clip)
            loss = loss + 0.5 * torch.maximum((new - target) ** 2, (held - target) ** 2)
            count += 1
    return loss, count


def recorded_slices(monkeypatch) -> list[list[int]]:
    """From now on the row numbers of every minibatch are kept here."""
    slices: list[list[int]] = []
    make = minibatches.make_minibatch

    def recorded(experience, rows, *rest):
        slices.append(rows.tolist())
        return make(experience, rows, *rest)

    monkeypatch.setattr(minibatches, "make_minibatch", recorded)
    return slices


def slow_gradients(role, roles, config, experience):
    if role == "actor":
        pg_loss, entropy, count, _ = slow_actor(roles, config, experience)
        loss = (pg_loss - config.actor.entropy_coef * entropy) / count
    else:
        total, count = slow_critic(roles, config, experience)
        loss = total / count
    return torch.autograd.grad(loss, optimizer_of(roles, role).parameters)


@pytest.mark.parametrize("role", UPDATES)
@pytest.mark.parametrize("microbatch_tokens", [1, 20, 16_384])
def test_the_gradient_does_not_depend_on_the_microbatch_split(
    build_whole, monkeypatch, role, microbatch_tokens
):
    """Trap 12: one row a backward, two or so, or all, equal the gradient of a loop over cells."""
    roles, config = build_whole(**{f"{role}__microbatch_tokens": microbatch_tokens})
    experience = made_experience(roles)
    expected = slow_gradients(role, roles, config, experience)
    steps = captured_gradients(optimizer_of(roles, role), monkeypatch)
    UPDATES[role](experience, roles, config, 0)
    [found] = steps
    assert max(float(g.abs().max()) for g in expected) > 1e-3
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("entropy_coef", [0.0, 0.5])
def test_the_logged_policy_loss_and_entropy_are_those_that_were_minimised(
    build_whole, monkeypatch, entropy_coef
):
    """Trap 14, part by part, before they are added: the mean over steps of what each minimised.

    Trap 15: what is about tokens is weighted by tokens, over minibatches of unequal ones.
    """
    roles, config = build_whole(actor__minibatch_rows=3, actor__entropy_coef=entropy_coef)
    experience = made_experience(roles)
    captured_gradients(roles.actor_optimizer, monkeypatch)
    slices = recorded_slices(monkeypatch)
    logged = update_actor(experience, roles, config, 0).meter.values()
    assert [len(rows) for rows in slices] == [3, 3, 1]
    steps = [slow_actor(roles, config, experience, rows) for rows in slices]
    losses = [float(pg_loss.detach()) / count for pg_loss, _, count, _ in steps]
    assert logged["actor/pg_loss"] == pytest.approx(sum(losses) / 3, abs=1e-9)
    if entropy_coef:
        bonuses = [-float(e.detach()) / count for _, e, count, _ in steps]  # before the coef
        assert logged["actor/entropy_loss"] == pytest.approx(sum(bonuses) / 3, abs=1e-9)
    _, entropy, count, clipped = slow_actor(roles, config, experience)
    assert logged["actor/entropy"] == pytest.approx(float(entropy.detach()) / count, abs=1e-9)
    assert 0 < clipped < count
    assert logged["actor/pg_clipfrac"] == pytest.approx(clipped / count)


def test_the_logged_value_loss_is_the_one_that_was_minimised(build_whole, monkeypatch):
    """Trap 14: the mean over steps of what each minimised."""
    roles, config = build_whole(critic__minibatch_rows=3)
    experience = made_experience(roles)
    captured_gradients(roles.critic_optimizer, monkeypatch)
    slices = recorded_slices(monkeypatch)
    logged = update_critic(experience, roles, config, 0).meter.values()
    assert [len(rows) for rows in slices] == [3, 3, 1]
    steps = [slow_critic(roles, config, experience, rows) for rows in slices]
    losses = [float(loss.detach()) / count for loss, count in steps]
    assert logged["critic/vf_loss"] == pytest.approx(sum(losses) / 3, abs=1e-9)


def test_approx_kl_is_the_old_policys_divergence_from_the_new(build_whole, monkeypatch):
    """e^D - D - 1 with D = new - old, from old samples; the other sign is another number."""
    roles, config = build_whole()
    experience = made_experience(roles)
    captured_gradients(roles.actor_optimizer, monkeypatch)
    report = update_actor(experience, roles, config, 0)
    mask = experience.response_mask
    gaps = (report.new_log_probs - experience.old_log_probs)[mask].tolist()
    expected = sum(math.exp(d) - d - 1 for d in gaps) / len(gaps)
    assert report.meter.values()["actor/approx_kl"] == pytest.approx(expected)


def schedule(
    minibatch_rows: int, epochs: int, seed: int = 0, iteration: int = 0
) -> MinibatchSchedule:
    return MinibatchSchedule("actor", seed, iteration, epochs, minibatch_rows, 99, "token_mean", 12)


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 4), st.integers(0, 99))
def test_each_row_is_used_once_an_epoch_and_the_ragged_tail_too(rows, size, epochs, seed):
    """Trap 13."""
    slices = [s.tolist() for s in row_slices(rows, schedule(size, epochs, seed=seed))]
    assert len(slices) == epochs * math.ceil(rows / size)
    for epoch in range(epochs):
        steps = slices[epoch * math.ceil(rows / size) :][: math.ceil(rows / size)]
        assert sorted(row for step in steps for row in step) == list(range(rows))
        assert all(len(step) == size for step in steps[:-1])


def test_each_epoch_and_iteration_has_a_fresh_permutation():
    """Trap 13."""
    orders = [
        tuple(rows.tolist())
        for iteration in range(2)
        for rows in row_slices(20, schedule(20, 3, iteration=iteration))
    ]
    assert len(set(orders)) == 6


@pytest.mark.parametrize("role", UPDATES)
def test_an_update_shows_every_row_once_an_epoch_to_the_network(build_whole, monkeypatch, role):
    """Trap 13: seven rows in steps of three make three steps an epoch."""
    roles, config = build_whole(**{f"{role}__minibatch_rows": 3, f"{role}__epochs": 2})
    seen: list[int] = []
    split, experience = minibatches.split_minibatch, made_experience(roles)

    def recorded(minibatch, *limits):
        for batch in split(minibatch, *limits):
            assert torch.equal(batch.sequences.ids, experience.sequences.select(batch.rows).ids)
            seen.extend(batch.rows.tolist())
            yield batch

    monkeypatch.setattr(minibatches, "split_minibatch", recorded)
    steps = captured_gradients(optimizer_of(roles, role), monkeypatch)
    UPDATES[role](experience, roles, config, 0)
    assert len(steps) == 6
    assert Counter(seen) == dict.fromkeys(range(7), 2)
    assert seen[:7] != seen[7:]


@pytest.mark.parametrize("role", UPDATES)
def test_unscored_rows_leave_the_loss_its_count_and_its_metrics(build_whole, monkeypatch, role):
    """Gradient and metrics are those of the other rows alone."""
    roles, config = build_whole()
    experience = made_experience(roles, unscored=(1, 4))
    steps = captured_gradients(optimizer_of(roles, role), monkeypatch)
    with_them = UPDATES[role](experience, roles, config, 0).meter.values()
    rest = only_rows(experience, [0, 2, 3, 5, 6])
    without = UPDATES[role](rest, roles, config, 0).meter.values()
    for a, b in zip(*steps, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
    assert with_them == pytest.approx(without, abs=1e-9)


@pytest.mark.parametrize("role", UPDATES)
def test_a_minibatch_with_no_true_cell_gives_loss_zero_and_no_nan(build_whole, role):
    roles, config = build_whole(**{f"{role}__minibatch_rows": 2})
    before = [p.detach().clone() for p in optimizer_of(roles, role).parameters]
    report = UPDATES[role](made_experience(roles, unscored=tuple(range(7))), roles, config, 0)
    assert all(math.isfinite(x) for x in report.meter.values().values())
    assert report.meter.values()[f"{role}/steps"] == 0
    loss = {"actor": "actor/pg_loss", "critic": "critic/vf_loss"}[role]
    assert report.meter.values().get(loss, 0.0) == 0.0
    assert [event.kind for event in report.events] == ["empty_minibatch"] * 4
    for a, b in zip(before, optimizer_of(roles, role).parameters, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("role", UPDATES)
def test_a_minibatch_with_no_true_cell_is_an_event(build_whole, role):
    roles, config = build_whole()
    report = UPDATES[role](made_experience(roles, unscored=tuple(range(7))), roles, config, 0)
    assert report.events


@pytest.mark.parametrize(("role", "field"), [("actor", "policy_advantages"), ("critic", "returns")])
@pytest.mark.parametrize("rubbish", [math.nan, math.inf])
def test_a_step_whose_loss_is_not_finite_leaves_every_byte_of_the_weights(
    build_whole, role, field, rubbish
):
    roles, config = build_whole(**{f"{role}__minibatch_rows": 7, f"{role}__epochs": 2})
    experience = made_experience(roles)
    getattr(experience, field)[3, 0] = rubbish
    parameters = optimizer_of(roles, role).parameters
    before = [p.detach().clone() for p in parameters]
    report = UPDATES[role](experience, roles, config, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    assert [event.kind for event in report.events] == ["non_finite_loss"] * 2
    assert role in report.events[0].message
    assert not optimizer_of(roles, role).adam.state  # nor do Adam's moments remember it


def test_after_a_dropped_step_the_others_go_on(build_whole):
    roles, config = build_whole(actor__minibatch_rows=1)
    experience = made_experience(roles)
    experience.policy_advantages[3, 0] = math.nan
    before = [p.detach().clone() for p in roles.actor_optimizer.parameters]
    report = update_actor(experience, roles, config, 0)
    after = roles.actor_optimizer.parameters
    assert len(report.events) == 1
    assert all(p.isfinite().all() for p in after)
    assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
