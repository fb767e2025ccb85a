"""A reward model as PPO's reward: the right number at the last token, on the reference's scale."""

import json
from pathlib import Path

import pytest
import torch
from helpers import changed, mask_of, read_jsonl, sequences_of, table
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

import tether
from tether import api
from tether.config.load import validate_config
from tether.errors import UserError
from tether.models.reward_model import RewardModel, load_reward_model
from tether.ppo.roles import build_roles
from tether.rewards.learned import LearnedScorer, measure_scale
from tether.rewards.scorers import Scale

CPU = torch.device("cpu")
EOS = 256
ROWS = [
    {"prompt": "1+1=?", "response": "2", "finished": True},
    {"prompt": "1+1=?", "response": "I would say that it is three.", "finished": True},
    {"prompt": "Why?", "response": "", "finished": True},
    {"prompt": [{"role": "user", "content": "22?"}], "response": "22", "finished": True},
]


def made(kind: str):
    """A random reward model of that kind over the byte tokenizer's ids."""
    torch.manual_seed(1)
    small = {"vocab_size": 260, "num_labels": 1}
    match kind:
        case "llama":
            shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
            config = LlamaConfig(
                **small, **shape, num_attention_heads=2, initializer_range=0.3, pad_token_id=257
            )
            return LlamaForSequenceClassification(config).eval()
        case "gpt2":  # padding is how a dialogue ends, as GPT-2's users have it
            config = GPT2Config(
                **small, n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3
            )
            return GPT2ForSequenceClassification(config).eval()
        case "bert":
            config = BertConfig(
                **small,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                initializer_range=0.3,
            )
            return BertForSequenceClassification(config).eval()
    raise ValueError(kind)


@pytest.fixture
def reward_dir(tmp_path, byte_tokenizer):
    """A function that writes a reward model's directory."""

    def write(kind: str = "llama", **changes) -> str:
        model = made(kind)
        directory = tmp_path / f"reward-{kind}"
        model.save_pretrained(directory)
        byte_tokenizer.save_pretrained(directory)
        if changes:
            path = directory / "config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        return str(directory)

    return write


def own_score(model, tokenizer, row: dict) -> float:
    """transformers' forward on the unpadded row, whose text is written out here."""
    asked = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][0]["content"]
    text = f"<|user|>{asked}<|assistant|>{row['response']}<|end|>"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits.item()


@table("kind", ["llama", "gpt2", "bert"])
@table("microbatch_tokens", [1, 40, 10_000])
def test_a_score_is_transformers_own_whatever_the_batch(
    reward_dir, byte_tokenizer, kind, microbatch_tokens
):
    reward = load_reward_model(reward_dir(kind), "float32", CPU, microbatch_tokens)
    found = LearnedScorer(reward, None, Scale()).raw_scores(ROWS)
    model = made(kind)
    expected = [own_score(model, byte_tokenizer, row) for row in ROWS]
    assert found == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 3) for score in found}) == len(ROWS)


def test_the_last_token_counts_even_where_it_looks_like_padding(byte_tokenizer):
    """transformers' own pooling would skip an EOS that is also the padding id."""
    model = made("gpt2")
    model.config.pad_token_id = EOS
    reward = RewardModel(model, byte_tokenizer, 100)
    rows = [[1, 2, EOS], [1, 2, 3, 4, EOS]]
    model_without = made("gpt2")
    expected = [model_without(input_ids=torch.tensor([ids])).logits.item() for ids in rows]
    assert reward.scores(rows).tolist() == pytest.approx(expected, abs=1e-5)


def test_a_response_that_was_cut_off_is_read_without_an_end(reward_dir, byte_tokenizer):
    reward = load_reward_model(reward_dir(), "float32", CPU, 1000)
    row = {"prompt": "1+1=?", "response": "2", "finished": False}
    ids = byte_tokenizer("<|user|>1+1=?<|assistant|>2", add_special_tokens=False).input_ids
    with torch.no_grad():
        expected = made("llama")(input_ids=torch.tensor([ids])).logits.item()
    assert LearnedScorer(reward, None, Scale()).raw_scores([row]) == pytest.approx(
        [expected], abs=1e-5
    )


def test_a_score_counts_deviations_from_the_reference(reward_dir):
    scale = measure_scale([1.0, 2.0, 6.0])
    assert (scale.mean, scale.std) == (3.0, pytest.approx(7**0.5))
    reward = load_reward_model(reward_dir(), "float32", CPU, 1000)
    plain = LearnedScorer(reward, None, Scale()).raw_scores(ROWS)
    verdicts = LearnedScorer(reward, None, scale).score(ROWS)
    assert [v.score for v in verdicts] == pytest.approx([(x - 3) / 7**0.5 for x in plain])


def test_a_dialogue_beyond_the_positions_is_unscorable_and_the_others_are_not(reward_dir):
    reward = load_reward_model(reward_dir("gpt2"), "float32", CPU, 1000)
    long = {"prompt": "a" * 70, "response": "b", "finished": True}
    first, second = LearnedScorer(reward, None, Scale()).score([long, ROWS[0]])
    assert first.score is None
    assert "only 64 positions" in first.problem
    assert second.score is not None


# As the reward of a run


@pytest.fixture
def learned_config(tiny_config, reward_dir) -> dict:
    return changed(tiny_config, reward__kind=f"model:{reward_dir()}", train__iterations=3)


def test_ppo_trains_on_it_and_the_reference_scores_0_on_average(learned_config):
    roles = build_roles(validate_config(learned_config))
    scale = roles.reward.scale
    assert scale.std > 0
    result = tether.train(learned_config)
    assert result.iterations_done == 3
    state = json.loads((result.run / "checkpoints/000003/state.json").read_text())
    assert state["reward_scale"] == {"mean": scale.mean, "std": scale.std}
    # 18 prompts; the first iteration's rows are the reference's own responses.
    assert abs(read_jsonl(result.run / "metrics.jsonl")[0]["score/mean"]) < 1.0


def test_the_scale_follows_from_the_seed(learned_config):
    scales = [
        build_roles(validate_config({**learned_config, "seed": seed})).reward.scale
        for seed in (0, 0, 1)
    ]
    assert scales[0] == scales[1] != scales[2]


def test_a_resumed_run_keeps_its_scale_and_ends_in_the_same_bits(learned_config, tmp_path):
    whole = tether.train(changed(learned_config, run__dir=str(tmp_path / "whole")))
    stopped = changed(learned_config, run__dir=str(tmp_path / "stopped"), train__iterations=1)
    tether.train(stopped)
    resumed = api.resume(tmp_path / "stopped", {"train.iterations": 3})
    assert resumed.resumed_from == 1
    for name in ("metrics.jsonl", "checkpoints/000003/actor/model.safetensors"):
        assert (whole.run / name).read_bytes() == (tmp_path / "stopped" / name).read_bytes()


@pytest.mark.long
def test_a_resumed_run_takes_its_scale_from_the_checkpoint(learned_config, monkeypatch):
    first = tether.train(changed(learned_config, train__iterations=1))
    kept = json.loads((first.run / "checkpoints/000001/state.json").read_text())["reward_scale"]
    monkeypatch.setattr("tether.ppo.roles.measure_scale", lambda raw: Scale(9.0, 9.0))
    resumed = api.resume(first.run, {"train.iterations": 2})
    state = json.loads((resumed.run / "checkpoints/000002/state.json").read_text())
    assert state["reward_scale"] == kept


def test_another_reward_model_is_another_run(learned_config):
    run = tether.train(changed(learned_config, train__iterations=1)).run
    path = learned_config["reward"]["kind"].removeprefix("model:")
    other = made("llama")
    with torch.no_grad():
        other.score.weight.add_(1.0)
    other.save_pretrained(path)
    with pytest.raises(UserError, match=r"changed since it was started: .*reward.kind"):
        api.resume(run, {"train.iterations": 2})


def test_a_critic_from_the_reward_model_starts_as_its_score(learned_config, byte_tokenizer):
    path = learned_config["reward"]["kind"].removeprefix("model:")
    config = validate_config(changed(learned_config, model__critic=path))
    roles = build_roles(config)
    ids = byte_tokenizer("<|user|>1+1=?<|assistant|>2<|end|>", add_special_tokens=False).input_ids
    sequences = sequences_of([(ids[:-2], ids[-2:])])
    _, final_values = roles.critic.values(sequences, mask_of(sequences))
    row = {"prompt": "1+1=?", "response": "2", "finished": True}
    [verdict] = roles.reward.score([row])
    assert final_values.tolist() == pytest.approx([verdict.score], abs=1e-4)


# Bad input


def test_two_labels_are_refused_in_one_sentence(tmp_path, byte_tokenizer):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        num_labels=2,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "two")
    byte_tokenizer.save_pretrained(tmp_path / "two")
    with pytest.raises(UserError, match="has 2 labels, but a reward model has one"):
        load_reward_model(str(tmp_path / "two"), "float32", CPU, 100)


def test_a_language_model_is_no_reward_model(tiny_model_dir):
    with pytest.raises(UserError, match="`tether reward-model`"):
        load_reward_model(tiny_model_dir, "float32", CPU, 100)


def test_code_in_a_reward_models_tokenizer_is_refused_without_a_question(
    reward_dir, tmp_path, monkeypatch
):
    """transformers asks on the terminal unless it is told not to run such code."""
    directory, ran, asked = Path(reward_dir()), tmp_path / "ran", []
    (directory / "theirs.py").write_text(f"open({str(ran)!r}, 'w')")
    settings = directory / "tokenizer_config.json"
    theirs = {
        "tokenizer_class": "Theirs",
        "auto_map": {"AutoTokenizer": ["theirs.Theirs", None]},
    }
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **theirs}))
    monkeypatch.setattr("builtins.input", lambda *question: asked.append(question) or "y")
    with pytest.raises(UserError, match="Python code of its own, which tether never runs"):
        load_reward_model(str(directory), "float32", CPU, 100)
    assert not asked
    assert not ran.exists()


def test_a_model_that_is_not_there_is_named(learned_config):
    with pytest.raises(UserError, match="nowhere"):
        tether.check(changed(learned_config, reward__kind="model:nowhere"))


def test_one_that_likes_everything_the_same_is_refused(learned_config, reward_dir):
    model = made("llama")
    with torch.no_grad():
        model.score.weight.zero_()
    model.save_pretrained(reward_dir())
    with pytest.raises(UserError, match="the same score"):
        tether.train(learned_config)


def test_a_reward_model_beside_other_parts_is_refused(tiny_config, reward_dir):
    config = changed(tiny_config)
    config["reward"] = {
        "parts": [
            {"name": "taste", "kind": f"model:{reward_dir()}"},
            {"name": "length", "kind": "exact_answer"},
        ]
    }
    with pytest.raises(UserError, match="a reward model must be the whole reward"):
        tether.check(config)


def test_a_trace_scores_on_the_scale_of_its_run_even_of_one_prompt(learned_config):
    run = tether.train(changed(learned_config, train__iterations=1)).run
    scale = json.loads((run / "checkpoints/000001/state.json").read_text())["reward_scale"]
    found = api.trace("1+1=?", model=str(run), response="2")
    path = learned_config["reward"]["kind"].removeprefix("model:")
    reward = load_reward_model(path, "float32", CPU, 1000)
    [raw] = LearnedScorer(reward, None, Scale()).raw_scores([ROWS[0]])
    expected = (raw - scale["mean"]) / scale["std"]
    assert found["score"] == pytest.approx(expected, abs=1e-4)
