"""I1: a reward function that fails in every way a function can, inside a real run.

The function counts its calls in a file, so that it strikes the same rows whichever process calls
it; from the outside it is seen who was named, who was left out, and who is still alive.
"""

import os
import signal
import time
from pathlib import Path

from faults import trials
from faults.attempt import Attempt, no_traceback, train
from faults.row import Row, tally
from faults.world import World
from tether.ppo.scoring import NUM_TRIED

PROMPTS, SAMPLES = 2, 4
ROWS = PROMPTS * SAMPLES
ITERATIONS = 3
STRUCK_ITERATION, STRUCK_ROW = 1, 3

REWARD = '''
import ctypes, os, pathlib, sys, time

HERE = pathlib.Path(__file__).parent

def fork_and_linger():
    """The copy stays behind, in the middle of the call."""
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
    (HERE / "alive").write_text(str(pid))
    return 0.5

def fork_and_return():
    """Both copies come back with a score, and only one was asked."""
    return 0.5 if os.fork() else 0.25

def hang():
    (HERE / "alive").write_text(str(os.getpid()))
    time.sleep(600)

def print_megabytes():
    for stream in (1, 2):
        os.write(stream, b"x" * 2_000_000)
    print("x" * 2_000_000, "\\n" * 1000)
    raise ValueError("y" * 2_000_000)

def raise_error():
    raise RuntimeError("no idea")

DEEDS = {
    "raises": raise_error,
    "hangs": hang,
    "returns None": lambda: None,
    "returns NaN": lambda: float("nan"),
    "returns inf": lambda: float("inf"),
    "returns a string": lambda: "0.5",
    "returns two numbers": lambda: [0.5, 0.5],
    "calls sys.exit": lambda: sys.exit(0),
    "calls os._exit": lambda: os._exit(0),
    "segfaults": lambda: ctypes.string_at(0),
    "forks and lingers": fork_and_linger,
    "forks and returns twice": fork_and_return,
    "prints megabytes": print_megabytes,
}

def reward(response):
    with open(HERE / "calls", "ab") as calls:
        calls.write(b".")
    number = (HERE / "calls").stat().st_size
    deed = DEED_OF_CALL.get(number, DEED_OF_CALL.get("every"))
    return DEEDS[deed]() if deed else len(set(response)) / 8
'''

# What each does to the rows from STRUCK_ROW on; a fork is no failure as long as nobody notices.
FAULTS = {
    "raises": ["raises"],
    "hangs": ["hangs"],
    "returns None": ["returns None"],
    "returns NaN": ["returns NaN"],
    "returns inf": ["returns inf"],
    "returns a string": ["returns a string"],
    "returns the wrong number": ["returns two numbers"],
    "calls exit": ["calls sys.exit", "calls os._exit"],
    "segfaults": ["segfaults"],
    "forks": ["forks and lingers", "forks and returns twice"],
    "prints megabytes": ["prints megabytes"],
}
HARMLESS = {"forks"}


def row_i1(world: World, folder: Path, tries: int, seed: int) -> Row:
    """Every fault on a row or two of an iteration, then on all rows, then the parent killed."""
    verdicts = [_one_row_fails(world, folder, name, seed) for name in list(FAULTS)[:tries]]
    verdicts.append(_all_rows_fail(world, folder))
    verdicts.append(_parent_is_killed(world, folder))
    return tally("I1", "the reward raises, hangs, returns rubbish, dies, forks, prints", verdicts)


def _one_row_fails(world: World, folder: Path, name: str, seed: int) -> str | None:
    place = folder / name.replace(" ", "_")
    struck = {STRUCK_ROW + i: deed for i, deed in enumerate(FAULTS[name])}
    before = (
        NUM_TRIED + STRUCK_ITERATION * ROWS
    )  # calls, those of the trial before training included
    calls = {before + row + 1: deed for row, deed in struck.items()}
    tried = train(place, world.recipe, *_fields(place, calls), "--seed", str(seed))
    failed = [] if name in HARMLESS else list(struck)
    problem = no_traceback(tried) or _wrong_end(tried, failed) or _survivor(place)
    return None if problem is None else f"{name}: {problem}"


def _wrong_end(tried: Attempt, failed: list[int]) -> str | None:
    if tried.code != 0:
        return f"the run ended with code {tried.code}"
    named = [(e["kind"], e["iteration"], e["row"]) for e in tried.lines("events.jsonl")]
    if named != [("unscorable", STRUCK_ITERATION, row) for row in failed]:
        return f"the events name {named}"
    if any(len(e["message"]) > 1000 for e in tried.lines("events.jsonl")):
        return "an event is longer than a person reads"
    rows = tried.lines(f"rollouts/{STRUCK_ITERATION:06d}.jsonl")
    left_out = [r["row"] for r in rows if not r["usable"] and r["score"] is None]
    if left_out != failed:
        return f"rows {left_out} were left out"
    return _wrong_advantages(rows, failed) or _wrong_scores(tried, rows, failed)


def _wrong_advantages(rows: list[dict], failed: list[int]) -> str | None:
    """A row's advantage is its score minus the mean of its group's other scored rows."""
    for row in rows:
        first = row["row"] // SAMPLES * SAMPLES
        others = [
            r["score"]
            for r in rows[first : first + SAMPLES]
            if r["row"] not in (row["row"], *failed)
        ]
        expected = 0.0 if row["row"] in failed else row["score"] - sum(others) / len(others)
        if any(abs(found - expected) > 1e-6 for found in row["policy_advantages"]):
            return f"row {row['row']} has advantages {row['policy_advantages']}, not {expected}"
    return None


def _wrong_scores(tried: Attempt, rows: list[dict], failed: list[int]) -> str | None:
    scores = [r["score"] for r in rows if r["row"] not in failed]
    mean = tried.lines("metrics.jsonl")[STRUCK_ITERATION]["score/mean"]
    if abs(mean - sum(scores) / len(scores)) > 1e-6:
        return f"score/mean is {mean}"
    for iteration in range(ITERATIONS):
        struck = (STRUCK_ROW, STRUCK_ROW + 1) if iteration == STRUCK_ITERATION else ()
        for row in tried.lines(f"rollouts/{iteration:06d}.jsonl"):
            if row["row"] not in struck and row["score"] != len(set(row["response"])) / 8:
                return f"iteration {iteration}, row {row['row']} got another row's score"
    return None


def _all_rows_fail(world: World, folder: Path) -> str | None:
    place = folder / "all_rows"
    tried = train(place, world.recipe, *_fields(place, {"every": "raises"}))
    events = [(e["kind"], e["row"]) for e in tried.lines("events.jsonl")]
    if tried.code != 1 or "no idea" not in tried.complaint or "Traceback" in tried.said:
        return f"all rows: code {tried.code}, {tried.complaint!r}"
    if events != [*(("unscorable", row) for row in range(ROWS)), ("stopped", None)]:
        return f"all rows: events name {events}"
    return None


def _parent_is_killed(world: World, folder: Path) -> str | None:
    """Nobody is left to kill the child then: it must have seen to its own end."""
    place = folder / "parent_killed"
    place.mkdir(parents=True)
    fields = _fields(place, {3: "hangs"}, timeout=600)
    words = ("train", world.recipe, "--run.dir", place / "run", *fields)
    trial = trials.start(*words, log=place / "said.txt")
    if not _wait_for(lambda: (place / "alive").is_file(), seconds=60):
        trial.kill()
        return f"parent killed: the reward was never called: {trial.said()[-200:]!r}"
    trial.kill()
    problem = _survivor(place)
    return None if problem is None else f"parent killed: {problem}"


def _fields(place: Path, calls: dict, timeout: float = 0.5) -> list[str]:
    """A reward file of its own; RLOO, whose baseline shows who took part in it."""
    place.mkdir(parents=True, exist_ok=True)
    reward = place / "reward.py"
    reward.write_text(f"DEED_OF_CALL = {calls!r}\n{REWARD}")
    fields = {
        "reward.kind": f"{reward}:reward",
        "reward.timeout_seconds": timeout,
        "reward.max_failed_share": 0.5,
        "rollout.prompts": PROMPTS,
        "rollout.samples_per_prompt": SAMPLES,
        "run.rollouts_rows": ROWS,
        "advantage.estimator": "rloo",
        "kl.in_reward.coef": 0,
        "kl.refresh_reference_every": 0,
        "data.heldout": "null",
        "train.iterations": ITERATIONS,
    }
    return [word for name, value in fields.items() for word in (f"--{name}", str(value))]


def _survivor(place: Path) -> str | None:
    """A process that a deed left behind and that still runs a moment after the command ended."""
    if not (place / "alive").is_file():
        return None
    pid = int((place / "alive").read_text())
    if _wait_for(lambda: not _runs(pid), seconds=5):
        return None
    os.kill(pid, signal.SIGKILL)
    return "a process of the reward outlived the run"


def _runs(pid: int) -> bool:
    """A zombie that nobody has reaped yet no longer runs."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def _wait_for(happened, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.02)
    return happened()
