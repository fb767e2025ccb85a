"""Measure two lambdas and value pretraining on long responses, and paste into docs/updates.md.

    python scripts/measure_long_responses.py            # measure what is missing, print
    python scripts/measure_long_responses.py --write    # and paste

A prompt is four letters of twelve; a response has 64, and its score, 1 or 0 after the end, says
whether it began with the prompt's four. The other sixty are free, as much of a long response is:
what decides comes early, and with a lambda of 0.95 only 4% of the score reaches it, unless a critic
knows by then. Supervised training on responses that keep each letter with 80% gives a model that is
right in 0.8^4 = 41%, from which each variant gets as many rows, those of value pretraining's bank
counted. Before that each gets the same search over the actor's rate, on seed 100.

Results are kept under docs/results by a hash of their settings: another machine goes on. The
settings stood here before the first run on seeds 0 to 2. Some 25 processor minutes. Exits 1 if the
critic explains less than 0.25 at the first policy step, or if the held-out score is not better on
every seed, intervals apart.
"""

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from measure import paste
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import Fuse
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from yardstick_runs import one_run, one_sft, pooled, shown
from yardstick_store import KEPT, ROOT, Store, minutes

from tether.algo.masked import explained_variance
from tether.cli.terminal import table
from tether.ppo.estimates import Estimate
from tether.run.reader import read_lines

SOURCE = ROOT / "scripts" / "yardstick_recipes"
RECIPE, SFT, REWARD = (SOURCE / name for name in ("opening.yaml", "opening_sft.yaml", "opening.py"))
CODE = ("scripts/yardstick_recipes", "scripts/measure_long_responses.py", "src/tether")
SEEDS, SEARCH_SEED = (0, 1, 2), 100
RATES = (1e-3, 3e-4, 3e-3)
ALPHABET, OPENING, LETTERS = "abcdefghijkl", 4, 64
KEPT_SHARE = 0.8  # of the opening's letters, in the demonstrations
DEMONSTRATIONS, TRAIN, HELDOUT = 24_000, 8_000, 500
ITERATIONS, ROWS, BANK = 40, 128, 512  # the recipe's, and the rows of value pretraining
ENOUGH = 0.25  # explained variance at the first policy step

PLAIN, BOTH = "one lambda, 0.95", "two lambdas, value pretraining"
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    PLAIN: {},
    "one lambda, 1": {"advantage.lam": 1.0},
    "two lambdas": {"critic.lam": 1.0},
    BOTH: {
        "critic.lam": 1.0,
        "critic.pretrain.prompts": BANK,
        "critic.pretrain.explained_variance": 0.5,
        "critic.pretrain.max_epochs": 20,
        "train.iterations": ITERATIONS - BANK // ROWS,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="paste into docs/updates.md")
    parser.add_argument("--search", action="store_true", help="only the search, on seed 100")
    parser.add_argument("--results", type=Path, default=KEPT, help="one file a run")
    options = parser.parse_args()
    store = Store(options.results, Path("runs/long-responses"))
    rates = {name: best_rate(store, name) for name in VARIANTS}
    print(*(f"{name}: {rate:g}" for name, rate in rates.items()), sep="\n")
    if options.search:
        return
    found = {
        name: [one_cell(store, name, rate, seed) for seed in SEEDS] for name, rate in rates.items()
    }
    lines = [describe(found, rates), "", *verdict(found)]
    spent = minutes(result for results in found.values() for result in results)
    below = [f"  {spent:.1f} processor minutes.", *(f"  {m}" for m in store.machines)]
    print(*lines, *below, sep="\n")
    if options.write:
        marker = "long responses: made by `python scripts/measure_long_responses.py --write`"
        paste(ROOT / "docs" / "updates.md", marker, [*lines, "", *below])
    sys.exit(0 if is_reached(found) else 1)


def best_rate(store: Store, name: str) -> float:
    """Return the actor's rate with the best held-out score on the search's seed."""

    def score(rate: float) -> float:
        return final(one_cell(store, name, rate, SEARCH_SEED)).mean

    return max(RATES, key=score)


def one_cell(store: Store, name: str, rate: float, seed: int) -> dict[str, Any]:
    beside = {
        "data": [ALPHABET, OPENING, LETTERS, KEPT_SHARE, DEMONSTRATIONS, TRAIN, HELDOUT],
        "sft": SFT.read_text(encoding="utf-8"),
        "reward": REWARD.read_text(encoding="utf-8"),
    }

    def paths() -> dict[str, Any]:
        folder = store.work / f"seed{seed}"
        make(folder, seed)
        started = {
            "seed": seed,
            "model.start": str(folder / "model"),
            "data.train": str(folder / "demonstrations.jsonl"),
        }
        return {
            "model.actor": str(one_sft(SFT, started, folder / "sft-run")),
            "data.train": str(folder / "train.jsonl"),
            "data.heldout": str(folder / "heldout.jsonl"),
            "reward.kind": f"{REWARD}:opening_kept",
        }

    fields = {"seed": seed, "actor.lr": rate, **VARIANTS[name]}
    slug = "".join(c if c.isalnum() else "-" for c in name)
    kept = f"long-{slug}-seed{seed}"
    return one_run(store, kept, RECIPE, fields, paths, CODE, beside, also=read_explained)


def make(folder: Path, seed: int, demonstrations: int = DEMONSTRATIONS) -> None:
    """Write model/, demonstrations.jsonl for supervised training, train.jsonl and heldout.jsonl."""
    if (folder / "model" / "tokenizer.json").is_file():  # written last
        return
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(f"opening {seed}")
    asked: set[str] = set()
    for name, count in (("heldout", HELDOUT), ("train", TRAIN)):
        openings = [draw_opening(rng, asked) for _ in range(count)]
        if name == "heldout":
            asked = set(openings)
        write_jsonl(folder / f"{name}.jsonl", [{"prompt": f"{o}=", "opening": o} for o in openings])
    openings = (draw_opening(rng, asked) for _ in range(demonstrations))
    shown_rows = [{"prompt": f"{o}=", "response": demonstrate(rng, o)} for o in openings]
    write_jsonl(folder / "demonstrations.jsonl", shown_rows)
    build_model(seed).save_pretrained(folder / "model")
    build_tokenizer().save_pretrained(folder / "model")


def draw_opening(rng: random.Random, without: set[str]) -> str:
    while True:
        opening = "".join(rng.choice(ALPHABET) for _ in range(OPENING))
        if opening not in without:
            return opening


def demonstrate(rng: random.Random, opening: str) -> str:
    """Return 64 letters that keep each of the opening's with 80%; the others are drawn freely."""

    def kept(letter: str) -> str:
        others = ALPHABET.replace(letter, "")
        return letter if rng.random() < KEPT_SHARE else rng.choice(others)

    free = (rng.choice(ALPHABET) for _ in range(LETTERS - OPENING))
    return "".join([*map(kept, opening), *free])


VOCABULARY = {c: i for i, c in enumerate((*ALPHABET, "=", "<|pad|>", "<|end|>"))}
POSITIONS = 80


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per letter."""
    words = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<|pad|>"))
    words.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    words.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        model_max_length=POSITIONS,
    )


def build_model(seed: int) -> GPT2LMHeadModel:
    """Return a GPT-2 of 2 layers and width 64: its learnt positions tell the opening from the rest
    and where a response ends."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=len(VOCABULARY),
        n_layer=2,
        n_embd=64,
        n_head=4,
        n_positions=POSITIONS,
        bos_token_id=None,
        eos_token_id=VOCABULARY["<|end|>"],
        pad_token_id=VOCABULARY["<|pad|>"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_explained(run: Path) -> dict[str, Any]:
    """Return the share of the variance of lambda = 1 returns that the critic explains at the first
    policy step: on the first iteration's rows, with the values before any update."""
    rows = read_lines(run / "rollouts" / "000000.jsonl")
    values, returns = [], []
    for row in rows:
        rewards = row["token_level_rewards"]
        values += row["values"]
        returns += [sum(rewards[t:]) for t in range(len(rewards))]
    one, other = torch.tensor([values]), torch.tensor([returns])
    mask = torch.ones_like(one, dtype=torch.bool)
    return {"explained": float(explained_variance(one, other, mask))}


def final(result: Mapping[str, Any]) -> Estimate:
    """Return the held-out score of sampled responses after training."""
    return Estimate.from_record(result["evals"][-1]["sampled"])


def describe(found: Mapping[str, Sequence[Mapping[str, Any]]], rates: Mapping[str, float]) -> str:
    head = ["variant", "rate", "explained at the first step", "held out, by seeds", "all seeds"]
    rows = [head]
    start = pooled([result["evals"][0]["sampled"] for result in found[PLAIN]])
    rows.append(["start", "", "", "", f"{start.mean:.1%}"])
    for name, results in found.items():
        explained = ", ".join(f"{result['explained']:.2f}" for result in results)
        scores = ", ".join(f"{final(result).mean:.1%}" for result in results)
        every = shown(pooled([result["evals"][-1]["sampled"] for result in results]))
        rows.append([name, f"{rates[name]:g}", explained, scores, every])
    return table(rows, numbers_from=5)


def signs(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, bool]:
    """Return what is asked of value pretraining and two lambdas, and whether it was found."""
    plain, both = found[PLAIN], found[BOTH]
    pairs = [(final(p), final(b)) for p, b in zip(plain, both, strict=True)]
    return {
        f"the critic explains at least {ENOUGH:g} at the first policy step": all(
            result["explained"] >= ENOUGH for result in both
        ),
        "and without pretraining nothing": all(abs(result["explained"]) < 0.05 for result in plain),
        "better on every seed, intervals apart": all(p.high < b.low for p, b in pairs),
    }


def verdict(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    return [f"  {sign}: {'yes' if held else 'no'}" for sign, held in signs(found).items()]


def is_reached(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> bool:
    return all(signs(found).values())


if __name__ == "__main__":
    main()
