"""Files that ship with the package, named `tether:PATH` in a config."""

from pathlib import Path

PREFIX = "tether:"


def is_shipped(name: object) -> bool:
    return isinstance(name, str) and name.startswith(PREFIX)


def resolve(name: str) -> Path:
    """The place on disk of `tether:PATH`, or of an ordinary path."""
    if name.startswith(PREFIX):
        return Path(__file__).parent / name.removeprefix(PREFIX)
    return Path(name)


def looked_at(name: str) -> str:
    """Say where a relative path was looked for, to stand behind it in a sentence."""
    path = resolve(name)
    return "" if path.is_absolute() else f" (looked for at {Path.cwd() / path})"
