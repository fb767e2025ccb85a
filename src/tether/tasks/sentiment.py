"""Openings of reviews, to be continued: the task of recipe `sentiment`.

An opening is a thing that people review, put into the beginning of a sentence:

    We checked in to the lakeside inn after midnight, and

Half of the beginnings are neutral, half tell of something that went wrong, so that the untrained
continuations are about as often glad as not. A thing belongs to one side of the split for good, and
so does a beginning: no held-out opening shares either with a training prompt.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "heldout"]

HELDOUT_THING, HELDOUT_BEGINNING = 5, 3  # one in so many of a group's is held out


@dataclass(frozen=True)
class Group:
    """Things that are reviewed alike, and beginnings that fit each of them."""

    things: tuple[str, ...]
    neutral: tuple[str, ...]
    trouble: tuple[str, ...]


def _split(text: str) -> tuple[str, ...]:
    return tuple(" ".join(part.split()) for part in text.split(";"))


GROUPS = {
    "meal": Group(
        _split("""noodle bar; taco truck; seafood grill; corner pizzeria; steakhouse; vegan diner;
        tapas bar; breakfast café; sushi counter; curry house; bakery; burger place; oyster bar;
        dumpling shop; station buffet; wine bar; ramen kitchen; fish and chip shop; food court;
        rooftop restaurant; sandwich bar; pancake house; falafel stand; tea room; brasserie"""),
        _split("""We had dinner at the {} on a Tuesday, and;
        I stopped at the {} on my way home and ordered;
        My sister had told me about the {}, so I;
        The menu at the {} is short, and the kitchen;
        Our waiter at the {} brought the first course and;
        I have been to the {} three times this year. The food"""),
        _split("""We waited forty minutes for a table at the {}, and then;
        The soup at the {} was cold, and when I told them;
        They had lost our booking at the {}, so we;
        The {} was almost empty, and the reason became clear when;
        The bill at the {} was higher than the menu said, and the manager"""),
    ),
    "stay": Group(
        _split("""lakeside inn; airport hotel; youth hostel; mountain lodge; beach resort; campsite;
        farmhouse; city apartment; guest house by the harbour; motel on route nine; castle hotel;
        ski chalet; houseboat; bungalow; spa hotel; tree house; vineyard cottage; capsule hotel;
        converted mill; desert camp; island villa; boarding house; railway hotel; forest cabin;
        student residence"""),
        _split("""We checked in to the {} after midnight, and;
        I spent four nights at the {} for work. My room;
        The {} is ten minutes from the station, and the staff;
        Breakfast at the {} starts at seven, and;
        We took the children to the {} last summer, and they;
        The photographs of the {} show a large window. In the room"""),
        _split("""The heating at the {} did not work, and at the desk;
        Somebody was still in our room at the {}, so;
        The walls of the {} are thin, and all night;
        The {} charged my card twice, and after three calls;
        The bed at the {} was too short for me, and in the morning"""),
    ),
    "product": Group(
        _split("""kettle; blender; vacuum cleaner; office chair; backpack; rain jacket; laptop;
        desk lamp; air fryer; mattress; tent; folding bicycle; printer; toaster; cordless drill;
        keyboard; pair of headphones; pair of running shoes; watch; electric razor; suitcase;
        coffee grinder; garden hose; baby monitor; frying pan; sewing machine; phone charger;
        bookshelf; sleeping bag; camera; guitar; lawn mower; electric blanket; water filter;
        kitchen scale; ladder; umbrella; microphone; router; barbecue"""),
        _split("""I bought this {} three months ago, and;
        The {} arrived yesterday. The first thing I noticed was;
        After two weeks with this {}, I;
        I use the {} every morning, and so far it;
        My neighbour has the same {}, and we both;
        This {} costs twice as much as my old one, and it"""),
        _split("""The {} stopped working after a week, and the shop;
        One part of the {} was missing, so I wrote to the seller and;
        The {} looks different from the picture, and when I used it;
        I had to send the first {} back, and the second one;
        The instructions for this {} are only four lines long, and"""),
    ),
    "work": Group(
        _split("""crime novel; documentary; board game; stage play; album; science fiction film;
        podcast; cookbook; video game; biography; exhibition; musical; short story collection;
        television series; travel guide; jazz concert; opera; children's book; puzzle game;
        history book; comedy special; photography book; poetry reading; animated film;
        ballet"""),
        _split("""I finished the {} last night, and the ending;
        A friend lent me the {} and said nothing about it. I;
        The first half of the {} is slow. The second half;
        I went into the {} knowing nothing, and;
        The {} is about two brothers and a house. What I remember most is;
        My daughter and I share the {}, and she"""),
        _split("""The {} is an hour too long, and by the middle I;
        I wanted my money back after the {}, because;
        Half of the audience had left the {} before the end, but;
        The plot of the {} makes little sense, and the characters;
        The critics hated the {}, and I"""),
    ),
    "service": Group(
        _split("""dentist; plumber; moving company; car rental; hairdresser; language course; gym;
        internet provider; driving school; vet; delivery service; bank; travel agency; taxi firm;
        bicycle workshop; swimming pool; dry cleaner; airline; night train; ferry; pharmacy;
        public library; wedding photographer; locksmith; tailor; dance class; optician;
        phone shop; garden centre; cinema"""),
        _split("""I have been with this {} for two years, and;
        We called the {} on a Sunday afternoon, and somebody;
        The people at the {} explained every step, and then;
        I chose this {} because it is close to my office. It;
        My mother recommended this {}, and after my first visit I;
        The {} has a new website, so I made an appointment and"""),
        _split("""The {} was an hour late, and nobody;
        The {} got my name wrong three times, and in the end;
        I complained to the {} about the price, and they;
        Nobody at the {} answered the telephone, so I went there and;
        The {} cancelled on the day itself, and"""),
    ),
}


@dataclass(frozen=True)
class Opening:
    group: str
    thing: str
    begins: str  # with {} for the thing

    @property
    def text(self) -> str:
        return self.begins.format(self.thing)

    def row(self) -> dict[str, str]:
        """Return the data row."""
        return {"prompt": self.text, "group": self.group}


def openings(split: Split) -> Iterator[Opening]:
    """Yield every opening of one side, group by group."""
    for name, group in GROUPS.items():
        kinds = (group.neutral, group.trouble)
        begins = [one for kind in kinds for one in _side(kind, split, HELDOUT_BEGINNING)]
        for thing in _side(group.things, split, HELDOUT_THING):
            for one in begins:
                yield Opening(name, thing, one)


def draw_openings(split: Split, num: int, rng: random.Random) -> list[Opening]:
    """Draw `num` different openings of one side, about as many of each thing."""
    by_thing: dict[str, list[Opening]] = {}
    for opening in openings(split):
        by_thing.setdefault(opening.thing, []).append(opening)
    for found in by_thing.values():
        rng.shuffle(found)
    rounds = max(map(len, by_thing.values()))
    in_turn = [found[i] for i in range(rounds) for found in by_thing.values() if i < len(found)]
    if num > len(in_turn):
        raise ValueError(f"there are {len(in_turn)} openings for {split}, not {num}")
    chosen = in_turn[:num]
    rng.shuffle(chosen)
    return chosen


def _side(parts: tuple[str, ...], split: Split, every: int) -> list[str]:
    heldout = split == "heldout"
    return [part for i, part in enumerate(parts) if (i % every == 1) == heldout]
