"""The recorded run that ships."""

import re
from pathlib import Path

from helpers import read_jsonl

from tether.assets import resolve
from view.conftest import client_of

RECORDED = resolve("tether:recorded")


def files() -> list[Path]:
    return [path for path in RECORDED.rglob("*") if path.is_file()]


def test_the_recorded_run_is_small_and_whole():
    assert sum(path.stat().st_size for path in files()) < 700_000
    [run] = client_of(RECORDED).get("/api/runs").json()["runs"]
    assert (run["state"], run["problem"]) == ("finished", None)
    metrics = read_jsonl(RECORDED / run["id"] / "metrics.jsonl")
    assert run["iterations"] == len(metrics) == run["planned"]
    evals = read_jsonl(RECORDED / run["id"] / "evals.jsonl")
    assert evals[-1]["sampled"]["mean"] > evals[0]["sampled"]["mean"] + 0.1


def test_every_recorded_row_opens_and_equals_its_log():
    client = client_of(RECORDED)
    [run] = [run["id"] for run in client.get("/api/runs").json()["runs"]]
    described = client.get(f"/api/runs/{run}").json()
    assert described["problems"] == []
    opened = 0
    for iteration in described["rollouts"]:
        for row in client.get(f"/api/runs/{run}/rollouts/{iteration}").json()["rows"]:
            path = f"/api/runs/{run}/rollouts/{iteration}/{row['row']}/whatif"
            body = client.get(path).json()
            assert (body["own"], body["note"]) == (True, None)
            assert body["before"] == body["after"]
            opened += 1
    assert opened >= 60


def test_the_recording_names_no_place_on_the_machine_that_made_it():
    for path in files():
        assert not re.search(r"/(?:home|root|tmp|work|Users)/", path.read_text()), path
