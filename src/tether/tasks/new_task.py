"""`tether init`: write a folder with a recipe, a reward and data that train without edits."""

import json
import re
from pathlib import Path

from tether import assets
from tether.errors import UserError, one_line

FILES = ("recipe.yaml", "reward.py", "train.jsonl", "heldout.jsonl")
PLAIN = re.compile(r"[\w./-]+")  # needs no quotes in YAML
NAME = re.compile(r"[^/\\.][^/\\]*")  # what run.name may be


def write_task(folder: Path) -> list[Path]:
    """Write the files into a new folder; an existing one is refused."""
    if not NAME.fullmatch(folder.name):
        raise UserError(f"{folder} cannot name a task: its name must not start with a dot.")
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder} exists already; choose another name.")
    written = []
    try:
        folder.mkdir(parents=True)
        for name in FILES:
            text = assets.resolve(f"tether:task/{name}").read_text(encoding="utf-8")
            path = folder / name
            path.write_text(_filled(text, folder) if name == FILES[0] else text, encoding="utf-8")
            written.append(path)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {one_line(error)}.") from None
    return written


def _filled(recipe: str, folder: Path) -> str:
    """Put the folder's paths into the recipe, quoted where YAML needs it."""
    lines = []
    for line in recipe.splitlines(keepends=True):
        found = re.match(r"(\s+\w+: )(FOLDER/\S+|NAME)(\s.*)", line, re.DOTALL)
        if found is None:
            lines.append(line.replace("FOLDER", folder.as_posix()) if line[0] == "#" else line)
            continue
        before, value, after = found.groups()
        value = value.replace("FOLDER", folder.as_posix()).replace("NAME", folder.name)
        quoted = value if PLAIN.fullmatch(value) or _plain_reward(value) else json.dumps(value)
        lines.append(f"{before}{quoted}{after}")
    return "".join(lines)


def _plain_reward(value: str) -> bool:
    path, _, name = value.rpartition(":")
    return bool(PLAIN.fullmatch(path) and name.isidentifier())
