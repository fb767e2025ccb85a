"""Write a registry, episodes that show how to ask it, and questions for PPO.

In the episodes the tool is mostly not asked, and often about the wrong person: enough for PPO to
choose from, and far from a solution.
"""

import json
import random
import re
from pathlib import Path

from tether import assets
from tether.data.files import read_rows

NUM_EPISODES, NUM_HELDOUT = 600, 60
ASKS, ASKS_RIGHT = 0.4, 0.6  # share of the episodes, and of those that ask
HERE = Path(__file__).parent


def people() -> list[tuple[str, str]]:
    """Return names and years of birth from the corpus that ships."""
    texts = [
        row["contents"] for row in read_rows(str(assets.resolve("tether:search/corpus.jsonl")))
    ]
    found = [re.match(r"(.+)\n.+ was born in the year (\d{4})", text) for text in texts]
    return [(match[1], match[2]) for match in found if match]


def episode(name: str, others: list[tuple[str, str]], rng: random.Random) -> list[str]:
    """Return what is written, read, written; or one written text, a guess."""
    if rng.random() >= ASKS:
        return [f"<answer> {rng.randint(1000, 1999)} </answer>"]
    is_right = rng.random() < ASKS_RIGHT
    asked, year = rng.choice([person for person in others if (person[0] == name) == is_right])
    return [
        f"<registry> {asked} </registry>",
        f"<result>{asked} was born in the year {year}</result>",
        f"<answer> {year} </answer>",
    ]


def main() -> None:
    rng = random.Random(0)
    everybody = people()
    rng.shuffle(everybody)
    train, heldout = everybody[:-NUM_HELDOUT], everybody[-NUM_HELDOUT:]
    (HERE / "born.json").write_text(json.dumps(dict(everybody)))
    shown = [name for name, _ in rng.choices(train, k=NUM_EPISODES)]
    write("episodes.jsonl", [{"prompt": ask(n), "response": episode(n, train, rng)} for n in shown])
    for file, part in (("train.jsonl", train), ("heldout.jsonl", heldout)):
        write(file, [{"prompt": ask(name), "ground_truth": year} for name, year in part])


def ask(name: str) -> str:
    return f"When was {name} born?"


def write(file: str, rows: list[dict]) -> None:
    (HERE / file).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
