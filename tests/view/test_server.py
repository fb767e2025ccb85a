"""The answers of the page's server: runs that grow, shrink, are damaged, old, or not there."""

import io
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
import tracemalloc
from urllib.parse import quote

import pytest
from helpers import read_jsonl, table

from tether.run.glossary import METRICS, TIMINGS
from tether.run.lock import RunLock
from tether.view import api, growing_file, run_reader
from tether.view.rollout_rows import summary
from view.conftest import MadeRun, client_of

SCORE = "names=score/mean"


def test_the_list_says_what_each_run_reached(client, runs):
    body = client.get("/api/runs").json()
    assert [run["id"] for run in body["runs"]] == sorted(p.name for p in runs.iterdir())
    assert body["demo"] is False
    grpo = next(run for run in body["runs"] if run["id"] == "grpo")
    last = read_jsonl(runs / "grpo" / "metrics.jsonl")[-1]
    assert (grpo["iterations"], grpo["planned"], grpo["state"]) == (2, 2, "finished")
    assert grpo["score"] == last["score/mean"]
    assert grpo["problem"] is None


def test_the_last_evaluation_is_the_held_out_score(made):
    made.append("evals", {"iteration": 0, "sampled": {"mean": 0.25}})
    made.append("evals", {"iteration": 5, "sampled": {"mean": 0.75}})
    [run] = client_of(made.directory.parent).get("/api/runs").json()["runs"]
    assert run["heldout"] == 0.75


def test_a_run_is_running_while_its_lock_is_held_and_stopped_after(made):
    client = client_of(made.directory.parent)

    def state() -> str:
        return client.get("/api/runs").json()["runs"][0]["state"]

    assert state() == "stopped"
    with RunLock(made.directory):
        assert state() == "running"
    for iteration in range(5, 10):
        made.iterate(iteration)
    assert state() == "finished"


def test_names_stand_in_the_order_of_the_glossary(client):
    body = client.get("/api/runs/gae").json()
    order = [*METRICS, *TIMINGS]
    assert body["names"] == sorted(body["names"], key=order.index)
    assert {"score/mean", "time/rollout"} <= set(body["names"])
    assert body["glossary"]["score/mean"]["meaning"] == METRICS["score/mean"].meaning
    assert body["rollouts"] == [0, 1]
    assert body["config"]["actor"]["update"]["dual_clip"] == 1.05
    assert body["config_text"].startswith("schema: 1")


def test_series_come_whole_first_and_then_only_what_is_new(made, ask):
    first = ask(f"/series?{SCORE},time/rollout")
    assert first["iteration"] == [0, 1, 2, 3, 4]
    assert first["values"]["score/mean"] == [0.0, 0.1, 0.2, 0.3, 0.4]
    assert first["values"]["time/rollout"] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert (first["next"], first["reset"], first["problems"]) == (5, False, [])
    made.iterate(5)
    second = ask(f"/series?{SCORE}&since=5")
    assert (second["iteration"], second["values"]) == ([5], {"score/mean": [0.5]})
    assert (second["next"], second["reset"]) == (6, False)


def test_a_file_is_read_on_and_never_again(made, ask, monkeypatch):
    for iteration in range(5, 500):
        made.iterate(iteration)
    ask(f"/series?{SCORE}")
    opened, read = growing_file.open_inside, []

    class Counting(io.FileIO):
        def read(self, size: int = -1) -> bytes:
            data = super().read(size)
            read.append(len(data))
            return data

    def counting(root, path):
        with opened(root, path) as file:
            return Counting(os.dup(file.fileno()), "rb")

    monkeypatch.setattr(growing_file, "open_inside", counting)
    made.iterate(500)
    assert ask(f"/series?{SCORE}&since=500")["iteration"] == [500]
    assert len(read) == 2  # metrics and timings, once each
    assert sum(read) < 2 * (growing_file.ANCHOR_BYTES + 100)  # the new line, and what is compared
    read.clear()
    assert ask(f"/series?{SCORE}&since=501")["iteration"] == []
    assert read == []  # nothing changed, nothing opened


def test_a_run_cut_back_by_a_resume_is_told_as_a_reset(made, ask):
    ask(f"/series?{SCORE}")
    made.cut("metrics", 2)
    made.cut("timings", 2)
    body = ask(f"/series?{SCORE}&since=5")
    assert body["reset"] is True
    assert body["iteration"] == [0, 1]
    assert body["next"] == 2


def test_a_run_cut_back_and_grown_beyond_is_noticed_too(made, ask):
    known = ask(f"/series?{SCORE}")
    made.cut("metrics", 2)
    for iteration in range(2, 8):
        made.append("metrics", {"iteration": iteration, "score/mean": 7.0})
    body = ask(f"/series?{SCORE}&since=5&generation={known['generation']}")
    assert body["reset"] is True
    assert body["values"]["score/mean"] == [0.0, 0.1, *[7.0] * 6]
    another_page = ask(f"/series?{SCORE}&since=5&generation={known['generation']}")
    assert another_page["reset"] is True
    assert ask(f"/series?{SCORE}&since=8&generation={body['generation']}")["reset"] is False


def test_a_replaced_run_of_the_same_name_is_a_reset(made, ask, tmp_path):
    ask(f"/series?{SCORE}")
    made.directory.rename(tmp_path / "aside")
    MadeRun(made.directory, iterations=6)
    assert ask(f"/series?{SCORE}&since=5")["reset"] is True


def test_half_a_last_line_waits_for_its_other_half(made, ask):
    path = made.directory / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"schema": 1, "iteration": 5, "sco')
    body = ask(f"/series?{SCORE}")
    assert (body["next"], body["problems"]) == (5, [])  # it may still be being written
    long_ago = time.time() - 60
    os.utime(path, (long_ago, long_ago))
    assert "half a line" in ask(f"/series?{SCORE}")["problems"][0]
    with path.open("a") as file:
        file.write('re/mean": 0.5}\n')
    body = ask(f"/series?{SCORE}&since=5")
    assert (body["values"]["score/mean"], body["problems"]) == ([0.5], [])


@pytest.mark.parametrize(
    "line",
    ["not JSON", "[1, 2]", "null", '{"a": 1', "[" * 100_000, "\x00\x01", '"\ud83d"', ""],
    ids=["text", "list", "null", "half", "deep", "bytes", "surrogate", "empty"],
)
def test_a_damaged_line_is_named_and_the_rest_is_shown(made, ask, line):
    with (made.directory / "metrics.jsonl").open("a", errors="surrogatepass") as file:
        file.write(line + "\n")
    made.iterate(5)
    body = ask(f"/series?{SCORE}")
    assert body["iteration"] == [0, 1, 2, 3, 4, 5]
    assert body["problems"] == ["metrics.jsonl, line 6 is not a JSON object."]


def test_numbers_that_are_no_numbers_become_null(made, ask):
    with (made.directory / "metrics.jsonl").open("a") as file:
        for i, text in enumerate(["NaN", "Infinity", "-1e999", '"x"', "true", "1" + "0" * 400]):
            file.write(f'{{"schema": 1, "iteration": {5 + i}, "score/mean": {text}}}\n')
    assert ask(f"/series?{SCORE}&since=5")["values"]["score/mean"] == [None] * 6


def test_a_metric_that_appears_late_is_null_before(made, ask):
    made.append("metrics", {"iteration": 5, "new/name": 3.0})
    body = ask("/series?names=new/name,score/mean,never/there")
    assert body["values"]["new/name"] == [None] * 5 + [3.0]
    assert body["values"]["score/mean"][-1] is None
    assert body["values"]["never/there"] == [None] * 6
    assert "new/name" in ask()["names"]


def test_timings_are_joined_by_iteration(made, ask):
    made.append("metrics", {"iteration": 5, "score/mean": 0.5})  # its timings never came
    made.append("metrics", {"iteration": 6, "score/mean": 0.6})
    made.append("timings", {"iteration": 6, "time/rollout": 9.0})
    assert ask("/series?names=time/rollout&since=4")["values"]["time/rollout"] == [5.0, None, 9.0]


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "timings.jsonl"])
def test_a_missing_file_is_named_and_the_rest_is_shown(made, ask, name):
    (made.directory / name).unlink()
    assert f"{name} is missing." in ask()["problems"]
    ask(f"/series?{SCORE}")
    listed = client_of(made.directory.parent).get("/api/runs").json()["runs"]
    assert [run["id"] for run in listed] == ["made"]


@pytest.mark.parametrize(
    "text",
    [
        *("a: [", "just text", "", "a: !!python/object/apply:os.system ['true']", "\x00"),
        *("a: &a [*a]", "a: " + "[" * 3000 + "]" * 3000),  # without a bottom
    ],
    ids=lambda text: ascii(text[:20]),
)
def test_a_config_that_cannot_be_read_is_said(made, ask, text):
    (made.directory / "config.yaml").write_text(text)
    body = ask()
    assert body["config"] == {}
    assert body["problems"][0].startswith("config.yaml")


def test_a_config_whose_aliases_stand_for_millions_is_not_unfolded(made, ask):
    levels = "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 10)}]\n" for i in range(9))
    (made.directory / "config.yaml").write_text("a0: &a0 [1, 2]\n" + levels)
    began = time.perf_counter()
    assert "too many values" in ask()["problems"][0]
    assert time.perf_counter() - began < 2


def test_a_config_may_hold_what_json_has_no_word_for(made, ask):
    text = "schema: 1\na: 2026-11-15\nb: .inf\n2026-11-16: 1\nc: !!set {x, y}\nd: !!binary aGk=\n"
    (made.directory / "config.yaml").write_text(text)
    config = ask()["config"]
    assert (config["a"], config["b"], config["2026-11-16"]) == ("2026-11-15", None, 1)


@pytest.mark.parametrize("depth", [500, 900, 980, 20_000])
def test_an_event_that_is_very_deep_takes_no_other_down(made, ask, depth):
    made.append("events", {"iteration": 0, "kind": "k", "message": "m"})
    with (made.directory / "events.jsonl").open("a") as file:
        file.write('{"schema": 1, "message": ' + "[" * depth + "]" * depth + "}\n")
    assert ask("/events")["events"][-1]["message"] == "m"


def test_another_schema_is_said_and_what_is_known_is_shown(made, ask):
    (made.directory / "config.yaml").write_text("schema: 9\ntrain: {iterations: 3}\n")
    with (made.directory / "metrics.jsonl").open("a") as file:
        file.write('{"schema": 9, "iteration": 5, "score/mean": 0.5}\n')
    problems = ask()["problems"]
    assert sum("schema 9" in problem for problem in problems) == 2
    assert ask(f"/series?{SCORE}")["next"] == 6


def test_events_come_newest_first_in_pages(made, ask):
    for i in range(7):
        made.append("events", {"iteration": i, "kind": "k", "row": None, "message": f"m{i}"})
    body = ask("/events?offset=1&limit=3")
    assert [event["message"] for event in body["events"]] == ["m5", "m4", "m3"]
    assert body["total"] == 7


def test_evaluations_come_as_they_were_written(made, ask):
    record = {"iteration": 0, "greedy": {"mean": 0.5}, "sampled": {"mean": 0.25}, "kl": None}
    made.append("evals", record)
    assert ask("/evals")["evals"] == [{"schema": 1, **record}]


def test_rows_are_summed_up_from_their_tokens(client, runs):
    body = client.get("/api/runs/gae/rollouts/1").json()
    rows = read_jsonl(runs / "gae" / "rollouts" / "000001.jsonl")
    assert len(body["rows"]) == len(rows)
    for line, row in zip(body["rows"], rows, strict=True):
        k1 = [a - b for a, b in zip(row["old_log_probs"], row["ref_log_probs"], strict=True)]
        assert line["kl"] == pytest.approx(math.fsum(k1))
        assert line["reward"] == pytest.approx(math.fsum(row["token_level_rewards"]))
        assert line["advantage"] == pytest.approx(
            math.fsum(row["advantages"]) / len(row["advantages"])
        )
        for name in ("row", "data_line", "prompt", "response", "score", "finish_reason"):
            assert line[name] == row[name]
        assert line["length"] == len(row["response_ids"])


@table(
    "path",
    [
        "/nothing",
        "/api/runs/nobody",
        "/api/runs/made/rollouts/3",
        "/api/runs/made/rollouts/-1",
        "/api/runs/made/rollouts/x",
        "/api/runs/made/rollouts/0/99",
        "/api/runs/made/rollouts/0/99/whatif",
        "/api/runs/made/",
        "/static/nothing.js",
        "/static/",
    ],
)
def test_what_is_not_there_is_404_in_json(made, path):
    (made.directory / "rollouts" / "000000.jsonl").write_text("{}\n")
    answer = client_of(made.directory.parent).get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]
    assert answer.headers["content-type"] == "application/json"


@table("query", ["since=-1", "since=x", "since=1e3", "generation=y"])
def test_a_count_that_is_none_is_refused(made, query):
    answer = client_of(made.directory.parent).get(f"/api/runs/made/series?{query}")
    assert answer.status_code == 400


OLD_ROW = {
    "schema": 1, "iteration": 0, "row": 4, "prompt": "p", "response": "ab", "score": 1.0,
    "response_ids": [5, 6], "old_log_probs": [-1.0, -2.0], "ref_log_probs": [-1.5, -2.0],
}  # fmt: skip


def test_a_row_of_an_older_version_shows_what_it_has(made, ask):
    (made.directory / "rollouts" / "000000.jsonl").write_text(json.dumps(OLD_ROW) + "\n")
    [line] = ask("/rollouts/0")["rows"]
    assert (line["kl"], line["usable"], line["reward"], line["advantage"]) == (
        0.5,
        True,
        None,
        None,
    )
    body = ask("/rollouts/0/4")
    assert body["tokens"] == ["[5]", "[6]"]
    assert body["mask"] == [True, True]
    assert body["columns"]["old_log_probs"] == [-1.0, -2.0]
    assert body["columns"]["values"] is None
    assert body["columns"]["objective"] is None
    assert body["clip"] == ["", ""]
    assert "lacks columns" in ask("/rollouts/0/4/whatif?kl.in_reward.coef=1")["note"]


SPOILT = [
    {"old_log_probs": "x"},
    {"old_log_probs": [1.0]},
    {"old_log_probs": [None, "x"]},
    {"response_ids": 5},
    {"response_ids": None},
    {"response_ids": []},
    {"response_mask": [1, 2, 3]},
    {"response_tokens": {}},
    {"row": "x"},
    {"row": -3},
    {"score": "high", "beta": [], "whitening": 7, "usable": "no"},
    {"whitening": {"mean": None, "count": 1e400}},
    {"prompt": "\ud83d", "response": ["no", "text"]},
]


@pytest.mark.parametrize("spoilt", SPOILT, ids=lambda changes: "-".join(changes))
def test_a_spoilt_row_takes_nothing_else_down(runs, tmp_path, spoilt):
    shutil.copytree(runs / "gae", tmp_path / "runs" / "gae")
    path = tmp_path / "runs" / "gae" / "rollouts" / "000001.jsonl"
    rows = read_jsonl(path)
    rows[1] = {**rows[1], **spoilt}
    path.write_text("\n".join([json.dumps(row) for row in rows] + ["half"]))
    client = client_of(tmp_path / "runs")
    body = client.get("/api/runs/gae/rollouts/1").json()
    assert len(body["rows"]) == len(rows)
    assert len(body["problems"]) == 1
    for line in body["rows"]:
        path = f"/api/runs/gae/rollouts/1/{line['row']}"
        for tail in ("", "/whatif", "/whatif?advantage.estimator=grpo&kl.in_reward.coef=1"):
            answer = client.get(path + tail)
            assert answer.status_code == (404 if line["row"] < 0 else 200)
            json.dumps(answer.json(), allow_nan=False)


def test_runs_appear_and_vanish_while_the_page_is_open(made, tmp_path):
    client = client_of(made.directory.parent)

    def ids() -> list[str]:
        return [run["id"] for run in client.get("/api/runs").json()["runs"]]

    assert ids() == ["made"]
    MadeRun(made.directory.parent / "another")
    assert ids() == ["another", "made"]
    (made.directory.parent / "another").rename(tmp_path / "gone")
    assert ids() == ["made"]
    assert client.get("/api/runs/another").status_code == 404


def test_a_run_named_itself_is_the_only_one(made):
    client = client_of(made.directory)
    assert [run["id"] for run in client.get("/api/runs").json()["runs"]] == ["made"]
    assert client.get("/api/runs/made").status_code == 200


def test_a_folder_without_runs_answers_with_none(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "file.txt").touch()
    assert client_of(tmp_path).get("/api/runs").json()["runs"] == []


def test_a_folder_that_vanishes_is_said(tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    client = client_of(folder)
    folder.rmdir()
    body = client.get("/api/runs").json()
    assert body["runs"] == []
    assert "cannot be read" in body["problems"][0]


def test_a_run_id_may_hold_anything_a_folder_name_may(tmp_path):
    name = "a b#%?ü\"'<x>"
    MadeRun(tmp_path / name)
    client = client_of(tmp_path)
    assert client.get("/api/runs").json()["runs"][0]["id"] == name
    assert client.get(f"/api/runs/{quote(name, safe='')}").json()["id"] == name


def test_a_request_that_breaks_the_server_is_said_in_json(made, monkeypatch):
    monkeypatch.setattr(api, "list_runs", lambda *a: 1 / 0)
    answer = client_of(made.directory.parent).get("/api/runs")
    assert answer.status_code == 500
    assert "terminal" in answer.json()["error"]
    assert answer.headers["x-frame-options"] == "DENY"


def run_command(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tether", "view", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_port_in_use_is_one_sentence_that_names_it(made):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run_command(str(made.directory), "--port", str(port))
    assert ended.returncode == 2
    assert f"--port {port}" in ended.stderr
    assert ended.stderr.count("\n") == 1


@table(
    ("words", "named"),
    [
        (["does/not/exist"], "does/not/exist"),
        ([".", "--port", "70000"], "--port"),
        ([".", "--host", "no.such.host.invalid"], "--host"),
        ([".", "--host", "192.0.2.1"], "--host"),  # an address kept for examples
    ],
)
def test_a_wrong_word_is_one_sentence_and_code_2(words, named):
    ended = run_command(*words)
    assert ended.returncode == 2
    assert named in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_the_page_opens_without_loading_torch(made):
    code = f"""
import sys
from pathlib import Path
from starlette.testclient import TestClient
from tether.view.server import make_app
from tether.view.run_reader import Folder
app = make_app(Folder(Path({str(made.directory.parent)!r})), "127.0.0.1", 8377)
client = TestClient(app, base_url="http://127.0.0.1:8377")
for path in ("/", "/api/runs", "/api/runs/made", "/api/runs/made/series?names=score/mean"):
    assert client.get(path).status_code == 200, path
print({{"torch", "plotly"}} & set(sys.modules))
"""
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.stdout == "set()\n", ended.stderr


def test_a_list_of_rows_loads_torch_beside_the_answers(made):
    """The first row that is opened need not wait for it."""
    (made.directory / "rollouts" / "000000.jsonl").write_text('{"schema": 1, "row": 0}\n')
    code = f"""
import sys, time
from pathlib import Path
from starlette.testclient import TestClient
from tether.view.server import make_app
from tether.view.run_reader import Folder
app = make_app(Folder(Path({str(made.directory.parent)!r})), "127.0.0.1", 8377)
client = TestClient(app, base_url="http://127.0.0.1:8377")
assert client.get("/api/runs/made/rollouts/0").status_code == 200
deadline = time.monotonic() + 100
while not hasattr(sys.modules.get("tether.view.whatif"), "logged_journey"):
    assert time.monotonic() < deadline, "never loaded"
    time.sleep(0.05)
assert client.get("/api/runs/made/rollouts/0").status_code == 200
print(sys.modules["torch"].get_num_threads())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout == "1\n", ended.stderr


def test_plotly_is_sent_once_and_then_only_asked_for(client):
    first = client.get("/plotly.min.js")
    assert first.status_code == 200
    assert len(first.content) > 1_000_000
    again = client.get("/plotly.min.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = client.get("/plotly.min.js", headers={"If-None-Match": '"older"'})
    assert other.status_code == 200


def test_a_huge_row_is_counted_and_not_held(made, ask):
    """Of 200 MB nothing is kept, and the rows beside it are shown."""
    path = made.directory / "rollouts" / "000000.jsonl"
    with path.open("wb") as file:
        file.write(b'{"schema": 1, "row": 0, "prompt": "a"}\n{"schema": 1, "row": 1, "prompt": "')
        for _ in range(200):
            file.write(b"x" * (1 << 20))
        file.write(b'"}\n{"schema": 1, "row": 2, "prompt": "c"}')
    tracemalloc.start()
    body = ask("/rollouts/0")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [row["row"] for row in body["rows"]] == [0, 2]
    [problem] = body["problems"]
    assert "000000.jsonl, line 2 has 209,7" in problem
    assert "not shown" in problem
    assert peak < 150 << 20


def test_rows_beyond_what_is_held_of_a_file_are_counted_off(made, ask, monkeypatch):
    monkeypatch.setattr(run_reader, "MAX_ROWS_BYTES", 100)
    path = made.directory / "rollouts" / "000000.jsonl"
    path.write_text("".join(f'{{"schema": 1, "row": {i}, "prompt": "a"}}\n' for i in range(5)))
    body = ask("/rollouts/0")
    assert [row["row"] for row in body["rows"]] == [0, 1]  # 39 bytes each
    assert body["problems"] == ["000000.jsonl is shown up to line 2: the rest is beyond 100 bytes."]


def test_the_length_of_a_row_is_what_the_policy_wrote():
    """As `response/length_mean` counts it; what a tool said is no part of it."""
    row = {"response_ids": [1, 2, 3, 4], "response_mask": [True, False, False, True]}
    assert summary(0, row)["length"] == 2
