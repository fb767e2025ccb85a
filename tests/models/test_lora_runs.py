"""Whole runs with adapters: what learns, what is saved, and that it goes on to the same bits."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from helpers import (
    Stop,
    changed,
    configured,
    distinct_letters,
    made_experience,
    read_jsonl,
    stopping,
    table,
    tiny_recipe,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import tether
from tether import api
from tether.errors import UserError
from tether.models.policy import AdapterOffReference, FrozenReference
from tether.models.weights import trainable_parameters
from tether.planning.plan import make_plan
from tether.ppo.result import first_controls
from tether.ppo.roles import build_roles
from tether.ppo.updates.actor import update_actor
from tether.ppo.updates.critic import update_critic
from tether.run.checkpoint_store import latest_checkpoint

LORA = {"rank": 4, "alpha": 8.0}


@pytest.fixture(scope="module")
def recipe(tiny_model_dir, tiny_data, tmp_path_factory):
    return changed(
        tiny_recipe(tiny_model_dir, tiny_data, tmp_path_factory.mktemp("finished") / "run"),
        model__lora=LORA,
        model__critic_lora={"rank": 2, "targets": ["q_proj", "down_proj"]},
        actor__lr=1e-2,
        train__iterations=4,
        train__checkpoint_every=2,
        train__eval_prompts=3,
    )


@pytest.fixture
def config(recipe, tmp_path):
    return changed(recipe, run__dir=str(tmp_path / "run"))


@pytest.fixture(scope="module")
def finished(recipe):
    """A run that the tests only read."""
    return tether.train(recipe, reward=distinct_letters)


def test_a_stopped_run_with_adapters_goes_on_to_the_same_bits(config, finished):
    with pytest.raises(Stop):  # 6 scores in the first evaluation, 12 an iteration
        tether.train(config, reward=stopping(6 + 3 * 12 + 5))
    run = Path(config["run"]["dir"])
    result = api.resume(run, reward=distinct_letters)
    assert (result.resumed_from, result.iterations_done) == (2, 4)
    for name in ("metrics.jsonl", "evals.jsonl", "rollouts/000003.jsonl"):
        assert (run / name).read_bytes() == (finished.run / name).read_bytes()
    one, other = latest_checkpoint(run), latest_checkpoint(finished.run)
    names = {path.name for path in one.iterdir()}
    assert names == {path.name for path in other.iterdir()}
    for name in (
        "adapter.safetensors",
        "critic.safetensors",
        "actor_optimizer.safetensors",
        "critic_optimizer.safetensors",
    ):
        assert (one / name).read_bytes() == (other / name).read_bytes()


def test_a_checkpoint_holds_what_learns_and_no_base(finished, tiny_model_dir):
    checkpoint = latest_checkpoint(finished.run)
    adapter = load_file(checkpoint / "adapter.safetensors")
    assert len(adapter) == 2 * 2 * 7, "two matrices for seven linear layers, twice"
    assert all("lora_" in name for name in adapter)
    assert any(bool(x.any()) for name, x in adapter.items() if "lora_B" in name)
    critic = load_file(checkpoint / "critic.safetensors")
    assert {name for name in critic if "lora_" not in name} == {"head.weight", "head.bias"}
    assert bool(critic["head.weight"].any())
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".safetensors", ".json"}
    base = Path(tiny_model_dir, "model.safetensors").stat().st_size
    assert (checkpoint / "adapter.safetensors").stat().st_size < base
    assert not (checkpoint / "actor").exists()
    [moments] = {len(load_file(checkpoint / "actor_optimizer.safetensors")) / len(adapter)}
    assert moments == 3, "two moments and a count for each matrix"


def test_the_kl_is_exactly_0_until_the_adapter_moves(finished):
    first, *later = read_jsonl(finished.run / "metrics.jsonl")
    assert first["kl/sequence_mean"] == 0.0
    assert any(abs(line["kl/sequence_mean"]) > 1e-4 for line in later)
    before, after = read_jsonl(finished.run / "evals.jsonl")
    assert before["kl"] == 0.0
    assert after["kl"] != 0.0


def test_only_adapters_and_the_head_are_moved(config):
    settings = configured(config)
    roles = build_roles(settings, distinct_letters)
    everything = [*roles.actor.model.named_parameters(), *roles.critic.named_parameters()]
    start = [weight.detach().clone() for _, weight in everything]
    experience = made_experience(roles)
    for iteration in range(2):
        update_critic(experience, roles, settings, iteration)
        update_actor(experience, roles, settings, iteration, first_controls(settings))
    for (name, weight), before in zip(everything, start, strict=True):
        learns = "lora_" in name or name.startswith("head.")
        assert torch.equal(weight, before) != learns, name
    held = [*roles.actor_optimizer.parameters, *roles.critic_optimizer.parameters]
    assert sum(w.numel() for w in held) == sum(
        w.numel() for name, w in everything if "lora_" in name or name.startswith("head.")
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"actor__update": {"kind": "trpo"}},
        {"actor__update": {"kind": "penalty", "estimator": "full"}},
        {"kl__in_loss": {"coef": 0.1, "estimator": "full"}},
        {"critic": {"shared_trunk": True}, "model__critic_lora": None},
        {"model__gradient_checkpointing": True},
        {"model__dtype": "bfloat16"},  # of both bases
        {"model__critic_dtype": "bfloat16"},
        {"advantage__estimator": "rloo", "critic": {}, "model__critic_lora": None},
    ],
)
def test_adapters_go_with(config, changes):
    short = {"train__iterations": 2, "actor__epochs": 1, "train__checkpoint_every": 0}
    config = changed(config, data__heldout=None, **short, **changes)
    result = tether.train(config, reward=distinct_letters)
    lines = read_jsonl(result.run / "metrics.jsonl")
    assert all(math.isfinite(line["kl/sequence_mean"]) for line in lines)
    adapter = load_file(latest_checkpoint(result.run) / "adapter.safetensors")
    assert any(bool(x.any()) for name, x in adapter.items() if "lora_B" in name)


@table(
    ("changes", "words"),
    [
        ({"kl__refresh_reference_every": 2}, r"kl\.refresh_reference_every does not go with"),
        ({"model__reference_dtype": "bfloat16"}, r"model\.reference_dtype does not apply"),
        ({"critic": {"shared_trunk": True}}, r"model\.critic_lora does not apply"),
        ({"advantage__estimator": "rloo", "critic": {}}, r"model\.critic_lora needs a critic"),
        ({"model__lora": {"targets": []}}, r"model\.lora\.targets"),
        ({"model__lora": {"rank": 0}}, r"model\.lora\.rank"),
    ],
)
def test_what_does_not_go_with_adapters_is_refused_by_name(config, changes, words):
    with pytest.raises(UserError, match=words):
        configured(config, **changes)


def test_the_base_is_the_reference_unless_another_is_named(config, tmp_path, tiny_model_dir):
    roles = build_roles(configured(config), distinct_letters)
    assert isinstance(roles.reference, AdapterOffReference)
    named = build_roles(configured(config, model__reference=tiny_model_dir), distinct_letters)
    assert isinstance(named.reference, AdapterOffReference)
    other = tmp_path / "other"
    AutoModelForCausalLM.from_pretrained(tiny_model_dir).save_pretrained(other)
    apart = build_roles(configured(config, model__reference=str(other)), distinct_letters)
    assert isinstance(apart.reference, FrozenReference)


def test_each_role_has_its_number_format(tiny_config):
    config = configured(
        tiny_config, model__reference_dtype="bfloat16", model__critic_dtype="float64"
    )
    roles = build_roles(config, distinct_letters)
    assert roles.actor.model.dtype == torch.float32
    assert roles.reference.policy.model.dtype == torch.bfloat16
    assert {w.dtype for w in roles.critic.parameters()} == {torch.float64}
    result = tether.train(config, reward=distinct_letters)
    assert read_jsonl(result.run / "metrics.jsonl")[0]["kl/sequence_mean"] != 0.0


def test_eval_generate_and_trace_read_a_run_with_adapters(finished, config):
    run = str(finished.run)
    evaluation = api.evaluate(run, reward=distinct_letters)
    assert evaluation.greedy == finished.after.greedy
    assert evaluation.sampled == finished.after.sampled
    assert evaluation.kl == finished.after.kl
    merged, plain = (
        tether.generate("3+1=?", model=run),
        tether.generate("3+1=?", model=config["model"]["actor"]),
    )
    assert merged != plain, "the adapter was trained hard enough to show"
    traced = api.trace("3+1=?", run, reward=distinct_letters)
    assert any(traced["tokens"]["kl"])


def test_an_adapter_that_does_not_fit_the_fields_is_refused(finished):
    with pytest.raises(UserError, match=r"change model\.lora"):
        api.evaluate(str(finished.run), overrides={"model.lora.rank": 2}, reward=distinct_letters)


def test_an_adapter_is_not_put_on_another_base(finished, tiny_model_dir, tmp_path):
    """Its hash is kept with the checkpoint."""
    other = tmp_path / "other"
    shutil.copytree(tiny_model_dir, other)
    AutoModelForCausalLM.from_pretrained(tiny_model_dir).double().save_pretrained(other)
    run = Path(shutil.copytree(finished.run, tmp_path / "run"))
    path = run / "config.yaml"
    path.write_text(path.read_text().replace(tiny_model_dir, str(other)))
    with pytest.raises(UserError, match="no longer the model that the adapter"):
        tether.generate("3+1=?", model=str(run))
    with pytest.raises(UserError, match="no longer the model that the adapter"):
        api.evaluate(str(run), reward=distinct_letters)


def test_the_plan_counts_what_learns(config, tiny_config):
    settings = configured(config, kl__in_reward={"coef": 0.1})
    roles = build_roles(settings, distinct_letters)
    plan = make_plan(settings, roles)
    # Two layers of q, k, v, o (32 x 32), gate, up (64 x 32), down (32 x 64): rank 4 a side.
    adapter = 2 * 4 * (4 * (32 + 32) + 3 * (32 + 64))
    assert plan.actor.learning == adapter
    assert plan.actor.parameters == 260 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 64) + 32 + adapter
    assert plan.reference.parameters == 0
    assert plan.checkpoint_bytes == 3 * 4 * (adapter + plan.critic.learning)
    assert plan.critic.learning == 2 * 2 * (32 + 32 + 64 + 32) + 33
    weights = 4 * (plan.actor.parameters + plan.critic.parameters)
    assert plan.state_bytes == weights + plan.checkpoint_bytes
    assert "of which 4.35k learn" in str(plan.lines())
    full = make_plan(configured(tiny_config), build_roles(configured(tiny_config)))
    assert full.reference.parameters == full.actor.parameters == full.actor.learning


def test_state_json_names_the_base_and_no_adapter_config_is_written(finished):
    state = json.loads((latest_checkpoint(finished.run) / "state.json").read_text())
    assert state["inputs"]["model.actor"]
    assert not list(finished.run.rglob("adapter_config.json"))


def test_learned_names_tied_weights_once(tiny_model):
    names = trainable_parameters(tiny_model)
    assert "lm_head.weight" not in names
    assert "model.embed_tokens.weight" in names


@pytest.mark.parametrize("update", [{"kind": "trpo"}, {"kind": "penalty", "estimator": "full"}])
def test_recomputed_layers_make_the_same_run(tiny_config, tmp_path, update):
    """Gradient checkpointing changes memory and time, and no number beyond rounding."""
    config = changed(
        tiny_config, actor__update=update, train__iterations=2, data__heldout=None, actor__lr=1e-4
    )
    plain = tether.train(config, reward=distinct_letters)
    again = changed(config, run__dir=str(tmp_path / "again"), model__gradient_checkpointing=True)
    recomputed = tether.train(again, reward=distinct_letters)
    one, other = (read_jsonl(result.run / "metrics.jsonl") for result in (plain, recomputed))
    for before, after in zip(one, other, strict=True):
        assert before == pytest.approx(after, rel=1e-4, abs=1e-6)
