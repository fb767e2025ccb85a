"""What is asked of every side: the same model, prompts and settings, as JSON.

Prompts are random ids from a fixed seed, all of one length, as no side needs to understand them;
the arithmetic problems are the recipe's own.
"""

import random
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from bench.models import CACHE, VOCABULARY
from bench.protocol import Job
from tether import assets
from tether.config import DataSection
from tether.config.load import load_config
from tether.data.prompts import load_prompts

THREADS = 2
FIRST_ID = 16  # the ids below it are special in one model or the other


def prompts(rows: int, tokens: int, vocabulary: int = VOCABULARY, seed: int = 0) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(FIRST_ID, vocabulary) for _ in range(tokens)] for _ in range(rows)]


def mixed_lengths(rows: int, shortest: int, longest: int, seed: int = 0) -> list[int]:
    """Evenly spread from the shortest to the longest, in a shuffled order."""
    step = (longest - shortest) / (rows - 1)
    lengths = [round(shortest + step * i) for i in range(rows)]
    random.Random(seed).shuffle(lengths)
    return lengths


def sampling_job(
    model: Path,
    prompt_ids: list[list[int]],
    lengths: list[int],
    repeats: int,
    compute: str = "float32",
) -> Job:
    return {
        "model": str(model),
        "compute": compute,
        "prompts": prompt_ids,
        "lengths": lengths,
        "threads": THREADS,
        "repeats": repeats,
    }


def ppo_job(
    model: Path,
    prompt_ids: list[list[int]],
    response_tokens: int,
    repeats: int,
    lora_rank: int = 0,
    shared_trunk: bool = False,
    compute: str = "float32",
    learn_layers: int | None = None,
) -> Job:
    """Four epochs of one minibatch each, with a reference; the learning rate changes no time.

    `compute` is the number format of products; weights that learn are float32 on every side.
    """
    return {
        "model": str(model),
        "compute": compute,
        "learn_layers": learn_layers,
        "prompts": prompt_ids,
        "response_tokens": response_tokens,
        "epochs": 4,
        "lr": 1e-6,
        "beta": 0.05,
        "lora_rank": lora_rank,
        "shared_trunk": shared_trunk,
        "threads": THREADS,
        "repeats": repeats,
        "scratch": scratch("ppo"),
    }


def update_job(
    model: Path, prompt_ids: list[list[int]], samples: int, response_tokens: int, share: bool
) -> Job:
    """The updates of an iteration with several rows per prompt; one epoch, one minibatch."""
    job = ppo_job(model, prompt_ids, response_tokens, repeats=2)
    return {**job, "epochs": 1, "samples_per_prompt": samples, "share_prompts": share}


def time_to_score_job(
    score: float,
    eval_every: int,
    compute: str = "float32",
    overrides: dict[str, Any] | None = None,
    **fields: Any,
) -> Job:
    """The recipe `arithmetic` for both sides; TRL is given its prompts as text and as ids.

    The seed of a run is the number of its turn. `overrides` are ours, `fields` are TRL's.
    """
    config = load_config("arithmetic", {"threads": THREADS})
    tokenizer = AutoTokenizer.from_pretrained(assets.resolve(config.model.actor))

    def problems(file: str) -> list[dict]:
        found = load_prompts(file, DataSection(train=file), tokenizer, ["answer"]).prompts
        return [
            {"prompt": tokenizer.decode(ids), "ids": ids, "answer": columns["answer"]}
            for ids, columns in zip(found.ids, found.columns, strict=True)
        ]

    in_format = {} if compute == "float32" else {"model.compute": compute}
    return {
        "recipe": "arithmetic",
        "overrides": {**in_format, **(overrides or {})},
        "compute": compute,
        "model": str(assets.resolve(config.model.actor)),
        "train": problems(config.data.train),
        "heldout": problems(config.data.heldout)[: config.train.eval_prompts],
        "rows": config.rows,
        "samples_per_prompt": config.rollout.samples_per_prompt,
        "response_tokens": config.rollout.max_response_tokens,
        "minibatch_rows": config.actor.minibatch_rows,
        "epochs": config.actor.epochs,
        "iterations": config.train.iterations,
        "lr": config.actor.lr,
        "critic_lr": config.critic.lr,
        "beta": config.kl.in_reward.coef,
        "score": score,
        "eval_every": eval_every,
        "threads": THREADS,
        "repeats": 1,
        "scratch": scratch("time-to-score"),
        **fields,
    }


def scratch(name: str) -> str:
    folder: Path = CACHE / "scratch" / name
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)
