"""The arithmetic recipe learns with vLLM as its sampler (`make vllm`)."""

from importlib.util import find_spec

import pytest
from helpers import read_jsonl

from tether import api
from tether.config.load import load_config


@pytest.mark.long
@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed; see `make vllm`")
def test_arithmetic_learns_from_rows_that_vllm_sampled(tmp_path):
    overrides = {
        "rollout.sampler": "vllm",
        "threads": 1,
        "train.checkpoint_every": 0,
        "run.dir": str(tmp_path / "run"),
    }
    result = api.train(load_config("arithmetic", overrides))
    assert result.before.sampled.mean <= 0.60
    assert result.after.sampled.mean >= 0.85
    assert result.after.sampled.apart_from(result.before.sampled)
    metrics = read_jsonl(result.run / "metrics.jsonl")
    assert all(line["rollout/log_prob_diff_mean"] < 1e-4 for line in metrics)
    assert all(line["rollout/effective_share"] > 0.999 for line in metrics)
