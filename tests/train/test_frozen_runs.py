"""Whole runs in which some layers learn: what is saved, and that they go on to the same bits."""

import shutil
from pathlib import Path

import pytest
import torch
from helpers import Stop, changed, distinct_letters, first_or_all, read_jsonl, stopping
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import tether
from tether import api
from tether.errors import UserError
from tether.explain.trace import trace_prompt
from tether.run.checkpoint_store import latest_checkpoint

CHANGES = {
    "own critic": {"kl__refresh_reference_every": 3},
    "lora": {"model__lora": {"rank": 2}, "model__critic_lora": {"rank": 2}},
    "shared trunk": {"critic": {"shared_trunk": True}},
}
LEARNT = [f"model.layers.1.{name}" for name in ("input_layernorm", "post_attention_layernorm")]
LEARNT += [f"model.layers.1.self_attn.{name}_proj" for name in "qkvo"]
LEARNT += [f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")]
LEARNT = {f"{name}.weight" for name in [*LEARNT, "model.norm"]}


def of_top_layer(config: dict, **dotted) -> dict:
    return changed(
        config,
        model__learn_layers=1,
        actor__lr=1e-2,
        train__iterations=4,
        train__checkpoint_every=2,
        train__eval_prompts=3,
        **dotted,
    )


@pytest.mark.parametrize("which", first_or_all(CHANGES))
def test_a_stopped_run_goes_on_to_the_same_bits(tiny_config, which, tmp_path):
    config = of_top_layer(tiny_config, **CHANGES[which])
    with pytest.raises(Stop):  # 6 scores in the first evaluation, 12 an iteration
        tether.train(config, reward=stopping(6 + 3 * 12 + 5))
    run = Path(config["run"]["dir"])
    result = api.resume(run, reward=distinct_letters)
    assert (result.resumed_from, result.iterations_done) == (2, 4)
    whole = tether.train(changed(config, run__dir=str(tmp_path / "whole")), reward=distinct_letters)
    for name in ("metrics.jsonl", "evals.jsonl", "rollouts/000003.jsonl"):
        assert (run / name).read_bytes() == (whole.run / name).read_bytes()
    one, other = latest_checkpoint(run), latest_checkpoint(whole.run)
    names = {path.name for path in one.iterdir()}
    assert names == {path.name for path in other.iterdir()}
    for name in names - {"state.json"}:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.fixture(scope="module")
def finished(tiny_model_dir, tiny_data, tmp_path_factory):
    """A run whose base lies in a folder of its own."""
    folder = tmp_path_factory.mktemp("frozen")
    shutil.copytree(tiny_model_dir, folder / "base")
    config = {
        "threads": 1,
        "run": {"dir": str(folder / "run")},
        "model": {"actor": str(folder / "base"), "learn_layers": "1..1"},
        "data": {"train": tiny_data, "heldout": tiny_data},
        "rollout": {"prompts": 6, "samples_per_prompt": 2, "max_response_tokens": 8},
        "reward": {"kind": "exact_answer"},
        "actor": {"lr": 1e-2, "epochs": 2, "minibatch_rows": 5},
        "train": {"iterations": 2, "eval_prompts": 3},
    }
    return tether.train(config, reward=distinct_letters).run


def test_a_checkpoint_holds_what_learns_alone(finished):
    checkpoint = latest_checkpoint(finished)
    actor = load_file(checkpoint / "actor.safetensors")
    assert actor.keys() == LEARNT
    critic = load_file(checkpoint / "critic.safetensors")
    names = {name.replace("model.", "trunk.", 1) for name in LEARNT}
    assert critic.keys() == names | {"head.weight", "head.bias"}
    assert not (checkpoint / "actor").exists()
    moments = load_file(checkpoint / "actor_optimizer.safetensors")
    assert len(moments) == 3 * len(actor), "two moments and a count for each"


def test_an_export_is_the_whole_model_with_what_was_learnt(finished, tmp_path):
    directory = api.export(finished, tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    base = AutoModelForCausalLM.from_pretrained(finished.parent / "base").state_dict()
    learnt = load_file(latest_checkpoint(finished) / "actor.safetensors")
    assert exported.keys() == base.keys()
    for name, weight in exported.items():
        assert torch.equal(weight, learnt.get(name, base[name])), name
        assert torch.equal(weight, base[name]) != (name in learnt), name
    assert "layers 1..1" in (directory / "README.md").read_text()


def test_the_run_is_evaluated_traced_and_answers(finished):
    after = read_jsonl(finished / "evals.jsonl")[-1]
    overrides = {"train.eval_prompts": 3}
    found = api.evaluate(str(finished), reward=distinct_letters, overrides=overrides)
    assert found.kl == pytest.approx(after["kl"], rel=1e-6)
    assert found.sampled.mean == pytest.approx(after["sampled"]["mean"])
    assert found.kl != 0
    assert api.generate("1+1=?", str(finished), max_tokens=4)
    record = trace_prompt(str(finished), "1+1=?", columns={"answer": "2"}, reward=distinct_letters)
    assert any(abs(x) > 1e-4 for x in record["tokens"]["kl"])
    assert record["new_values"] is not None


def test_layers_of_another_base_are_refused(finished, tmp_path):
    shutil.copytree(finished.parent, tmp_path / "moved")
    run = tmp_path / "moved" / "run"
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace(str(finished.parent), str(tmp_path / "moved")))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "moved" / "base")
    with torch.no_grad():
        model.model.embed_tokens.weight += 1
    model.save_pretrained(tmp_path / "moved" / "base")
    with pytest.raises(UserError, match=r"no longer the model that the layers in .* were trained"):
        api.export(run, tmp_path / "out")
