"""I5: rewards that leave processes behind and hold their pipes, tools that always fail,
environments that write to their row or cannot be made, inside real runs.

Every row of the data is some kilobytes wide, so that more rows wait for the reward than a pipe
holds when the reward strikes.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from faults import trials
from faults.attempt import Attempt, no_traceback, train
from faults.row import Row, tally
from faults.world import World

PROMPTS, SAMPLES = 6, 2
ROWS = PROMPTS * SAMPLES
STRUCK = 2  # the row of iteration 0 that the reward strikes at
WIDE = 16_000  # characters of a column; all rows together are more than 64 KiB
LINGER = 20  # seconds that what was left behind lives

REWARD = f'''
import os, pathlib, subprocess, sys, time

HERE = pathlib.Path(__file__).parent

def leave_helper():
    """A program in a session of its own, with all that it inherits."""
    code = "import time; time.sleep({LINGER})"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True, close_fds=False)

def leave_copy():
    """A copy of this process in a session of its own, pipes and all."""
    if os.fork() == 0:
        os.setsid()
        time.sleep({LINGER})
        os._exit(0)

def hang():
    (HERE / "hanging").write_text("")
    time.sleep(600)

def junk():
    os.write(int(sys.argv[-1]), b"hello\\n" * 20_000)

DEEDS = {{
    "helper": leave_helper, "copy": leave_copy, "hang": hang, "junk": junk,
    "die": lambda: os._exit(7), "close": lambda: os.closerange(3, 100),
}}

def reward(prompt, response, wide):
    sentinel = HERE / "struck"
    if prompt == PROMPT and not sentinel.exists() and (HERE / "armed").exists():
        sentinel.write_text("")
        for deed in DEEDS_TO_DO:
            DEEDS[deed]()
    (HERE / "armed").write_text("") if prompt == LAST else None
    return len(set(response)) / 8
'''

ENVIRONMENTS = """
import string, time

class Letters:
    stops = tuple(string.ascii_letters)
    def reset(self, columns):
        return f" {columns['answer']} "
    def step(self, text):
        return f"[{text[-1]}]"

class Writes(Letters):
    def reset(self, columns):
        said = super().reset(columns)
        columns["answer"] = "spoilt"
        columns["wide"] = None
        return said

class Raises(Letters):
    def __init__(self):
        raise RuntimeError("no licence")

class Fails(Letters):
    def step(self, text):
        raise RuntimeError("out of order")

class Hangs(Letters):
    def __init__(self):
        time.sleep(600)
"""

# What the reward does on one row; each costs that row and nothing else.
STRIKES = {
    "a helper, then a hang": ["helper", "hang"],
    "a copy, then a hang": ["copy", "hang"],
    "a copy, then death": ["copy", "die"],
    "a helper, then death": ["helper", "die"],
    "junk among its scores": ["junk"],
    "its pipes closed": ["close"],
}


def row_i5(world: World, folder: Path, tries: int, seed: int) -> Row:
    """The first `tries` of all cases."""
    cases: list[Callable[[], str | None]] = [
        lambda: _reward_strikes(world, folder, "a copy, then a hang"),
        lambda: _signals(world, folder, ["copy", "hang"], signals=2),
        lambda: _environment_stops(world, folder, "Raises", "no licence"),
        lambda: _environment_writes(world, folder),
        *(
            lambda name=name: _reward_strikes(world, folder, name)
            for name in STRIKES
            if name != "a copy, then a hang"
        ),
        lambda: _signals(world, folder, ["helper", "hang"], signals=1),
        lambda: _environment_stops(world, folder, "Fails", "out of order"),
        lambda: _environment_stops(world, folder, "Hangs", "longer than timeout_seconds"),
    ]
    fault = "rewards that leave processes, tools that always fail, environments that write"
    return tally("I5", fault, [case() for case in cases[:tries]])


def _reward_strikes(world: World, folder: Path, name: str) -> str | None:
    place = folder / name.replace(" ", "_").replace(",", "")
    tried = train(place, world.recipe, *_reward_fields(world, place, STRIKES[name]))
    return _named(name, no_traceback(tried) or _one_row_lost(tried))


def _one_row_lost(tried: Attempt) -> str | None:
    if tried.code != 0:
        return f"the run ended with code {tried.code}: {tried.complaint!r}"
    lost = [e for e in tried.lines("events.jsonl") if e["kind"] == "unscorable"]
    if len(lost) != 1:
        return f"{len(lost)} rows were lost"
    if len(tried.lines("metrics.jsonl")) != 2:
        return "an iteration is missing"
    for iteration in (0, 1):
        for row in tried.lines(f"rollouts/{iteration:06d}.jsonl"):
            own = len(set(row["response"])) / 8
            if row["score"] not in (own, None):
                return f"row {row['row']} got another row's score"
    return None


def _signals(world: World, folder: Path, deeds: list[str], signals: int) -> str | None:
    """A run whose reward hangs for minutes ends within seconds of its signals."""
    name = f"{deeds[0]} and {signals} signals"
    place = folder / name.replace(" ", "_")
    fields = _reward_fields(world, place, deeds, timeout=600)
    words = ("train", world.recipe, "--run.dir", place / "run", *fields)
    trial = trials.start(*words, log=place / "said.txt")
    deadline = time.monotonic() + 90
    while not (place / "hanging").exists():
        if not trial.process.is_alive() or time.monotonic() > deadline:
            trial.kill()
            return _named(name, f"the reward never hung: {trial.said()[-200:]!r}")
        time.sleep(0.02)
    time.sleep(0.3)
    for _ in range(signals):
        if trial.process.is_alive():
            os.kill(trial.process.pid, signal.SIGTERM)
        time.sleep(1.0)
    try:
        code = trial.wait(15.0)
    except TimeoutError:
        return _named(name, "it goes on after its signals")
    return None if code in (143, -signal.SIGTERM) else _named(name, f"code {code}")


def _environment_stops(world: World, folder: Path, kind: str, why: str) -> str | None:
    place = folder / f"environment_{kind}"
    tried = train(place, world.recipe, *_environment_fields(world, place, kind))
    if tried.code != 1 or "Traceback" in tried.said:
        return _named(kind, f"code {tried.code}: {tried.said[-200:]!r}")
    if "rollout.max_failed_share" not in tried.complaint or why not in tried.complaint:
        return _named(kind, f"it said {tried.complaint!r}")
    if "stopped" not in [event["kind"] for event in tried.lines("events.jsonl")]:
        return _named(kind, "the run does not say why it stopped")
    return None


def _environment_writes(world: World, folder: Path) -> str | None:
    """It ends as one that does not write to its row."""
    found = []
    for kind in ("Letters", "Writes"):
        place = folder / f"environment_{kind}"
        tried = train(place, world.recipe, *_environment_fields(world, place, kind))
        if problem := no_traceback(tried):
            return _named(kind, problem)
        names = ("metrics.jsonl", "rollouts/000000.jsonl", "rollouts/000001.jsonl")
        lines = [line for name in names for line in tried.lines(name)]
        found.append([{**line, "data_file": None} for line in lines])  # which each has its own of
    return None if found[0] == found[1] else "an environment changed rows that were not its own"


def _reward_fields(world: World, place: Path, deeds: list[str], timeout: float = 1.0) -> list[str]:
    prompts = _data(world, place)
    (place / "reward.py").write_text(
        f"PROMPT, LAST, DEEDS_TO_DO = {prompts[STRUCK]!r}, {prompts[2]!r}, {deeds!r}\n{REWARD}"
    )
    # The rows that the reward is tried on before training arm it.
    fields = {"reward.kind": f"{place / 'reward.py'}:reward", "reward.timeout_seconds": timeout}
    return _words(place, fields)


def _environment_fields(world: World, place: Path, kind: str) -> list[str]:
    _data(world, place)
    (place / "world.py").write_text(ENVIRONMENTS)
    fields = {
        "rollout.environment": f"{place / 'world.py'}:{kind}",
        "rollout.max_response_tokens": 40,
        "rollout.max_observation_tokens": 16,
        "reward.kind": "length",
        "reward.arguments.at_most": 30,
    }
    return _words(place, fields)


def _words(place: Path, fields: dict) -> list[str]:
    whole = {
        **fields,
        "data.train": place / "train.jsonl",
        "data.heldout": "null",
        "data.shuffle": "false",
        "rollout.prompts": PROMPTS,
        "rollout.samples_per_prompt": SAMPLES,
        "run.rollouts_rows": ROWS,
        "train.iterations": 2,
    }
    return [word for name, value in whole.items() for word in (f"--{name}", str(value))]


def _data(world: World, place: Path) -> list[str]:
    """The world's rows, made wide; their prompts."""
    place.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in world.data.read_text().splitlines()]
    wide = [{**row, "wide": "x" * WIDE} for row in rows]
    (place / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in wide))
    return [row["prompt"] for row in rows]


def _named(name: str, problem: str | None) -> str | None:
    return None if problem is None else f"{name}: {problem}"
