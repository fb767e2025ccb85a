"""Whole runs whose rows are sampled apart, by threads in the place of Ray's processes."""

import ast
import hashlib
import random
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import Stop, changed, distinct_letters, first_or_all, read_jsonl, stopping, table
from rollout.fleets import Threads

import tether
from tether import api
from tether.config import LaunchSection, cores
from tether.config.load import validate_config
from tether.dist import ray_samplers
from tether.dist.ray_samplers import refuse_no_room, refuse_small_cluster
from tether.errors import UserError
from tether.ppo.sampler_host import SamplerHost
from tether.run.glossary import TIMINGS
from tether.train import samplers


@pytest.fixture
def fleets(monkeypatch):
    """The fleets of the runs of a test; `fleets.fault` goes for those that are made later."""

    class Made(list):
        fault = None

    made = Made()

    def make_fleet(config):
        host = partial(SamplerHost, config.model_dump(mode="json", by_alias=True))
        made.append(Threads(host, made.fault))
        return made[-1]

    monkeypatch.setattr(samplers, "make_fleet", make_fleet)
    return made


@pytest.fixture
def config(tiny_config) -> dict:
    return changed(
        tiny_config,
        rollout__chunk_tokens=60,
        train={"iterations": 4, "eval_every": 2, "eval_prompts": 3, "checkpoint_every": 2},
    )


def files(run: Path) -> dict[str, str]:
    """Hashes of what a run must repeat to the bit, whoever samples."""
    names = [*run.glob("*s.jsonl"), *run.glob("rollouts/*"), *run.glob("checkpoints/*/**/*.saf*")]
    found = {str(p.relative_to(run)): hashlib.sha256(p.read_bytes()).hexdigest() for p in names}
    for name in ("events.jsonl", "timings.jsonl", "samplers.jsonl"):
        found.pop(name, None)
    assert len(found) > 6
    return found


def trained(config, **fields) -> Path:
    return tether.train(changed(config, **fields), reward=distinct_letters).run


@pytest.mark.parametrize("lag", first_or_all([1, 0, 2]))
def test_samplers_that_die_and_a_run_that_is_killed_end_with_the_bits_of_one_process(
    config, fleets, tmp_path, lag
):
    alone = trained(config, rollout__lag=lag, run__dir=str(tmp_path / "alone"))
    assert not fleets
    rng = random.Random(lag)
    fleets.fault = lambda number, chunk: "die" if rng.random() < 0.15 else None
    apart = changed(config, rollout__lag=lag, launch={"samplers": 2, "max_restarts": 20})
    with pytest.raises(Stop):  # in the third iteration, after the checkpoint
        tether.train(apart, reward=stopping(2 * 6 + (2 + lag) * 12 + 5))
    run = Path(apart["run"]["dir"])
    assert api.resume(run, reward=distinct_letters).resumed_from == 2
    assert files(run) == files(alone)
    assert len(fleets) == 2
    assert all(fleet.closed for fleet in fleets)
    assert sum(len(fleet.seats) for fleet in fleets) > 4  # some were lost
    kinds = [event["kind"] for event in read_jsonl(run / "events.jsonl")]
    assert "sampler_lost" in kinds


@pytest.mark.parametrize(
    "model",
    first_or_all(
        [
            {"compute": "bfloat16"},
            {"lora": {"rank": 2}},
            {"lora": {"rank": 2}, "compute": "bfloat16"},
            {"learn_layers": 1},
            {"dtype": "float64"},
        ]
    ),
    ids=str,
)
def test_weights_arrive_as_the_sampler_reads_them(config, fleets, tmp_path, model):
    settings = {**config["model"], **model}
    short = changed(config, model=settings, train__iterations=2, data__heldout=None)
    alone = trained(short, run__dir=str(tmp_path / "alone"))
    assert files(trained(short, launch__samplers=1)) == files(alone)
    sent = fleets[0].shared
    assert sent == [0, 1]


def test_a_run_says_who_sampled_what_with_which_weights(config, fleets):
    run = trained(config, launch__samplers=2, train__iterations=3, rollout__lag=1)
    asked = sorted((version, first) for _, version, first in fleets[0].asked)
    lines = read_jsonl(run / "samplers.jsonl")
    chunks = [chunk for line in lines for chunk in line["chunks"]]
    trained_on = [chunk for chunk in chunks if chunk["purpose"] == "token"]
    for i in range(3):
        rows = [chunk["rows"] for chunk in trained_on if chunk["iteration"] == i]
        assert sorted(row for a, b in rows for row in range(a, b)) == [*range(12)]
    assert {(c["iteration"], c["version"]) for c in trained_on} == {(0, 0), (1, 0), (2, 1)}
    assert {c["sampler"] for c in chunks} <= {"sampler 1", "sampler 2"}
    assert all(chunk["asked"] <= chunk["began"] <= chunk["ended"] for chunk in chunks)
    noted = sorted((chunk["version"], chunk["rows"][0]) for chunk in chunks)
    assert set(noted) <= set(asked)
    assert [*lines[0]["stages"]] == ["rollout", "reward", "forward", "update"]
    assert all(line["seconds"] >= sum(line["stages"].values()) - 1e-3 for line in lines)
    assert lines[0]["before"] is None
    assert all(line["before"] >= 0 for line in lines[1:])


def test_timings_say_what_samplers_did(config, fleets):
    run = trained(config, launch__samplers=2, train__iterations=2)
    other = "time/tools", "time/collectives", "throughput/mfu"
    names = [name for name in TIMINGS if name not in other]
    for line in read_jsonl(run / "timings.jsonl"):
        assert [*line] == ["schema", "iteration", *names]
        assert line["samplers/ready"] >= 1
        assert line["samplers/chunks"] > 2
        assert 0 <= line["samplers/idle_share"] <= 1
        assert line["samplers/lost"] == 0


@table(
    ("fields", "named"),
    [
        ({"launch__kind": "ray"}, r"launch\.kind ray does not go with launch\.samplers = 2"),
        ({"launch__num_workers": 2}, r"launch\.num_workers does not go with launch\.samplers"),
        ({"rollout__sampler": "vllm"}, r"rollout\.sampler vllm does not go with launch\.samplers"),
        ({"rollout__environment": "a.py:make"}, r"rollout\.environment does not go with launch"),
    ],
)
def test_what_samplers_apart_cannot_do_is_refused_by_field(config, fields, named):
    apart = changed(config, launch__samplers=2, rollout__max_response_tokens=200)
    apart["rollout"].pop("chunk_tokens")
    with pytest.raises(UserError, match=named):
        validate_config(changed(apart, **fields))


def test_more_samplers_than_there_is_room_for_are_refused_at_check(config, monkeypatch):
    pytest.importorskip("ray", reason="Ray is an extra; `make test` installs it")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    many = cores() + 1
    with pytest.raises(UserError, match=rf"launch\.samplers = {many} .* need {many} of CPU"):
        api.check(changed(config, launch__samplers=many))
    with pytest.raises(UserError, match=r"sampler_resources big: 1 need 1 of big"):
        refuse_no_room(LaunchSection(samplers=1, sampler_resources={"big": 1}))
    refuse_no_room(LaunchSection(samplers=many, address="head:6379"))


def test_more_samplers_than_a_named_cluster_has_room_for_are_refused_at_check(monkeypatch):
    """A node of 3 CPUs has room for one that wants 2; one that has left has none."""
    pytest.importorskip("ray", reason="Ray is an extra; `make test` installs it")
    nodes = [
        {"Alive": True, "Resources": {"CPU": 3.0, "memory": 1e9}},
        {"Alive": True, "Resources": {"CPU": 4.0}},
        {"Alive": False, "Resources": {"CPU": 64.0}},
    ]
    fake = nullcontext(SimpleNamespace(nodes=lambda: nodes))
    monkeypatch.setattr(ray_samplers, "connected", lambda address, workers: fake)

    def launch(count: int, **resources: float) -> LaunchSection:
        asked = {"samplers": count, "sampler_resources": resources, "address": "head:6379"}
        return LaunchSection.model_validate(asked)

    refuse_small_cluster(launch(3, CPU=2))
    refuse_small_cluster(launch(9))
    for count, resources, room in ((4, {"CPU": 2}, 3), (1, {"GPU": 1}, 0), (1, {"CPU": 5}, 0)):
        with pytest.raises(UserError, match=rf"launch\.samplers = {count}, .*room for {room} now"):
            refuse_small_cluster(launch(count, **resources))


def test_threads_and_chunks_of_samplers_are_of_the_run_and_their_number_is_not(config):
    from tether.train.resume import changed_fields

    then = validate_config(changed(config, launch__samplers=1)).to_dict()

    def changes(**fields):
        return changed_fields(then, validate_config(changed(config, **fields)))

    assert changes(launch__samplers=2) == []
    [threads] = changes(rollout__sampler_threads=2)
    [chunks] = changes(rollout__chunk_tokens=61)
    assert threads.startswith("rollout.sampler_threads,")
    assert chunks.startswith("rollout.chunk_tokens,")


def test_nothing_imports_ray_before_it_is_asked_for():
    source = Path(tether.__file__).parent
    for file in source.rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [n for n in names if n.split(".")[0] == "ray"], file
