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
