"""The fingerprint of a run: what it is made from. If any of that changes, it is another run.

RUN/fingerprint.json is on the disk before the first iteration and is held against what is there at
every resume, also before the first checkpoint:

    folder      where the run was started; relative paths in its config.yaml are meant from there
    config      the fields that it was started with
    inputs      SHA-256 of every file that it reads, by config field: whole files
    versions    of the libraries that its numbers depend on
    python_reward  whether its reward was a function handed over in Python, which no file holds
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from tether.config import Config
from tether.errors import RunStopped, UserError, one_line
from tether.models.locate import find_model
from tether.rewards.functions import learned_model
from tether.run.checkpoint_store import sync
from tether.run.directory import FINGERPRINT, PROMPTS, SCHEMA
from tether.run.reader import NotRegular, read_lines, read_regular
from tether.support.user_code import MISSING, hash_file

Inputs = dict[str, dict[str, str]]  # config field -> file -> SHA-256
Say = Callable[[str], None]

# What a model or its tokenizer is read from; a README or a hidden file beside it changes nothing.
MODEL_FILES = (".safetensors", ".json", ".jinja", ".txt", ".model", ".gguf")
HASHERS = 4  # threads: hashing leaves the interpreter free
LONG_BYTES = 4 << 30  # what takes some seconds to read, and is announced
SAY_SECONDS = 10.0
PROMPTS_COMPARED = 64  # newest iterations whose prompts are drawn again; the files cover the rest
ENDS = 1 << 20  # bytes at each end of a file that the first version looked at


@dataclass(frozen=True)
class Fingerprint:
    folder: str
    config: Mapping[str, Any]
    inputs: Inputs
    versions: Mapping[str, str]
    python_reward: bool = False


def take_fingerprint(
    settings: Mapping[str, Any],
    files: Iterable[tuple[str, Mapping[str, Path]]],
    say: Say = lambda text: None,
    python_reward: bool = False,
) -> Fingerprint:
    """Hash every file that a run reads. `say` is told how far it is, if it takes long."""
    return Fingerprint(os.getcwd(), settings, hash_inputs(files, say), versions(), python_reward)


def refuse_lost_reward(run: Path, typed: Collection[str]) -> None:
    """Refuse to score a run by `reward.kind` that was trained by a function of the caller's.

    `typed` are the dotted fields that the caller gave, in place of the run's own.
    """
    fingerprint = read_fingerprint(run)
    if fingerprint is None or not fingerprint.python_reward:
        return
    if not any(field.startswith("reward.") for field in typed):
        raise UserError(
            f"{run} was trained with a reward handed over in Python, which its files do not hold; "
            f"pass it again as reward=…, or name one: --reward.kind FILE.py:FUNCTION."
        )


def versions() -> dict[str, str]:
    found = {"torch": torch, "transformers": transformers, "tokenizers": tokenizers}
    return {name: str(module.__version__) for name, module in found.items()}


def hash_inputs(
    files: Iterable[tuple[str, Mapping[str, Path]]], say: Say = lambda text: None
) -> Inputs:
    """Return the SHA-256 of files that are given by config field and name."""
    found = dict(files)
    hashes = _hash_all({path for named in found.values() for path in named.values()}, say)
    return {
        field: {name: hashes[path] for name, path in named.items()}
        for field, named in found.items()
    }


def model_files(model: Path) -> dict[str, Path]:
    """Return weights, settings, tokenizer and chat template of a model."""
    if model.is_file():
        return {model.name: model}
    names = {path: path.relative_to(model) for path in sorted(model.rglob("*"))}
    return {
        str(name): path
        for path, name in names.items()
        if path.suffix in MODEL_FILES
        and not any(part.startswith(".") for part in name.parts)
        and path.is_file()
    }


def hash_model(model: Path) -> dict[str, str]:
    return {name: hash_file(path) for name, path in model_files(model).items()}


def _hash_all(paths: set[Path], say: Say) -> dict[Path, str]:
    """Hash some files at a time, the largest first."""
    sizes = {path: path.stat().st_size if path.is_file() else 0 for path in paths}
    total, done, last = sum(sizes.values()), 0, time.monotonic()
    if total >= LONG_BYTES:
        say(f"hashing {total / 2**30:.1f} GiB of model and data files …")
    hashes: dict[Path, str] = {}
    with ThreadPoolExecutor(HASHERS) as pool:
        work = {
            pool.submit(hash_file, p): p
            for p in sorted(paths, key=lambda path: sizes[path], reverse=True)
        }
        for finished in as_completed(work):
            path = work[finished]
            hashes[path], done = finished.result(), done + sizes[path]
            if total >= LONG_BYTES and time.monotonic() - last > SAY_SECONDS:
                say(f"hashing: {done / 2**30:.1f} of {total / 2**30:.1f} GiB …")
                last = time.monotonic()
    return hashes


def changed_inputs(before: Mapping[str, Mapping[str, str]], now: Inputs) -> list[str]:
    """Name every file that is not what it was."""
    found = []
    for field in {**before, **now}:
        then, today = before.get(field, {}), now.get(field, {})
        for name in {**then, **today}:
            if then.get(name) == today.get(name):
                continue
            gone = today.get(name, MISSING) == MISSING
            what = ", which is gone" if gone else "" if name in then else ", which is new"
            found.append(f"the file behind {field} ({name}{what})")
    return found


def changed_versions(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [
        f"{name}, {before[name]} then and {now[name]} now"
        for name in before
        if name in now and before[name] != now[name]
    ]


def write_fingerprint(run: Path, fingerprint: Fingerprint) -> None:
    """Put it on the disk, whole, before anything else of the run."""
    staged = run / f".{FINGERPRINT}"
    text = json.dumps({"schema": SCHEMA, **asdict(fingerprint)}, indent=1, ensure_ascii=False)
    try:
        staged.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
        sync(staged)
        os.replace(staged, run / FINGERPRINT)
        sync(run)
    except OSError as error:
        staged.unlink(missing_ok=True)
        reason = one_line(error).lower()
        raise RunStopped(f"{run / FINGERPRINT} could not be written: {reason}.") from None


def read_fingerprint(run: Path) -> Fingerprint | None:
    """Return what a run was started from; None for a run of the first version."""
    path = run / FINGERPRINT
    try:
        found = json.loads(read_regular(path))
        if found.pop("schema") != SCHEMA:
            raise UserError(f"{path} is of another version of tether.")
        fingerprint = Fingerprint(**found)
        for part in (fingerprint.config, fingerprint.inputs, fingerprint.versions):
            if not isinstance(part, Mapping):
                raise TypeError("not a mapping")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {one_line(error).lower()}.") from None
    except (ValueError, KeyError, TypeError, AttributeError, NotRegular):
        raise UserError(
            f"{path} is damaged, so that it cannot be told whether this would be the same run; "
            f"restore it, or remove it to go by what the newest checkpoint remembers."
        ) from None
    return fingerprint


def prompts_digest(ids: Sequence[Sequence[int]]) -> str:
    """Return the SHA-256 of the token ids of an iteration's prompts, in their order."""
    return hashlib.sha256(json.dumps([list(row) for row in ids]).encode()).hexdigest()


def changed_row_ids(
    run: Path,
    draw: Callable[[int, tuple[int, int] | None, list[int] | None], Iterable[Sequence[int]]],
) -> list[str]:
    """Draw the rows of past iterations again; their token ids must be those that were drawn then.

    `draw` returns the ids of an iteration's rows, from its number and, if the line has them, its
    window on the data (start and count) or the prompts that a curriculum drew.
    """
    for line in read_lines(run / PROMPTS)[-PROMPTS_COMPARED:]:
        iteration, window = line.get("iteration"), _window(line.get("window"))
        rows = _rows(line.get("rows"))
        if type(iteration) is not int or prompts_digest(
            [*draw(iteration, window, rows)]
        ) != line.get("sha256"):
            return [f"the token ids of the prompts of iteration {iteration}"]
    return []


def _window(given: Any) -> tuple[int, int] | None:
    """Return a window that the file holds, None for anything else."""
    sound = isinstance(given, list) and len(given) == 2 and all(type(n) is int for n in given)
    return (given[0], given[1]) if sound and min(given) >= 0 else None


def _rows(given: Any) -> list[int] | None:
    """Return the rows that the file holds, None for anything else."""
    sound = isinstance(given, list) and all(type(n) is int and n >= 0 for n in given)
    return given if sound else None


def first_version_inputs(
    config: Config, inputs: Iterable[tuple[str, Mapping[str, Path]]]
) -> dict[str, str]:
    """Return what a checkpoint of the first version remembers: one hash per field, of weights the
    sizes and both ends only, and the version of torch."""
    found = {}
    for field, files in inputs:
        weights = learned_model(config.reward) is not None and field == "reward.kind"
        if not weights and not field.startswith("model."):
            found[field] = hash_file(next(iter(files.values())))
    for role in ("actor", "reference", "critic"):
        model = getattr(config.model, role)
        if model is not None:
            found[f"model.{role}"] = hash_ends(find_model(model, config.model.hub))
    reward = learned_model(config.reward)
    if reward is not None:
        found["reward.kind"] = hash_ends(find_model(reward))
    return {**found, "torch": str(torch.__version__)}


def hash_ends(model: Path) -> str:
    """Hash names, sizes and both ends of each file, as the first version did."""
    digest = hashlib.sha256()
    files = [model] if model.is_file() else [p for p in model.rglob("*") if p.is_file()]
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(model)} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(ENDS))
            file.seek(max(0, size - ENDS))
            digest.update(file.read(ENDS))
    return digest.hexdigest()
