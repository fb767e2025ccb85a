"""A real browser on a real server over real runs; shared by all tests, as each takes a second."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import tether
from tests.browser.hostile import row_of, write

CHROMIUM = shutil.which("chromium")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "1000"}
ITERATIONS = 8
WIDE = {"width": 1280, "height": 900}

TINY = {  # the arithmetic recipe, small enough for several iterations a second
    "--train.eval_prompts": 8,
    "--rollout.prompts": 8,
    "--actor.minibatch_rows": 8,
    "--run.rollouts_every": 1,
    "--threads": 1,
}


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of `tether view` over a folder, on a port that is free."""
    command = [sys.executable, "-m", "tether", "view", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        said = process.stdout.readline()
        yield next(word for word in said.split() if word.startswith("http://"))
    finally:
        process.terminate()
        process.wait()


def wait_until(page, expression: str, seconds: float = 120) -> None:
    """Until a JavaScript expression holds. The page's policy forbids Playwright's own way of
    waiting, which evaluates text inside the page."""
    for _ in range(int(seconds / 0.1)):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"never came true: {expression}")


@pytest.fixture(scope="session")
def browser():
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=CHROMIUM,
            args=[
                "--no-sandbox",
                "--disable-gpu",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--no-first-run",
                "--disable-quic",
            ],
        )
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    context = browser.new_context(viewport=WIDE, locale="en-GB")
    page = context.new_page()
    page.set_default_timeout(180_000)
    yield page
    context.close()


@contextmanager
def trained(run: Path, iterations: int) -> Iterator[subprocess.Popen]:
    """`tether train` at work; what it says goes into a file beside the run."""
    options = [str(part) for pair in TINY.items() for part in pair]
    command = [sys.executable, "-m", "tether", "train", "arithmetic", *options]
    command += ["--train.iterations", str(iterations), "--run.dir", str(run)]
    with log_of(run).open("w") as log:
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def log_of(run: Path) -> Path:
    return run.with_suffix(".log")


def make_tool_run(run: Path) -> None:
    """By hand: every third token is tool output; and a row as older versions wrote it."""
    (run / "rollouts").mkdir(parents=True)
    (run / "config.yaml").write_text("schema: 1\n")
    write(run / "metrics.jsonl", [{"iteration": 0, "score/mean": 1.0}])
    tokens = ["found", " it", "\n", "so", " 5", "<|end|>"]
    with_holes = row_of(0, "what is it?", tokens, holes=True)
    with_holes["correction_weights"] = [0.0, 2.0, 0.5, 0.0, 1.0, 1.5]
    with_holes["turns"] = [
        {"policy": False, "text": "found"},
        {"policy": True, "text": " it\n"},
        {"policy": False, "text": "so"},
        {"policy": True, "text": " 5<|end|>"},
    ]
    call = {"turn": 0, "name": "search", "arguments": "what", "fault": None}
    with_holes["calls"] = [
        {**call, "result": "found", "cut": True, "error": None},
        {**call, "turn": 1, "result": "", "cut": False, "error": "no answer", "fault": "tool"},
    ]
    older = row_of(1, "what was it?", tokens)
    for column in ("response_tokens", "usable", "greedy_score", "ref_log_probs", "whitening"):
        del older[column]
    write(run / "rollouts" / "000000.jsonl", [with_holes, older])


@pytest.fixture(scope="session")
def run(browser, tmp_path_factory) -> Path:
    """The directory of a run that has ended; beside it lies one in which a tool wrote tokens."""
    run = tmp_path_factory.mktemp("runs") / "live"
    make_tool_run(run.parent / "tools")
    fields = {name.removeprefix("--"): value for name, value in TINY.items()}
    fields |= {"train.iterations": ITERATIONS, "run.dir": str(run)}
    tether.train(tether.load_config("arithmetic", fields), quiet=True)
    return run


@pytest.fixture(scope="session")
def address(run) -> Iterator[str]:
    """The page over that run."""
    with served(run.parent) as address:
        yield address
