"""S5: a pickle that acts when it is loaded, in every place where a command may look for a file."""

import hashlib
import io
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from faults.attempt import attempt, no_traceback, train
from faults.row import Row, tally
from faults.world import World

BESIDE = [
    "pytorch_model.bin",
    "model.pt",
    "training_args.bin",
    "tokenizer.pkl",
    "adapter_model.bin",
]


@dataclass(frozen=True)
class Bomb:
    """Unpickled, it makes a file."""

    canary: Path

    def __reduce__(self) -> tuple:
        return open, (str(self.canary), "w")

    def plain(self) -> bytes:
        return pickle.dumps(self)

    def zipped(self) -> bytes:
        """As torch.save writes one."""
        buffer = io.BytesIO()
        torch.save(self, buffer)
        return buffer.getvalue()


@dataclass(frozen=True)
class Slot:
    """Where the bomb goes in a copy of the world and a finished run, and who then looks there."""

    name: str
    place: Callable[[Path, bytes], None]
    commands: tuple[str, ...]


def row_s5(world: World, folder: Path, tries: int, seed: int) -> Row:
    """Both kinds of pickle in all slots, or in as many as asked for, evenly spread."""
    folder.mkdir(parents=True, exist_ok=True)
    if not _explodes(folder):
        return Row("S5", "pickles in every file slot", 1, 0, "the bomb itself is a dud")
    made = train(folder / "made", world.recipe, "--train.iterations", "2")
    slots = list(_slots(world, made.run))
    every = max(1, len(slots) // tries)
    verdicts = [
        _try(world, made.run, folder / f"{number:03d}", slot)
        for number, slot in enumerate(slots)
        if number % every == 0
    ]
    return tally("S5", "pickles in every file slot", verdicts)


def _explodes(folder: Path) -> bool:
    canary = folder / "proof"
    for content in (Bomb(canary).plain(), Bomb(canary).zipped()):
        canary.unlink(missing_ok=True)
        if content.startswith(b"PK"):
            torch.load(io.BytesIO(content), weights_only=False).close()
        else:
            pickle.loads(content).close()
        if not canary.exists():
            return False
    return True


def _slots(world: World, run: Path) -> Iterator[Slot]:
    at_work = ("check", "train", "generate-model")
    for name in [*sorted(path.name for path in world.model.iterdir()), *BESIDE]:
        yield Slot(f"model/{name}", _put(f"world/model/{name}"), at_work)
    for name in BESIDE[:2]:
        yield Slot(f"model/{name} alone", _put_instead(name), at_work)
    for name in ("train.jsonl", "recipe.yaml", "reward.py"):
        yield Slot(name, _put(f"world/{name}"), ("check", "train"))
    on_runs = ("resume", "generate-run", "eval", "runs")
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        name = str(path.relative_to(run))
        yield Slot(f"run/{name}", _put(f"run/{name}"), on_runs)
        if name.startswith("checkpoints/000002/") and path.name != "manifest.json":
            yield Slot(f"run/{name}, sealed", _put_sealed(name), on_runs)


def _put(name: str) -> Callable[[Path, bytes], None]:
    return lambda home, bomb: (home / name).write_bytes(bomb) and None


def _put_instead(name: str) -> Callable[[Path, bytes], None]:
    """Of the weights, which are not there."""

    def put(home: Path, bomb: bytes) -> None:
        (home / "world" / "model" / "model.safetensors").unlink()
        (home / "world" / "model" / name).write_bytes(bomb)

    return put


def _put_sealed(name: str) -> Callable[[Path, bytes], None]:
    """With the right hash in the manifest, as whoever can write the one can write the other."""

    def put(home: Path, bomb: bytes) -> None:
        path = home / "run" / name
        path.write_bytes(bomb)
        checkpoint = home / "run" / "checkpoints" / "000002"
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        inside = str(path.relative_to(checkpoint))
        manifest["sha256"][inside] = hashlib.sha256(bomb).hexdigest()
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))

    return put


def _try(world: World, run: Path, home: Path, slot: Slot) -> str | None:
    canary = home / "canary"
    kinds = [Bomb(canary).plain()]
    if slot.name.endswith((".bin", ".pt", ".safetensors", "alone", "sealed")):
        kinds.append(Bomb(canary).zipped())
    for bomb in kinds:
        for command in slot.commands:
            shutil.rmtree(home, ignore_errors=True)
            _copy(world, run, home)
            slot.place(home, bomb)
            tried = attempt(home / "try", *_words(command, home))
            if canary.exists():
                return f"{slot.name}: {command} unpickled it"
            if problem := no_traceback(tried):
                return f"{slot.name}: {command}: {problem}"
    shutil.rmtree(home)
    return None


def _copy(world: World, run: Path, home: Path) -> None:
    """The world with paths of its own, and the run in it."""
    shutil.copytree(world.folder, home / "world")
    shutil.copytree(run, home / "run")
    for path in (home / "world" / "recipe.yaml", home / "run" / "config.yaml"):
        path.write_text(path.read_text().replace(str(world.folder), str(home / "world")))


def _words(command: str, home: Path) -> list[str | Path]:
    recipe, run = home / "world" / "recipe.yaml", home / "run"
    say = ["generate", "1+1=?", "--max-tokens", "2", "--model"]
    return {
        "check": ["check", recipe],
        "train": ["train", recipe, "--run.dir", home / "new", "--train.iterations", "1"],
        "generate-model": [*say, home / "world" / "model"],
        "generate-run": [*say, run],
        "resume": ["resume", run, "--train.iterations", "3", "--allow-changed"],
        "eval": ["eval", run],
        "runs": ["runs", home],
    }[command]
