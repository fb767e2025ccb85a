"""How long a large run takes to open, and that following it costs what is new, not what is old.

The whole, 10,000 iterations and a million token rows: pytest -s -m learn tests/view/test_scale.py
"""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tether.view.api import read_series
from tether.view.metric_table import MAX_POINTS, thin
from tether.view.run_reader import Folder
from view.conftest import MadeRun, client_of

NAMES = [f"part{i // 8}/name{i % 8}" for i in range(40)]
ROWS, TOKENS = 64, 16
COLUMNS = (
    "rollout_log_probs", "old_log_probs", "ref_log_probs", "new_log_probs", "kl", "values",
    "token_level_scores", "token_level_rewards", "advantages", "returns", "policy_advantages",
)  # fmt: skip

MEASURE = """
import sys, time
from pathlib import Path
from starlette.testclient import TestClient
from tether.view.server import make_app
from tether.view.run_reader import Folder
client = TestClient(
    make_app(Folder(Path(sys.argv[1])), "127.0.0.1", 8377), base_url="http://127.0.0.1:8377"
)
client.get("/nothing")  # the test client itself warms up
began = time.perf_counter()
client.get("/api/runs")
listed = time.perf_counter()
names = client.get("/api/runs/large").json()["names"]
described = time.perf_counter()
body = client.get("/api/runs/large/series?names=" + ",".join(names[:8])).json()
drawn = time.perf_counter()
again = client.get(f"/api/runs/large/series?names={names[0]}&since={body['next']}").json()
followed = time.perf_counter()
assert "torch" not in sys.modules
print(listed - began, described - listed, drawn - described, followed - drawn, body["next"])
"""


def make_large_run(folder: Path, iterations: int, files: int) -> Path:
    chance = random.Random(0)
    run = MadeRun(folder / "large", iterations=0, planned=iterations).directory
    with (run / "metrics.jsonl").open("w") as metrics, (run / "timings.jsonl").open("w") as timings:
        for i in range(iterations):
            values = {name: chance.gauss(0, 1) for name in NAMES}
            metrics.write(json.dumps({"schema": 1, "iteration": i, **values}) + "\n")
            seconds = {f"time/{stage}": chance.random() for stage in "abcdef"}
            timings.write(json.dumps({"schema": 1, "iteration": i, **seconds}) + "\n")
    first = run / "rollouts" / "000000.jsonl"
    with first.open("w") as file:
        for row in range(ROWS):
            lists = {name: [chance.gauss(0, 1) for _ in range(TOKENS)] for name in COLUMNS}
            ids = {"response_ids": list(range(TOKENS)), "response_mask": [True] * TOKENS}
            record = {"schema": 1, "row": row, "prompt": "p", "response": "r", "score": 1.0}
            file.write(json.dumps({**record, **ids, **lists}) + "\n")
    for i in range(1, files):
        os.link(first, run / "rollouts" / f"{i * 10:06d}.jsonl")
    return run


def measure(folder: Path) -> list[float]:
    """Seconds for the list, the run, the first curves, and one more look at them."""
    command = [sys.executable, "-c", MEASURE, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *seconds, _ = map(float, done.stdout.split())
    return seconds


def test_a_run_of_a_thousand_iterations_opens_at_once(tmp_path):
    make_large_run(tmp_path, iterations=1000, files=100)
    assert sum(measure(tmp_path)[:3]) < 0.5


@pytest.mark.long
def test_ten_thousand_iterations_and_a_million_token_rows_open_within_a_second(tmp_path):
    make_large_run(tmp_path, iterations=10_000, files=1000)
    seconds = measure(tmp_path)
    print("list, run, first curves, next look:", ", ".join(f"{s:.3f} s" for s in seconds))
    assert sum(seconds[:3]) < 1.0
    assert seconds[3] < 0.05


def test_a_long_series_is_thinned_and_keeps_its_spikes(tmp_path):
    run = MadeRun(tmp_path / "long", iterations=0)
    for i in range(5000):
        spike = {1234: 99.0, 4321: -99.0}.get(i, (i % 7) / 7)
        run.append("metrics", {"iteration": i, "score/mean": spike, "other": float(i)})
    [source] = Folder(tmp_path).runs().values()
    body = read_series(source, ["score/mean", "other"], 0, None)
    points = dict(zip(body["iteration"], body["values"]["score/mean"], strict=True))
    assert points[1234] == 99.0
    assert points[4321] == -99.0
    assert {0, 4999} <= set(points)
    assert 1000 <= len(points) <= MAX_POINTS + 10
    assert max(b - a for a, b in zip(body["iteration"], body["iteration"][1:], strict=False)) <= 5
    assert body["next"] == 5000
    assert all(points[i] == pytest.approx((i % 7) / 7) for i in points if i not in (1234, 4321))


def test_a_short_series_is_not_thinned():
    assert thin([[0.0] * MAX_POINTS], MAX_POINTS) == list(range(MAX_POINTS))


def test_a_series_of_nothing_but_gaps_is_thinned_too():
    assert len(thin([[float("nan")] * 4000], 4000)) >= 1000


def test_following_a_large_run_costs_next_to_nothing(tmp_path):
    """CPU of one look (the list and the new rows) after each new iteration of a long run.

    At a look every two seconds, 20 ms are 1% of one core.
    """
    run = make_large_run(tmp_path, iterations=3000, files=300)
    client = client_of(tmp_path)
    names = ",".join(NAMES[:8])
    since = client.get(f"/api/runs/large/series?names={names}").json()["next"]
    looks = 20
    spent = 0.0
    for i in range(looks):
        with (run / "metrics.jsonl").open("a") as file:
            values = dict.fromkeys(NAMES, 0.5)
            file.write(json.dumps({"schema": 1, "iteration": 3000 + i, **values}) + "\n")
        began = time.process_time()
        client.get("/api/runs")
        body = client.get(f"/api/runs/large/series?names={names}&since={since}").json()
        spent += time.process_time() - began
        assert body["iteration"] == [3000 + i]
        since = body["next"]
    print(f"one look: {1000 * spent / looks:.1f} ms")
    assert spent / looks < 0.02
