"""Y7: parity with rare long demonstrations, after Tsilivis et al. 2025 (2510.11495).

Three shares of long demonstrations; from each supervised model PPO and GRPO go on, in as many rows.
"""

import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from yardstick_runs import one_run, one_sft, pooled, shown
from yardstick_store import ROOT, Curve, Details, Outcome, Store, minutes, row_of_signs

SOURCE = ROOT / "examples" / "parity"
CODE = ("examples/parity", "scripts/yardstick_parity.py", "src/tether")
SEEDS = (0, 1, 2)
SHARES = (0.1, 0.2, 0.5)
BELOW = [share for share in SHARES if share < 1 / 3]
METHODS: Mapping[str, dict[str, Any]] = {
    "PPO": {},
    "GRPO": {"advantage.estimator": "grpo"},
}
CHANCE = (0.45, 0.55)  # where greedy responses of the supervised model are to lie
GENERALISED = 0.95
KNOWN = "below a third greedy at chance; then RL generalises, and responses grow"
HEAD = {
    "en": ["long", "", "greedy before", "greedy after", "sampled after", "tokens, first to last"],
    "zh": ["长示范", "", "贪心，之前", "贪心，之后", "采样，之后", "token 数，首轮到末轮"],
}


def run(store: Store) -> Outcome:
    cells = {
        (share, method): [one_cell(store, share, method, seed) for seed in SEEDS]
        for share in SHARES
        for method in METHODS
    }
    signs = signs_of(cells)
    row = row_of_signs(
        part="Y7",
        task={
            "en": "parity of 12 – 20 bits, rare long demonstrations",
            "zh": "12 – 20 位的奇偶性，长示范很少",
        },
        known=KNOWN,
        signs=signs,
        minutes=minutes(result for results in cells.values() for result in results),
    )
    details = Details(HEAD, [line(*key, results) for key, results in cells.items()])
    curves = [
        Curve(f"parity, {method}", f"{share:.0%} long", mean_curve(results))
        for (share, method), results in cells.items()
    ]
    return Outcome([row], curves, details)


def one_cell(store: Store, share: float, method: str, seed: int) -> dict[str, Any]:
    beside = {
        "share": share,
        "sft": (SOURCE / "sft.yaml").read_text(encoding="utf-8"),
        "made by": (SOURCE / "make.py").read_text(encoding="utf-8"),
        "reward": (SOURCE / "reward.py").read_text(encoding="utf-8"),
    }

    def paths() -> dict[str, Any]:
        folder = store.work / f"parity-{share:g}-seed{seed}"
        model = supervised(folder, share, seed)
        files = {name: str(folder / f"{name}.jsonl") for name in ("train", "heldout")}
        return {
            "model.actor": str(model),
            "data.train": files["train"],
            "data.heldout": files["heldout"],
            "reward.kind": f"{SOURCE / 'reward.py'}:parity_at_end",
        }

    name = f"Y7-{share:g}-{method}-seed{seed}"
    fields = {"seed": seed, **METHODS[method]}
    return one_run(store, name, SOURCE / "rl.yaml", fields, paths, CODE, beside)


def supervised(folder: Path, share: float, seed: int) -> Path:
    """Make the data and the model, and train it on the demonstrations."""
    if not (folder / "model" / "tokenizer.json").is_file():  # written last
        command = [sys.executable, str(SOURCE / "make.py"), str(folder)]
        subprocess.run([*command, "--share", str(share), "--seed", str(seed)], check=True)
    fields = {
        "seed": seed,
        "model.start": str(folder / "model"),
        "data.train": str(folder / "demonstrations.jsonl"),
    }
    return one_sft(SOURCE / "sft.yaml", fields, folder / "sft-run")


def share_of(results: Sequence[Mapping[str, Any]], when: int, how: str) -> Any:
    return pooled([result["evals"][when][how] for result in results])


def tokens(results: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return the mean tokens of a sampled response in the first iteration and in the last."""
    lengths = [result["curves"]["response/length_mean"] for result in results]
    return statistics.fmean(x[0] for x in lengths), statistics.fmean(x[-1] for x in lengths)


def line(share: float, method: str, results: Sequence[Mapping[str, Any]]) -> list[str]:
    shares = [
        shown(share_of(results, when, how))
        for when, how in ((0, "greedy"), (-1, "greedy"), (-1, "sampled"))
    ]
    first, last = tokens(results)
    return [f"{share:.0%}", method, *shares, f"{first:.1f} – {last:.1f}"]


def signs_of(cells: Mapping[tuple[float, str], Sequence[Mapping[str, Any]]]) -> dict[str, bool]:
    """Return what the paper says, and whether it was found here with every share below a third."""
    low, high = CHANCE
    rare = {key: results for key, results in cells.items() if key[0] in BELOW}
    signs = {
        "supervised, greedy, at chance below a third": all(
            low <= share_of(results, 0, "greedy").mean <= high for results in rare.values()
        ),
    }
    for method in METHODS:
        of_method = [results for (_, m), results in rare.items() if m == method]
        signs[f"{method} generalises"] = all(
            share_of(results, -1, "greedy").mean >= GENERALISED for results in of_method
        )
        signs[f"responses grow under {method}"] = all(
            last > first for first, last in map(tokens, of_method)
        )
    return signs


def mean_curve(results: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return the mean score of sampled rows over the seeds by iteration."""
    scores = zip(*(result["curves"]["score/mean"] for result in results), strict=True)
    return [(i + 1, statistics.fmean(column)) for i, column in enumerate(scores)]
