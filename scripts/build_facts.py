"""The questions of the recipe `smollm2`: facts that a small instruct model half knows and answers
in long sentences. Writes assets/facts/{train,heldout}.jsonl; no fact is in both."""

import json
from pathlib import Path

CAPITALS = """Paris France, Berlin Germany, Rome Italy, Madrid Spain, Lisbon Portugal, London
England, Dublin Ireland, Vienna Austria, Athens Greece, Warsaw Poland, Budapest Hungary, Prague
Czechia, Oslo Norway, Stockholm Sweden, Helsinki Finland, Copenhagen Denmark, Brussels Belgium,
Amsterdam Netherlands, Moscow Russia, Kyiv Ukraine, Cairo Egypt, Nairobi Kenya, Tokyo Japan,
Beijing China, Seoul South-Korea, Delhi India, Bangkok Thailand, Hanoi Vietnam, Manila
Philippines, Jakarta Indonesia, Canberra Australia, Ottawa Canada, Brasilia Brazil, Lima Peru,
Santiago Chile, Bogota Colombia, Havana Cuba, Tehran Iran, Baghdad Iraq, Ankara Turkey, Kabul
Afghanistan, Islamabad Pakistan, Kathmandu Nepal, Dhaka Bangladesh, Sofia Bulgaria, Bucharest
Romania, Belgrade Serbia, Zagreb Croatia, Bern Switzerland, Reykjavik Iceland, Tunis Tunisia,
Algiers Algeria, Rabat Morocco, Accra Ghana, Caracas Venezuela"""

OPPOSITES = """hot cold, big small, up down, day night, black white, wet dry, fast slow, happy
sad, open closed, full empty, old young, rich poor, strong weak, tall short, light dark, good
bad, hard soft, early late, left right, true false, clean dirty, loud quiet, thick thin, wide
narrow, win lose, buy sell, push pull, love hate, war peace, begin end, first last, alive dead"""

COLOURS = """grass green, snow white, coal black, blood red, milk white, a banana yellow, a
lemon yellow, a tomato red, the sky blue, the sun yellow, a carrot orange, a strawberry red, a
cucumber green, an orange orange, chocolate brown, cotton white"""

NEXT = """Monday Tuesday, Tuesday Wednesday, Wednesday Thursday, Thursday Friday, Friday
Saturday, Saturday Sunday, January February, February March, March April, April May, May June,
June July, July August, August September, September October, October November, November December"""

YOUNG = """dog puppy, cat kitten, cow calf, horse foal, sheep lamb, pig piglet, hen chick, bear
cub, lion cub, duck duckling, goat kid, frog tadpole"""

HELDOUT_EVERY = 4
WAYS = ("{} Answer with one word.", "{} Reply with a single word.", "In one word: {}")


def pairs(table: str) -> list[tuple[str, str]]:
    """The last word of an entry, and what stands before it."""
    entries = [entry.split() for entry in table.split(",")]
    return [(" ".join(words[:-1]), words[-1]) for words in entries]


def questions() -> list[dict[str, str]]:
    asked = [
        *((f"What is the capital of {country}?", city) for city, country in pairs(CAPITALS)),
        *((f"What is the opposite of {word}?", other) for word, other in pairs(OPPOSITES)),
        *((f"What colour is {thing}?", colour) for thing, colour in pairs(COLOURS)),
        *((f"What comes after {name}?", after) for name, after in pairs(NEXT)),
        *((f"What is a young {animal} called?", young) for animal, young in pairs(YOUNG)),
    ]
    return [{"question": ask, "answer": answer} for ask, answer in asked]


def phrased(part: list[dict[str, str]]) -> list[dict[str, str]]:
    """Every question in every way of asking for one word."""
    return [
        {"prompt": way.format(row["question"]), "answer": row["answer"]}
        for row in part
        for way in WAYS
    ]


def main() -> None:
    folder = Path(__file__).parent.parent / "src" / "tether" / "assets" / "facts"
    folder.mkdir(exist_ok=True)
    every = questions()
    parts = {
        "heldout": every[::HELDOUT_EVERY],
        "train": [row for i, row in enumerate(every) if i % HELDOUT_EVERY],
    }
    for name, part in parts.items():
        asked = phrased(part)
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in asked)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{name}: {len(asked)} prompts")


if __name__ == "__main__":
    main()
