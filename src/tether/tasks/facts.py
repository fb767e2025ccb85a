"""An invented world of people and towns, in English and Chinese: the task of recipe `search_qa`.

No model can know its facts; they are in short documents, one per entity:

    Vask Harbour was founded in the year 1423 and has mayor Dalo Veskin and judge Oren Tamsel.
    祁安乔，出生年份1874，出生地渡霜镇。

A one-hop question is answered by its subject's document. For a two-hop question that document only
names the entity to look up next:

    In which year was the mayor of Vask Harbour born?   Vask Harbour -> Dalo Veskin -> 1874

The document that an answer is read from belongs to one side of the split for good, so no fact that
training rewards is ever asked for in the held-out questions.
"""

import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Language = Literal["english", "chinese"]
Kind = Literal["person", "town"]
Split = Literal["train", "heldout"]

LANGUAGES: tuple[Language, ...] = ("english", "chinese")
HELDOUT_PERCENT = 25
FIRST_YEAR, LAST_YEAR = 1000, 1999

GIVEN = """Dalo Oren Mirva Teshin Ulric Branka Selwy Iskar Joveta Rulan Pelka Nimro Avelt Corsi
Dreyda Eskil Fenno Garva Hestia Ivo Jarmo Kessa Lorin Mavro Nerys Ottar Pavla Quill Rasmo Sunniva
Tolva Ursin Vanko Wenzel Yorra Zelma"""
FAMILY = """Veskin Tamsel Brolund Karrow Ditmar Elsvik Fogarth Grimble Haldane Imrek Jostad Kolvar
Lindqua Morvane Nagorn Orsulak Pralt Quorrin Rostock Sembra Thorvil Umbrecht Valtane Wexmoor Yastrem
Zolner Ackery Birdal Crendon Dunmallow Enderlay Farrowby Gostwick Hollin Irvane Jessop"""
TOWN_FIRST = """Vask Elder Brine Thistle Copper Marrow Gorse Silver Raven Amber Cinder Willow Drift
Saffron Juniper Flint Heron Larch Pewter Quarry Russet Sable Tansy Umber Velvet Winter Yarrow Zephyr
Badger Clover"""
TOWN_SECOND = """Harbour Fen Mill Ford Bridge Cross Moor Hollow Gate Reach Well Landing Vale Croft
Barrow Strand Spire Hatch Meadow Weir"""

SURNAMES = "祁阮柯詹靳翟裴瞿霍聂卞冉储邬宓桑荀晏滕蒲"
GIVEN_CHARACTERS = "安乔晴朗岚桐薇澄越翰琪珂萱韬琳曜茗潇棠逸蔚筠泽骁黛禾钰彦"
TOWN_CHARACTERS = "渡霜枫鹭竹岭柳溪汀荻梧鹤砚雁磐苇橘莲杉泉浦屿榆葵坞鲤"

# In each language: the documents, and the questions by kind of subject and by the fact asked for.
# In a document the word for a fact comes right before it: that is how it can be found.
DOCUMENTS: Mapping[Language, Mapping[Kind, str]] = {
    "english": {
        "person": "{name} was born in the year {year} in the town {town}.",
        "town": "{name} was founded in the year {year} and has mayor {mayor} and judge {judge}.",
    },
    "chinese": {
        "person": "{name}，出生年份{year}，出生地{town}。",
        "town": "{name}，建镇年份{year}，镇长{mayor}，法官{judge}。",
    },
}
ONE_HOP: Mapping[Language, Mapping[tuple[Kind, str], str]] = {
    "english": {
        ("person", "year"): "In which year was {name} born?",
        ("person", "town"): "In which town was {name} born?",
        ("town", "year"): "In which year was {name} founded?",
        ("town", "mayor"): "Who is the mayor of {name}?",
        ("town", "judge"): "Who is the judge of {name}?",
    },
    "chinese": {
        ("person", "year"): "{name}的出生年份是哪一年？",
        ("person", "town"): "{name}的出生地是哪里？",
        ("town", "year"): "{name}的建镇年份是哪一年？",
        ("town", "mayor"): "{name}的镇长是谁？",
        ("town", "judge"): "{name}的法官是谁？",
    },
}
# (kind of subject, fact that names the next entity, fact asked of that entity)
TWO_HOP: Mapping[Language, Mapping[tuple[Kind, str, str], str]] = {
    "english": {
        ("town", "mayor", "year"): "In which year was the mayor of {name} born?",
        ("town", "mayor", "town"): "In which town was the mayor of {name} born?",
        ("town", "judge", "year"): "In which year was the judge of {name} born?",
        ("town", "judge", "town"): "In which town was the judge of {name} born?",
        ("person", "town", "year"): "In which year was the town where {name} was born founded?",
        ("person", "town", "mayor"): "Who is the mayor of the town where {name} was born?",
        ("person", "town", "judge"): "Who is the judge of the town where {name} was born?",
    },
    "chinese": {
        ("town", "mayor", "year"): "{name}的镇长的出生年份是哪一年？",
        ("town", "mayor", "town"): "{name}的镇长的出生地是哪里？",
        ("town", "judge", "year"): "{name}的法官的出生年份是哪一年？",
        ("town", "judge", "town"): "{name}的法官的出生地是哪里？",
        ("person", "town", "year"): "{name}的出生地的建镇年份是哪一年？",
        ("person", "town", "mayor"): "{name}的出生地的镇长是谁？",
        ("person", "town", "judge"): "{name}的出生地的法官是谁？",
    },
}


@dataclass(frozen=True)
class Entity:
    """A person or a town; `facts` by name: year, and town of birth, or mayor and judge."""

    name: str
    kind: Kind
    language: Language
    facts: Mapping[str, str]

    @property
    def text(self) -> str:
        """Return its document."""
        return DOCUMENTS[self.language][self.kind].format(name=self.name, **self.facts)


@dataclass(frozen=True)
class Question:
    prompt: str
    answer: str
    asked: str  # the fact's name, such as year
    path: tuple[Entity, ...]  # the entities to look up, in order; the last one has the answer


World = Mapping[str, Entity]  # by name


def draw_person_name(rng: random.Random, language: Language) -> str:
    if language == "english":
        return f"{rng.choice(GIVEN.split())} {rng.choice(FAMILY.split())}"
    first, second = rng.sample(GIVEN_CHARACTERS, 2)
    return rng.choice(SURNAMES) + first + second


def draw_town_name(rng: random.Random, language: Language) -> str:
    if language == "english":
        return f"{rng.choice(TOWN_FIRST.split())} {rng.choice(TOWN_SECOND.split())}"
    return "".join(rng.sample(TOWN_CHARACTERS, 2)) + "镇"


def draw_world(
    rng: random.Random, language: Language, num_people: int, num_towns: int
) -> dict[str, Entity]:
    """Draw a world in which each person is born in one of the towns and has at most one office."""
    people = _distinct(draw_person_name, rng, language, num_people)
    towns = _distinct(draw_town_name, rng, language, num_towns)
    officers = rng.sample(people, 2 * num_towns)
    world = {}
    for name in people:
        facts = {"year": draw_year(rng), "town": rng.choice(towns)}
        world[name] = Entity(name, "person", language, facts)
    for name, mayor, judge in zip(towns, officers[::2], officers[1::2], strict=True):
        facts = {"year": draw_year(rng), "mayor": mayor, "judge": judge}
        world[name] = Entity(name, "town", language, facts)
    return world


def draw_year(rng: random.Random) -> str:
    return str(rng.randint(FIRST_YEAR, LAST_YEAR))


def _distinct(
    draw: Callable[[random.Random, Language], str], rng: random.Random, language: Language, num: int
) -> list[str]:
    """Draw `num` different names, in the order drawn: a set's order differs between runs."""
    names: dict[str, None] = {}
    while len(names) < num:
        names[draw(rng, language)] = None
    return list(names)


def ask_one_hop(world: World) -> Iterator[Question]:
    """Yield every question that its subject's own document answers."""
    for subject in world.values():
        for (kind, asked), form in ONE_HOP[subject.language].items():
            if kind == subject.kind:
                prompt = form.format(name=subject.name)
                yield Question(prompt, subject.facts[asked], asked, (subject,))


def ask_two_hop(world: World) -> Iterator[Question]:
    """Yield every question that needs the document of an entity its subject names."""
    for subject in world.values():
        for (kind, leads_on, asked), form in TWO_HOP[subject.language].items():
            if kind == subject.kind:
                other = world[subject.facts[leads_on]]
                prompt = form.format(name=subject.name)
                yield Question(prompt, other.facts[asked], asked, (subject, other))


def split_of(question: Question) -> Split:
    """Return the side of the entity whose document has the answer, by CRC-32 of its name."""
    bucket = zlib.crc32(question.path[-1].name.encode()) % 100
    return "heldout" if bucket < HELDOUT_PERCENT else "train"
