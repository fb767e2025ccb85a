"""The commands as a person meets them: what they print, and what they say to wrong input."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import helpers
import pytest

from tether.cli.terminal import printable, table


@pytest.fixture
def tiny_words(tiny_model_dir, tiny_data) -> list[str]:
    """A recipe shrunk to the tiny model and a few rows."""
    fields = {
        "threads": 1,
        "model.actor": tiny_model_dir,
        "data.train": tiny_data,
        "data.heldout": tiny_data,
        "rollout.prompts": 4,
        "rollout.samples_per_prompt": 2,
        "rollout.max_response_tokens": 6,
        "actor.minibatch_rows": 4,
        "critic.minibatch_rows": 4,
        "train.iterations": 2,
    }
    return [word for name, value in fields.items() for word in (f"--{name}", str(value))]


def test_help_is_quick_and_imports_no_torch():
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "tether", "--help"], check=True, capture_output=True)
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.5
    code = (
        "import sys; sys.argv = ['tether', '--help']\n"
        "from tether.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_train_help_lists_every_field_with_default_and_doc_line(tether):
    from tether.config import walk_fields

    code, out, _ = tether("train", "--help")
    assert code == 0
    for dotted, info in walk_fields():
        assert f"--{dotted} " in out
        assert info.description in out


def test_train_prints_the_table_and_the_next_command(tether, tiny_words):
    code, out, _ = tether("train", *tiny_words, "--run.dir", "first")
    assert code == 0
    assert "self-check ratio 1" in out
    assert re.search(r"sampled +0\.0% +0\.0% – \d+\.\d% +", out)
    assert "Next: tether generate" in out
    assert len(Path("first/metrics.jsonl").read_text().splitlines()) == 2


def test_a_second_run_never_collides_with_the_first(tether, tiny_words):
    for _ in range(2):
        assert tether("train", *tiny_words)[0] == 0
    assert sorted(p.name for p in Path("runs").iterdir()) == ["arithmetic-001", "arithmetic-002"]
    code, out, _ = tether("runs")
    assert code == 0
    assert "runs/arithmetic-002" in out


def test_the_written_config_makes_the_same_run_again(tether, tiny_words):
    tether("train", *tiny_words, "--run.dir", "a", "--seed", "5")
    tether("train", "a/config.yaml", "--run.dir", "b")
    assert Path("a/metrics.jsonl").read_bytes() == Path("b/metrics.jsonl").read_bytes()


def test_eval_and_generate_read_a_run(tether, tiny_words):
    tether("train", *tiny_words, "--run.dir", "a")
    code, out, _ = tether("eval", "a")
    last = json.loads(Path("a/evals.jsonl").read_text().splitlines()[-1])
    assert code == 0
    assert f"KL to the reference: {last['kl']:.4f} nats" in out
    code, out, _ = tether("generate", "1+1=?", "--model", "a", "--samples", "3")
    assert code == 0
    assert len(out.splitlines()) == 3


def test_check_prints_the_arithmetic_of_the_batch(tether, tiny_words):
    code, out, _ = tether("check", *tiny_words, "--actor.epochs", "3")
    assert code == 0
    assert re.search(r"rows per iteration +8 +4 prompts x 2 samples", out)
    assert re.search(r"actor steps per iteration +6 +epochs 3 x minibatches 2 of 4 rows", out)
    assert not Path("runs").exists()


def test_recipes_lists_what_ships(tether):
    assert "arithmetic" in tether("recipes")[1]


@helpers.table(
    ("words", "sentence"),
    [
        (["--rollout.promts", "4"], "Unknown field rollout.promts; did you mean rollout.prompts?"),
        (["--lr", "1"], "Unknown field lr; did you mean actor.lr?"),
        (["--train.iterations", "many"], "train.iterations is 'many', but should be a valid int"),
        (["--rollout.samples_per_prompt", "0"], "rollout.samples_per_prompt is 0, but"),
        (["--actor.update.eps_low", "1.5"], "actor.update.eps_low is 1.5, but"),
        (["--actor.lr", ".nan"], "actor.lr is nan, but"),
        (["--train.iterations"], "--train.iterations needs a value"),
        (["--seed.x", "1"], "seed is {'x': 1}, but should be a valid integer"),
        (["arithmetics"], "No recipe or YAML file 'arithmetics'; did you mean 'arithmetic'?"),
        (["--data.train", "no.jsonl"], "no.jsonl cannot be opened: no such file or directory"),
        (["--model.actor", "no-model"], "No model at 'no-model'"),
        (["--reward.kind", "no_rule"], "reward.kind 'no_rule' is not a rule that ships"),
        (["--reward.kind", "no.py:f"], "reward.kind names no.py, which is not a file"),
        (["--device", "abacus"], "There is no device 'abacus'"),
        (["--rollout.max_response_tokens", "500"], "fills the 128 positions"),
    ],
)
def test_wrong_input_gets_one_sentence_and_code_2(tether, tiny_words, words, sentence):
    recipe = [] if words[0].startswith("--") else [words[0]]
    code, _, err = tether("train", *recipe, *tiny_words, *words[len(recipe) :])
    assert code == 2
    assert sentence in err
    assert len(err.splitlines()) == 1
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("field", "value", "file"),
    [
        ("--data.train", "no.jsonl", "no.jsonl"),
        ("--model.actor", "no-model", "no-model"),
        ("--reward.kind", "no.py:f", "no.py"),
    ],
)
def test_a_relative_path_that_leads_nowhere_is_told_with_the_place(
    tether, tiny_words, field, value, file
):
    code, _, err = tether("train", *tiny_words, field, value)
    assert code == 2
    assert f"(looked for at {Path.cwd() / file})" in err


def test_a_value_that_is_nested_too_deeply_gets_one_sentence(tether):
    code, _, err = tether("check", "--rollout.tools", "[" * 5000)
    assert code == 2
    assert err.startswith("tether: --rollout.tools: '[[[")
    assert len(err) < 400


def test_an_existing_run_directory_is_refused_and_left_alone(tether, tiny_words):
    Path("kept").mkdir()
    Path("kept/notes.txt").write_text("mine")
    code, _, err = tether("train", *tiny_words, "--run.dir", "kept")
    assert (code, err.count("\n")) == (2, 1)
    assert "run.dir kept exists" in err
    code, _, err = tether("train", *tiny_words, "--run.dir", "kept", "--run.overwrite", "true")
    assert code == 2
    assert "is not a run; choose another" in err
    assert [p.name for p in Path("kept").iterdir()] == ["notes.txt"]


def test_an_empty_prompt_is_refused(tether, tiny_model_dir):
    code, _, err = tether("generate", " ", "--model", tiny_model_dir)
    assert code == 2
    assert "The prompt is empty" in err


def test_a_model_without_eos_is_refused(tether, tiny_words, tiny_model_dir, tmp_path):
    import shutil

    shutil.copytree(tiny_model_dir, "no-eos")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        path = Path("no-eos") / name
        values = {k: v for k, v in json.loads(path.read_text()).items() if "eos" not in k}
        path.write_text(json.dumps(values))
    code, _, err = tether("train", *tiny_words, "--model.actor", "no-eos")
    assert code == 2
    assert "names no EOS token" in err


def test_model_text_cannot_steer_the_terminal():
    assert printable("a\x1b[2Jb\r\n\u202ec") == "a\\x1b[2Jb\\r\\n\\u202ec"
    assert printable("是的，1+1=2") == "是的，1+1=2"


def test_tables_align_wide_characters():
    lines = table([["词", "n"], ["是的", "10"], ["a", "2"]]).splitlines()
    assert lines[2:] == ["  是的   10", "  a       2"]
