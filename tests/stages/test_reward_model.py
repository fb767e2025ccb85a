"""Bradley-Terry by hand, calibration on a table, and a reward model from end to end."""

import json
import math
from pathlib import Path

import pytest
import torch
from helpers import f64, read_jsonl, table
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tether import api
from tether.algo.losses import bradley_terry_losses
from tether.config.stages import PreferenceSection
from tether.data.dialogues import PreferencePair, encode_whole_dialogue, load_pairs
from tether.errors import UserError
from tether.models.reward_model import start_reward_model
from tether.stages.reward_model import Bin, RewardModelStage, reliability

CPU = torch.device("cpu")
EOS, USER, ASSISTANT = 256, 258, 259  # of the byte tokenizer


def write_rows(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def letters(tokenizer, text: str) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(letter) for letter in text]


# The loss


@table(
    ("difference", "loss", "slope"),
    [
        (0.0, 0.6931472, -0.5),
        (1.0, 0.3132617, -0.2689414),
        (-2.0, 2.1269280, -0.8807971),
        (700.0, 0.0, 0.0),
        (-700.0, 700.0, -1.0),
    ],
)
def test_the_loss_and_its_slope_are_those_of_a_logistic_curve(difference, loss, slope):
    chosen = f64([3.0 + difference]).requires_grad_()
    rejected = f64([3.0]).requires_grad_()
    found = bradley_terry_losses(chosen, rejected)
    found.sum().backward()
    assert found.item() == pytest.approx(loss, abs=1e-7)
    assert chosen.grad.item() == pytest.approx(slope, abs=1e-7)
    assert rejected.grad.item() == pytest.approx(-slope, abs=1e-7)


PAIRS = [
    PreferencePair([1, 2, 3, 4, 5], [1, 2, 3, 9]),
    PreferencePair([6, 7], [6, 8, 8, 8, 8, 8, 8, 8]),
    PreferencePair([10, 11, 12], [10, 11, 13]),
]


def random_head(reward, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = reward.model.score.weight
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) / 3)


def mean_loss(model) -> float:
    """By transformers' own forward, one bare row at a time."""
    with torch.no_grad():
        scores = [
            [model(input_ids=torch.tensor([ids])).logits.item() for ids in (p.chosen, p.rejected)]
            for p in PAIRS
        ]
    return sum(math.log1p(math.exp(b - a)) for a, b in scores) / len(scores)


@pytest.mark.parametrize("microbatch_tokens", [1000, 20, 1])
def test_the_gradient_is_that_of_finite_differences(
    tiny_model_dir, float64_norms, microbatch_tokens
):
    reward = start_reward_model(tiny_model_dir, "float64", CPU, microbatch_tokens)
    random_head(reward)
    metrics = RewardModelStage(reward, PAIRS, []).backward([0, 1, 2])
    assert metrics["loss"] == pytest.approx(mean_loss(reward.model), abs=1e-9)
    embedding = reward.model.model.embed_tokens.weight
    for weight, place in ((reward.model.score.weight, (0, 3)), (embedding, (8, 5))):
        step, here = 1e-6, weight[place].item()
        with torch.no_grad():
            weight[place] = here + step
            above = mean_loss(reward.model)
            weight[place] = here - step
            below = mean_loss(reward.model)
            weight[place] = here
        assert weight.grad[place].item() == pytest.approx((above - below) / (2 * step), abs=1e-7)


def test_a_new_head_says_nothing_so_the_first_loss_is_log_2(tiny_model_dir):
    reward = start_reward_model(tiny_model_dir, "float32", CPU, 1000)
    assert reward.scores([pair.chosen for pair in PAIRS]).tolist() == [0, 0, 0]
    metrics = RewardModelStage(reward, PAIRS, []).backward([0, 1, 2])
    assert metrics == {"loss": pytest.approx(math.log(2)), "accuracy": 0.5}


# Calibration


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def test_accuracy_and_calibration_error_of_a_table_made_by_hand():
    """Sure at 0.98 and right 3 times of 4; at 0.62 and right once of 2; one tie."""
    sure, unsure = logit(0.98), logit(0.62)
    chosen = f64([sure, sure, sure, 0.0, unsure, 0.0, 5.0])
    rejected = f64([0.0, 0.0, 0.0, sure, 0.0, unsure, 5.0])
    found = reliability(chosen, rejected)
    assert found.accuracy == pytest.approx((3 + 1 + 0.5) / 7)
    gaps = 4 * abs(0.98 - 0.75) + 2 * abs(0.62 - 0.5) + 1 * abs(0.5 - 0.5)
    assert found.calibration_error == pytest.approx(gaps / 7)
    assert [(one.accuracy, one.count) for one in found.bins] == [(0.5, 1), (0.5, 2), (0.75, 4)]
    assert [one.confidence for one in found.bins] == pytest.approx([0.5, 0.62, 0.98])


def test_utter_certainty_falls_into_the_last_bin():
    assert reliability(f64([900.0]), f64([0.0])).bins == [Bin(1.0, 1.0, 1)]


# The rows


@pytest.fixture
def section(tmp_path):
    return PreferenceSection(train=str(tmp_path / "pairs.jsonl"))


def loaded(rows: list, section: PreferenceSection, tokenizer, context=None) -> list[PreferencePair]:
    write_rows(Path(section.train), rows)
    return load_pairs(section.train, section, tokenizer, context)


def test_texts_messages_and_whole_conversations_say_the_same(byte_tokenizer, section):
    ask = {"role": "user", "content": "ab"}
    good, bad = ({"role": "assistant", "content": text} for text in ("c", "de"))
    rows = [
        {"prompt": "ab", "chosen": "c", "rejected": "de"},
        {"prompt": [ask], "chosen": [good], "rejected": [bad]},
        {"prompt": [ask], "chosen": "c", "rejected": "de"},
        {"chosen": [ask, good], "rejected": [ask, bad]},
    ]
    a, b, c, d, e = letters(byte_tokenizer, "abcde")
    pair = PreferencePair([USER, a, b, ASSISTANT, c, EOS], [USER, a, b, ASSISTANT, d, e, EOS])
    assert loaded(rows, section, byte_tokenizer) == [pair] * 4


def test_the_ending_is_the_templates_own_and_one_cut_off_has_none(byte_tokenizer, monkeypatch):
    ended = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|pad|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    monkeypatch.setattr(byte_tokenizer, "chat_template", ended)
    a, b = letters(byte_tokenizer, "ab")
    begun = [USER, a, 257, ASSISTANT, b]
    assert encode_whole_dialogue(byte_tokenizer, "a", "b") == [*begun, 257]
    assert encode_whole_dialogue(byte_tokenizer, "a", "b", finished=False) == begun


def test_without_a_template_texts_are_joined(byte_tokenizer, monkeypatch):
    monkeypatch.setattr(byte_tokenizer, "chat_template", None)
    a, b = letters(byte_tokenizer, "ab")
    assert encode_whole_dialogue(byte_tokenizer, "a", "b") == [a, b, EOS]
    assert encode_whole_dialogue(byte_tokenizer, "a", "b", finished=False) == [a, b]


BAD_ROWS = {
    "it has no column 'rejected'": {"prompt": "a", "chosen": "b"},
    "it has no column 'prompt'": {"chosen": "b", "rejected": "c"},
    "are the same": {"prompt": "a", "chosen": "b", "rejected": "b"},
    "not text, or empty": {"prompt": "a", "chosen": "b", "rejected": ""},
    "must be a list": {"prompt": "a", "chosen": [], "rejected": "b"},
    "does not end with the assistant's": {
        "chosen": [{"role": "user", "content": "a"}],
        "rejected": [{"role": "user", "content": "b"}],
    },
    "only 30 positions": {"prompt": "a" * 30, "chosen": "b", "rejected": "c"},
}


@pytest.mark.parametrize("problem", BAD_ROWS)
def test_a_broken_row_is_refused_with_its_line(byte_tokenizer, section, problem):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}, BAD_ROWS[problem]]
    with pytest.raises(UserError, match=f"pairs.jsonl, line 2: .*{problem}"):
        loaded(rows, section, byte_tokenizer, 30)


# A run


@pytest.fixture
def reward_config(tiny_model_dir, tmp_path) -> dict:
    """People here like an x in the response and hate a y."""
    rows = [
        {"prompt": f"{i}", "chosen": f"{i}x", "rejected": f"{j}y"}
        for i in range(6)
        for j in range(6)
    ]
    return {
        "threads": 1,
        "run": {"dir": str(tmp_path / "reward-model")},
        "model": {"start": tiny_model_dir},
        "data": {
            "train": write_rows(tmp_path / "train.jsonl", rows[:30]),
            "heldout": write_rows(tmp_path / "heldout.jsonl", rows[30:]),
        },
        "train": {"passes": 6, "minibatch_rows": 10, "lr": 1e-2},
    }


def test_a_run_learns_the_taste_and_reports_calibration(reward_config):
    result = api.reward_model(reward_config)
    first, last = read_jsonl(result.run / "evals.jsonl")
    assert (first["accuracy"], last["accuracy"]) == (0.5, 1.0)
    assert first["loss"] == pytest.approx(math.log(2))
    assert last["loss"] < 0.1
    assert first["calibration_error"] == 0
    assert sum(one["count"] for one in last["bins"]) == last["pairs"] == 6
    assert len(read_jsonl(result.run / "metrics.jsonl")) == 18  # 6 x 30 / 10


def test_the_directory_is_a_plain_sequence_classifier(reward_config):
    result = api.reward_model(reward_config)
    directory = result.checkpoint / "reward"
    model = AutoModelForSequenceClassification.from_pretrained(directory)
    assert model.config.num_labels == 1
    assert model.config.architectures == ["LlamaForSequenceClassification"]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    rows = read_jsonl(reward_config["data"]["heldout"])

    def score(row: dict, side: str) -> float:
        ids = [USER, *letters(tokenizer, row["prompt"]), ASSISTANT]
        ids += [*letters(tokenizer, row[side]), EOS]
        return model(input_ids=torch.tensor([ids])).logits.item()

    differences = [score(row, "chosen") - score(row, "rejected") for row in rows]
    loss = sum(math.log1p(math.exp(-d)) for d in differences) / len(rows)
    assert loss == pytest.approx(result.after["loss"], abs=1e-5)


def test_the_same_seed_gives_the_same_bits(reward_config, tmp_path):
    weights = []
    for name in ("a", "b"):
        reward_config["run"] = {"dir": str(tmp_path / name)}
        checkpoint = api.reward_model(reward_config).checkpoint
        weights.append((checkpoint / "reward" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_a_reward_model_goes_on_from_another_with_its_head(reward_config, tmp_path):
    first = api.reward_model(reward_config)
    reward_config["run"] = {"dir": str(tmp_path / "second")}
    reward_config["model"]["start"] = str(first.checkpoint / "reward")
    second = api.reward_model(reward_config)
    assert second.before["loss"] == pytest.approx(first.after["loss"], abs=1e-6)
