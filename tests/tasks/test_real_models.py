"""The recipes with real weights: `tether fetch smollm2` puts them into models/."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tether
from tether import api
from tether.config.load import load_config
from tether.data.files import read_rows
from tether.run.reader import read_lines

WEIGHTS = Path(__file__).resolve().parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
needs_weights = pytest.mark.skipif(
    not WEIGHTS.is_file(), reason="needs the weights: tether fetch smollm2"
)


def config_of(run: Path, recipe: str = "sentiment", **fields):
    small = {
        "run.dir": str(run),
        "model.actor": str(WEIGHTS),
        "rollout.prompts": 4,
        "actor.minibatch_rows": 16,
        "train.iterations": 3,
        "train.eval_prompts": 8,
        "train.checkpoint_every": 1,
        "train.probe": None,
        **fields,
    }
    return load_config(recipe, small)


@pytest.mark.long
@needs_weights
def test_three_iterations_with_real_weights_and_the_export_speaks_as_the_run(tmp_path):
    run, exported = tmp_path / "run", tmp_path / "exported"
    result = tether.train(config_of(run))
    assert result.iterations_done == 3
    assert all(line["score/std"] > 0 for line in read_lines(run / "metrics.jsonl"))
    api.export(run, exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    talker = api.Talker(str(run), max_tokens=16)
    for row in read_rows("tether:sentiment/heldout.jsonl")[:6]:
        inputs = tokenizer(row["prompt"], return_tensors="pt")
        with torch.no_grad():
            output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
        plain = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
        assert talker.respond(row["prompt"])[0][0] == plain.removesuffix("<|im_end|>")


@pytest.mark.long
@needs_weights
def test_a_run_that_stopped_in_the_middle_ends_with_the_same_bits(tmp_path):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    tether.train(config_of(whole, **{"data.heldout": None}))

    class Killed(Exception):
        pass

    class Stopper(api.Watcher):
        def iterated(self, record):
            if record.iteration == 1:
                raise Killed  # after iteration 2 was written, before its checkpoint

    config = config_of(halves, **{"data.heldout": None})
    with pytest.raises(Killed):
        tether.train(config, watch=Stopper())
    tether.train(config, resume=True)
    assert (whole / "metrics.jsonl").read_bytes() == (halves / "metrics.jsonl").read_bytes()
    for path in (whole / "checkpoints" / "000003").glob("*.safetensors"):
        other = halves / "checkpoints" / "000003" / path.name
        assert path.read_bytes() == other.read_bytes()
