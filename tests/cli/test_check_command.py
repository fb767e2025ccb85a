"""`tether check`: does the plan fit this machine, and how long will an iteration take?"""

import re

import pytest
import torch

from tether.planning import machine, preview

SMALL = ["--rollout.prompts", "8", "--actor.minibatch_rows", "8", "--threads", "1"]


@pytest.fixture
def free(monkeypatch):
    """Say how much memory is free here."""

    def told(number: int) -> None:
        for module in (machine, preview):
            monkeypatch.setattr(module, "free_bytes", lambda device: number)

    return told


def test_a_plan_that_fits_says_so_and_how_long_an_iteration_takes(tether, free):
    free(2**33)
    code, out, _ = tether("check", *SMALL)
    assert code == 0
    assert re.search(r"free here +8\.0 GiB +the peak fits", out)
    assert re.search(r"in all +[\d.]+ (ms|s) +rough: at \d+ GFLOP/s, measured here", out)
    assert "note" not in out


@pytest.mark.long
def test_a_plan_that_does_not_fit_says_so(tether, free):
    free(2**26)
    code, out, _ = tether("check", *SMALL)
    assert code == 0
    assert re.search(r"free here +64\.0 MiB +too little: the peak would take", out)
    assert "note: this does not fit into the memory that is free here" in out


@pytest.mark.long
def test_a_given_rate_comes_before_a_measured_one(tether):
    _, out, _ = tether("check", *SMALL, "--launch.teraflops", "0.001")
    assert "one after the other" in out
    assert "measured here" not in out


def test_the_limit_of_a_container_counts(tmp_path, monkeypatch):
    for name, text in (("memory.max", "1000\n"), ("memory.current", "400\n")):
        (tmp_path / name).write_text(text)
    path = machine.Path
    monkeypatch.setattr(
        machine, "Path", lambda *p: tmp_path / p[1] if p[0] == "/sys/fs/cgroup" else path(*p)
    )
    assert machine.free_bytes("cpu") == 600


def test_the_rate_is_that_of_the_quickest_product(monkeypatch):
    """Three products of 0.1, 0.01 and 0.29 s: two of them waited for another program."""
    clock = iter([0.0, 0.0, 0.1, 0.1, 0.11, 0.11, 0.4, 0.4])
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    assert machine._teraflops("cpu", torch.float32) == pytest.approx(2 * 768**3 / 0.01 / 1e12)
