"""Every command of README and of the pages that a new user reads first works as it stands.

Each page is walked in an empty folder with the files that it shows. Commands are understood: the
command exists, its words make a valid config, what it is said to refuse it refuses in those words.
The first blocks of the pages are also run, cut short.
"""

import json
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tether as package
from tether.cli.field_options import one_word, parse_words
from tether.cli.main import app
from tether.config.load import load_config, merge_overrides, read_recipe, validate_config
from tether.config.stages import PipelineConfig, RewardModelConfig, SFTConfig
from tether.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    "README.md",
    "README.zh-CN.md",
    "docs/own-task.md",
    "docs/running.md",
    "docs/from-trl.md",
    "docs/zh/from-trl.md",
    "docs/from-verl.md",
    "docs/zh/from-verl.md",
    "docs/real-models.md",
]
COMMANDS = {command.name for command in app.registered_commands}
STAGES = {"sft": SFTConfig, "reward-model": RewardModelConfig}
SHORT = [
    *("--threads", "1", "--rollout.prompts", "4", "--rollout.samples_per_prompt", "2"),
    *("--actor.minibatch_rows", "8", "--train.iterations", "1", "--train.eval_prompts", "4"),
]


@dataclass(frozen=True)
class Command:
    words: list[str]
    refusal: str | None  # the line that a page says it ends with


def blocks(page: str, *languages: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"^( *)```(\w+)\n(.*?)^\1```", text, re.DOTALL | re.MULTILINE)
    return [
        re.sub(rf"^{indent}", "", body, flags=re.MULTILINE)
        for indent, language, body in found
        if language in languages
    ]


def commands(page: str) -> list[Command]:
    """What a person types in them, with the words of one command on one line."""
    found = []
    for block in blocks(page, "sh", "console"):
        lines = re.sub(r"\\\n\s*", "", block).splitlines()
        for line, following in zip(lines, [*lines[1:], ""], strict=True):
            typed = re.sub(r"^.*\| (?=tether)", "", line.removeprefix("$ "))
            if typed.startswith("tether "):
                said = following.removeprefix("tether: ")
                words = shlex.split(typed, comments=True)[1:]
                found.append(Command(words, said if said != following else None))
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The files that the pages show or speak of."""
    monkeypatch.chdir(tmp_path)
    rows = [(f"{a}+3=?", str(a + 3)) for a in range(10, 40)]
    for name in ("train.jsonl", "test.jsonl"):
        lines = [
            {"prompt": [{"role": "user", "content": prompt}], "answer": answer}
            for prompt, answer in rows
        ]
        Path(name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in ("train.parquet", "test.parquet"):
        table = [
            {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": prompt}],
                "reward_model": {"style": "rule", "ground_truth": answer},
            }
            for prompt, answer in rows
        ]
        pq.write_table(pa.Table.from_pylist(table), name)
    Path("rewards.py").write_text(blocks("docs/from-trl.md", "python")[-1])
    Path("score.py").write_text(blocks("docs/from-verl.md", "python")[-1])
    [own] = [block for block in blocks("README.md", "python") if "# my_reward.py" in block]
    close = next(block for block in blocks("docs/running.md", "python") if "close_enough" in block)
    Path("my_reward.py").write_text(own + close)
    Path("mine.yaml").write_text(blocks("docs/running.md", "yaml")[0])
    Path("runs/mine-001").mkdir(parents=True)
    Path("runs/mine-001/config.yaml").write_text(Path("mine.yaml").read_text())
    Path("prompts.jsonl").write_text(blocks("docs/running.md", "json")[0])
    Path("pairs.jsonl").write_text('{"prompt": "1+1=?", "response": "2"}\n')
    return tmp_path


@pytest.fixture
def typed(folder, monkeypatch, capsys):
    """Runs a command in this process, in that folder: (exit code, stdout, stderr)."""

    def run(words: list[str]) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tether", *words])
        with pytest.raises(SystemExit) as stop:
            package.cli.main.main()
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return run


def configure(words: list[str]) -> None:
    """What `train`, `check`, `sft` and `reward-model` do before they load anything."""
    command, *rest = words
    schema = STAGES.get(command)
    plain, overrides = parse_words([w for w in rest if w != "--resume"], schema)
    recipe = one_word(plain, "" if schema else "arithmetic", "recipe")
    if schema is not None:
        mapping: dict = read_recipe(recipe) if recipe else {}
        merge_overrides(mapping, overrides, schema)
        validate_config(mapping, schema)
    elif read_recipe(recipe).get("stage") == "rlhf":
        load_config(recipe, overrides, PipelineConfig)
    else:
        load_config(recipe, overrides)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_understood_or_refused_in_the_words_of_the_page(page, typed):
    found = commands(page)
    assert len(found) >= 2
    for command in found:
        assert command.words[0] in COMMANDS, command
        if command.words[0] in ("init", "recipes") and ">" not in command.words:
            assert typed(command.words)[0] == 0, command
        elif command.refusal is not None:
            code, _, err = typed(command.words)
            assert (code, err.strip()) == (2, f"tether: {command.refusal}"), command
        elif command.words[0] in ("train", "check", *STAGES):
            configure(command.words)


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/real-models.md"])
def test_a_first_page_says_how_the_command_is_put_on_the_path(page):
    assert ". .venv/bin/activate" in (ROOT / page).read_text(encoding="utf-8")


def test_a_new_user_reads_what_the_model_that_ships_cannot_learn_and_what_to_do_then():
    page = (ROOT / "docs/own-task.md").read_text(encoding="utf-8")
    [section] = re.findall(
        r"^## A model that can learn it\n(.*?)^## ", page, re.DOTALL | re.MULTILINE
    )
    for said in ("It cannot learn to", "`tether sft`", "--model.actor path/to/model"):
        assert said in section
    assert "own-task.md" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_wrong_command_on_a_page_would_be_noticed(folder):
    with pytest.raises(UserError, match=r"Unknown field actor\.lrr"):
        configure(["train", "--actor.lrr", "1"])
    with pytest.raises(UserError, match="No recipe"):
        configure(["check", "missing.yaml"])


@pytest.mark.parametrize("page", ["docs/from-trl.md", "docs/from-verl.md"])
def test_the_first_block_of_a_page_for_newcomers_trains(page, typed, folder):
    words = commands(page)[0].words
    words = ["tether:starter" if word == "path/to/model" else word for word in words]
    code, _, err = typed([*words, *SHORT, "--run.dir", "out"])
    assert code == 0, err
    evaluated = (folder / "out" / "evals.jsonl").read_text().splitlines()
    assert len(evaluated) == (2 if "--data.heldout" in words else 0)


def test_the_readmes_own_reward_trains_and_is_evaluated_on_its_own_rows(typed):
    typed(["init", "my-task"])
    [command] = [c for c in commands("README.md") if "my_reward.py:short_and_right" in c.words]
    code, out, err = typed([*command.words, *SHORT])
    assert code == 0, err
    assert "held-out prompts of my-task/heldout.jsonl" in out


def test_the_readmes_python_runs(folder, capsys):
    [block] = [block for block in blocks("README.md", "python") if "tether.train(" in block]
    assert block in blocks("README.zh-CN.md", "python")
    short = '"rollout.prompts": 4, "actor.minibatch_rows": 8, "threads": 1, "train.eval_prompts": 4'
    assert '"train.iterations": 20' in block
    program = block.replace('"train.iterations": 20', f'"train.iterations": 1, {short}')
    exec(compile(program, "README.md", "exec"), {})
    before, after = map(float, capsys.readouterr().out.split())
    assert 0 <= before <= 1
    assert 0 <= after <= 1
