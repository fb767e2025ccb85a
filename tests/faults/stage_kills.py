"""R9: kill -9 of `tether sft`, `tether reward-model` and each stage of `tether train rlhf`, then
resume. What a run leaves at its end has the same SHA-256 as if it had not been killed."""

import hashlib
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml

from faults.interruptions import done_with, each, log_of
from faults.row import Row, tally
from faults.trials import Trial, start
from faults.world import World

FAULT = "kill -9 of sft, reward-model and each stage of rlhf, then resume"
COMPARED = ("metrics.jsonl", "evals.jsonl", "report.json")
TWICE = 3  # one run in so many is killed again while it is resumed


@dataclass(frozen=True)
class Kind:
    """A command, and the files whose appearance begins each part of its run."""

    name: str
    words: tuple[str, ...]  # of a new run, without its directory
    config: str  # the file that makes the directory a run, which can be resumed
    parts: dict[str, str]  # part -> file that is there once it has begun; "" = from the start

    def start(self, run: Path) -> Trial:
        """Begin the run or go on with it, and return at once."""
        begun = (run / self.config).is_file()
        words = ("resume", run) if begun else (*self.words, "--run.dir", run)
        return start(*words, log=log_of(run))


STAGE_PARTS = {"loading": "", "training": "config.yaml"}
PIPELINE_PARTS = {
    "loading": "",
    "sft": "sft/config.yaml",
    "pairs": "sft/checkpoints/000006",
    "reward-model": "reward-model/config.yaml",
    "ppo": "ppo/config.yaml",
    "report": "ppo/checkpoints/000003",
}


def make_kinds(world: World, folder: Path) -> list[Kind]:
    """Write the data and recipes of three tiny trainings that save every other step."""
    folder.mkdir(parents=True, exist_ok=True)
    talk = [{"prompt": f"{a}+{b}=?", "response": str(a + b)} for a in range(5) for b in (1, 22)]
    pairs = [
        {"prompt": f"{i}", "chosen": f"{i}1", "rejected": f"{j}2"}
        for i in range(4)
        for j in range(3)
    ]
    train = {"passes": 6, "minibatch_rows": 4, "lr": 1e-3, "eval_every": 4, "checkpoint_every": 2}
    stages = []
    for name, rows in (("sft", talk), ("reward-model", pairs)):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        recipe = {
            "threads": 1,
            "stage": name,
            "model": {"start": str(world.model)},
            "data": {"train": str(data), "heldout": str(data)},
            "train": train,
        }
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(recipe))
        stages.append(Kind(name, (name, str(path)), "config.yaml", STAGE_PARTS))
    path = folder / "rlhf.yaml"
    path.write_text(yaml.safe_dump(pipeline(world)))
    return [*stages, Kind("rlhf", ("train", str(path)), "recipe.yaml", PIPELINE_PARTS)]


def pipeline(world: World) -> dict:
    saved = {"lr": 1e-3, "checkpoint_every": 2, "eval_every": 2}
    return {
        "threads": 1,
        "stage": "rlhf",
        "start": str(world.model),
        "task": {
            "demonstrations": 12,
            "questions": 8,
            "pairs": 20,
            "heldout": 6,
            "max_response_tokens": 6,
        },
        "sft": {"train": {"passes": 2, "minibatch_rows": 4, **saved}},
        "reward_model": {"train": {"passes": 2, "minibatch_rows": 4, **saved}},
        "ppo": {
            "run": {"rollouts_every": 1},
            "rollout": {"prompts": 4, "samples_per_prompt": 2},
            "actor": {"lr": 1e-3, "minibatch_rows": 4},
            "train": {"iterations": 3, "checkpoint_every": 1, "eval_every": 2},
        },
    }


def fingerprint(run: Path) -> dict[str, str]:
    """Return the SHA-256 of numbers, data between stages, and weights and moments at the end.

    A row of rollouts names the file of its prompt, which lies in the pipeline's own directory.
    """
    files = [path for name in COMPARED for path in run.rglob(name)]
    files += [*run.glob("data/*"), *run.rglob("rollouts/*")]
    for latest in run.rglob("LATEST"):
        files += (latest.parent / latest.read_text().strip()).rglob("*.safetensors")
    return {
        str(path.relative_to(run)): hashlib.sha256(
            path.read_bytes().replace(bytes(run), b"RUN")
        ).hexdigest()
        for path in sorted(files)
    }


@dataclass(frozen=True)
class StageBench:
    """One kind of run, and what it looks like when it was never killed."""

    kind: Kind
    folder: Path
    seed: int

    @cached_property
    def whole(self) -> tuple[dict[str, str], dict[str, float]]:
        """Return the fingerprint of an undisturbed run, and the seconds of each of its parts."""
        run = self.folder / f"{self.kind.name}-whole"
        for attempt in ("cold", "warm"):  # the fork server is warm for the second
            done_with(run)
            trial, began, seen = self.kind.start(run), time.perf_counter(), {}
            while trial.process.is_alive():
                for part, mark in self.kind.parts.items():
                    if part not in seen and (not mark or (run / mark).exists()):
                        seen[part] = time.perf_counter() - began
                time.sleep(0.002)
            if trial.wait() != 0:
                raise AssertionError(f"{attempt} run failed: {trial.said()[-500:]}")
        ends = [*list(seen.values())[1:], time.perf_counter() - began]
        seconds = {part: end - seen[part] for part, end in zip(seen, ends, strict=True)}
        return fingerprint(run), seconds

    def kill_once(self, run: Path, part: str, chance: random.Random) -> None:
        """Start or resume, wait until the part has begun, and kill at a random moment of it."""
        trial, mark = self.kind.start(run), self.kind.parts[part]
        while mark and trial.process.is_alive() and not (run / mark).exists():
            time.sleep(0.002)
        _, seconds = self.whole
        trial.process.join(chance.uniform(0, seconds[part]))
        trial.kill()

    def attempt(self, number: int) -> str | None:
        """Kill a run in one part, resume it to the end, and say what differs."""
        kind, chance = self.kind, random.Random(f"{self.seed} r9 {self.kind.name} {number}")
        parts = list(kind.parts)
        part, run = parts[number % len(parts)], self.folder / f"r9-{kind.name}-{number}"
        self.kill_once(run, part, chance)
        if number % TWICE == 0:
            self.kill_once(run, part, chance)
        where = f"{kind.name} killed in {part}"
        trial = kind.start(run)
        code = trial.wait()
        if code != 0:
            return f"{where}: resume ended with {code}: {trial.said()[-300:]}"
        expected, _ = self.whole
        found = fingerprint(run)
        names = sorted({**found, **expected})
        differing = [name for name in names if found.get(name) != expected.get(name)]
        if differing:
            return f"{where}: {', '.join(differing[:4])} differ"
        done_with(run)
        return None


def row_r9(world: World, folder: Path, tries: int, seed: int, kinds: Sequence[str] = ()) -> Row:
    """Kill each kind of run `tries` times."""
    verdicts, remarks = [], []
    for kind in make_kinds(world, folder):
        if kinds and kind.name not in kinds:
            continue
        bench = StageBench(kind, folder, seed)
        bench.whole  # noqa: B018  (before two trials want it at once)
        found = each(tries, bench.attempt)
        held = sum(verdict is None for verdict in found)
        remarks.append(f"{kind.name} {held} of {tries}")
        verdicts += found
    return tally("R9", FAULT, verdicts, ", ".join(remarks))
