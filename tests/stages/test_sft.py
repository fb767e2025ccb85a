"""Supervised training: what is learnt and what only read, the loss by hand, a run end to end."""

import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch
from helpers import Stop, first_or_all, read_jsonl, slow_log_probs
from transformers import AutoModelForCausalLM, AutoTokenizer

import tether
from tether import api
from tether.config import Config
from tether.config.stages import ConversationSection, SFTConfig
from tether.data.dialogues import (
    Conversation,
    encode_messages,
    encode_prompt_and_response,
    load_conversations,
)
from tether.errors import UserError
from tether.models.policy import Policy
from tether.stages.sft import SFTSettings, SFTStage, train_sft
from tether.stages.training import rows_of_step
from tether.train.watch import Watcher
from tether.view.api import list_runs
from tether.view.run_reader import Folder

EOS, USER, ASSISTANT = 256, 258, 259  # of the byte tokenizer


@pytest.fixture
def own_model(tiny_model):
    """A copy that a test may train."""
    model = type(tiny_model)(tiny_model.config)
    model.load_state_dict(tiny_model.state_dict())
    return model.eval()


def letters(tokenizer, text: str) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(letter) for letter in text]


def write_rows(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


# What is learnt


def test_a_response_is_learnt_with_its_end_and_the_prompt_is_only_read(byte_tokenizer):
    found = encode_prompt_and_response(byte_tokenizer, "2+2=?", "4")
    assert found.prompt_ids == [USER, *letters(byte_tokenizer, "2+2=?"), ASSISTANT]
    assert found.response_ids == [*letters(byte_tokenizer, "4"), EOS]
    assert found.loss_mask == [True, True]


def test_of_a_conversation_the_turns_of_assistants_are_learnt(byte_tokenizer):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "bc"},
        {"role": "user", "content": "de"},
        {"role": "assistant", "content": "f"},
    ]
    found = encode_messages(byte_tokenizer, messages)
    a, b, c, d, e, f = letters(byte_tokenizer, "abcdef")
    assert found.prompt_ids == [USER, a, ASSISTANT]
    assert found.response_ids == [b, c, EOS, USER, d, e, ASSISTANT, f, EOS]
    assert found.loss_mask == [True] * 3 + [False] * 4 + [True] * 2


def test_an_ending_that_the_template_writes_is_not_there_twice(byte_tokenizer, monkeypatch):
    ended = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    monkeypatch.setattr(byte_tokenizer, "chat_template", ended)
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    found = encode_messages(byte_tokenizer, [{"role": r, "content": t} for r, t in turns])
    b, c, d = letters(byte_tokenizer, "bcd")
    assert found.response_ids == [b, EOS, USER, c, EOS, ASSISTANT, d, EOS]
    assert found.loss_mask == [True, True, False, False, False, False, True, True]


def test_a_message_row_of_one_turn_is_the_same_as_a_prompt_and_a_response(byte_tokenizer, tmp_path):
    rows = [
        {"prompt": "a", "response": "b"},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    ]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    found = load_conversations(path, ConversationSection(train=path), byte_tokenizer, None)
    assert found[0] == found[1]


def test_what_a_tool_said_in_an_episode_is_read_and_not_learnt(byte_tokenizer, tmp_path):
    row = {"prompt": "a", "response": ["<t>b</t>", "<r>c</r>", "d"]}
    path = write_rows(tmp_path / "rows.jsonl", [row])
    (found,) = load_conversations(path, ConversationSection(train=path), byte_tokenizer, None)
    assert found.prompt_ids == [USER, *letters(byte_tokenizer, "a"), ASSISTANT]
    assert found.response_ids == [*letters(byte_tokenizer, "<t>b</t><r>c</r>d"), EOS]
    assert found.loss_mask == [True] * 8 + [False] * 8 + [True, True]


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        (["call", "result"], "'response' lists 2 texts; write what the model wrote"),
        ([], "'response' lists 0 texts"),
        (["call", 3, "answer"], "text 2 of 'response' is not text"),
        (["call", "result", " "], "text 3 of 'response' is not text, or empty"),
        (None, "'response' is not text, or empty"),
    ],
)
def test_an_episode_that_cannot_be_learnt_is_refused_by_row(
    byte_tokenizer, tmp_path, response, problem
):
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "response": response}])
    with pytest.raises(UserError, match=f"line 1: {problem}"):
        load_conversations(path, ConversationSection(train=path), byte_tokenizer, None)


# The loss


PAIRS = [
    Conversation([1, 2, 3], [4, 5, 6, 7, 8], [True, True, False, False, True]),
    Conversation([9], [10], [True]),
    Conversation([11, 12, 13, 14, 15, 16], [17, 18], [True, True]),
]


def slow_loss(model, rows: list[Conversation]) -> torch.Tensor:
    """-mean of log pi over learnt tokens, one bare row after the other."""
    found = []
    for row in rows:
        log_probs = slow_log_probs(model, row.prompt_ids, row.response_ids)
        found += [x for x, counts in zip(log_probs, row.loss_mask, strict=True) if counts]
    return -torch.stack(found).mean()


@pytest.mark.parametrize("microbatch_tokens", [1000, 14, 1])
def test_loss_and_gradient_are_those_of_bare_rows_however_they_are_split(
    own_model, vocabulary, microbatch_tokens
):
    expected = slow_loss(own_model, PAIRS)
    expected.backward()
    gradients = [p.grad.clone() for p in own_model.parameters()]
    own_model.zero_grad()
    stage = SFTStage(Policy(own_model, 1.0, microbatch_tokens), vocabulary, PAIRS, [])
    metrics = stage.backward([0, 1, 2])
    assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-5)
    assert metrics["tokens"] == 6
    for parameter, gradient in zip(own_model.parameters(), gradients, strict=True):
        assert torch.allclose(parameter.grad, gradient, atol=1e-5)


def test_padding_is_counted_by_backward(own_model, vocabulary):
    whole = SFTStage(Policy(own_model, 1.0, 1000), vocabulary, PAIRS, [])
    alone = SFTStage(Policy(own_model, 1.0, 1), vocabulary, PAIRS, [])
    # Rows of 8, 2 and 8 tokens in a rectangle of 3 x 8.
    assert whole.backward([0, 1, 2])["padding_share"] == pytest.approx(1 - 18 / 24)
    assert alone.backward([0, 1, 2])["padding_share"] == 0


def test_held_out_loss_is_the_mean_over_all_tokens_together(own_model, vocabulary):
    stage = SFTStage(Policy(own_model, 1.0, 10), vocabulary, PAIRS, PAIRS)
    found = stage.evaluate()
    assert found["loss"] == pytest.approx(slow_loss(own_model, PAIRS).item(), abs=1e-5)
    assert (found["tokens"], found["rows"]) == (6, 3)


def test_lessons_are_plain_adamw_with_a_warm_cosine(own_model, vocabulary, byte_tokenizer):
    """The starter is built by `train_sft`: its numbers must not move."""
    reference = type(own_model)(own_model.config)
    reference.load_state_dict(own_model.state_dict())
    dialogues = [("ab", "cd"), ("e", "fgh")]
    heard = []
    settings = SFTSettings(num_steps=4, lr=1e-2, rows=2, warmup_steps=2, weight_decay=0.1)
    policy = Policy(own_model, 1.0, 1000)
    train_sft(policy, vocabulary, dialogues, settings, lambda step, loss: heard.append(loss))

    rows = [encode_prompt_and_response(byte_tokenizer, *dialogue) for dialogue in dialogues]
    adam = torch.optim.AdamW(reference.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    expected = []
    for lr in (0.005, 0.01, 0.01, 0.005):  # half, whole, then cos 0 and cos pi/2 of the fall
        loss = slow_loss(reference, rows)
        expected.append(loss.item())
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        adam.param_groups[0]["lr"] = lr
        adam.step()
    assert heard == pytest.approx(expected, abs=1e-4)


# A run


@pytest.fixture
def sft_config(tiny_model_dir, tmp_path) -> dict:
    rows = [{"prompt": f"{a}+1=?", "response": str(a + 1)} for a in range(8)]
    return {
        "threads": 1,
        "run": {"dir": str(tmp_path / "sft")},
        "model": {"start": tiny_model_dir},
        "data": {
            "train": write_rows(tmp_path / "train.jsonl", rows),
            "heldout": write_rows(tmp_path / "heldout.jsonl", rows[:3]),
        },
        "train": {"passes": 10, "minibatch_rows": 4, "lr": 1e-2, "eval_every": 8},
    }


def test_a_run_learns_and_leaves_what_every_run_leaves(sft_config):
    result = api.sft(sft_config)
    metrics = read_jsonl(result.run / "metrics.jsonl")
    assert [line["iteration"] for line in metrics] == list(range(20))  # 10 x 8 / 4
    evals = read_jsonl(result.run / "evals.jsonl")
    assert [line["iteration"] for line in evals] == [0, 8, 16, 20]
    assert evals[-1]["loss"] < 0.5 * evals[0]["loss"]
    assert result.before["loss"] == evals[0]["loss"]
    assert result.after["loss"] == evals[-1]["loss"]
    assert (result.run / "checkpoints" / "LATEST").read_text().strip() == "000020"


def test_the_model_loads_in_plain_transformers_and_serves_the_other_commands(
    sft_config, tiny_config
):
    result = api.sft(sft_config)
    directory = result.checkpoint / "actor"
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    rows = [encode_prompt_and_response(tokenizer, f"{a}+1=?", str(a + 1)) for a in range(3)]
    assert slow_loss(model, rows).item() == pytest.approx(result.after["loss"], abs=1e-5)
    said = tether.generate("1+1=?", model=str(result.run), max_tokens=4)
    assert said == tether.generate("1+1=?", model=str(directory), max_tokens=4)
    tiny_config["model"]["actor"] = str(directory)
    tiny_config["train"]["iterations"] = 1
    assert tether.train(tiny_config).iterations_done == 1


def test_the_same_seed_gives_the_same_bits_and_another_another_order(sft_config, tmp_path):
    def run(name: str, seed: int) -> tuple[bytes, bytes]:
        config = {**sft_config, "run": {"dir": str(tmp_path / name)}, "seed": seed}
        result = api.sft(config)
        weights = (result.checkpoint / "actor" / "model.safetensors").read_bytes()
        return weights, (result.run / "metrics.jsonl").read_bytes()

    first = run("a", 1)
    assert run("b", 1) == first
    assert run("c", 2) != first


def test_the_written_config_makes_the_same_run_again(sft_config, tmp_path):
    first = api.sft(sft_config)
    config = tether.load_config(
        first.run / "config.yaml", {"run.dir": str(tmp_path / "again")}, SFTConfig
    )
    second = api.sft(config)
    files = [r.run / "metrics.jsonl" for r in (first, second)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_gradient_that_is_not_finite_moves_nothing_and_three_end_the_stage(
    sft_config, monkeypatch
):
    def broken(self, rows):
        next(iter(self.model.parameters())).grad = torch.full_like(
            next(iter(self.model.parameters())), math.nan
        )
        return {"loss": math.nan}

    monkeypatch.setattr(SFTStage, "backward", broken)
    with pytest.raises(tether.errors.RunStopped, match="not finite"):
        api.sft(sft_config)
    events = read_jsonl(Path(sft_config["run"]["dir"]) / "events.jsonl")
    assert [event["kind"] for event in events] == [*["non_finite_step"] * 3, "stopped"]


def test_the_learning_rate_rises_to_its_peak_and_falls_along_a_cosine(sft_config):
    sft_config["train"] |= {"warmup_share": 0.1, "lr": 1e-3}
    found = [line["lr"] for line in read_jsonl(api.sft(sft_config).run / "metrics.jsonl")]
    fall = [1e-3 * 0.5 * (1 + math.cos(math.pi * step / 18)) for step in range(18)]
    assert found == pytest.approx([0.5e-3, 1e-3, *fall])


def test_an_evaluation_uses_no_more_rows_than_it_is_told(sft_config):
    sft_config["train"]["eval_rows"] = 2
    assert api.sft(sft_config).after["rows"] == 2


def test_a_signal_ends_the_stage_after_its_step_and_saves_what_was_learnt(sft_config):
    class Impatient(Watcher):
        def iterated(self, record):
            if record.iteration == 4:
                os.kill(os.getpid(), signal.SIGINT)

    result = api.sft(sft_config, Impatient())
    assert result.interrupted == signal.SIGINT
    assert result.iterations_done == 5
    assert result.checkpoint.name == "000005"
    assert len(read_jsonl(result.run / "metrics.jsonl")) == 5


# Stopping and going on


class StopAt(Watcher):
    """Ends a run as rudely as a kill, once so many steps are written."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def iterated(self, record):
        if record.iteration + 1 == self.steps:
            raise Stop


def stopped_run(config: dict, run: Path, steps: int) -> Path:
    with pytest.raises(Stop):
        api.sft({**config, "run": {"dir": str(run)}}, StopAt(steps))
    return run


def final_bytes(run: Path) -> list[bytes]:
    names = ("actor/model.safetensors", "actor_optimizer.safetensors")
    weights = [run / "checkpoints/000020" / name for name in names]
    return [path.read_bytes() for path in (run / "metrics.jsonl", run / "evals.jsonl", *weights)]


@pytest.mark.parametrize("steps", first_or_all([7, 2, 13]))
def test_a_stopped_stage_goes_on_to_the_same_bits(sft_config, tmp_path, steps):
    sft_config["train"]["checkpoint_every"] = 5
    whole = api.sft(sft_config)
    run = stopped_run(sft_config, tmp_path / "stopped", steps)
    result = api.resume(run)
    assert result.resumed_from == steps // 5 * 5
    assert final_bytes(run) == final_bytes(whole.run)
    assert result.after == whole.after


def test_a_finished_stage_is_left_as_it_is(sft_config):
    first = api.sft(sft_config)
    before = (first.run / "events.jsonl").read_bytes()
    again = api.resume(first.run)
    assert (again.resumed_from, again.checkpoint) == (20, first.checkpoint)
    assert (first.run / "events.jsonl").read_bytes() == before


def test_the_page_tells_a_finished_stage_from_a_stopped_one(sft_config, tmp_path):
    api.sft({**sft_config, "run": {"dir": str(tmp_path / "runs/finished")}})
    stopped_run(sft_config, tmp_path / "runs/stopped", 7)
    found = {run["id"]: run for run in list_runs(Folder(tmp_path / "runs"), demo=False)["runs"]}
    assert {name: run["state"] for name, run in found.items()} == {
        "finished": "finished",
        "stopped": "stopped",
    }
    assert found["finished"]["planned"] == 20


def test_a_stage_whose_rows_changed_is_refused_and_nothing_is_cut(sft_config, tmp_path):
    run = stopped_run(sft_config, tmp_path / "stopped", 7)
    rows = Path(sft_config["data"]["train"])
    rows.write_text(rows.read_text().replace("3+1", "3+2"))
    with pytest.raises(UserError, match=r"the file behind data\.train"):
        api.resume(run)
    assert len(read_jsonl(run / "metrics.jsonl")) == 7
    with pytest.raises(UserError, match=r"train\.lr, 0\.01 then and 0\.02 now"):
        api.resume(run, {"train.lr": 0.02})


def test_the_rows_of_a_step_are_a_window_on_permutations_laid_end_to_end():
    steps = [row for step in range(6) for row in rows_of_step(step, 4, 6, seed=3)]
    passes = [steps[i : i + 4] for i in range(0, len(steps), 4)]
    assert all(sorted(one) == [0, 1, 2, 3] for one in passes)
    assert len({tuple(one) for one in passes}) > 1


# Bad input

TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
BAD_ROWS = {
    "it has no column 'prompt'": {"question": "a"},
    "'response' is not text": {"prompt": "a", "response": 3},
    "must be a list": {"messages": "a"},
    "needs a role": {"messages": [{"content": "a"}]},
    "content is not text": {"messages": [{"role": "user", "content": None}]},
    "is not the assistant's": {"messages": TALK[:1]},
    "more than data.max_tokens": {"prompt": "a" * 40, "response": "b"},
}


@pytest.mark.parametrize("problem", BAD_ROWS)
def test_a_broken_row_is_refused_with_its_line(sft_config, tmp_path, problem):
    rows = [{"prompt": "a", "response": "b"}, BAD_ROWS[problem]]
    sft_config["data"]["train"] = write_rows(tmp_path / "bad.jsonl", rows)
    sft_config["data"]["max_tokens"] = 20
    with pytest.raises(UserError, match=f"bad.jsonl, line 2: .*{problem}"):
        api.sft(sft_config)
    assert not Path(sft_config["run"]["dir"]).exists()


def test_an_empty_file_is_refused(sft_config, tmp_path):
    sft_config["data"]["train"] = write_rows(tmp_path / "none.jsonl", [])
    with pytest.raises(UserError, match="has no rows"):
        api.sft(sft_config)


def test_messages_need_a_chat_template(byte_tokenizer, monkeypatch, tmp_path):
    monkeypatch.setattr(byte_tokenizer, "chat_template", None)
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": TALK}])
    with pytest.raises(UserError, match=r"line 1: .*no chat template; give a prompt"):
        load_conversations(path, ConversationSection(train=path), byte_tokenizer, None)


def test_a_template_that_rewrites_earlier_turns_is_noticed(byte_tokenizer, monkeypatch):
    forgetful = (
        "{% for m in messages %}<|{{ m.role }}|>"
        "{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    monkeypatch.setattr(byte_tokenizer, "chat_template", forgetful)
    with pytest.raises(Exception, match="changes earlier turns once others follow"):
        encode_messages(byte_tokenizer, TALK + TALK)


def test_a_stage_given_to_another_command_is_one_sentence(sft_config):
    run = api.sft(sft_config).run
    with pytest.raises(UserError, match="is a recipe of `tether sft`"):
        tether.train(run / "config.yaml")


def test_no_field_of_a_stage_goes_without_a_word():
    from tether.config import walk_fields

    assert all(info.description for _, info in walk_fields(SFTConfig))
    assert not {name for name, _ in walk_fields(SFTConfig)} <= {n for n, _ in walk_fields(Config)}


@pytest.mark.parametrize("command", ["sft", "reward_model"])
def test_more_processes_than_rows_of_a_step_are_refused_before_anything_is_written(
    tmp_path, monkeypatch, tiny_model_dir, command
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "3")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    config = {
        "model": {"start": tiny_model_dir},
        "data": {"train": "rows.jsonl"},
        "train": {"minibatch_rows": 2},
    }
    with pytest.raises(UserError, match=r"2 rows, too few for 3 processes; raise train\.minib"):
        getattr(api, command)(config)
    assert not (tmp_path / "runs").exists()
