"""Rows R1 to R8: a run that was stopped ends as one that was not, bit for bit."""

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from faults.row import Row, tally
from faults.trials import (
    AtCall,
    BreakDisk,
    CountCalls,
    Fill,
    LimitFiles,
    Signals,
    Trial,
    start,
    tether,
)
from faults.world import ITERATIONS, PROMPTS, World, fingerprint, iterations_written
from tether.run.checkpoint_store import newest_whole, problem_with

WORKERS = 2
# What a save does that a kill could fall between.
STEPS_OF_A_SAVE = (
    *("os:fsync", "os:rename", "os:replace", "shutil:rmtree"),
    *("tether.train.checkpoint_files:save_file", "tether.run.checkpoint_store:_sha256"),
)
SAVE = "tether.train.loop:save_checkpoint"
RESUMED = 5  # every so many of R2's runs; 5 shares no factor with the steps of a save


@dataclass(frozen=True)
class Bench:
    """A world, a folder for trial runs, and what a run that was never stopped looks like."""

    world: World
    folder: Path
    seed: int

    @cached_property
    def whole(self) -> Path:
        run = self.folder / "whole"
        assert self.train(run) == 0
        return run

    @cached_property
    def expected(self) -> dict[str, str]:
        return fingerprint(self.whole)

    @cached_property
    def seconds(self) -> float:
        """What an uninterrupted run takes, once it trains."""
        self.expected  # noqa: B018  (the fork server is warm after it)
        trial = self.start(self.folder / "timed")
        trial.wait_until_it_trains()
        began = time.perf_counter()
        assert trial.wait() == 0
        return time.perf_counter() - began

    def start(self, run: Path) -> Trial:
        """Begin the run or go on with it, and return at once."""
        begun = (run / "config.yaml").is_file()
        words = ("resume", run) if begun else ("train", self.world.recipe, "--run.dir", run)
        return start(*words, log=log_of(run))

    def train(self, run: Path, *words: str, sabotage: Callable[[], None] | None = None) -> int:
        words = ("train", self.world.recipe, "--run.dir", run, *words)
        return tether(*words, sabotage=sabotage, log=log_of(run))

    def resume(self, run: Path) -> int:
        return tether("resume", run, log=log_of(run))

    def go_on(self, run: Path) -> str | None:
        """Resume, or begin if there is no run yet; what is lost, if anything."""
        code = self.start(run).wait()
        if code != 0:
            return f"resume ended with {code}: {log_of(run).read_text()[-300:]}"
        return self.compare(run)

    def compare(self, run: Path) -> str | None:
        found = fingerprint(run)
        differing = sorted(
            name
            for name in {**found, **self.expected}
            if found.get(name) != self.expected.get(name)
        )
        if differing:
            return f"{run.name}: {', '.join(differing[:4])} differ"
        for name in ("metrics.jsonl", "timings.jsonl"):
            if iterations_written(run, name) != list(range(ITERATIONS)):
                return f"{run.name}: {name} has lines {iterations_written(run, name)}"
        return None


def log_of(run: Path) -> Path:
    return run.with_name(f"{run.name}.log")


def each(tries: int, attempt: Callable[[int], str | None]) -> list[str | None]:
    """The verdict of every try, some at a time."""

    def guarded(number: int) -> str | None:
        try:
            return attempt(number)
        except Exception as error:  # a trial that cannot even be judged is lost
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(guarded, range(tries)))


def done_with(run: Path) -> None:
    shutil.rmtree(run, ignore_errors=True)


def r1_kills(bench: Bench, tries: int) -> list[Row]:
    """kill -9 at a random moment, then resume; R8 is counted within."""
    places: list[str] = []
    lines_lost = [0]

    def attempt(number: int) -> str | None:
        chance = random.Random(f"{bench.seed} r1 {number}")
        run = bench.folder / f"r1-{number}"
        trial = bench.start(run)
        if number % 10:  # one in ten may be killed before it trains
            trial.wait_until_it_trains()
        trial.process.join(chance.uniform(0, bench.seconds))
        trial.kill()
        places.append(_where(run))
        problem = bench.go_on(run)
        written = iterations_written(run, "metrics.jsonl") if run.exists() else []
        lines_lost[0] += written != list(range(ITERATIONS))
        if problem is None:
            done_with(run)
        return problem

    bench.expected, bench.seconds  # noqa: B018
    verdicts = each(tries, attempt)
    counts = ", ".join(f"{places.count(place)} {place}" for place in sorted(set(places)))
    return [
        tally("R1", "kill -9 at a random moment, then resume", verdicts, f"killed {counts}"),
        Row("R8", "metric rows after kill -9, none lost or doubled", tries, tries - lines_lost[0]),
    ]


def _where(run: Path) -> str:
    if not (run / "config.yaml").is_file():
        return "before the run began"
    saved = [path.name for path in (run / "checkpoints").glob("0*")]
    if f"{ITERATIONS:06d}" in saved:
        return "when it was done"
    return f"after checkpoint {int(max(saved))}" if saved else "before the first checkpoint"


def r2_kills_in_save(bench: Bench, rounds: int, every: int = 1) -> Row:
    """kill -9 at every step inside a checkpoint save: what is in place must be whole, and some of
    the runs go on to the end to prove it."""
    counter = bench.folder / "steps"
    counting = CountCalls(STEPS_OF_A_SAVE, SAVE, counter)
    assert bench.train(bench.folder / "counted", sabotage=counting) == 0
    steps = int(counter.read_text())
    calls = [call for _ in range(rounds) for call in range(1, steps + 1, every)]
    unfinished = [0]

    def attempt(number: int) -> str | None:
        run, kill = bench.folder / f"r2-{number}", Signals(signal.SIGKILL)
        sabotage = AtCall(STEPS_OF_A_SAVE, calls[number], kill, inside=SAVE)
        if bench.train(run, sabotage=sabotage) != -signal.SIGKILL:
            return f"step {calls[number]} was never reached"
        unfinished[0] += any((run / "checkpoints").glob(".staged-*"))
        newest, damaged = newest_whole(run)
        if damaged:
            return f"step {calls[number]}: {damaged}"
        in_place = sorted(path.name for path in (run / "checkpoints").glob("0*"))
        if in_place and (newest is None or newest.name != in_place[-1]):
            return f"step {calls[number]}: {in_place[-1]} does not load"
        problem = bench.go_on(run) if number % RESUMED == 0 else None
        if problem is None:
            done_with(run)
        return problem and f"step {calls[number]}: {problem}"

    remark = f"{steps} steps in 4 saves, each {rounds} x, every {RESUMED}th resumed to the end"
    verdicts = each(len(calls), attempt)
    remark += f"; {unfinished[0]} left a half-written one behind"
    return tally("R2", "kill -9 at every step inside a checkpoint save", verdicts, remark)


def r3_ten_kills(bench: Bench, tries: int) -> Row:
    def attempt(number: int) -> str | None:
        chance = random.Random(f"{bench.seed} r3 {number}")
        run = bench.folder / f"r3-{number}"
        for _ in range(10):
            trial = bench.start(run)
            trial.wait_until_it_trains()
            trial.process.join(chance.uniform(0, 0.3) * bench.seconds)
            trial.kill()
        problem = bench.go_on(run)
        if problem is None:
            done_with(run)
        return problem

    bench.expected, bench.seconds  # noqa: B018
    return tally("R3", "ten kills in one run", each(tries, attempt))


# Where a signal may fall: a function that runs then, a call of it well inside the run, and how
# many calls later it falls in the next round.
PLACES = {
    "rollout": ("tether.rollout.local:choose_tokens", 31, 7),
    "scoring": ("tether.support.child_process:ChildProcess.receive", 25, 7),
    "update": ("tether.ppo.optimizer:Optimizer.step", 9, 7),
    "save": ("tether.run.checkpoint_store:_sha256", 4, 7),
    "eval": ("tether.ppo.evaluate:score_responses", 2, 1),  # two calls an evaluation
}
SENDINGS = {
    "SIGTERM": (Signals(signal.SIGTERM), 143),
    "SIGINT": (Signals(signal.SIGINT), 130),
    "SIGINT twice": (Signals(signal.SIGINT, signal.SIGINT), -signal.SIGINT),
}


def r4_signals(bench: Bench, rounds: int) -> Row:
    cases = list(itertools.product(range(rounds), PLACES, SENDINGS))

    def attempt(number: int) -> str | None:
        turn, place, sending = cases[number]
        (function, call, step), (signals, expected_code) = PLACES[place], SENDINGS[sending]
        run = bench.folder / f"r4-{number}"
        sabotage = AtCall((function,), call + step * turn, signals)
        case = f"{sending} in {place}"
        code = bench.train(run, sabotage=sabotage)
        # Where the last iteration was saved already there is no save for a second signal to end.
        saved_before = signals.second is not None and code == 130
        if code != expected_code and not saved_before:
            return f"{case}: exit code {code}, not {expected_code}"
        done = len(iterations_written(run, "metrics.jsonl"))
        saved = [int(path.name) for path in (run / "checkpoints").glob("0*")]
        if (signals.second is None or saved_before) and done not in saved:
            return f"{case}: {done} iterations done, but checkpoints {sorted(saved)}"
        problem = bench.go_on(run)
        if problem is None:
            done_with(run)
        return problem and f"{case}: {problem}"

    bench.expected  # noqa: B018
    fault = "SIGTERM, SIGINT, second SIGINT, in rollout, scoring, update, save, eval"
    return tally("R4", fault, each(len(cases), attempt))


def r5_disk(bench: Bench, tries: int) -> Row:
    """A full disk (a small tmpfs), a limit on file size, a disk that fails."""
    kinds = ["full", "limit", "fails"]
    if os.geteuid() != 0:
        kinds.remove("full")

    def attempt(number: int) -> str | None:
        kind, chance = kinds[number % len(kinds)], random.Random(f"{bench.seed} r5 {number}")
        mount = bench.folder / f"r5-{number}"
        mount.mkdir()
        if kind == "full":
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", mount], check=True)
        # What the command says goes to another disk, as on a full one nobody could read it.
        log_of(mount / "run").symlink_to(bench.folder / f"r5-{number}.log")
        try:
            return _disk_fault(bench, mount / "run", kind, chance)
        finally:
            if kind == "full":
                subprocess.run(["umount", mount], check=True)
            done_with(mount)

    bench.expected  # noqa: B018
    fault = "disk full (small tmpfs), RLIMIT_FSIZE, EIO"
    remark = "" if "full" in kinds else "no tmpfs: not root"
    return tally("R5", fault, each(tries, attempt), remark)


def _disk_fault(bench: Bench, run: Path, kind: str, chance: random.Random) -> str | None:
    ballast = run.parent / "ballast"
    strikes = {
        "full": Fill(ballast, leave=chance.randrange(200_000)),
        "limit": LimitFiles(chance.randrange(1_000, 60_000)),
        "fails": BreakDisk(),
    }
    sabotage = AtCall(("os:fsync",), chance.randrange(2, 90), strikes[kind])
    code = bench.train(run, sabotage=sabotage)
    said = log_of(run).read_text().strip().splitlines()[-1]
    if code == 0:
        return bench.compare(run)  # the fault came too late to matter
    if code != 1 or not said.startswith("tether: ") or "could not be written" not in said:
        return f"{kind}: exit code {code}, and it said: {said}"
    ballast.unlink(missing_ok=True)
    newest, damaged = newest_whole(run)
    in_place = sorted(path.name for path in (run / "checkpoints").glob("0*"))
    if damaged or (in_place and newest is None):
        return f"{kind}: the last good checkpoint does not load: {damaged}"
    problem = bench.go_on(run)
    return problem and f"{kind}: {problem}"


def stopped_run(bench: Bench, name: str) -> Path:
    """A run killed after 7 of 8 iterations: checkpoints 4 and 6 (and the best) are there."""
    run = bench.folder / name
    kill = AtCall(("tether.train.ppo:run_iteration",), 8, Signals(signal.SIGKILL))
    assert bench.train(run, sabotage=kill) == -signal.SIGKILL
    return run


def r6_damage(bench: Bench, tries: int, resumed: int) -> Row:
    """Truncated files and flipped bits in the newest checkpoint; the one before is used, and some
    of the runs go on to the end to prove it."""
    original = stopped_run(bench, "r6-original")
    files = sorted(p for p in (original / "checkpoints/000006").rglob("*") if p.is_file())
    names = [str(path.relative_to(original)) for path in files]
    to_the_end = set(range(0, tries, max(1, tries // resumed)))

    def attempt(number: int) -> str | None:
        chance = random.Random(f"{bench.seed} r6 {number}")
        run = bench.folder / f"r6-{number}"
        shutil.copytree(original, run)
        name = names[number % len(names)]
        what = damage(run / name, chance)
        if problem_with(run / "checkpoints/000006") is None:
            return f"{name} {what}: not noticed"
        newest, _ = newest_whole(run)
        if newest is None or newest.name != "000004":
            return f"{name} {what}: {newest} was taken"
        problem = None
        if number in to_the_end:
            problem = bench.go_on(run) or _says_damaged(run)
        done_with(run)
        return problem and f"{name} {what}: {problem}"

    bench.expected  # noqa: B018
    remark = f"{len(names)} files; {len(to_the_end)} of the runs resumed to the end"
    return tally(
        "R6", "truncated files, flipped bits in a checkpoint", each(tries, attempt), remark
    )


def damage(path: Path, chance: random.Random) -> str:
    content = bytearray(path.read_bytes())
    if chance.random() < 0.5:
        length = chance.randrange(len(content))
        path.write_bytes(content[:length])
        return f"cut to {length} bytes"
    bit = chance.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    return f"with bit {bit} flipped"


def _says_damaged(run: Path) -> str | None:
    lines = (run / "events.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    said = "set aside" in log_of(run).read_text()
    return None if "damaged_checkpoint" in kinds and said else "it did not say so"


def r7_every_iteration(bench: Bench, iterations: Iterable[int] | None = None) -> Row:
    """Resume at every iteration of two data passes; every prompt is used once a pass."""
    every = ("--train.checkpoint_every", "1", "--train.keep_last", "99")
    full = bench.folder / "r7-full"
    words = (*every, "--run.rollouts_rows", "99")
    assert bench.train(full, *words) == 0
    passes = prompts_used(full)
    expected = {
        name: digest for name, digest in fingerprint(full).items() if not name.endswith(".json")
    }

    def attempt(number: int) -> str | None:
        done = points[number]
        run = bench.folder / f"r7-{done}"
        shutil.copytree(full, run)
        for path in (run / "checkpoints").glob("0*"):
            if int(path.name) > done:
                shutil.rmtree(path)
        code = bench.resume(run)
        found = fingerprint(run)
        differing = [name for name, digest in expected.items() if found.get(name) != digest]
        if code != 0 or differing:
            return f"at {done}: code {code}, {differing[:3]} differ"
        if prompts_used(run) != passes:
            return f"at {done}: other prompts"
        done_with(run)
        return None

    points = list(range(ITERATIONS) if iterations is None else iterations)
    each_once = all(sorted(one) == list(range(1, PROMPTS + 1)) for one in passes)
    verdicts = [*each(len(points), attempt), None if each_once else "a prompt skipped or repeated"]
    remark = f"{len(points)} iterations, and 2 whole passes over {PROMPTS} prompts looked at"
    return tally("R7", "resume at every iteration of two data passes", verdicts, remark)


def prompts_used(run: Path) -> list[list[int]]:
    """Data lines in the order of their use, by whole data pass."""
    lines = []
    for path in sorted((run / "rollouts").glob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        lines += [row["data_line"] for row in rows if row["row"] % 2 == 0]
    whole = len(lines) // PROMPTS * PROMPTS
    return [lines[i : i + PROMPTS] for i in range(0, whole, PROMPTS)]
