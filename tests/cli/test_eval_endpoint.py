"""`tether eval --endpoint`: another's model on our prompts."""

import json
import re

import pytest
from helpers import table
from rollout.completions import Server, adds

from tether import assets
from tether.models.vocabulary import load_vocabulary_without_model


@pytest.fixture
def server():
    server = Server(adds(load_vocabulary_without_model("tether:starter")))
    yield server
    server.http.shutdown()
    server.http.server_close()


def test_eval_asks_the_endpoint_and_scores_what_it_says(server, tether, monkeypatch):
    monkeypatch.setenv("SECRET", "abc")
    code, out, err = tether(
        *("eval", "--endpoint", server.url, "--endpoint-model", "sums"),
        *("--endpoint-key", "SECRET", "--train.eval_prompts", "40"),
        *("--reward.kind", "number_match"),
    )
    assert code == 0, err
    lines = assets.resolve("tether:arithmetic/heldout.jsonl").read_text().splitlines()
    heldout = [json.loads(line)["prompt"] for line in lines[:40]]
    right = sum("7" not in prompt for prompt in heldout) / 40
    assert 0.2 < right < 0.9
    assert re.search(r"greedy +100\.0%", out)
    assert re.search(rf"sampled +{right:.1%}", out)
    assert "KL" not in out
    assert len(server.asked) == 80
    assert {body["key"] for body in server.asked} == {"Bearer abc"}
    assert {body["model"] for body in server.asked} == {"sums"}


@table(
    ("words", "sentence"),
    [
        (["--endpoint", "http://h:1"], "--endpoint needs --endpoint-model NAME"),
        (["--endpoint-model", "m"], "go with --endpoint URL"),
        (
            ["--endpoint", "http://h:1", "--endpoint-model", "m", "--endpoint-key", "NOT_SET"],
            "NOT_SET, which is not set",
        ),
        (["--endpoint", "h:1", "--endpoint-model", "m"], "write http://HOST:PORT"),
        (
            ["--endpoint", "http://h:1", "--endpoint-model", "m", "--data.heldout", "null"],
            "data.heldout is not set",
        ),
    ],
)
def test_eval_refuses_half_an_endpoint(tether, words, sentence):
    code, _, err = tether("eval", *words)
    assert code == 2
    assert sentence in " ".join(err.split())
