"""Build the model that the recipe `reasoning` begins with: part of `make starter`.

First it is taught right answers of the recipe's five families. Then comes a short lesson in which
every second answer is that of another question of the family, so that it often guesses: the form of
an answer is right, and what it says is not. Which of its two habits pays is left to PPO. Questions
are of other seeds than the recipe's, and none of them is a held-out one.
"""

import argparse
import random
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from build_starter import ASSETS, build_model, build_tokenizer, report
from reasoning_gym.arithmetic.leg_counting import ANIMALS

import tether
from tether.config.load import load_config
from tether.models.policy import Policy
from tether.models.vocabulary import Vocabulary
from tether.stages.sft import SFTSettings, train_sft
from tether.support.reasoning_gym import reasoning_gym_family

PREFIX = "reasoning_gym:"
HELDOUT_SEED = 1_000_000_000  # where held-out questions begin; those of training begin at 0
Dialogue = tuple[str, str]


@dataclass(frozen=True)
class Lesson:
    seed: int  # of its first question
    num_questions: int  # of each family
    guesses: float  # of the answers, how many are another question's
    settings: SFTSettings


LESSONS = (
    Lesson(500_000_000, 8000, 0.0, SFTSettings(num_steps=1500, lr=2e-3, weight_decay=0.1)),
    Lesson(
        700_000_000,
        2000,
        0.5,
        SFTSettings(num_steps=150, lr=1e-3, weight_decay=0.1, warmup_steps=20),
    ),
)
TWICE = "chain_sum"  # the hardest; the first lesson has twice as many of its questions

# Each becomes one token, as does the name of an animal; all else is read letter by letter.
PHRASES = (
    "State the final answer to the following arithmetic problem: ",
    "Find the Greatest Common Divisor (GCD) of these numbers: ",
    ". Give only the GCD as your final answer.",
    "Your task is to count how many legs there are in total when given a list of animals.\n\nNow, "
    "how many legs are there in total if you have ",
    'How many times does the letter "',
    '" appear in the text: "',
    "Spell this word backward (example: sun -> nus): ",
)


def families() -> dict[str, dict]:
    """Return the arguments of the recipe's families, by name; the size is that of held-out data."""
    sources = load_config("reasoning").data.files("heldout")
    return {source.path.removeprefix(PREFIX): dict(source.arguments) for source in sources}


def draw_questions(family: str, seed: int, size: int, arguments: dict) -> list[Dialogue]:
    """Return questions with their answers."""
    given = {name: value for name, value in arguments.items() if name != "size"}
    items = reasoning_gym_family(family, seed, size, given)
    return [(items[i]["question"], items[i]["answer"]) for i in range(size)]


def draw_lesson(lesson: Lesson, rng: random.Random) -> list[Dialogue]:
    """Return the dialogues of a lesson, without the recipe's held-out questions."""
    found = []
    for family, arguments in families().items():
        heldout = draw_questions(family, HELDOUT_SEED, arguments["size"], arguments)
        asked = {question for question, _ in heldout}
        twice = 2 if family == TWICE and not lesson.guesses else 1
        drawn = draw_questions(family, lesson.seed, twice * lesson.num_questions, arguments)
        found += [
            (question, rng.choice(drawn)[1] if rng.random() < lesson.guesses else answer)
            for question, answer in drawn
            if question not in asked
        ]
    rng.shuffle(found)
    return found


def pieces() -> str:
    """Return what is kept apart before the merges: phrases, names of animals, and characters."""
    animals = sorted(ANIMALS, key=len, reverse=True)
    names = [rf"(?<=[0-9] ){re.escape(animal)}" for animal in animals]
    return "|".join([*map(re.escape, PHRASES), *names, r"[\s\S]"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ASSETS, help="where reasoning_starter/ goes")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # sums of floats depend on the number of threads
    rng = random.Random(f"lessons {args.seed}")
    lessons = [draw_lesson(lesson, rng) for lesson in LESSONS]
    texts = [text for dialogue in lessons[0] for text in dialogue]
    tokenizer = build_tokenizer(texts, pieces(), vocab_size=1024, min_frequency=50)
    model = build_model(tokenizer, width=128, inner=384, layers=4, max_new_tokens=12)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")

    vocabulary = Vocabulary(tokenizer, frozenset([tokenizer.eos_token_id]))
    policy = Policy(model, temperature=1.0, microbatch_tokens=16_384)
    for lesson, dialogues in zip(LESSONS, lessons, strict=True):
        train_sft(policy, vocabulary, dialogues, lesson.settings, report)
    start = args.out / "reasoning_starter"
    model.save_pretrained(start)
    tokenizer.save_pretrained(start, save_jinja_files=False)

    evaluation = tether.evaluate(str(start), "reasoning", {"threads": 1})
    for name, part in (("greedy", evaluation.greedy), ("sampled", evaluation.sampled)):
        print(f"held-out {name}: {part.mean:.1%} of {part.count}")


if __name__ == "__main__":
    main()
