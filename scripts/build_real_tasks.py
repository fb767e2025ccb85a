"""The prompts of the recipe `sentiment`: writes assets/sentiment/{train,heldout}.jsonl."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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


if __name__ == "__main__":
    main()
