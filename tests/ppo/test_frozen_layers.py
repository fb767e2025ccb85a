"""Layers that are frozen: the numbers of freezing by `requires_grad` alone, without their work."""

from dataclasses import fields, replace

import pytest
import torch
from helpers import (
    captured_gradients,
    changed,
    distinct_letters,
    made_experience,
    table,
    tiny_llama,
)

from tether.config.load import validate_config
from tether.errors import UserError
from tether.models.forward import AbsentLayers, layer_stack, trunk
from tether.models.weights import trainable_parameters
from tether.ppo.iteration import run_iteration
from tether.ppo.optimizer import Optimizer
from tether.ppo.result import first_controls
from tether.ppo.roles import build_roles
from tether.ppo.selfcheck import check_start
from tether.ppo.updates.actor import update_actor
from tether.ppo.updates.critic import update_critic

LAYERS = 4


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory, byte_tokenizer) -> dict[str, str]:
    """Four layers, with the head tied to the embedding and not."""
    found = {}
    for name in ("tied", "untied"):
        directory = tmp_path_factory.mktemp(name)
        model = tiny_llama(260, 256, layers=LAYERS, tied=name == "tied")
        model.save_pretrained(directory)
        byte_tokenizer.save_pretrained(directory)
        found[name] = str(directory)
    return found


@pytest.fixture
def build(scored_config, model_dirs):
    def built(head="tied", **dotted):
        small = {"actor__microbatch_tokens": 40, "critic__microbatch_tokens": 30}
        given = {"model__actor": model_dirs[head], **small, **dotted}
        config = validate_config(changed(scored_config, **given))
        return build_roles(config, distinct_letters), config

    return built


def learns(name: str, layers: range, tied: bool) -> bool:
    """Whether a weight of this name learns, by the rule in words."""
    if "layers." in name:
        return int(name.split("layers.")[1].split(".")[0]) in layers
    return name.endswith(("model.norm.weight", "trunk.norm.weight", "head.bias")) or (
        name.endswith(("lm_head.weight", "head.weight")) and not (tied and "lm_head" in name)
    )


def frozen_by_flag(roles, config, layers: range, tied: bool):
    """The same roles without learn_layers, whose other weights merely do not require gradients."""
    for module in (roles.actor.model, roles.critic):
        for name, weight in module.named_parameters():
            adapted = any("lora_" in n for n, _ in module.named_parameters())
            wanted = learns(name, layers, tied) and (
                not adapted or "lora_" in name or name.startswith("head.")
            )
            weight.requires_grad_(wanted)
    actor = list(trainable_parameters(roles.actor.model).values())
    if config.critic.shared_trunk:
        actor += list(roles.critic.head.parameters())
        return replace(roles, actor_optimizer=Optimizer(actor, 1e-3, 1.0))
    critic = list(trainable_parameters(roles.critic).values())
    return replace(
        roles,
        actor_optimizer=Optimizer(actor, 1e-3, 1.0),
        critic_optimizer=Optimizer(critic, 1e-3, 1.0),
    )


@torch.no_grad()
def move_alike(split, plain) -> None:
    """Move what learns off its start, the same way in both, so that no KL and no value is 0."""
    generator = torch.Generator().manual_seed(3)
    pairs = [(split.actor.model, plain.actor.model), (split.critic, plain.critic)]
    for one, other in pairs:
        a, b = trainable_parameters(one), trainable_parameters(other)
        assert a.keys() == b.keys()
        for name, weight in a.items():
            weight += 0.02 * torch.randn(weight.shape, generator=generator).to(weight.dtype)
            b[name].copy_(weight)


def pair(build, which: int | str, layers: range, head: str = "tied", **dotted):
    """(roles that share lower states, roles frozen by flag, config of the latter)."""
    split, _ = build(head, model__learn_layers=which, **dotted)
    whole, config = build(head, **dotted)
    plain = frozen_by_flag(whole, config, layers, head == "tied")
    move_alike(split, plain)
    return split, plain, config


CASES = {
    "clip": {},
    "dual clip, entropy": {"actor__update": {"dual_clip": 1.1}, "actor__entropy_coef": 0.1},
    "penalty": {"actor__update": {"kind": "penalty"}},
    "penalty, full": {"actor__update": {"kind": "penalty", "estimator": "full"}},
    "cpi": {"actor__update": {"kind": "cpi"}},
    "reinforce": {"actor__update": {"kind": "reinforce"}},
    "gspo": {"actor__update": {"kind": "gspo", "eps_low": 0.1, "eps_high": 0.1}},
    "cispo": {"actor__update": {"kind": "cispo"}},
    "dppo": {"actor__update": {"kind": "dppo", "max_divergence": 1e-3}},
    "full KL in the loss": {"kl__in_loss": {"coef": 0.1, "estimator": "full"}},
    "shared trunk": {"critic": {"shared_trunk": True}},
    "recomputed": {"model__gradient_checkpointing": True},
    "one row a microbatch": {"actor__microbatch_tokens": 1, "critic__microbatch_tokens": 1},
    "lora": {"model__lora": {"rank": 2}, "model__critic_lora": {"rank": 2}},
    "lora, shared trunk": {"model__lora": {"rank": 2}, "critic": {"shared_trunk": True}},
}
WHERE = [(1, range(3, 4), "tied"), ("1..2", range(1, 3), "untied"), (4, range(4), "untied")]


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_freezing_by_flag(build, case, monkeypatch):
    """Ragged rows with a column of tool output, an unscored row and a last minibatch of two."""
    number = list(CASES).index(case)
    which, layers, head = WHERE[number % len(WHERE)]
    split, plain, config = pair(build, which, layers, head, **CASES[case])
    found = []
    for roles in (split, plain):
        experience = made_experience(plain, unscored=(3,))
        if roles is split:
            sequences = split.actor.with_lower_states(experience.sequences)
            experience = replace(experience, sequences=sequences)
        optimizers = (roles.actor_optimizer, roles.critic_optimizer)
        steps = [captured_gradients(o, monkeypatch) for o in optimizers if o is not None]
        reports = (
            update_critic(experience, roles, config, 0),
            update_actor(experience, roles, config, 0, first_controls(config)),
        )
        metrics = {k: v for r in reports for k, v in r.meter.values().items()}
        found.append((steps, metrics))
    (steps, metrics), (slow_steps, slow_metrics) = found
    assert metrics == pytest.approx(slow_metrics, rel=1e-5, abs=1e-6)
    assert [len(s) for s in steps] == [len(s) for s in slow_steps] != []
    for mine, slow in zip(steps, slow_steps, strict=True):
        for step, (a, b) in enumerate(zip(mine, slow, strict=True)):
            assert len(a) == len(b)
            norm = torch.stack([x.norm() for x in b]).norm()
            gap = max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))
            assert norm > 0, step
            assert gap < 1e-6 * max(1.0, float(norm)), step


@pytest.mark.parametrize("change", [{}, {"critic": {"shared_trunk": True}}], ids=["own", "shared"])
def test_an_iteration_reads_the_numbers_of_whole_passes(build, change):
    split, plain, config = pair(build, 2, range(2, 4), "untied", **change)
    found = [run_iteration(0, first_controls(config), roles, config) for roles in (split, plain)]
    one, other = (outcome.experience for outcome in found)
    assert torch.equal(one.sequences.ids, other.sequences.ids)
    for field in fields(one):
        if field.name not in ("sequences", "rows"):
            a, b = getattr(one, field.name), getattr(other, field.name)
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert min(float(x.abs().max()) for x in (one.kl, one.values)) > 1e-3
    after, slow_after = (trainable_parameters(roles.actor.model) for roles in (split, plain))
    for name, weight in after.items():
        torch.testing.assert_close(weight, slow_after[name], rtol=0, atol=2e-5)


def test_trpo_takes_the_step_of_freezing_by_flag(build):
    update = {"kind": "trpo", "cg_iterations": 4}
    exact = {"model__dtype": "float64", "actor__update": update, "actor__entropy_coef": 0.0}
    split, plain, config = pair(build, "1..2", range(1, 3), "untied", **exact)
    start = [w.detach().clone() for w in trainable_parameters(split.actor.model).values()]
    for roles in (split, plain):
        experience = made_experience(plain)
        if roles is split:
            sequences = split.actor.with_lower_states(experience.sequences)
            experience = replace(experience, sequences=sequences)
        update_actor(experience, roles, config, 0, first_controls(config))
        if roles is plain:
            break
        moved = [w.detach().clone() for w in trainable_parameters(split.actor.model).values()]
    after = list(trainable_parameters(plain.actor.model).values())
    assert max(float((a - b).abs().max()) for a, b in zip(moved, start, strict=True)) > 1e-4
    for a, b in zip(moved, after, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-8)


def test_lower_layers_run_once_per_iteration_and_never_with_gradients(build, monkeypatch):
    roles, config = build(
        model__learn_layers="2..2", kl__in_loss={"coef": 0.1, "estimator": "full"}
    )
    roles.sampler.sync(roles.actor.model, 0)
    rollout = roles.sampler.run
    seen, sampling = [], []

    def sampled(*args, **kwargs):
        sampling.append(True)
        try:
            return rollout(*args, **kwargs)
        finally:
            sampling.pop()

    monkeypatch.setattr(roles.sampler, "run", sampled)
    lowest = layer_stack(trunk(roles.actor.model))[0]
    lowest.register_forward_hook(
        lambda layer, args, out: None if sampling else seen.append((len(out), out.requires_grad))
    )
    outcome = run_iteration(0, first_controls(config), roles, config)
    assert sum(rows for rows, _ in seen) == config.rows == len(outcome.experience)
    assert not any(gradients for _, gradients in seen)


def test_reference_and_critic_hold_no_second_copy_of_what_is_frozen(build):
    roles, _ = build(model__learn_layers="1..2")
    actor = {id(w) for w in roles.actor.model.parameters()}
    learning = sum(w.numel() for w in trainable_parameters(roles.actor.model).values())
    reference = roles.reference.policy.model
    own = [w for w in reference.parameters() if id(w) not in actor]
    assert sum(w.numel() for w in own) == learning
    own = [w for w in roles.critic.trunk.parameters() if id(w) not in actor]
    assert sum(w.numel() for w in own) == learning
    for network in (trunk(reference), roles.critic.trunk):
        assert isinstance(layer_stack(network)[0], AbsentLayers)
        assert isinstance(network.embed_tokens, AbsentLayers)


def test_a_role_without_lower_layers_refuses_rows_without_their_states(build):
    roles, _ = build(model__learn_layers=1)
    experience_rows = made_experience(roles).sequences
    with pytest.raises(RuntimeError, match="lower_states"):
        roles.critic(experience_rows)


def test_other_weights_are_run_whole(build, model_dirs, tmp_path, byte_tokenizer):
    """A reference and a critic of another model cannot share states: they read the ids."""
    other = tiny_llama(260, 256, seed=9, layers=3)
    other.save_pretrained(tmp_path / "other")
    byte_tokenizer.save_pretrained(tmp_path / "other")
    named = {"model__reference": str(tmp_path / "other"), "model__critic": str(tmp_path / "other")}
    split, config = build(model__learn_layers=1, **named)
    plain, _ = build(**named)
    found = [run_iteration(0, first_controls(config), roles, config) for roles in (split, plain)]
    a, b = (outcome.experience for outcome in found)
    torch.testing.assert_close(a.ref_log_probs, b.ref_log_probs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(a.values, b.values, rtol=1e-5, atol=1e-5)
    names = trainable_parameters(split.critic)
    assert {n.split(".")[2] for n in names if "layers." in n} == {"2"}  # the top one of its three


def test_a_refreshed_reference_becomes_the_actor(build):
    roles, _ = build(model__learn_layers=2, kl__refresh_reference_every=1)
    with torch.no_grad():
        for weight in trainable_parameters(roles.actor.model).values():
            weight += 0.05
    sequences = roles.actor.with_lower_states(made_experience(roles).sequences)
    mask = made_experience(roles).response_mask
    now = roles.actor.log_probs(sequences, mask)
    assert float((roles.reference.log_probs(sequences, mask, now) - now).abs().max()) > 1e-3
    saved = {name: weight.clone() for name, weight in roles.reference.state().items()}
    assert saved.keys() == trainable_parameters(roles.actor.model).keys()
    roles.reference.refresh(roles.actor)
    assert torch.equal(roles.reference.log_probs(sequences, mask, now), now)
    roles.reference.load_state(saved)
    assert not torch.equal(roles.reference.log_probs(sequences, mask, now), now)


def test_the_self_check_passes(build):
    roles, config = build(model__learn_layers=2)
    assert "ratio 1" in check_start(roles, config)


@table(
    ("changes", "sentence"),
    [
        ({"model__learn_layers": 5}, r"model\.learn_layers is 5, but .* has 4 layers, 0 to 3"),
        ({"model__learn_layers": "2..4"}, r"model\.learn_layers is 2\.\.4, but .* has 4 layers"),
        ({"model__learn_layers": 0}, r"model\.learn_layers: 0 layers cannot learn"),
        ({"model__learn_layers": "0"}, r"model\.learn_layers: 0 layers cannot learn"),
        ({"model__learn_layers": -1}, r"model\.learn_layers: '-1' does not say"),
        ({"model__learn_layers": True}, r"model\.learn_layers: 'True' does not say"),
        ({"model__learn_layers": "3..2"}, r"model\.learn_layers: .*empty; write 2\.\.3"),
        ({"model__learn_layers": "top"}, r"model\.learn_layers: 'top' .*as 12\.\.20"),
        ({"model__learn_layers": "1..2..3"}, r"model\.learn_layers: .*as 12\.\.20"),
        (
            {
                "model__learn_layers": 1,
                "launch": {"num_workers": 2, "weights": "sharded", "tensor_parallel": 2},
            },
            r"launch\.tensor_parallel = 2 does not go with model\.learn_layers",
        ),
        (
            {"model__learn_layers": 2, "model__lora": {"targets": ["layers.1.self_attn.q_proj"]}},
            r"model\.lora\.targets names 'layers\.1\.self_attn\.q_proj', which "
            r"model\.learn_layers freezes; name linear layers in layers 2 to 3",
        ),
        (
            {
                "model__learn_layers": 2,
                "model__critic_lora": {"targets": ["layers.1.mlp.up_proj"]},
            },
            r"model\.critic_lora\.targets names 'layers\.1\.mlp\.up_proj'",
        ),
    ],
)
def test_what_cannot_learn_is_refused_by_its_field(build, changes, sentence):
    with pytest.raises(UserError, match=sentence):
        build(**changes)


def test_a_digit_or_a_range_may_be_typed(build):
    for typed, first in (("1", 3), ("2..3", 2)):
        roles, _ = build(model__learn_layers=typed)
        assert roles.actor.lower_layers == first
