"""The generated task as files: demonstrations, questions, and labelled pairs of responses."""

import itertools
import math
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tether.algo.random import uniform
from tether.data.arithmetic import Split
from tether.data.courtesy import Question, demonstrate, draw_questions, utility
from tether.data.templates import render_prompt
from tether.models.loading import load_causal_lm, load_vocabulary
from tether.pipeline.layout import Layout
from tether.rollout.episode import Draw, SingleTurn
from tether.rollout.local import LocalSampler
from tether.stages import PipelineConfig
from tether.train.roles import pick_device

BATCH = 512  # responses sampled together
SPLITS: tuple[Split, ...] = ("train", "heldout")


def write_demonstrations(layout: Layout) -> None:
    for split, size in _sizes(layout.config, layout.config.task.demonstrations):
        rng = random.Random(f"demonstrations {split} {layout.config.seed}")
        questions = take_questions(rng, split, size)
        rows = [
            {**question.row(), "response": demonstrate(question, rng)} for question in questions
        ]
        layout.write("demonstrations", split, rows)


def write_questions(layout: Layout) -> None:
    for split, size in _sizes(layout.config, layout.config.task.questions):
        rng = random.Random(f"questions {split} {layout.config.seed}")
        layout.write("questions", split, [q.row() for q in take_questions(rng, split, size)])


def write_pairs(layout: Layout, sft: Path) -> None:
    """Two responses of the SFT policy to each question, compared by people who err."""
    config = layout.config
    for split, size in _sizes(config, config.task.pairs):
        rng = random.Random(f"pairs {split} {config.seed}")
        questions = take_questions(rng, split, size)
        twice = [question for question in questions for _ in range(2)]
        texts = sample_texts(config, sft, twice, f"pairs {split}")
        luck = uniform(config.seed, f"labels {split}", np.arange(size)).tolist()
        compared = zip(questions, texts[::2], texts[1::2], luck, strict=True)
        layout.write(
            "pairs",
            split,
            [
                label(question, first, second, config.task.noise, u)
                for question, first, second, u in compared
                if first.strip() and second.strip() and first != second
            ],
        )


def take_questions(rng: random.Random, split: Split, size: int) -> list[Question]:
    return list(itertools.islice(draw_questions(rng, split), size))


def label(question: Question, first: str, second: str, noise: float, u: float) -> dict[str, str]:
    """The first is chosen with probability sigmoid(difference in true utility / noise)."""
    difference = utility(first, question) - utility(second, question)
    likes_first = u < 1 / (1 + math.exp(-difference / noise))
    chosen, rejected = (first, second) if likes_first else (second, first)
    return {"prompt": question.prompt, "chosen": chosen, "rejected": rejected}


def sample_texts(
    config: PipelineConfig, model: Path, questions: Sequence[Question], purpose: str
) -> list[str]:
    """One response a question; what is drawn depends on the seed and the purpose."""
    network = load_causal_lm(str(model), "float32", pick_device(config.device))
    vocabulary = load_vocabulary(str(model), network)
    sampler = LocalSampler(vocabulary.eos_ids, config.task.max_response_tokens, 1.0)
    sampler.sync(network, 0)
    turns = [SingleTurn(render_prompt(vocabulary.tokenizer, q.prompt)) for q in questions]
    texts = []
    for start in range(0, len(turns), BATCH):
        rollout = sampler.run(turns[start : start + BATCH], Draw(config.seed, purpose, start))
        rows = zip(rollout.response_ids.tolist(), rollout.response_lengths.tolist(), strict=True)
        texts += [vocabulary.decode(ids[:length]) for ids, length in rows]
    return texts


def _sizes(config: PipelineConfig, train: int) -> list[tuple[Split, int]]:
    return list(zip(SPLITS, (train, config.task.heldout), strict=True))
