"""What the doctor says on the page: the same as the command, also of runs that are not whole."""

import json
import subprocess
import sys

import pytest

from tether.run.doctor.diagnosis import RULES, examine
from tether.view import notices
from view.conftest import MadeRun

# What `tether doctor` needs of every iteration; a response is cut off in nine of ten rows.
NUMBERS = {
    "score/mean": 0.5,
    "score/std": 0.5,
    "response/eos_rate": 0.1,
    "response/length_mean": 9.0,
    "actor/approx_kl": 0.01,
    "kl/token_mean": 0.1,
}


@pytest.fixture
def trouble(made) -> MadeRun:
    """The hand-written run, with numbers that show one trouble, and rows."""
    made.cut("metrics", 0)
    for i in range(8):
        made.append("metrics", {"iteration": i, **NUMBERS})
    for name, ids in (("000000", range(20)), ("000007", [7] * 20)):
        rows = [{"schema": 1, "row": i, "response_ids": list(ids)} for i in range(4)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (made.directory / "rollouts" / f"{name}.jsonl").write_text(text)
    return made


def rules(body: dict) -> list[str]:
    return [finding["rule"] for finding in body["findings"]]


def test_the_page_says_what_the_command_says(trouble, ask):
    body, command = ask("/notices"), examine(trouble.directory).as_dict()
    assert rules(body) == ["repetition", "truncation"]
    assert body["findings"] == json.loads(json.dumps(command["findings"]))
    assert (body["judged"], body["rules"]) == (len(command["judged"]), len(RULES))
    assert body["begun"] is False


def test_it_speaks_of_what_has_been_written_since(trouble, ask):
    assert "stopped" not in rules(ask("/notices"))
    trouble.append("events", {"iteration": 8, "kind": "failed", "message": "the disk is full"})
    for i in range(8, 40):
        trouble.append("metrics", {"iteration": i, **NUMBERS, "response/eos_rate": 1.0})
    body = ask("/notices")
    assert rules(body) == ["stopped", "repetition"]
    assert body["findings"][0]["message"] == "the disk is full"


def test_a_run_that_has_just_begun_says_so(made, ask):
    made.cut("metrics", 1)
    body = ask("/notices")
    assert body["begun"] is True
    assert body["fewest"] == 5
    assert body["findings"] == []


def test_damage_and_an_older_schema_are_named_and_the_rest_is_judged(trouble, ask):
    with (trouble.directory / "metrics.jsonl").open("a") as file:
        file.write("not JSON\n")
        file.write(json.dumps({"schema": 0, "iteration": 8, **NUMBERS}) + "\n")
    (trouble.directory / "config.yaml").unlink()
    for path in (trouble.directory / "rollouts").iterdir():
        path.unlink()
    body = ask("/notices")
    assert rules(body) == ["truncation"]
    assert any("line 9 is not" in problem for problem in body["problems"])
    assert any("schema 0" in problem for problem in body["problems"])


def test_large_files_of_rows_are_left_to_the_command(trouble, ask, monkeypatch):
    monkeypatch.setattr(notices, "MAX_ROWS_BYTES", 100)
    assert rules(ask("/notices")) == ["truncation"]
    assert len(ask("/notices")["findings"]) < len(examine(trouble.directory).findings)


def test_ten_thousand_iterations_are_judged_at_once_and_without_torch(trouble):
    trouble.cut("metrics", 0)
    lines = [json.dumps({"schema": 1, "iteration": i, **NUMBERS}) for i in range(10_000)]
    (trouble.directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    code = f"""
import sys, time
from pathlib import Path
from tether.view.notices import read_notices
from tether.view.run_reader import Folder
[run] = Folder(Path({str(trouble.directory.parent)!r})).runs().values()
run.read_series()
began = time.process_time()
found = read_notices(run)["findings"]
print(len(found), "torch" in sys.modules, time.process_time() - began)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found, torch, seconds = done.stdout.split()
    assert (found, torch) == ("2", "False")
    assert float(seconds) < 0.5
