"""Y3: twenty families of reasoning-gym, named in advance, one YAML for all: supervised, then PPO.

A Llama of 4 layers and width 128 reads right answers for a fixed number of steps, from seeds that
neither PPO nor the held-out questions use. Held-out questions that PPO's hold too are left out.
"""

import importlib.metadata
import importlib.util
import json
import random
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from build_starter import build_model, build_tokenizer
from yardstick_runs import one_run, one_sft
from yardstick_store import ROOT, Details, NotThere, Outcome, Row, Store, minutes

from tether.config.load import load_config
from tether.ppo.estimates import Estimate
from tether.support.reasoning_gym import reasoning_gym_family

RECIPES = ROOT / "scripts" / "yardstick_recipes"
RECIPE = RECIPES / "reasoning.yaml"
CODE = ("scripts/yardstick_recipes", "scripts/yardstick_reasoning.py", "src/tether")
PREFIX = "reasoning_gym:"
SEED = 0
STEPS, ROWS = 1500, 64  # of the supervised stage
LESSON_SEED = 500_000_000  # of its first question; PPO's begin at 0, held-out ones at a milliard
VOCABULARY = 4096
PROMISED = 15
HEAD = {
    "en": ["family", "before", "after", "greedy before", "greedy after", ""],
    "zh": ["题型", "之前", "之后", "贪心，之前", "贪心，之后", ""],
}
HOW = ("sampled", "greedy")
VERDICTS = {True: "+", False: "−", None: ""}


def run(store: Store) -> Outcome:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise NotThere("reasoning-gym is not installed: pip install -e '.[reasoning]'")
    result = one_run(
        store,
        f"Y3-seed{SEED}",
        RECIPE,
        {"seed": SEED},
        lambda: {"model.actor": str(supervised(store.work / f"reasoning-seed{SEED}", SEED))},
        CODE,
        {
            "sft": (RECIPES / "reasoning_sft.yaml").read_text(encoding="utf-8"),
            "lesson": [STEPS, ROWS, LESSON_SEED, VOCABULARY],
            "reasoning_gym": importlib.metadata.version("reasoning_gym"),
        },
    )
    before, after = (result["evals"][when] for when in (0, -1))
    verdicts = {
        name: verdict(of(before, name, "sampled"), of(after, name, "sampled"))
        for name in before["sets"]
    }
    means = [f"{record['sampled']['mean']:.3f}" for record in (before, after)]
    improved = sum(v is True for v in verdicts.values())
    damaged = sum(v is False for v in verdicts.values())
    row = Row(
        part="Y3",
        task={
            "en": "20 families of reasoning-gym, one YAML",
            "zh": "reasoning-gym 的 20 类题，同一个 YAML",
        },
        known="none at this size",
        ours=f"{improved} improved, {damaged} damaged",
        reached=improved >= PROMISED and not damaged,
        minutes=minutes([result]),
        note={
            "en": f"all questions {means[0]} to {means[1]}",
            "zh": f"全部题目 {means[0]} 到 {means[1]}",
        },
    )
    lines = []
    for name, sign in verdicts.items():
        scores = [of(record, name, how) for how in HOW for record in (before, after)]
        lines.append([name, *map(shown, scores), VERDICTS[sign]])
    return Outcome([row], details=Details(HEAD, lines))


def of(record: Mapping[str, Any], family: str, how: str) -> Estimate:
    return Estimate.from_record(record["sets"][family][how])


def verdict(before: Estimate, after: Estimate) -> bool | None:
    """Return whether a family got better (True) or worse (False) with intervals apart."""
    return None if not after.apart_from(before) else after.mean > before.mean


def shown(score: Estimate) -> str:
    return f"{score.mean:.2f} ({score.low:.2f} – {score.high:.2f})"


def families() -> dict[str, dict[str, Any]]:
    """Return the arguments of the recipe's families by name, without the size."""
    recipe = load_config(RECIPE, {"model.actor": "tether:starter"})
    sources = recipe.data.files("train")
    return {
        source.path.removeprefix(PREFIX): {k: v for k, v in source.arguments.items() if k != "size"}
        for source in sources
    }


def supervised(folder: Path, seed: int) -> Path:
    """Write the lesson and the model, and train it by `tether sft`."""
    if not (folder / "model" / "tokenizer.json").is_file():  # written last
        write_lesson(folder, seed)
    fields = {
        "seed": seed,
        "model.start": str(folder / "model"),
        "data.train": str(folder / "lesson.jsonl"),
    }
    return one_sft(RECIPES / "reasoning_sft.yaml", fields, folder / "sft-run")


def write_lesson(folder: Path, seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    named = families()
    each = -(-STEPS * ROWS // len(named))
    rows = []
    for family, arguments in named.items():
        items = reasoning_gym_family(family, LESSON_SEED + 2 * seed * each, 2 * each, arguments)
        drawn = (items[i] for i in range(2 * each))
        answered = (x for x in drawn if str(x["answer"]))  # 0 in another base is an empty text
        rows += [
            {"prompt": x["question"], "response": str(x["answer"])} for x in islice(answered, each)
        ]
    random.Random(f"Y3 {seed}").shuffle(rows)
    rows = rows[: STEPS * ROWS]
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / "lesson.jsonl").write_text("".join(lines), encoding="utf-8")
    torch.manual_seed(seed)
    some = [text for row in rows[:20_000] for text in row.values()]
    tokenizer = build_tokenizer(some, "[0-9]", VOCABULARY, min_frequency=20)
    model = build_model(tokenizer, width=128, inner=384, layers=4, max_new_tokens=24)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model", save_jinja_files=False)
