"""Checkpoints of several processes: who hashes what, kills in the middle of a save, time-outs."""

import json
import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import few_or_many
from torch import Tensor, nn

from dist.processes import run_processes
from tether.config import LaunchSection
from tether.dist import world as worlds
from tether.dist.collectives import gather
from tether.dist.liveness import naming_lost_processes
from tether.dist.world import (
    REWARDS,
    SAVING,
    START,
    USUAL,
    World,
    entered,
    waiting_for,
    world,
)
from tether.errors import OthersLost, UserError
from tether.run import checkpoint_store
from tether.run.checkpoint_store import newest_whole, sweep
from tether.train import checkpoint as checkpoints
from tether.train import checkpoint_files
from tether.train.checkpoint import Progress, newest_whole_by_all, save_checkpoint
from tether.train.checkpoint_files import read_tensors
from tether.train.training import Contents

FILES = ("critic.safetensors", "actor_optimizer.safetensors")


class Settings:
    def to_dict(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Numbers:
    """A training that has nothing but tensors, all of the same number."""

    number: int
    config = Settings()

    def learning_modules(self) -> dict[str, nn.Module]:
        return {}

    def contents(self) -> Contents:
        tensors = {f"x{i}": torch.full((50, 40), float(self.number)) for i in range(6)}
        return Contents({}, dict.fromkeys(FILES, tensors), {})

    def checkpoints_to_keep(self, run: Path) -> list[Path]:
        return checkpoint_store.all_checkpoints(run)[:2]


def save(run: Path, *numbers: int) -> None:
    for number in numbers:
        save_checkpoint(run, Progress(number), Numbers(number), {})  # pyright: ignore


def held(checkpoint: Path) -> set[float]:
    """All numbers in its tensors."""
    tensors: list[Tensor] = [t for file in FILES for t in read_tensors(checkpoint / file).values()]
    assert len(tensors) == 12
    return {float(x) for tensor in tensors for x in tensor.unique()}


def watch_hashing() -> list[str]:
    seen, hashed = [], checkpoint_store._sha256
    checkpoint_store._sha256 = lambda path: seen.append(path.name) or hashed(path)
    return seen


def save_and_verify(run: Path) -> tuple[list[str], list[str], Any]:
    with entered("cpu", 1, 60.0):
        seen = watch_hashing()
        save(run, 1)
        written = seen.copy()
        seen.clear()
        return written, seen, newest_whole_by_all(run)


def test_each_process_hashes_what_it_wrote_and_verifies_a_share(tmp_path):
    found = run_processes(2, save_and_verify, tmp_path)
    files = {path.name for path in (tmp_path / "checkpoints/000001").iterdir()} - {"manifest.json"}
    manifest = json.loads((tmp_path / "checkpoints/000001/manifest.json").read_text())
    assert manifest["sha256"].keys() == files
    assert len(files) == 5
    for done in zip(*(one[:2] for one in found), strict=True):
        assert set(done[0]) | set(done[1]) == files
        assert len(done[0]) + len(done[1]) == len(files)  # each of them once
        assert min(map(len, done)) == 2
    own = "critic-00002-of-00002.safetensors", "actor_optimizer-00002-of-00002.safetensors"
    assert sorted(found[1][0]) == sorted(own)
    assert [one[2] for one in found] == [(tmp_path / "checkpoints/000001", {})] * 2
    assert newest_whole(tmp_path) == found[0][2]
    assert held(tmp_path / "checkpoints/000001") == {1.0}


def verify(run: Path) -> Any:
    with entered("cpu", 1, 60.0):
        try:
            return newest_whole_by_all(run)
        except UserError as error:
            return str(error)


def spoil(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_damage_is_known_to_all_whoever_finds_it(tmp_path):
    save(tmp_path, 1, 2)
    older, newer = (tmp_path / "checkpoints" / name for name in ("000001", "000002"))
    for name in (*FILES, "state.json"):
        before = (newer / name).read_bytes()
        spoil(newer / name)
        assert run_processes(2, verify, tmp_path) == [(older, {newer: f"{name} is damaged"})] * 2
        (newer / name).write_bytes(before)
    (newer / FILES[0]).unlink()
    (newer / "manifest.json").write_text("{")
    (older / FILES[1]).unlink()
    expected = {
        newer: "manifest.json is missing or damaged",
        older: f"{FILES[1]} is missing or damaged",
    }
    assert run_processes(2, verify, tmp_path) == [(None, expected)] * 2
    assert newest_whole(tmp_path) == (None, expected)


STEPS = (
    (checkpoint_files, "save_file"),
    (checkpoint_store, "sync"),
    (checkpoint_store, "_sha256"),
    (os, "rename"),
    (os, "replace"),
    (checkpoints, "prune"),
)


def save_until_killed(run: Path, rank: int, step: int, torn: bool) -> None:
    """Save a third checkpoint; the process of that rank is killed before that step of it, or once
    half a file is written."""
    left = [step]

    def counted(function):
        def call(*arguments, **named):
            left[0] -= 1
            if left[0] == 0:
                if torn:
                    function(*arguments, **named)
                    os.truncate(arguments[1], Path(arguments[1]).stat().st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **named)

        return call

    with entered("cpu", 1, 60.0):
        if world().rank == rank:
            for place, name in STEPS:
                setattr(place, name, counted(getattr(place, name)))
        save(run, 3)


# Process 0 writes 2 files of tensors, makes 3 files durable and hashes them, does so with the
# manifest and its folder, and then moves all to its place; process 1 has 2 files.
BEFORE_THE_MOVE = [
    *((0, step, False) for step in range(1, 12)),
    *((1, step, False) for step in range(1, 7)),
    *((rank, step, True) for rank in (0, 1) for step in (1, 2)),
]
AFTER_IT = [(0, step, False) for step in (12, 13, 14, 15)]


@few_or_many("kills", [(0, 9, False), (1, 2, True)], BEFORE_THE_MOVE + AFTER_IT)
def test_a_kill_in_the_middle_of_saving_leaves_the_one_before(tmp_path, kills):
    whole = tmp_path / "whole"
    save(whole, 1, 2)
    for number, kill in enumerate(kills):
        run = tmp_path / str(number)
        shutil.copytree(whole, run)
        with pytest.raises(AssertionError, match=r"a process died|cannot go on"):
            run_processes(2, save_until_killed, run, *kill)
        found, damaged = newest_whole(run)
        assert damaged == {}
        assert found is not None
        assert found.name == ("000003" if kill in AFTER_IT else "000002")
        assert held(found) == {float(found.name)}
        sweep(run)
        kept = {path.name for path in (run / "checkpoints").iterdir()}
        assert kept <= {"000001", "000002", "000003", "LATEST"}


def wait_for(what: str, seconds: float, limits: dict[str, float]) -> str:
    with entered("cpu", 1, 60.0, limits):
        if world().rank == 1:
            time.sleep(seconds)
        try:
            with waiting_for(what):
                return str(gather(world().rank))
        except OthersLost as error:
            return str(error)


@pytest.mark.long
def test_time_outs_are_apart_and_the_one_that_ended_is_named():
    limits = {START: 60.0, REWARDS: 60.0, SAVING: 4.0}
    assert run_processes(2, wait_for, REWARDS, 6.0, limits) == ["[0, 1]"] * 2
    said, _ = run_processes(2, wait_for, SAVING, 20.0, limits)
    assert said.endswith("no answer from process 1 (launch.save_timeout_seconds = 4).")


def test_the_field_whose_time_out_ended_the_wait_is_named(monkeypatch):
    limits = {USUAL: 2.0, REWARDS: 3.0, SAVING: 4.0}
    monkeypatch.setattr(worlds, "_now", World(1, 2, {}, limits))
    for what, seconds in limits.items():
        with (
            pytest.raises(OthersLost, match=rf"process 0 \(launch\.{what} = {seconds:g}\)\."),
            waiting_for(what),
            naming_lost_processes(),
        ):
            raise RuntimeError("gloo: timed out")
    settings = LaunchSection(timeout_seconds=1, save_timeout_seconds=7)
    apart = {START: 600.0, REWARDS: 3600.0, SAVING: 7.0}
    assert settings.timeouts_apart == apart
