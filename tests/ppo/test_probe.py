"""A probe's numbers against a model called token by token, and before and after a run."""

import json
import math

import pytest
import torch
from helpers import changed, distinct_letters

import tether
from tether.data.probe import Fact, Probe
from tether.models.policy import Policy
from tether.models.vocabulary import Vocabulary
from tether.ppo.estimates import Interval
from tether.ppo.probe import ProbeResult, run_probe


@torch.no_grad()
def log_likelihood(model, tokenizer, text, seen):
    """Sum over the text's tokens after the first `seen`, one forward pass per token."""
    ids = tokenizer(text)["input_ids"]
    return sum(
        float(model(torch.tensor([ids[:i]])).logits[0, -1].log_softmax(-1)[ids[i]])
        for i in range(seen, len(ids))
    )


def test_facts_and_texts_are_those_of_single_forward_passes(tiny_model, byte_tokenizer):
    facts = [
        Fact("Which?", ("red", "blue", "a longer one", "no"), answer) for answer in range(4)
    ] + [Fact("And now?", ("yes", "never"), answer) for answer in range(2)]
    texts = ["It rains.", "A dog sleeps."]
    vocabulary = Vocabulary(byte_tokenizer, frozenset([256]))
    probe = Probe(facts, texts, ["Hello?"])
    found = run_probe(probe, Policy(tiny_model, 1.0, 64), vocabulary)

    for fact, right in zip(facts, found.right, strict=True):
        begin = f"Question: {fact.question}\nAnswer:"
        scores = [
            log_likelihood(tiny_model, byte_tokenizer, f"{begin} {choice}", len(begin))
            / len(choice)
            for choice in fact.choices
        ]
        assert right == (max(scores) == scores[fact.answer])
    assert sum(found.right[:4]) == 1  # one choice is the likeliest
    for text, nats in zip(texts, found.nats, strict=True):
        expected = -log_likelihood(tiny_model, byte_tokenizer, text, 1) / (len(text) - 1)
        assert nats == pytest.approx(expected, rel=1e-5)
    assert len(found.answers) == 1


def test_items_are_compared_with_themselves():
    before = ProbeResult([True, True, False, False], [1.0, 3.0], [])
    after = ProbeResult([True, False, False, False], [1.1, 3.1], [])
    assert before.facts().mean == 0.5
    assert before.perplexity().mean == pytest.approx(math.exp(2))
    gained = after.facts_gained(before)
    # Differences 0, -1, 0, 0: mean -1/4, standard deviation 1/2, standard error 1/4.
    assert (gained.mean, gained.low, gained.high) == pytest.approx(
        (-0.25, -0.25 - 1.959964 / 4, -0.25 + 1.959964 / 4)
    )
    ratio = after.perplexity_ratio(before)
    # Texts differ by 2 nats from each other, but each moved by the same 0.1.
    assert (ratio.mean, ratio.low, ratio.high) == pytest.approx([math.exp(0.1)] * 3)
    assert Interval.of_mean([2.0]) == Interval(2.0, -math.inf, math.inf)


def test_a_run_that_names_a_probe_keeps_what_it_found_before_and_after(tiny_config, tmp_path):
    (tmp_path / "probe").mkdir()
    (tmp_path / "probe" / "text.jsonl").write_text('{"text": "1+1=2"}\n{"text": "2+2=4"}\n')
    config = changed(
        tiny_config,
        data__heldout=tiny_config["data"]["train"],
        train__probe=str(tmp_path / "probe"),
        train__iterations=2,
        train__eval_every=1,
        train__eval_prompts=2,
        rollout__temperature=0.5,  # of sampling; a likelihood is the model's own
    )
    result = tether.train(config, reward=distinct_letters)
    assert result.before.probe is not None
    assert result.after.probe is not None
    lines = (tmp_path / "run" / "evals.jsonl").read_text().splitlines()
    kept = [json.loads(line).get("probe") for line in lines]
    assert [probe is not None for probe in kept] == [True, False, True]
    assert kept[0]["nats"] != kept[2]["nats"]
    assert ProbeResult.from_record(kept[2]) == tether.api.probe(
        str(tmp_path / "run"), str(tmp_path / "probe")
    )
