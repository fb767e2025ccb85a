"""R12: the terminal goes away; the disk is full when a stage saves; a run is resumed on the disk
that it fits. The run ends as one that met none of this."""

import errno
import json
import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

from faults.interruptions import PLACES, Bench, each, log_of, stopped_run
from faults.row import Row, tally
from faults.trials import AtCall, Signals, tether
from faults.world import World, iterations_written

SIGHUP_CODE = 128 + signal.SIGHUP


@dataclass(frozen=True)
class FullAt:
    """A disk that has no room for the n-th checkpoint of a run."""

    save: int

    def __call__(self) -> None:
        from tether.train import checkpoint

        finish, tried = checkpoint.finish, []

        def full(*arguments: object) -> object:
            tried.append(arguments)
            if len(tried) == self.save:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return finish(*arguments)

        checkpoint.finish = full


@dataclass(frozen=True)
class SmallDisk:
    """A disk of that size which holds the run and nothing else."""

    size: int
    run: Path

    def __call__(self) -> None:
        run, size = self.run, self.size

        def usage(folder: object) -> object:
            return type("Usage", (), {"free": size - bytes_of(run)})

        shutil.disk_usage = usage


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def row_r12(world: World, folder: Path, tries: int, seed: int) -> Row:
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(world, folder, seed)
    cases = [
        *(("SIGHUP", place) for place in ("rollout", "update")),
        ("stage", "1"),
        ("disk", ""),
        *(("SIGHUP", place) for place in ("scoring", "save", "eval")),
        *(("stage", save) for save in ("2", "3")),
        ("disk", "again"),
    ][:tries]
    attempts = {"SIGHUP": _hangup, "stage": _full_stage, "disk": _small_disk}

    def attempt(number: int) -> str | None:
        kind, detail = cases[number]
        problem = attempts[kind](bench, folder / f"r12-{number}", detail)
        return problem and f"{kind} {detail}: {problem}"

    bench.expected  # noqa: B018
    fault = "SIGHUP; a disk full at the end of a stage; a resume on the disk that a run fits"
    return tally("R12", fault, each(len(cases), attempt))


def _hangup(bench: Bench, run: Path, place: str) -> str | None:
    function, call, _ = PLACES[place]
    code = bench.train(run, sabotage=AtCall((function,), call, Signals(signal.SIGHUP)))
    if code != SIGHUP_CODE:
        return f"exit code {code}, not {SIGHUP_CODE}: {log_of(run).read_text()[-200:]}"
    done = len(iterations_written(run, "metrics.jsonl"))
    if not (run / "checkpoints" / f"{done:06d}").is_dir():
        return f"{done} iterations done, but not saved"
    last = json.loads((run / "events.jsonl").read_text().splitlines()[-1])
    if last["kind"] != "interrupted":
        return f"the run does not say why it ended: {last}"
    return bench.go_on(run)


def _full_stage(bench: Bench, run: Path, save: str) -> str | None:
    """The checkpoint of step 2, 4 or 6 does not fit; 6 is the last."""
    data = run.with_name(f"{run.name}.jsonl")
    rows = [{"prompt": f"{a}+1=?", "response": str(a + 1)} for a in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--model.start", bench.world.model, "--data.train", data, "--threads", "1")
    words = ("sft", *words, "--train.minibatch_rows", "4", "--train.passes", "3")
    words = (*words, "--train.checkpoint_every", "2")
    whole = run.with_name(f"{run.name}-whole")
    if tether(*words, "--run.dir", whole, log=log_of(whole)) != 0:
        return log_of(whole).read_text()[-300:]
    code = tether(*words, "--run.dir", run, sabotage=FullAt(int(save)), log=log_of(run))
    said = log_of(run).read_text()
    command = f"`tether resume {run}` goes on from the one before"
    if code != 1 or "no space left on device" not in said or command not in said:
        return f"exit code {code}; it said: {said[-300:]}"
    if tether("resume", run, log=log_of(run)) != 0:
        return log_of(run).read_text()[-300:]
    names = ("metrics.jsonl", "checkpoints/000006/actor/model.safetensors")
    same = all((run / name).read_bytes() == (whole / name).read_bytes() for name in names)
    return None if same else "metrics or weights differ"


def _small_disk(bench: Bench, run: Path, again: str) -> str | None:
    """Three checkpoints are kept and a fourth is written beside them: that is the whole disk."""
    stopped = stopped_run(bench, run.name)
    newest = stopped / "checkpoints/000006"
    others = bytes_of(stopped) - sum(bytes_of(p) for p in (stopped / "checkpoints").glob("0*"))
    disk = SmallDisk(4 * bytes_of(newest) + others, stopped)
    code = tether("resume", stopped, sabotage=disk, log=log_of(stopped))
    if code != 0:
        return f"exit code {code}; it said: {log_of(stopped).read_text()[-300:]}"
    return bench.compare(stopped)
