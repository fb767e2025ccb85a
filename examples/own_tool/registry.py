"""A tool of one's own: a registry of births, asked by `<registry> NAME </registry>`."""

import json
from pathlib import Path

BORN = json.loads((Path(__file__).parent / "born.json").read_text())


def registry(name: str) -> str:
    """Return what the registry holds about a person."""
    year = BORN.get(name.strip())
    return f"{name.strip()} was born in the year {year}" if year else "nobody has that name"
