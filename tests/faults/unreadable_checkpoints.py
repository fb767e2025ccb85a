"""R10: checkpoints that cannot be read, lie behind links, or have somebody else's files beside
them. What cannot be read is refused and nothing is changed; the rest goes on, bit for bit."""

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from faults.interruptions import Bench, done_with, each, log_of, stopped_run
from faults.row import Row, tally
from faults.trials import tether
from faults.world import World

FAILING = "/proc/self/mem"  # reading it gives EIO
NEWEST = "checkpoints/000006"


@dataclass(frozen=True)
class Deny:
    """From now on a file with such a name may not be opened."""

    name: str

    def __call__(self) -> None:
        opened = os.open

        def guarded(path: object, *arguments: int, **named: object) -> int:
            if str(path).endswith(self.name):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return opened(path, *arguments, **named)

        os.open = guarded


def fails_to_read(name: str) -> Callable[[Path], None]:
    def strike(run: Path) -> None:
        (run / NEWEST / name).unlink()
        (run / NEWEST / name).symlink_to(FAILING)

    return strike


def moved_behind_a_link(name: str) -> Callable[[Path], None]:
    def strike(run: Path) -> None:
        elsewhere = run.with_name(f"{run.name}-elsewhere")
        (run / name).rename(elsewhere)
        (run / name).symlink_to(elsewhere)

    return strike


def link_to_nothing(run: Path) -> None:
    shutil.rmtree(run / NEWEST)
    (run / NEWEST).symlink_to(run / "unmounted")


def all_damaged(run: Path) -> None:
    for path in (run / "checkpoints").glob("0*"):
        (path / "state.json").write_text("{}")


def fifo_for_state(run: Path) -> None:
    (run / NEWEST / "state.json").unlink()
    os.mkfifo(run / NEWEST / "state.json")


FOREIGN = ("rollouts/.DS_Store", "checkpoints/.DS_Store", "checkpoints/000006~", f"{NEWEST}/.x.swp")


def foreign_files(run: Path) -> None:
    for name in FOREIGN:
        (run / name).write_text("theirs")


def nothing(run: Path) -> None:
    pass


REFUSED = {
    "EIO in manifest.json": (fails_to_read("manifest.json"), None),
    "EIO in state.json": (fails_to_read("state.json"), None),
    "EIO in the actor": (fails_to_read("actor/model.safetensors"), None),
    "EIO in the critic": (fails_to_read("critic.safetensors"), None),
    "EACCES in manifest.json": (nothing, Deny("000006/manifest.json")),
    "EACCES in the actor": (nothing, Deny("000006/actor/model.safetensors")),
    "a link to nothing": (link_to_nothing, None),
    "all damaged": (all_damaged, None),
}
GOES_ON = {
    "foreign files": foreign_files,
    "a linked checkpoint": moved_behind_a_link(NEWEST),
    "linked checkpoints": moved_behind_a_link("checkpoints"),
    "a FIFO for state.json": fifo_for_state,
}


def files_of(run: Path) -> dict[str, bytes]:
    """All that a resume could cut or move, but not what a checkpoint's files hold."""
    files = {str(p.relative_to(run)): b"" for p in run.rglob("*")}
    return files | {p.name: p.read_bytes() for p in run.glob("*.jsonl")}


def row_r10(world: World, folder: Path, tries: int, seed: int) -> Row:
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(world, folder, seed)
    original = stopped_run(bench, "original")
    cases = [
        case
        for pair in zip(REFUSED, [*GOES_ON, *REFUSED], strict=False)
        for case in dict.fromkeys(pair)
    ]
    cases = list(dict.fromkeys([*cases, *REFUSED, *GOES_ON]))[:tries]

    def attempt(number: int) -> str | None:
        case = cases[number]
        run = folder / f"r10-{number}"
        shutil.copytree(original, run)
        problem = _refused(run, case) if case in REFUSED else _goes_on(bench, run, case)
        if problem is None:
            done_with(run)
        return problem and f"{case}: {problem}"

    bench.expected  # noqa: B018
    fault = "a checkpoint that cannot be read, behind a link, beside foreign files"
    return tally("R10", fault, each(len(cases), attempt), ", ".join(cases))


def _refused(run: Path, case: str) -> str | None:
    strike, sabotage = REFUSED[case]
    strike(run)
    before = files_of(run)
    code = tether("resume", run, sabotage=sabotage, log=log_of(run))
    said = log_of(run).read_text()
    if code != 2 or "Traceback" in said or "tether: " not in said:
        return f"exit code {code}; it said: {said[-300:]}"
    return None if files_of(run) == before else "files of the run were changed"


def _goes_on(bench: Bench, run: Path, case: str) -> str | None:
    GOES_ON[case](run)
    code = bench.resume(run)
    if code != 0:
        return f"exit code {code}; it said: {log_of(run).read_text()[-300:]}"
    if case == "foreign files":
        if (run / "rollouts/.DS_Store").read_text() != "theirs":
            return "a foreign file was touched"
        (run / "rollouts/.DS_Store").unlink()
    return bench.compare(run)
