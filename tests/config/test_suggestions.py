"""Words of other systems are understood, and far-fetched guesses are not made."""

import pytest
from helpers import table, tiny_llama

from tether.cli.field_options import one_word
from tether.config.load import load_config
from tether.errors import UserError
from tether.models.vocabulary import load_vocabulary


@table(
    ("typed", "meant"),
    [
        ("rollout.n", "rollout.samples_per_prompt"),
        ("actor.ppo_epochs", "actor.epochs"),
        ("max_completion_length", "rollout.max_response_tokens"),
        ("rollout.promts", "rollout.prompts"),
        ("critic.samples_per_prompt", "rollout.samples_per_prompt"),
    ],
)
def test_a_word_of_another_system_or_a_slip_is_answered_with_the_field(typed, meant):
    with pytest.raises(UserError, match=rf"Unknown field .*; did you mean {meant}\?"):
        load_config("arithmetic", {typed: 4})


def test_words_with_an_equals_sign_are_told_how_fields_are_written():
    with pytest.raises(UserError, match=r"Write --actor.lr 1e-6 in place of actor\.lr=1e-6\."):
        one_word(["arithmetic", "actor.lr=1e-6"], "", "recipe")


@table("typed", ["rollout.qq", "actor.zz"])
def test_what_resembles_no_field_is_not_guessed_at(typed):
    with pytest.raises(UserError, match=r"see `tether train --help`"):
        load_config("arithmetic", {typed: 4})


def test_a_model_without_a_tokenizer_is_told_so_in_a_whole_sentence(tmp_path):
    model = tiny_llama(260, 256)
    model.save_pretrained(tmp_path)
    with pytest.raises(
        UserError, match=r"has no tokenizer: none of tokenizer\.json.*comes from\.$"
    ):
        load_vocabulary(str(tmp_path), model)
