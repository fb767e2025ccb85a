"""Data and rewards of other systems, as they are: one command, and no edit to either."""

import json
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from helpers import changed, distinct_letters, read_jsonl

import tether as package
from tether import api
from tether.cli.main import main
from tether.errors import UserError
from tether.run.checkpoint_store import latest_checkpoint

SUMS = [(a, b) for a in range(4) for b in (1, 22, 333)]
COMPUTE_SCORE = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """In the manner of verl's own: one function, everything by keyword, a dict with the score."""
    assert data_source == "sums" and extra_info["split"] == "train"
    return {"score": len(set(solution_str)) / 8 + len(ground_truth), "acc": 0}
'''
TRL_REWARD = '''
def distinct(prompts, completions, solution, **kwargs):
    """In the manner of TRL's own: lists in, a list out."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    assert len(prompts) == len(texts) and kwargs["level"]
    return [len(set(text)) / 8 + len(answer) for text, answer in zip(texts, solution)]
'''


@pytest.fixture
def tether(monkeypatch, capsys):
    """Runs a command in this process: (exit code, stderr)."""

    def run(*words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["tether", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code or 0, capsys.readouterr().err

    return run


@pytest.fixture
def recipe(tmp_path, tiny_config) -> Path:
    """A run without data and reward: the command names those."""
    path = tmp_path / "recipe.yaml"
    mapping = {k: v for k, v in tiny_config.items() if k not in ("data", "reward")}
    path.write_text(yaml.safe_dump(mapping))
    return path


def user(text: str) -> list[dict]:
    return [{"content": text, "role": "user"}]


@pytest.fixture
def verl_parquet(tmp_path) -> Path:
    rows = [
        {
            "data_source": "sums",
            "prompt": user(f"{a}+{b}=?"),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"split": "train", "index": number},
        }
        for number, (a, b) in enumerate(SUMS)
    ]
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def trained(run: Path) -> list[dict]:
    """The rows of two iterations; each mean score is that of its rows, reckoned anew."""
    rows = []
    for iteration, metrics in enumerate(read_jsonl(run / "metrics.jsonl")):
        new = read_jsonl(run / f"rollouts/{iteration:06d}.jsonl")
        scores = []
        for row in new:
            a, b = row["prompt"].removesuffix("=?").split("+")
            scores.append(len(set(row["response"])) / 8 + len(str(int(a) + int(b))))
            assert row["score"] == pytest.approx(scores[-1])
        assert metrics["score/mean"] == pytest.approx(sum(scores) / len(scores))
        assert metrics["score/std"] > 0
        assert metrics["actor/grad_norm"] > 0
        rows += new
    assert len(rows) == 24
    return rows


def test_a_verl_parquet_and_compute_score_train_with_one_command(
    tether, recipe, verl_parquet, tmp_path
):
    score = tmp_path / "score.py"
    score.write_text(COMPUTE_SCORE)
    words = ["--data.train", verl_parquet, "--reward.kind", f"{score}:compute_score"]
    assert tether("train", recipe, *words) == (0, "")
    rows = trained(tmp_path / "run")
    assert {row["data_file"] for row in rows} == {str(verl_parquet)}
    for row in rows:  # the line says which row of the parquet it was
        a, b = SUMS[row["data_line"] - 1]
        assert row["prompt"] == f"{a}+{b}=?"


@pytest.mark.parametrize("chat", [False, True], ids=["text", "messages"])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_trl_dataset_and_reward_train_with_one_command(tether, recipe, tmp_path, suffix, chat):
    prompts = [f"{a}+{b}=?" for a, b in SUMS]
    rows = [
        {"prompt": user(prompt) if chat else prompt, "solution": str(a + b), "level": 1}
        for prompt, (a, b) in zip(prompts, SUMS, strict=True)
    ]
    data = tmp_path / f"train{suffix}"
    if suffix == ".jsonl":
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), data)
    (tmp_path / "rewards.py").write_text(TRL_REWARD)
    kind = f"{tmp_path / 'rewards.py'}:distinct"
    assert tether("train", recipe, "--data.train", data, "--reward.kind", kind) == (0, "")
    trained(tmp_path / "run")


def test_a_plain_csv_and_a_rule_with_other_column_names_train(tether, recipe, tmp_path):
    data = tmp_path / "train.csv"
    data.write_text("question,gold\n" + "".join(f"{a}+{b}=?,{a + b}\n" for a, b in SUMS))
    words = ["--data.prompt_column", "question", "--data.columns.answer", "gold"]
    words += ["--reward.kind", "number_match", "--reward.arguments.tolerance", "0.5"]
    assert tether("train", recipe, "--data.train", data, *words) == (0, "")
    for row in read_jsonl(tmp_path / "run/rollouts/000001.jsonl"):
        a, b = SUMS[row["data_line"] - 2]  # the first line names the columns
        assert row["prompt"] == f"{a}+{b}=?"


PARTS = [
    {"name": "short", "kind": "length", "weight": 0.5, "arguments": {"at_most": 4}},
    {"name": "letters", "kind": "regex", "weight": -2.0, "arguments": {"pattern": "[a-z]"}},
]


def test_parts_are_summed_by_weight_and_logged_by_name(tiny_config):
    run = package.train(changed(tiny_config, reward={"parts": PARTS})).run
    for iteration, metrics in enumerate(read_jsonl(run / "metrics.jsonl")):
        rows = read_jsonl(run / f"rollouts/{iteration:06d}.jsonl")
        sizes = [len(row["response"]) for row in rows]
        short = [1.0 if size <= 4 else 4 / size for size in sizes]
        letters = [float(any("a" <= c <= "z" for c in row["response"])) for row in rows]
        for row, x, y in zip(rows, short, letters, strict=True):
            assert row["score_parts"] == pytest.approx({"short": x, "letters": y})
            assert row["score"] == pytest.approx(0.5 * x - 2 * y)
        count = len(rows)
        assert metrics["score/part/short"] == pytest.approx(sum(short) / count)
        assert metrics["score/part/letters"] == pytest.approx(sum(letters) / count)
        total = 0.5 * sum(short) - 2 * sum(letters)
        assert metrics["score/mean"] == pytest.approx(total / count)
        assert 0 < metrics["score/part/letters"] < 1


def test_a_row_that_a_part_cannot_score_is_left_out_and_the_part_named(tiny_config, tmp_path):
    """The function fails on one prompt of six; its two rows leave all means."""
    (tmp_path / "r.py").write_text(
        "def f(prompt, response):\n    assert prompt != '0+1=?', 'not this'\n    return 1\n"
    )
    parts = [*PARTS, {"name": "mine", "kind": f"{tmp_path}/r.py:f"}]
    config = changed(
        tiny_config,
        reward={"parts": parts, "max_failed_share": 0.5},
        data__shuffle=False,
        data__heldout=None,
        train__iterations=1,
    )
    run = package.train(config).run
    events = read_jsonl(run / "events.jsonl")
    assert [(e["kind"], e["row"]) for e in events] == [("unscorable", 0), ("unscorable", 1)]
    assert all("part 'mine': AssertionError: not this" in e["message"] for e in events)
    rows = read_jsonl(run / "rollouts/000000.jsonl")
    assert [row["score_parts"] for row in rows[:2]] == [{}, {}]
    [metrics] = read_jsonl(run / "metrics.jsonl")
    assert metrics["score/part/mine"] == 1.0


class Stop(BaseException):
    """Ends a run as rudely as an exception can."""


@pytest.fixture
def mixed_config(tiny_config, tmp_path, verl_parquet) -> dict:
    """A parquet and a CSV, three prompts to one."""
    csv = tmp_path / "more.csv"
    csv.write_text("prompt\n" + "".join(f"{a}-1=?\n" for a in range(5)))
    files = [{"path": str(verl_parquet), "weight": 3}, {"path": str(csv), "weight": 1}]
    fields = {"train__iterations": 4, "train__checkpoint_every": 2, "rollout__prompts": 8}
    return changed(tiny_config, data={"train": files}, **fields)


def test_a_run_on_mixed_files_goes_on_to_the_same_bits(mixed_config, tmp_path):
    """8 prompts x 2 samples: the 60th score falls into the last of four iterations."""
    seen = []

    def stops(response: str) -> float:
        seen.append(response)
        if len(seen) == 60:
            raise Stop
        return distinct_letters(response)

    whole = package.train(
        changed(mixed_config, run__dir=str(tmp_path / "whole")), reward=distinct_letters
    ).run
    with pytest.raises(Stop):
        package.train(mixed_config, reward=stops)
    run = Path(mixed_config["run"]["dir"])
    assert api.resume(run, reward=distinct_letters).resumed_from == 2
    for name in ("metrics.jsonl", "rollouts/000003.jsonl"):
        assert (run / name).read_bytes() == (whole / name).read_bytes()
    for name in ("actor/model.safetensors", "critic.safetensors", "actor_optimizer.safetensors"):
        files = [(latest_checkpoint(folder) / name).read_bytes() for folder in (run, whole)]
        assert files[0] == files[1]
    names = [Path(row["data_file"]).name for row in read_jsonl(whole / "rollouts/000003.jsonl")]
    assert names[::2] == ["train.parquet"] * 3 + ["more.csv"] + ["train.parquet"] * 3 + ["more.csv"]


def test_a_changed_file_of_a_mixture_or_of_a_part_is_refused_by_name(mixed_config, tmp_path):
    score = tmp_path / "r.py"
    score.write_text("def f(response):\n    return len(response)\n")
    parts = [*PARTS, {"name": "mine", "kind": f"{score}:f"}]
    config = changed(mixed_config, reward={"parts": parts}, train__iterations=2)
    run = package.train(config).run
    more = {"train.iterations": 3}
    for path, what in (
        (tmp_path / "more.csv", r"data\.train\[1\]"),
        (score, r"reward\.parts, mine"),
    ):
        before = path.read_text()
        path.write_text(before + "\n" if path is score else before + "9-1=?\n")
        with pytest.raises(UserError, match=rf"the file behind {what}"):
            api.resume(run, more)
        path.write_text(before)
    assert api.resume(run, more).iterations_done == 3


GOOD = {"prompt": user("1+1=?"), "reward_model": {"style": "rule", "ground_truth": "2"}}
WANTS_TRUTH = "def f(solution_str, ground_truth):\n    return 0.0\n"


def bad_file(folder: Path, fault: str) -> Path:
    names = {"cut off": "a.parquet", "null": "a.parquet", "no header": "a.csv"}
    path = folder / names.get(fault, "a.jsonl")
    match fault:
        case "cut off":
            pq.write_table(pa.Table.from_pylist([GOOD]), path)
            path.write_bytes(path.read_bytes()[:-20])
        case "null":
            lacking = {**GOOD, "reward_model": {"style": "rule", "ground_truth": None}}
            pq.write_table(pa.Table.from_pylist([GOOD, lacking]), path)
        case "no header":
            path.write_text("1+1=?,2\n2+2=?,4\n")
        case "empty":
            path.write_text("")
        case "wrong type":
            path.write_text('{"prompt": 5}\n')
        case "missing column":
            path.write_text(json.dumps(GOOD) + '\n{"prompt": "2+2=?"}\n')
    return path


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("cut off", "a.parquet cannot be read as parquet"),
        ("null", "a.parquet, row 2: the reward asks for 'ground_truth', but it is null"),
        ("no header", "a.csv, line 2: there is no column 'prompt'"),
        ("empty", "a.jsonl has no rows"),
        ("wrong type", "a.jsonl, line 1: 'prompt' is int, not text"),
        ("missing column", "a.jsonl, line 2: the reward asks for 'ground_truth'"),
    ],
)
def test_bad_data_is_one_sentence_and_exit_code_two(tether, recipe, tmp_path, fault, sentence):
    (tmp_path / "r.py").write_text(WANTS_TRUTH)
    kind, path = f"{tmp_path / 'r.py'}:f", bad_file(tmp_path, fault)
    code, said = tether("check", recipe, "--data.train", path, "--reward.kind", kind)
    assert code == 2
    assert sentence in said
    assert said.count("\n") == 1


DROPS_LAST = "{% for m in messages[:-1] %}{{ m.content }}{% endfor %}:"


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (None, "row 1: the prompt is a list of messages, but the model has no chat template"),
        (DROPS_LAST, "row 1: The model's chat template drops the last turn ('0+1=?')"),
    ],
)
def test_messages_that_the_model_would_not_see_are_one_sentence(
    tether, recipe, verl_parquet, tiny_model_dir, tmp_path, template, sentence
):
    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir, model)
    (model / "chat_template.jinja").unlink()
    if template is not None:
        (model / "chat_template.jinja").write_text(template)
    words = ["--model.actor", model, "--data.train", verl_parquet, "--reward.kind", "exact_answer"]
    code, said = tether("check", recipe, *words)
    assert code == 2
    assert sentence in said
    assert said.count("\n") == 1
