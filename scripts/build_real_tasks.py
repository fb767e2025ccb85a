"""The prompts of the recipes `sentiment` and `instructions`: writes assets/NAME/*.jsonl."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tether.tasks.instructions import draw_instructions
from tether.tasks.sentiment import draw_openings

ASSETS = Path(__file__).parent.parent / "src" / "tether" / "assets"
SEED = 18


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")
    print(f"{path.parent.name}/{path.name}: {len(lines)} prompts")


def main() -> None:
    rng = random.Random(SEED)
    for split, num in (("train", 480), ("heldout", 116)):
        openings = draw_openings(split, num, rng)
        write(ASSETS / "sentiment" / f"{split}.jsonl", (opening.row() for opening in openings))
    rng = random.Random(SEED)
    rows = [one.row("train") for one in draw_instructions(rng, "train", 800)]
    write(ASSETS / "instructions" / "train.jsonl", rows)
    heldout = [
        one.row(part)
        for part in ("topics", "compositions", "kinds")
        for one in draw_instructions(rng, part, 60)
    ]
    rng.shuffle(heldout)
    write(ASSETS / "instructions" / "heldout.jsonl", heldout)


if __name__ == "__main__":
    main()
