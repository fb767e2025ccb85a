"""Every family's log-probs, in training and in sampling, against transformers' own forward."""

import copy

import pytest
import torch
from helpers import (
    changed,
    distinct_letters,
    mask_of,
    read_jsonl,
    response,
    sample,
    sequences_of,
    slow_log_probs,
)
from transformers import FalconConfig, FalconForCausalLM

import tether
from models.families import EOS_IDS, FAMILIES, VOCABULARY, make_family
from tether.errors import UserError
from tether.models.frozen_layers import refuse_unsplittable
from tether.models.loading import load_causal_lm
from tether.models.policy import Policy
from tether.models.vocabulary import load_vocabulary

ROWS = [
    ([5, 9, 200], [7, 8, 256]),
    ([1], [2, 3, 4, 5, 6, 7, 299, 298, 297, 0, 0]),
    (list(range(11, 24)), [18, 19]),
    ([0, 0, 21], [0, 22, 0, 0]),
]
every_family = pytest.mark.parametrize("family", FAMILIES)


@every_family
@pytest.mark.parametrize(("width", "microbatch_tokens"), [(None, 1), (None, 10_000), (40, 10_000)])
def test_log_probs_are_transformers_own_with_and_without_padding(family, width, microbatch_tokens):
    model = make_family(family)
    sequences = sequences_of(ROWS, width)
    found = Policy(model, 1.0, microbatch_tokens).log_probs(sequences, mask_of(sequences))
    for row, (prompt, ids) in enumerate(ROWS):
        expected = slow_log_probs(model, prompt, ids)
        torch.testing.assert_close(found[row, : len(ids)], expected, rtol=0, atol=1e-5)


@every_family
def test_a_pass_that_starts_above_frozen_layers_gives_transformers_own_log_probs(family):
    """Positions that GPT-2 adds and windows of single layers are those of the whole model."""
    model = make_family(family)
    for lower_layers in (1, 2):
        policy = Policy(model, 1.0, 30, lower_layers)
        sequences = policy.with_lower_states(sequences_of(ROWS))
        assert sequences.lower_states is not None
        found = policy.log_probs(sequences, mask_of(sequences))
        for row, (prompt, ids) in enumerate(ROWS):
            expected = slow_log_probs(model, prompt, ids)
            torch.testing.assert_close(found[row, : len(ids)], expected, rtol=0, atol=1e-5)


def test_an_architecture_that_cannot_start_between_layers_is_refused_by_name():
    """Falcon's layers return more than their states."""
    config = FalconConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, num_attention_heads=4
    )
    with pytest.raises(UserError, match=r"model\.learn_layers does not go with here: a falcon"):
        refuse_unsplittable(FalconForCausalLM(config).eval(), 1, "here")


@every_family
def test_left_padded_sampling_gives_the_log_probs_of_each_row_alone(family):
    """Prompts of different lengths, rows that end at different times in several ways."""
    model = make_family(family)
    prompts = [list(range(3, 3 + length)) for length in (1, 9, 4, 2, 6, 9)]
    ends = set(range(0, VOCABULARY, 9)) | set(EOS_IDS)
    rollout = sample(model, prompts, limit=14, eos_ids=tuple(ends))
    lengths = set(rollout.response_lengths.tolist())
    assert len(lengths) > 2, "the rows leave the batch at different times"
    for row, prompt in enumerate(prompts):
        ids = response(rollout, row)
        expected = slow_log_probs(model, prompt, ids)
        found = rollout.rollout_log_probs[row, : len(ids)]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_the_windows_of_these_tests_are_narrower_than_their_rows():
    """A wider window gives other log-probs, so the tests above would see a forgotten one."""
    for family in ("mistral", "qwen2-window"):
        model = make_family(family)
        wide = copy.deepcopy(model)
        wide.config.sliding_window = 100
        for layer in wide.model.layers:
            if getattr(layer.self_attn, "sliding_window", None):
                layer.self_attn.sliding_window = 100
        narrow, open_ = (slow_log_probs(m, *ROWS[1]) for m in (model, wide))
        assert (narrow - open_).abs().max() > 0.01


@pytest.fixture
def family_dir(tmp_path, byte_tokenizer):
    """A family's directory; its tokenizer has no pad token and fewer ids than the embedding."""

    def save(family: str) -> str:
        directory = tmp_path / family
        model = make_family(family)
        model.generation_config.eos_token_id = EOS_IDS
        model.save_pretrained(directory)
        bare = copy.deepcopy(byte_tokenizer)
        bare.pad_token = None
        bare.save_pretrained(directory)
        return str(directory)

    return save


@every_family
def test_every_family_trains_from_its_directory(family, family_dir, tiny_config):
    """The run's own checks hold: the first ratio is 1, sampler and trainer agree, the KL is 0."""
    config = changed(
        tiny_config, model__actor=family_dir(family), train__iterations=1, data__heldout=None
    )
    result = tether.train(config, reward=distinct_letters)
    [line] = read_jsonl(result.run / "metrics.jsonl")
    assert line["actor/grad_norm"] > 0


def test_ids_beyond_the_tokenizer_have_no_text_and_no_pad_token_is_needed(family_dir):
    directory = family_dir("qwen2")
    model = load_causal_lm(directory, "float32", torch.device("cpu"))
    vocabulary = load_vocabulary(directory, model)
    assert vocabulary.tokenizer.pad_token_id is None
    assert vocabulary.eos_ids == set(EOS_IDS)
    a = vocabulary.tokenizer("a").input_ids
    assert vocabulary.decode([*a, 299, *a]) == "aa"
    assert vocabulary.pieces([*a, 299]) == ["a", ""]
