"""An iteration in time, from samplers.jsonl as a run with samplers apart writes it."""

import json

import pytest

from view.conftest import client_of

STAGES = {"rollout": 2.0, "reward": 1.0, "forward": 3.0, "update": 4.0}


def chunk(sampler: int, iteration: int | None, asked: float, began: float, ended: float, **other):
    return {
        "sampler": f"sampler {sampler}",
        "purpose": "greedy" if iteration is None else "token",
        "iteration": iteration,
        "version": 0,
        "rows": [0, 8],
        "asked": asked,
        "began": began,
        "ended": ended,
        "lost": 0,
        **other,
    }


@pytest.fixture
def apart(made):
    """Two iterations at lag 1 of 10 and 11 s, and 2 s between them for an evaluation.

    Of the rows of iteration 2, which is never reached, one chunk is sampled in both.
    """
    first = [chunk(1, 0, 0, 0, 1.5), chunk(2, 0, 0, 0.5, 2), chunk(1, 1, 0.1, 1.5, 6)]
    second = [
        chunk(2, 1, -11.9, -10, -6),  # 0.1, 2 and 6 of the first
        chunk(10, None, -2, -1.5, -0.5),  # 10, 10.5 and 11.5: the evaluation
        chunk(2, 2, -1, -0.5, 4, version=1, lost=1),  # 11, 11.5 and 16
    ]
    made.append(
        "samplers",
        {"iteration": 0, "before": None, "seconds": 10, "stages": STAGES, "chunks": first},
    )
    made.append(
        "samplers",
        {"iteration": 1, "before": 2, "seconds": 11, "stages": STAGES, "chunks": second},
    )
    return made


def lanes(body: dict) -> dict:
    return {f"{lane['kind']} {lane['name']}".strip(): lane for lane in body["lanes"]}


def spans(lane: dict) -> list[tuple]:
    return [(s.get("stage", s.get("iteration")), s["from"], s["to"]) for s in lane["spans"]]


def test_an_iteration_lasts_until_the_next_and_shows_what_was_sampled_for_others(apart, ask):
    body = ask("/timeline/0")
    assert (body["apart"], body["seconds"]) == (True, 12)
    found = lanes(body)
    one, two, ten = (found[f"sampler sampler {n}"] for n in (1, 2, 10))
    assert [lane["name"] for lane in body["lanes"]][:3] == ["sampler 1", "sampler 2", "sampler 10"]
    assert spans(one) == [(0, 0, 1.5), (1, 1.5, 6)]
    assert spans(two) == [(0, 0.5, 2), (1, 2, 6), (2, 11.5, 16)]
    assert spans(ten) == [(None, 10.5, 11.5)]
    assert [span["trains"] for span in ten["spans"]] == [False]
    assert one["idle"] == pytest.approx(0.5)
    assert two["idle"] == pytest.approx(1 - 6 / 12)  # the last chunk only up to the end
    assert spans(found["rewards"]) == [("reward", 2, 3)]
    others = [("rollout", 0, 2), ("forward", 3, 6), ("update", 6, 10), ("between", 10, 12)]
    assert spans(found["trainer"]) == others
    assert found["trainer"]["idle"] == pytest.approx(2 / 12)


def test_what_waits_and_how_old_the_weights_are_is_counted(apart, ask):
    body = ask("/timeline/0")
    queue = [[0, 1], [0.1, 3], [0.5, 2], [1.5, 1], [2, 0], [10, 1], [10.5, 0], [11, 1], [11.5, 0]]
    assert body["queue"] == [[pytest.approx(second), n] for second, n in queue]
    assert body["staleness"] == [[0, 16], [1, 24]]
    last = ask("/timeline/1")
    assert last["seconds"] == 11  # nothing follows
    assert spans(lanes(last)["sampler sampler 2"]) == [(2, -0.5, 4)]
    assert "sampler sampler 10" not in lanes(last)


def test_a_line_of_another_attempt_is_not_taken_for_the_next(apart, ask):
    apart.append(
        "samplers",
        {"iteration": 2, "before": None, "stages": STAGES, "chunks": [chunk(3, 2, 0, 0, 1)]},
    )
    body = ask("/timeline/1")
    assert body["seconds"] == 11
    assert "sampler sampler 3" not in lanes(body)


def test_without_samplers_the_stages_follow_one_another(made, ask):
    made.append("timings", {"iteration": 5, **{f"time/{name}": x for name, x in STAGES.items()}})
    assert ask("/timeline")["iterations"] == [0, 1, 2, 3, 4, 5]
    body = ask("/timeline/5")
    assert (body["apart"], body["seconds"], body["queue"]) == (False, 10, [[0, 0]])
    assert [*lanes(body)] == ["rewards", "trainer"]
    assert spans(lanes(body)["trainer"]) == [
        ("rollout", 0, 2),
        ("forward", 3, 6),
        ("update", 6, 10),
    ]
    assert lanes(body)["trainer"]["idle"] is None  # sampling is its own work
    assert client_of(made.directory.parent).get("/api/runs/made/timeline/6").status_code == 404


def test_lines_that_come_and_lines_that_a_resume_cuts_are_noticed(apart, ask):
    client = client_of(apart.directory.parent)

    def iterations() -> list[int]:
        return client.get("/api/runs/made/timeline").json()["iterations"]

    def stages(iteration: int) -> float:
        return client.get(f"/api/runs/made/timeline/{iteration}").json()["seconds"]

    apart.cut("timings", 0)
    assert iterations() == [0, 1]
    path = apart.directory / "samplers.jsonl"
    with path.open("a") as file:
        file.write('{"schema": 1, "iteration": 2, "before": 1, "seconds": 20, ')
    assert iterations() == [0, 1]  # half a line
    with path.open("a") as file:
        file.write(f'"stages": {json.dumps(STAGES)}, "chunks": []}}\n')
    assert iterations() == [0, 1, 2]
    assert stages(1) == 12
    apart.cut("samplers", 1)
    assert iterations() == [0]
    line = {"iteration": 1, "before": 5, "seconds": 7, "stages": {"rollout": 7}, "chunks": []}
    apart.append("samplers", line)
    assert stages(0) == 15
    assert stages(1) == 7


def test_damage_is_left_out(apart, ask):
    broken = [
        None,
        {"sampler": 3, "asked": 0, "began": 1, "ended": 2},
        {"sampler": "late", "asked": 3, "began": 1, "ended": 2},
        {"sampler": "text", "asked": "0", "began": 1, "ended": 2},
        {**chunk(4, 0, 0, 1, 2), "rows": "all", "iteration": True, "version": None, "lost": []},
    ]
    line = {"iteration": 2, "before": "soon", "stages": {"update": 3, "odd": 1}, "chunks": broken}
    apart.append("samplers", line)
    with (apart.directory / "samplers.jsonl").open("a") as file:
        file.write('{"schema": 1}\nno JSON\n{"iteration": 3, no JSON}\n')
        file.write(json.dumps({"iteration": 4, "chunks": 5, "stages": []}) + "\n")
    body = ask("/timeline/2")
    assert [*lanes(body)] == ["sampler sampler 4", "rewards", "trainer"]
    [span] = lanes(body)["sampler sampler 4"]["spans"]
    assert [span[k] for k in ("rows", "iteration", "version", "lost")] == [None] * 4
    assert body["seconds"] == 3
    assert any("names no iteration" in problem for problem in body["problems"])
    client = client_of(apart.directory.parent)
    assert client.get("/api/runs/made/timeline/4").status_code == 404
