"""Build the world of facts and the model that is to learn to search it: part of `make starter`.

The model is taught on transcripts from thousands of small worlds, a fresh one for every few
questions, so that it cannot know any fact and has to copy from what it is given. In the first
lesson it sees good searches. The second is a mixture of habits in which it mostly guesses, and
where it searches often asks for the wrong thing. What to search for, and when, is left to PPO.
"""

import argparse
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tether import assets
from tether.data.conversations import Conversation
from tether.data.facts_world import (
    BIRTH_YEARS,
    FOUNDING_YEARS,
    GIVEN_CHARACTERS,
    LANGUAGES,
    SURNAMES,
    TOWN_CHARACTERS,
    Entity,
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
from tether.data.templates import render_prompt
from tether.models.loading import Vocabulary
from tether.models.policy import Policy
from tether.rollout.speech import Speech
from tether.train.sft import SFTSettings, train_conversations

ASSETS = Path(assets.__file__).parent
NUM_PEOPLE, NUM_TOWNS = 320, 120  # in each language
NUM_TRAIN, NUM_HELDOUT = 2800, 500


REPLY, MAX_OBSERVATION_TOKENS = "<information>{}</information>", 48  # as in the recipe


@dataclass(frozen=True)
class Habits:
    """How often, where there is a choice, a transcript does what would help."""

    searches: float
    first_query: float  # of the searches, how many ask for the subject
    searches_again: float  # of the two-hop questions whose first document has been found
    second_query: float  # of those, how many ask for the entity that it names


@dataclass(frozen=True)
class Lesson:
    num_transcripts: int
    habits: Habits
    learns_documents: bool  # a title that comes again in its text is practice in copying
    settings: SFTSettings


LESSONS = (
    Lesson(
        60_000,
        Habits(searches=0.9, first_query=0.9, searches_again=0.9, second_query=0.9),
        learns_documents=True,
        settings=SFTSettings(num_steps=4000, lr=3e-3, rows=32, weight_decay=0.1),
    ),
    Lesson(
        16_000,
        Habits(searches=0.35, first_query=0.5, searches_again=0.25, second_query=0.6),
        learns_documents=False,
        settings=SFTSettings(num_steps=500, lr=1e-3, rows=32, weight_decay=0.1),
    ),
)

PAD, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Kept apart before the merges: tags, capitalised words, pairs of digits, characters of names. All
# else is stock phrases, each of which becomes one token.
PIECES = (
    r"</?[a-z]+>| ?[A-Z][a-z]+|[0-9]{2}"
    rf"|[{SURNAMES}{GIVEN_CHARACTERS}{TOWN_CHARACTERS}]|(?<=[{TOWN_CHARACTERS}])镇"
)


@dataclass(frozen=True)
class Span:
    """A stretch of a transcript: the model's own, which it learns, or the tool's."""

    text: str
    learnt: bool


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
    yield Span(f"<answer> {answer or guess(question, rng)} </answer>", learnt=True)


def look_up(wanted: Entity, world: World, share: float, rng: random.Random) -> Entity:
    """The entity that is searched for: the wanted one, or any other."""
    if rng.random() < share:
        return wanted
    return rng.choice([other for other in world.values() if other is not wanted])


def searched(entity: Entity) -> Iterator[Span]:
    yield Span(f"<search> {entity.name} </search>", learnt=True)
    yield Span(f"{entity.name}\n{entity.text}", learnt=False)


def guess(question: Question, rng: random.Random) -> str:
    """Something of the right kind; right by chance only."""
    last = question.path[-1]
    match question.asked:
        case "year":
            return draw_year(rng, BIRTH_YEARS if last.kind == "person" else FOUNDING_YEARS)
        case "town":
            return draw_town_name(rng, last.language)
        case _:
            return draw_person_name(rng, last.language)


def draw_transcripts(lesson: Lesson, rng: random.Random) -> Iterator[tuple[str, list[Span]]]:
    """Prompts and transcripts, half of them two-hop, from many worlds of eleven entities."""
    for number in range(lesson.num_transcripts // 8):
        world = draw_world(rng, LANGUAGES[number % 2], num_people=8, num_towns=3)
        for ask in (ask_one_hop, ask_two_hop):
            for question in rng.sample(list(ask(world)), 4):
                yield question.prompt, list(transcribe(question, world, lesson.habits, rng))


def encode(
    tokenizer: PreTrainedTokenizerFast, prompt: str, spans: list[Span], learns_documents: bool
) -> Conversation:
    """Token by token what a rollout would give: each span is encoded apart."""
    speech = Speech(tokenizer, frozenset([tokenizer.eos_token_id]), ())
    ids: list[int] = []
    learnt: list[bool] = []
    for span in spans:
        if span.learnt:
            piece = tokenizer(span.text, add_special_tokens=False).input_ids
        else:
            piece, _, _ = speech.observation(span.text, REPLY, MAX_OBSERVATION_TOKENS)
        ids += piece
        learnt += [span.learnt or learns_documents] * len(piece)
    return Conversation(
        render_prompt(tokenizer, prompt, None), [*ids, tokenizer.eos_token_id], [*learnt, True]
    )


def texts_of(transcripts: list[tuple[str, list[Span]]]) -> Iterator[str]:
    """Every text that is encoded, for the tokenizer to learn from."""
    for prompt, spans in transcripts:
        yield from (prompt, *(span.text for span in spans), *REPLY.split("{}"))


def build_tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE, so any text survives the round trip."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        min_frequency=100,
        special_tokens=[PAD, END, SYSTEM, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        max_new_tokens=96,
    )
    return model


def write_world(folder: Path, rng: random.Random) -> None:
    """The corpus, and the questions of both sides of the split, one- and two-hop in equal parts."""
    folder.mkdir(parents=True, exist_ok=True)
    world: dict[str, Entity] = {}
    for language in LANGUAGES:
        world |= draw_world(rng, language, NUM_PEOPLE, NUM_TOWNS)
    contents = (f"{entity.name}\n{entity.text}" for entity in world.values())
    write_jsonl(
        folder / "corpus.jsonl",
        ({"id": str(number), "contents": text} for number, text in enumerate(contents)),
    )
    asked = {ask: list(ask(world)) for ask in (ask_one_hop, ask_two_hop)}
    for split, number in (("train", NUM_TRAIN), ("heldout", NUM_HELDOUT)):
        chosen = []
        for questions in asked.values():
            chosen += rng.sample([q for q in questions if split_of(q) == split], number // 2)
        rng.shuffle(chosen)
        rows = ({"prompt": q.prompt, "ground_truth": q.answer, "hops": len(q.path)} for q in chosen)
        write_jsonl(folder / f"{split}.jsonl", rows)


def write_jsonl(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8")


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
    tokenizer = build_tokenizer(texts_of(lessons[0]))
    model = build_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")

    def report(step: int, loss: float) -> None:
        if (step + 1) % 100 == 0:
            print(f"step {step + 1:5d}  loss {loss:.3f}", flush=True)

    vocabulary = Vocabulary(tokenizer, frozenset([tokenizer.eos_token_id]))
    for lesson, transcripts in zip(LESSONS, lessons, strict=True):
        conversations = [encode(tokenizer, *t, lesson.learns_documents) for t in transcripts]
        policy = Policy(model, temperature=1.0, microbatch_tokens=16_384)
        train_conversations(policy, vocabulary, conversations, lesson.settings, report)
    model.save_pretrained(args.out / "search_starter")
    tokenizer.save_pretrained(args.out / "search_starter", save_jinja_files=False)


if __name__ == "__main__":
    main()
