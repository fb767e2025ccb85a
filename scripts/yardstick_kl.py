"""Y5: where the KL enters, after Shah et al. 2025 (2512.21852): five cells, in and out of domain.

The recipe `arithmetic` is trained on its English prompts alone and looked at in English and in
Chinese, which it had learnt before. All cells have the same beta; in the loss the estimators stand
plain, without the ratio, as the paper and most libraries have them.
"""

import json
import random
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

from yardstick_runs import largest_fall, one_run, pooled, shown
from yardstick_store import ROOT, Curve, Details, NotThere, Outcome, Store, minutes, row_of_signs

from tether.tasks.arithmetic import carries, draw_distinct, draw_problems

RECIPE = ROOT / "scripts" / "yardstick_recipes" / "kl.yaml"
CODE = ("scripts/yardstick_recipes/kl.yaml", "scripts/yardstick_kl.py", "src/tether")
SEEDS = (0, 1, 2)
BETA = 0.05
TRAIN, HELDOUT = 8000, 500
UNSTABLE = 0.1  # a fall of the training score, over windows of five iterations, in any seed


def in_reward(estimator: str) -> dict[str, Any]:
    term = {"coef": BETA, "estimator": estimator, "ablation": True}
    return {f"kl.in_reward.{name}": value for name, value in term.items()}


def in_loss(estimator: str) -> dict[str, Any]:
    term = {"coef": BETA, "estimator": estimator, "weighting": "plain", "ablation": True}
    fields = {f"kl.in_loss.{name}": value for name, value in term.items()}
    return {"kl.in_reward.coef": 0.0, **fields}


# Without a KL there is no reference; a term of no weight still measures it.
CELLS: Mapping[str, dict[str, Any]] = {
    "k1 in the reward": in_reward("k1"),
    "k3 in the reward": in_reward("k3"),
    "k1 in the loss": in_loss("k1"),
    "k3 in the loss": in_loss("k3"),
    "none": {"kl.in_reward.coef": 0.0, "kl.in_loss.coef": 1e-12},
}
# Tried after the cells had been seen, to find out why k3 in the loss came out best; no sign reads
# these.
SLOWER = {"actor.lr": 1e-4, "critic.lr": 2.5e-4}
TRIED: Mapping[str, dict[str, Any]] = {
    "k1 in the reward, β 0.2": {**in_reward("k1"), "kl.in_reward.coef": 4 * BETA},
    "k1 in the reward, a quarter of the rate": {**in_reward("k1"), **SLOWER},
    "k3 in the loss, a quarter of the rate": {**in_loss("k3"), **SLOWER},
}
KNOWN = "k1 in the reward best; k3 in the reward, k1 in the loss unstable; k3 in the loss between"
HEAD = {
    "en": ["KL", "English", "Chinese", "English greedy", "KL, nats", "largest fall"],
    "zh": ["KL", "英语", "中文", "英语，贪心", "KL，nat", "最大回落"],
}


def run(store: Store) -> Outcome:
    cells = {
        name: [one_cell(store, name, kl, seed) for seed in SEEDS] for name, kl in CELLS.items()
    }
    signs = signs_of(cells)
    tried = tried_cells(store)
    row = row_of_signs(
        part="Y5",
        task={
            "en": "order of KL placements, trained in English, out of domain Chinese",
            "zh": "KL 放在何处的次序，只练英语，域外为中文",
        },
        known=KNOWN,
        signs=signs,
        minutes=minutes(chain(*cells.values(), *tried.values())),
    )
    all_cells = {**cells, **tried}
    details = Details(HEAD, [line(name, results) for name, results in all_cells.items()])
    curves = [
        Curve("KL placements, English", name, mean_curve(results))
        for name, results in cells.items()
    ]
    return Outcome([row], curves, details)


def tried_cells(store: Store) -> dict[str, list[dict[str, Any]]]:
    """Return what was tried afterwards, without the cells that are not measured yet."""
    found = {}
    for name, kl in TRIED.items():
        with suppress(NotThere):
            found[name] = [one_cell(store, name, kl, seed) for seed in SEEDS]
    return found


def one_cell(store: Store, name: str, kl: Mapping[str, Any], seed: int) -> dict[str, Any]:
    def paths() -> dict[str, Any]:
        folder = store.work / "kl-data"
        write_data(folder)
        heldout = {
            language: str(folder / f"heldout-{language}.jsonl")
            for language in ("english", "chinese")
        }
        return {"data.train": str(folder / "train.jsonl"), "data.heldout": heldout}

    fields = {"seed": seed, **kl}
    beside = {"data": [TRAIN, HELDOUT]}
    slug = name.replace(" ", "-").replace(",", "").replace("β", "beta")
    return one_run(store, f"Y5-{slug}-seed{seed}", RECIPE, fields, paths, CODE, beside)


def write_data(folder: Path) -> None:
    """Write English training prompts, and held-out ones in both languages: the starter's kind."""

    def draw(split: Any, language: Any) -> Any:
        rng = random.Random(f"Y5 {split} {language}")
        share = 0.45 if split == "train" else 0.25  # as scripts/build_starter.py has it
        return draw_problems(
            rng, split, (language,), share, lambda a, b: carries(a, b) or rng.random() < 0.7
        )

    folder.mkdir(parents=True, exist_ok=True)
    files = {"train": list(islice(draw("train", "english"), TRAIN))}
    for language in ("english", "chinese"):
        files[f"heldout-{language}"] = draw_distinct(draw("heldout", language), HELDOUT)
    for name, problems in files.items():
        rows = ({"prompt": p.prompt, "answer": p.answer} for p in problems)
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def final(results: Sequence[Mapping[str, Any]], language: str, how: str = "sampled") -> Any:
    """Return the share over all seeds after training."""
    return pooled([result["evals"][-1]["sets"][language][how] for result in results])


def falls(results: Sequence[Mapping[str, Any]]) -> float:
    return max(largest_fall(result["curves"]["score/mean"]) for result in results)


def spent(results: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean KL to the starter of a sampled English response, in nats."""
    return statistics.fmean(result["evals"][-1]["sets"]["english"]["kl"] for result in results)


def line(name: str, results: Sequence[Mapping[str, Any]]) -> list[str]:
    scores = [shown(final(results, language)) for language in ("english", "chinese")]
    greedy = shown(final(results, "english", "greedy"))
    return [name, *scores, greedy, f"{spent(results):.2f}", f"{falls(results):.3f}"]


def signs_of(cells: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, bool]:
    """Return what the paper says, and whether it was found here."""
    english = {name: final(results, "english").mean for name, results in cells.items()}
    chinese = {name: final(results, "chinese").mean for name, results in cells.items()}
    fell = {name: falls(results) for name, results in cells.items()}
    best, other = "k1 in the reward", "k3 in the loss"
    placed = [name for name in cells if name != "none"]
    return {
        "k1 in the reward best in domain": english[best] == max(english[n] for n in placed),
        "and out of domain": chinese[best] == max(chinese[n] for n in placed),
        "k3 in the reward unstable": fell["k3 in the reward"] > UNSTABLE,
        "k1 in the loss unstable": fell["k1 in the loss"] > UNSTABLE,
        "k3 in the loss stable": fell[other] <= UNSTABLE,
        "k3 in the loss worse than k1 in the reward": english[other] < english[best],
    }


def mean_curve(results: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return the mean training score over the seeds by iteration."""
    scores = zip(*(result["curves"]["score/mean"] for result in results), strict=True)
    return [(i + 1, statistics.fmean(column)) for i, column in enumerate(scores)]
