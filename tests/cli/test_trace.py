"""`tether trace` as a person meets it, and model text that must not steer the terminal."""

import json
import re
from pathlib import Path

import pytest
from helpers import table
from rich.cells import cell_len

from tether import api
from tether.cli import terminal
from tether.cli.terminal import print_sections
from tether.explain.trace_text import tell

# Colours, cursor moves, titles, links, clipboard, device queries, C1 forms of the same, bells and
# backspaces, line tricks, direction marks, invisible and half characters.
PAYLOADS = [
    *("\x1b[31mred", "\x1b[2J", "\x1b[H", "\x1b[1;1Hx", "\x1b[?25l", "\x1b[?1049h", "\x1b[6n"),
    *("\x1b]0;title\x07", "\x1b]2;title\x1b\\", "\x1b]8;;http://x.example\x07link\x1b]8;;\x07"),
    *("\x1b]8;;file:///etc/passwd\x1b\\x", "\x1b]52;c;cm0gLXJm\x07", "\x1b]1337;File=:AA\x07"),
    *("\x1bP+q544e\x1b\\", "\x1b_Gf=24;AA\x1b\\", "\x1b^x\x1b\\", "\x1bc", "\x1b(0", "\x1b#8"),
    *("\x1b[c", "\x1b[>0q", "\x1b[21t", "\x1b[8;1;1t", "\x1b", "\x1b[", "\x1b[38;2;1;2;3m"),
    *("\x9b31mx", "\x9b2J", "\x9d0;t\x9c", "\x90q\x9c", "\x85", "\x84", "\x8d"),
    *("\x07", "a\x08b", "a\rb", "a\nb", "a\x0bb", "a\x0cb", "\x00", "\x7f", "\x0e\x0f", "\t"),
    *("\u202eabc", "\u2066a\u2069", "\u200fa", "\u200ba", "\u2028a", "\u2029a", "\ufeffa"),
    *("\udc9b31m", "\U000e0041", "\u061ca"),
]


def raw(output: str) -> set[str]:
    return {c for c in output if c != "\n" and not c.isprintable()}


def test_there_are_at_least_fifty_payloads_and_each_would_be_seen():
    assert len(set(PAYLOADS)) >= 50
    assert all(raw(payload) or "\n" in payload for payload in PAYLOADS)


@pytest.fixture(scope="module")
def record(tiny_model_dir) -> dict:
    fields = {"threads": 1, "rollout.samples_per_prompt": 2, "advantage.estimator": "rloo"}
    return api.trace("2+1=?", tiny_model_dir, response="abc", overrides=fields)


@table("payload", PAYLOADS, ids=ascii)
def test_no_escape_in_any_text_of_a_trace_reaches_the_terminal(
    record, payload, capsys, monkeypatch
):
    monkeypatch.setattr(terminal, "terminal_width", lambda: terminal.ANY_WIDTH)
    hostile = json.loads(json.dumps(record))
    hostile["response"] = hostile["prompt"] = hostile["model"] = payload
    hostile["tokens"]["response_tokens"] = [payload] * 4
    hostile["prompt_tokens"], hostile["columns"] = [payload], {payload: payload}
    hostile["columns_source"], hostile["events"] = payload, [payload]
    for row in hostile["group"]:
        row["response"] = payload
    plain = _lines(tell({**record, "events": ["x"]}, "en", True), capsys)
    printed = _lines(tell(hostile, "en", True), capsys)
    assert raw("".join(printed)) == set()
    assert len(printed) == len(plain)  # nor does it begin a line of its own


def _lines(story, capsys) -> list[str]:
    print_sections(story)
    return capsys.readouterr().out.split("\n")


@table("payload", PAYLOADS, ids=ascii)
def test_no_escape_in_a_generated_response_reaches_the_terminal(tether, monkeypatch, payload):
    class Talker:
        def __init__(self, *given: object, **named: object) -> None: ...

        def respond(self, *given: object) -> list[tuple[str, bool]]:
            return [(payload, True), (payload, False)]

    monkeypatch.setattr(api, "Talker", Talker)
    code, out, err = tether("generate", "hello", "--model", "x")
    assert code == 0
    assert raw(out + err) == set()
    assert len(out.splitlines()) == 2


def test_a_hostile_response_typed_to_the_command_is_printed_harmless(tether, tiny_model_dir):
    code, out, _ = tether(
        *("trace", "\x1b[2Jhi", "--response", "\x1b[31m\x07", "--column", "answer=\x9b1m"),
        *("--model", tiny_model_dir, "--threads", "1", "--html", "t.html", "--json", "t.json"),
    )
    assert code == 0
    assert raw(out) == set()
    assert r"\x1b[2Jhi" in out
    assert json.loads(Path("t.json").read_text(encoding="utf-8"))["response"] == "\x1b[31m\x07"


def test_a_fresh_install_traces_the_example_in_chinese(tether):
    """Without a run there is the starter; every section is there, and the JSON beside it."""
    code, out, _ = tether(
        *("trace", "你知道1+1=2吗？", "--lang", "zh", "--threads", "1", "--explain"),
        *("--json", "t.json", "--html", "t.html"),
    )
    assert code == 0
    for number in range(1, 10):
        assert re.search(rf"^{number} ", out, flags=re.MULTILINE)
    assert "模型：tether:starter" in out
    assert "Critic 是新建的，输出头从零开始，所以价值全为 0" in out
    assert "→ t.json" in out
    record = json.loads(Path("t.json").read_text(encoding="utf-8"))
    assert record["columns"] == {"answer": "是的，1+1=2"}
    assert len(record["tokens"]["response_ids"]) == len(record["after"]["ratio"])
    assert Path("t.html").read_text(encoding="utf-8").startswith('<!doctype html>\n<html lang="zh')


@table("width", [80, 120])
@table("language", ["en", "zh"])
def test_no_line_is_wider_than_the_terminal(record, capsys, monkeypatch, width, language):
    monkeypatch.setenv("COLUMNS", str(width))
    for line in _lines(tell(record, language, True), capsys):
        assert cell_len(line) <= width


def test_the_newest_run_is_traced_by_default(tether, tiny_model_dir, tiny_data):
    fields = {
        "threads": 1,
        "model.actor": tiny_model_dir,
        "data.train": tiny_data,
        "data.heldout": "null",
        "rollout.prompts": 4,
        "actor.minibatch_rows": 4,
        "train.iterations": 1,
        "rollout.max_response_tokens": 4,
    }
    words = [word for name, value in fields.items() for word in (f"--{name}", str(value))]
    assert tether("train", *words)[0] == 0
    code, out, _ = tether("trace", "1+1=?")
    assert code == 0
    assert f"model: runs{'/'}arithmetic-001" in out


def test_a_run_of_a_stage_is_traced_with_the_data_and_reward_that_ship(
    tmp_path, tiny_model_dir, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": "1+1=?", "response": "2"}] * 2
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "threads": 1,
        "run": {"dir": "stage"},
        "model": {"start": tiny_model_dir},
        "data": {"train": "rows.jsonl"},
        "train": {"passes": 1, "minibatch_rows": 2},
    }
    api.sft(settings)
    record = api.trace("1+1=?", "stage", columns={"answer": "2"}, overrides={"threads": 1})
    assert record["model"].endswith("actor")


@table(
    ("words", "sentence"),
    [
        ([], "PROMPT is missing, as in tether trace '1+1=?'."),
        (["a", "b"], "PROMPT must be one word: put it in quotes"),
        (["hello"], "The reward asks for 'answer'"),
        (["1+1=?", "--column", "answer"], "--column 'answer' has no name and value"),
        (["1+1=?", "--model", "nowhere"], "No model at 'nowhere'"),
        (["hello", "--model", "nowhere"], "No model at 'nowhere'"),  # before the reward's column
        (["1+1=?", "--model", "no.yaml"], "No recipe or YAML file 'no.yaml'"),
        (["1+1=?", "--json", "no/t.json"], "no/t.json cannot be written: no is not a directory."),
        (["1+1=?", "--actor.lrr", "1"], "Unknown field actor.lrr"),
        (["1+1=?", "--seed", "x"], "seed is 'x', but"),
    ],
)
def test_wrong_input_gets_one_sentence_and_code_2(tether, words, sentence):
    code, out, err = tether("trace", *words)
    assert (code, out) == (2, "")
    assert sentence in err
    assert len(err.splitlines()) == 1
