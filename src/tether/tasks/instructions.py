"""Instructions that a program can verify: the task of recipe `instructions`.

    Write about the moon. Use at most 20 words. Do not use any commas.

A topic and one to three constraints of `rewards.constraints`. Held out are topics, sets of kinds
that training never combines, and three kinds that it never uses.
"""

import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

Part = Literal["train", "topics", "compositions", "kinds"]

TOPICS = """the moon; a cat; winter; the sea; bread; a train; mountains; a library; rain; football;
coffee; a garden; the sun; a bicycle; music; an island; bees; a bridge; breakfast; a teacher;
whales; a market; autumn; a lighthouse; chess; a river; apples; a doctor; the desert; a birthday;
horses; a kitchen; the wind; a museum; trees; a farmer; snow; a ship; tea; a dog; clouds; a city;
soup; a violin; the forest; a pilot; summer; a letter; cheese; a tiger; the stars; a school; rice;
a carpenter; spring; a castle; salt; an elephant; fishing; a village; ants; a clock; the weather;
a hospital; honey; a painter; night; a baker; swimming; a road; owls; a kite"""
HELDOUT_TOPIC = 6  # one in so many is held out

# How a kind asks for its value. Several ways, so that one phrase is not all there is to learn.
ASKED: Mapping[str, tuple[str, ...]] = {
    "max_words": ("Use at most {} words.", "Write no more than {} words."),
    "min_words": ("Use at least {} words.", "Write {} words or more."),
    "sentences": ("Write exactly {} sentences.", "The answer must have exactly {} sentences."),
    "bullets": (
        "Answer with exactly {} bullet points and nothing else, each on a line that begins with -.",
        "Write a list of exactly {} lines, each of which begins with -.",
    ),
    "lowercase": ("Use only lowercase letters.", "Write everything in lowercase."),
    "uppercase": ("Use only capital letters.", "Write everything in capitals."),
    "no_commas": ("Do not use any commas.", "Write without commas."),
    "begins_with": ('Begin with the words "{}".', 'The first words must be "{}".'),
    "ends_with": ('End with the words "{}".', 'The last words must be "{}".'),
    "contains": ('Use the word "{}".', 'The answer must contain the word "{}".'),
    "avoids": ('Do not use the word "{}".', 'Avoid the word "{}".'),
    "quoted": ("Put double quotation marks around the whole answer.",),
    "language": ("Answer in {} only.", "Use no language but {}."),
    "json_keys": ("Answer with a JSON object with the keys {} and nothing else.",),
    "title": ("Give it a title in double angular brackets, such as <<a title>>.",),
    "no_letter": ('Do not use the letter "{}".', 'Avoid the letter "{}".'),
}
UNSEEN_KINDS = ("uppercase", "title", "no_letter")
SEEN_KINDS = tuple(kind for kind in ASKED if kind not in UNSEEN_KINDS)
# Kinds that cannot both be kept, or hardly: JSON has quotation marks, commas and one long line.
CONFLICTS = {
    frozenset(pair)
    for pair in [
        ("lowercase", "uppercase"),
        ("max_words", "min_words"),
        ("bullets", "sentences"),
        ("bullets", "begins_with"),
        ("bullets", "quoted"),
        ("bullets", "title"),
        ("quoted", "title"),
        *(("json_keys", kind) for kind in ASKED if kind not in ("contains", "avoids", "language")),
    ]
}
BEGINS = ("I think that", "Many people", "In my view", "Every day", "Few things")
ENDS = ("and that is all", "in the end", "every single day", "as we know", "for everyone")
WORDS = ("old", "small", "bright", "water", "people", "time", "warm", "quiet", "long", "good")
KEYS = (("name", "colour"), ("what", "why"), ("title", "text"), ("place", "time"))
HELDOUT_PERCENT = 20  # of the sets of kinds


@dataclass(frozen=True)
class Instruction:
    topic: str
    constraints: tuple[tuple[str, Any], ...]  # kind and value
    prompt: str

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(kind for kind, _ in self.constraints)

    def row(self, part: Part) -> dict[str, Any]:
        """Return the data row; `part` says what is held out of it."""
        found = [{"kind": k} if v is None else {"kind": k, "value": v} for k, v in self.constraints]
        return {"prompt": self.prompt, "constraints": found, "part": part}


def topics(heldout: bool) -> list[str]:
    """Return the topics of one side."""
    every = [" ".join(topic.split()) for topic in TOPICS.split(";")]
    return [topic for i, topic in enumerate(every) if (i % HELDOUT_TOPIC == 4) == heldout]


def compositions(heldout: bool) -> list[tuple[str, ...]]:
    """Return the sets of one to three seen kinds of one side; a single kind is never held out."""
    sets = [found for size in (1, 2, 3) for found in combinations(SEEN_KINDS, size)]
    return [found for found in sets if _fit(found) and _held(found) == heldout]


def draw_instruction(rng: random.Random, part: Part) -> Instruction:
    """Draw an instruction of a part: training, or held out by topic, by set of kinds, by kind."""
    topic = rng.choice(topics(heldout=part == "topics"))
    if part == "kinds":
        kind = rng.choice(UNSEEN_KINDS)
        others = [c for c in compositions(False) if len(c) <= 2 and _fit((kind, *c))]
        kinds: tuple[str, ...] = (kind, *rng.choice([(), *rng.sample(others, 8)]))
    else:
        sets = compositions(heldout=part == "compositions")
        sizes = sorted({len(found) for found in sets})
        size = rng.choice(sizes)
        kinds = rng.choice([found for found in sets if len(found) == size])
    chosen = [(kind, _value(kind, rng)) for kind in rng.sample(kinds, len(kinds))]
    asked = [rng.choice(ASKED[kind]).format(_spoken(value)) for kind, value in chosen]
    return Instruction(topic, tuple(chosen), " ".join([f"Write about {topic}.", *asked]))


def draw_instructions(rng: random.Random, part: Part, num: int) -> list[Instruction]:
    """Draw `num` instructions with different prompts."""
    found: dict[str, Instruction] = {}
    while len(found) < num:
        drawn = draw_instruction(rng, part)
        found.setdefault(drawn.prompt, drawn)
    return list(found.values())


def _fit(kinds: tuple[str, ...]) -> bool:
    return not any(frozenset(pair) in CONFLICTS for pair in combinations(kinds, 2))


def _held(kinds: tuple[str, ...]) -> bool:
    """By CRC-32, as hash() differs between runs."""
    return len(kinds) > 1 and zlib.crc32("+".join(kinds).encode()) % 100 < HELDOUT_PERCENT


def _value(kind: str, rng: random.Random) -> Any:
    match kind:
        case "max_words":
            return rng.choice((10, 15, 20, 25))
        case "min_words":
            return rng.choice((8, 12, 16))
        case "sentences":
            return rng.choice((1, 2, 3))
        case "bullets":
            return rng.choice((2, 3, 4))
        case "begins_with":
            return rng.choice(BEGINS)
        case "ends_with":
            return rng.choice(ENDS)
        case "contains" | "avoids":
            return rng.choice(WORDS)
        case "language":
            return "english"
        case "json_keys":
            return list(rng.choice(KEYS))
        case "no_letter":
            return rng.choice("zxqjk")
    return None


def _spoken(value: Any) -> str:
    if isinstance(value, list):
        return " and ".join(f'"{key}"' for key in value)
    return "English" if value == "english" else str(value)
