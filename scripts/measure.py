"""What scripts that measure have in common: the machine's name, and pasting into a document."""

import datetime
import os
import platform
from pathlib import Path

import torch

from tether.support.processor import capability


def machine() -> str:
    """Date, cores, what they multiply by instructions, and torch: under every pasted figure."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.machine()
    today = datetime.date.today()
    cores = f"{os.cpu_count()} cores of {processor} ({capability()})"
    return f"{today}, {cores}, torch {torch.__version__}."


def paste(document: Path, marker: str, lines: list[str]) -> None:
    """Replace what stands between the marker's two comments by a block of plain text."""
    paste_markdown(document, marker, ["```text", *lines, "```"])


def paste_markdown(document: Path, marker: str, lines: list[str]) -> None:
    """Replace what stands between the marker's two comments."""
    begin, end = f"<!-- {marker} -->", "<!-- end -->"
    before, found, rest = document.read_text(encoding="utf-8").partition(begin)
    if not found:
        raise SystemExit(f"{document} has no {begin}")
    _, _, after = rest.partition(end)
    document.write_text(before + "\n".join([begin, *lines, end]) + after, encoding="utf-8")
