"""Build the world of facts and the model that is to learn to search it: part of `make starter`.

First the model repeats random tokens, which teaches it to copy whatever it is given. Then come
transcripts from thousands of small worlds, a fresh one for every few questions, so that there is no
fact to know. It sees good searches for a while; the last lesson is a mixture of habits in which it
mostly guesses, and where it searches often asks for the wrong thing. What to search for, and when,
is left to PPO.
"""

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from build_starter import ASSETS, SPLITS, build_model, build_tokenizer, report, write_jsonl
from transformers import PreTrainedTokenizerFast

import tether
from tether.data.dialogues import Conversation
from tether.data.messages import render_prompt
from tether.models.policy import Policy
from tether.models.vocabulary import Vocabulary
from tether.rollout.turn_tokens import TurnTokenizer
from tether.stages.sft import SFTSettings, train_conversations
from tether.tasks.facts import (
    FAMILY,
    GIVEN,
    GIVEN_CHARACTERS,
    LANGUAGES,
    SURNAMES,
    TOWN_CHARACTERS,
    TOWN_FIRST,
    TOWN_SECOND,
    Entity,
    Language,
    Question,
    World,
    ask_one_hop,
    ask_two_hop,
    draw_person_name,
    draw_town_name,
    draw_world,
    draw_year,
    split_of,
)

NUM_PEOPLE, NUM_TOWNS = 320, 120  # in each language
NUM_TRAIN, NUM_HELDOUT = 2800, 500
REPLY, MAX_OBSERVATION_TOKENS = "<information>{}</information>", 40  # as in a rollout


@dataclass(frozen=True)
class Habits:
    """How often, where there is a choice, a transcript does what would help."""

    searches: float
    first_query: float  # of the searches, how many ask for the subject
    searches_again: float  # of the two-hop questions whose first document has been found
    second_query: float  # of those, how many ask for the entity that it names


@dataclass(frozen=True)
class Lesson:
    habits: Habits
    settings: SFTSettings

    @property
    def num_transcripts(self) -> int:
        """None is seen twice."""
        return self.settings.num_steps * self.settings.rows


REPETITION = SFTSettings(num_steps=600, lr=2e-3, rows=32, weight_decay=0.1)
LESSONS = (
    Lesson(
        Habits(searches=0.9, first_query=0.9, searches_again=0.9, second_query=0.9),
        SFTSettings(num_steps=1000, lr=2e-3, rows=32, weight_decay=0.1),
    ),
    Lesson(
        Habits(searches=0.35, first_query=0.5, searches_again=0.25, second_query=0.6),
        SFTSettings(num_steps=400, lr=1e-3, rows=32, weight_decay=0.1),
    ),
)

# Kept apart before the merges: tags, pairs of digits, the words and characters of names, and what
# can be asked, which is then the same token in a question and in a document. All else is stock
# phrases, each of which becomes one token.
WORDS = "|".join(f"year town mayor judge {GIVEN} {FAMILY} {TOWN_FIRST} {TOWN_SECOND}".split())
CHARACTERS = f"{SURNAMES}{GIVEN_CHARACTERS}{TOWN_CHARACTERS}"
PIECES = (
    rf"</?[a-z]+>| ?\b(?:{WORDS})\b| ?[0-9]{{2}}"
    rf"|年份|出生地|镇长|法官|[{CHARACTERS}]|(?<=[{TOWN_CHARACTERS}])镇"
)


@dataclass(frozen=True)
class Span:
    """A stretch of a transcript: the model's own, which it learns, or the tool's."""

    text: str
    learnt: bool


def draw_repetitions(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> list[Conversation]:
    """Random tokens, to be said once more."""
    ordinary = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
    eos = tokenizer.eos_token_id
    rows = []
    for _ in range(REPETITION.num_steps * REPETITION.rows):
        ids = rng.sample(ordinary, rng.randint(6, 20))
        rows.append(Conversation(ids, [*ids, eos], [True] * (len(ids) + 1)))
    return rows


def transcribe(
    question: Question, world: World, habits: Habits, rng: random.Random
) -> Iterator[Span]:
    """One way of answering the question."""
    read: Entity | None = None
    if rng.random() < habits.searches:
        read = look_up(question.path[0], world, habits.first_query, rng)
        yield from searched(read)
        found = read is question.path[0] and len(question.path) > 1
        if found and rng.random() < habits.searches_again:
            read = look_up(question.path[1], world, habits.second_query, rng)
            yield from searched(read)
    answer = read.facts.get(question.asked) if read else None
    yield tagged("answer", answer or guess(question, rng), question.path[0].language)


def look_up(wanted: Entity, world: World, share: float, rng: random.Random) -> Entity:
    """The entity that is searched for: the wanted one, or any other."""
    if rng.random() < share:
        return wanted
    return rng.choice([other for other in world.values() if other is not wanted])


def searched(entity: Entity) -> Iterator[Span]:
    yield tagged("search", entity.name, entity.language)
    yield Span(f"{entity.name}\n{entity.text}", learnt=False)


def tagged(tag: str, text: str, language: Language) -> Span:
    """With spaces where the language has them, so that a word stands as it does in a sentence."""
    space = " " if language == "english" else ""
    return Span(f"<{tag}>{space}{text}{space}</{tag}>", learnt=True)


def guess(question: Question, rng: random.Random) -> str:
    """Something of the right kind; right by chance only."""
    language = question.path[0].language
    match question.asked:
        case "year":
            return draw_year(rng)
        case "town":
            return draw_town_name(rng, language)
        case _:
            return draw_person_name(rng, language)


def draw_transcripts(lesson: Lesson, rng: random.Random) -> Iterator[tuple[str, list[Span]]]:
    """Prompts and transcripts, half of them two-hop, from many worlds of eleven entities."""
    for number in range(lesson.num_transcripts // 8):
        world = draw_world(rng, LANGUAGES[number % 2], num_people=8, num_towns=3)
        for ask in (ask_one_hop, ask_two_hop):
            for question in rng.sample(list(ask(world)), 4):
                yield question.prompt, list(transcribe(question, world, lesson.habits, rng))


def encode(turn_tokens: TurnTokenizer, prompt: str, spans: list[Span]) -> Conversation:
    """Token by token what a rollout would give: each span is encoded apart."""
    tokenizer = turn_tokens.tokenizer
    ids: list[int] = []
    learnt: list[bool] = []
    for span in spans:
        if span.learnt:
            piece = tokenizer(span.text, add_special_tokens=False).input_ids
        else:
            piece, _, _ = turn_tokens.observation(span.text, REPLY, MAX_OBSERVATION_TOKENS)
        ids += piece
        learnt += [span.learnt] * len(piece)
    return Conversation(
        render_prompt(tokenizer, prompt, None), [*ids, tokenizer.eos_token_id], [*learnt, True]
    )


def texts_of(transcripts: list[tuple[str, list[Span]]]) -> Iterator[str]:
    """Every text that is encoded, for the tokenizer to learn from."""
    for prompt, spans in transcripts:
        yield from (prompt, *(span.text for span in spans), *REPLY.split("{}"))


def write_world(folder: Path, rng: random.Random) -> None:
    """The corpus, and the questions of both sides of the split, one- and two-hop in equal parts."""
    world: dict[str, Entity] = {}
    for language in LANGUAGES:
        world |= draw_world(rng, language, NUM_PEOPLE, NUM_TOWNS)
    contents = (f"{entity.name}\n{entity.text}" for entity in world.values())
    write_jsonl(
        folder / "corpus.jsonl",
        ({"id": str(number), "contents": text} for number, text in enumerate(contents)),
    )
    asked = {ask: list(ask(world)) for ask in (ask_one_hop, ask_two_hop)}
    for split, number in zip(SPLITS, (NUM_TRAIN, NUM_HELDOUT), strict=True):
        chosen = []
        for questions in asked.values():
            fair = [q for q in questions if split_of(q) == split and q.answer not in q.prompt]
            chosen += rng.sample(fair, number // 2)
        rng.shuffle(chosen)
        rows = ({"prompt": q.prompt, "ground_truth": q.answer, "hops": len(q.path)} for q in chosen)
        write_jsonl(folder / f"{split}.jsonl", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=ASSETS, help="where search/ and search_starter/ go"
    )
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # sums of floats depend on the number of threads
    write_world(args.out / "search", random.Random(f"world {args.seed}"))

    rng = random.Random(f"lessons {args.seed}")
    lessons = [list(draw_transcripts(lesson, rng)) for lesson in LESSONS]
    tokenizer = build_tokenizer(texts_of(lessons[0]), PIECES, vocab_size=2048, min_frequency=60)
    model = build_model(tokenizer, width=128, inner=256, layers=3, max_new_tokens=96)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")

    eos_ids = frozenset([tokenizer.eos_token_id])
    vocabulary, turn_tokens = (
        Vocabulary(tokenizer, eos_ids),
        TurnTokenizer(tokenizer, eos_ids, end_marks=()),
    )
    policy = Policy(model, temperature=1.0, microbatch_tokens=4096)
    train_conversations(policy, vocabulary, draw_repetitions(tokenizer, rng), REPETITION, report)
    for lesson, transcripts in zip(LESSONS, lessons, strict=True):
        conversations = [encode(turn_tokens, *transcript) for transcript in transcripts]
        train_conversations(policy, vocabulary, conversations, lesson.settings, report)
    model.save_pretrained(args.out / "search_starter")
    tokenizer.save_pretrained(args.out / "search_starter", save_jinja_files=False)

    search = {"kind": "search", "corpus": str(args.out / "search" / "corpus.jsonl"), "topk": 1}
    prompts = {f"data.{name}": str(args.out / "search" / f"{name}.jsonl") for name in SPLITS}
    overrides = {**prompts, "rollout.tools": [search], "threads": 1}
    evaluation = tether.evaluate(str(args.out / "search_starter"), "search_qa", overrides)
    for name, part in (("greedy", evaluation.greedy), ("sampled", evaluation.sampled)):
        print(f"held-out {name}: {part.mean:.1%} of {part.count}")
    print(f"searches per question: {evaluation.calls:.2f}")


if __name__ == "__main__":
    main()
