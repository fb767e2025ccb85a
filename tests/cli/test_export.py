"""`tether export`: the directory that other tools load says and does what the run did."""

import json

import pytest
import torch
from helpers import changed, distinct_letters
from transformers import AutoModelForCausalLM, AutoTokenizer

import tether as package
from tether.api import Talker

PROMPTS = ["3+1=?", "2+22=?", "5+333=?", "what?"]


@pytest.fixture(params=["adapter", "all weights"])
def run(request, tiny_config):
    lora = {"rank": 4, "alpha": 16.0} if request.param == "adapter" else None
    config = changed(tiny_config, model__lora=lora, actor__lr=1e-2)
    return package.train(config, reward=distinct_letters).run


def greedy_by_transformers(directory, prompt: str) -> str:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    given = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    given.pop("token_type_ids", None)
    out = model.generate(**given, do_sample=False, max_new_tokens=12)[0, given.input_ids.shape[1] :]
    ids = out.tolist()
    return tokenizer.decode(ids[:-1] if ids[-1] == 256 else ids)


def test_plain_transformers_gives_the_same_greedy_text(tether, run, tmp_path):
    code, out, _ = tether("export", run, tmp_path / "model")
    assert code == 0
    assert str(tmp_path / "model") in out
    talker = Talker(str(run), max_tokens=12)
    texts = [talker.respond(prompt)[0][0] for prompt in PROMPTS]
    assert [greedy_by_transformers(tmp_path / "model", prompt) for prompt in PROMPTS] == texts
    again = Talker(str(tmp_path / "model"), max_tokens=12)
    assert [again.respond(prompt)[0][0] for prompt in PROMPTS] == texts


def test_it_is_an_ordinary_directory_without_pickle_or_adapter(tether, run, tmp_path, tiny_model):
    tether("export", run, tmp_path / "model")
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
        "tether.yaml",
    } <= names
    assert not [name for name in names if "adapter" in name or name.endswith(".bin")]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.state_dict().keys() == tiny_model.state_dict().keys()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".staged")]


def test_the_card_says_how_it_was_trained(tether, run, tmp_path, tiny_model_dir):
    tether("export", run, tmp_path / "model")
    card = (tmp_path / "model/README.md").read_text(encoding="utf-8")
    before, after = (
        json.loads(line) for line in (run / "evals.jsonl").read_text().strip().split("\n")
    )
    for record in (before["greedy"], after["greedy"], before["sampled"], after["sampled"]):
        assert f"{record['mean']:.3f} ({record['low']:.3f} to {record['high']:.3f})" in card
    assert f"{after['kl']:.4f} nats" in card
    assert tiny_model_dir in card
    assert "2 of 12 responses each" in card
    assert f"tether {package.__version__}" in card
    assert ("LoRA adapter of rank 4" in card) == (not (run / "checkpoints/000002/actor").exists())


def test_a_taken_place_a_folder_that_is_no_run_and_a_run_without_checkpoint(tether, run, tmp_path):
    (tmp_path / "taken").mkdir()
    code, _, err = tether("export", run, tmp_path / "taken")
    assert code == 2
    assert "exists already" in err
    code, _, err = tether("export", tmp_path / "taken", tmp_path / "model")
    assert code == 2
    assert "is not a run" in err
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    code, _, err = tether("export", bare, tmp_path / "model")
    assert code == 2
    assert "no whole checkpoint" in err
    assert not (tmp_path / "model").exists()
