"""Train `search_qa` with state masking, without it and without the tool; paste into docs/search.md.

    python scripts/measure_search.py [--only masked] [--seeds 3] [--threads 2] [--write]

Three seeds of each, and one without the tool. A cell that was measured before under the same
config is not run again, and one that was broken off goes on where it stopped. Exits 1 if the
recipe no longer learns what the document says it learns.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from measure import machine, paste

import tether
from tether.cli.terminal import table
from tether.config import Config
from tether.data.files import read_rows
from tether.ppo.estimates import Estimate
from tether.ppo.evaluate import Evaluation
from tether.run.directory import CONFIG, METRICS, TIMINGS, is_run
from tether.run.reader import read_lines

DOCS = Path(__file__).resolve().parent.parent / "docs"
HELDOUT = "tether:search/heldout.jsonl"
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "masked": {},
    "unmasked": {"rollout.state_masking": False},
    "no tool": {"rollout.tools": []},
}
WORDS = {
    "masked": "as it ships",
    "unmasked": "state masking off",
    "no tool": "without the search tool",
}


@dataclass(frozen=True)
class Cell:
    """What one run gave; exact match of sampled responses to held-out questions."""

    before: Estimate
    after: Estimate
    one_hop: Estimate
    two_hop: Estimate
    searches_before: float
    searches: float
    kl: float
    minutes: float
    curve: list[float]  # mean score of each iteration's rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/measure-search"))
    parser.add_argument("--only", choices=VARIANTS, help="one variant")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="paste into docs/search.md")
    args = parser.parse_args()
    names = [args.only] if args.only else list(VARIANTS)
    results = {
        name: [measure(args.folder, name, seed, args.threads) for seed in range(seeds(name, args))]
        for name in names
    }
    lines = [describe(results), "", f"  Threads {args.threads}. {machine()}"]
    print("\n" + "\n".join(lines))
    if args.write:
        paste(DOCS / "search.md", "make search", lines)
        draw(results, DOCS / "figures" / "search.svg")
    problems = shortfalls(results)
    print("\n".join(problems) or "The recipe learns what it should.")
    sys.exit(1 if problems else 0)


def seeds(name: str, args: argparse.Namespace) -> int:
    """One is enough where nothing can be learned."""
    return 1 if name == "no tool" else args.seeds


def measure(folder: Path, name: str, seed: int, threads: int) -> Cell:
    """A cell, from its file if that was measured under this config."""
    run = folder / f"{name.replace(' ', '-')}-seed{seed}"
    record = run.with_suffix(".json")
    fields = {"seed": seed, "threads": threads, "run.dir": str(run), **VARIANTS[name]}
    config = tether.load_config("search_qa", fields)
    if record.is_file():
        kept = json.loads(record.read_text(encoding="utf-8"))
        if kept["config"] == config.to_dict():
            return read_cell(kept["cell"])
    print(f"{name}, seed {seed} …", flush=True)
    cell = train(config, run, folder)
    kept = {"config": config.to_dict(), "cell": asdict(cell)}
    record.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    return cell


def train(config: Config, run: Path, folder: Path) -> Cell:
    same = is_run(run) and tether.load_config(run / CONFIG).to_dict() == config.to_dict()
    if not same:  # a run under an older config has nothing to go on with
        shutil.rmtree(run, ignore_errors=True)
    result = tether.train(config, resume=same)
    before, after = result.before, result.after
    one_hop, two_hop = (evaluate_hops(run, folder, hops) for hops in (1, 2))
    return Cell(
        before=before.sampled,
        after=after.sampled,
        one_hop=one_hop.sampled,
        two_hop=two_hop.sampled,
        searches_before=before.calls or 0.0,
        searches=after.calls or 0.0,
        kl=after.kl or 0.0,
        minutes=sum(line["time/iteration"] for line in read_lines(run / TIMINGS)) / 60,
        curve=[line["score/mean"] for line in read_lines(run / METRICS)],
    )


def evaluate_hops(run: Path, folder: Path, hops: int) -> Evaluation:
    """On the held-out questions of so many hops alone."""
    path = folder / f"heldout-{hops}.jsonl"
    rows = [row for row in read_rows(HELDOUT) if row["hops"] == hops]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return tether.evaluate(str(run), overrides={"data.heldout": str(path)})


def read_cell(found: dict[str, Any]) -> Cell:
    estimates = ("before", "after", "one_hop", "two_hop")
    return Cell(**{k: Estimate(**v) if k in estimates else v for k, v in found.items()})


def middle(cells: list[Cell]) -> Cell:
    return sorted(cells, key=lambda cell: cell.after.mean)[len(cells) // 2]


def describe(results: Mapping[str, list[Cell]]) -> str:
    """Every cell, and below each variant the seed in the middle."""
    head = ["", "seed", "before", "after", "one hop", "two hops", "searches", "KL", "minutes"]
    rows = [head]
    for name, cells in results.items():
        for seed, cell in enumerate(cells):
            mark = "*" if cell is middle(cells) else ""
            shares = (cell.before, cell.after, cell.one_hop, cell.two_hop)
            rows.append(
                [
                    WORDS[name] if seed == 0 else "",
                    f"{seed}{mark}",
                    *(shown(share) for share in shares),
                    f"{cell.searches_before:.2f} to {cell.searches:.2f}",
                    f"{cell.kl:.1f}",
                    f"{cell.minutes:.1f}",
                ]
            )
    notes = (
        "Exact match, one sampled response per held-out question, 95% intervals; one and two\n"
        "hops apart, by draws of their own; searches per question; KL to the starter in nats per\n"
        "response. *: the seed in the middle."
    )
    return f"{table(rows)}\n\n{notes}"


def shown(share: Estimate) -> str:
    return f"{share.mean:.1%} ({100 * share.low:.0f}-{100 * share.high:.0f})"


def draw(results: Mapping[str, list[Cell]], path: Path) -> None:
    """The score of each iteration: a line for the mean of the seeds, a band for their range."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tether"
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for number, (name, cells) in enumerate(results.items()):
        scores = list(zip(*(cell.curve for cell in cells), strict=True))
        iterations = range(1, len(scores) + 1)
        colour = f"C{number}"
        axis.plot(iterations, [statistics.mean(s) for s in scores], color=colour, label=WORDS[name])
        axis.fill_between(
            iterations, [min(s) for s in scores], [max(s) for s in scores], color=colour, alpha=0.2
        )
    axis.set(xlabel="iteration", ylabel="exact match of the sampled rows", ylim=(0, 1))
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, metadata={"Date": None})


def shortfalls(results: Mapping[str, list[Cell]]) -> list[str]:
    """What the document promises, of the seed in the middle of each."""
    promises = {}
    if "masked" in results:
        cell = middle(results["masked"])
        promises |= {
            "exact match before is at most 30%": cell.before.mean <= 0.30,
            "exact match after is at least 80%": cell.after.mean >= 0.80,
            "two-hop questions are above 60%": cell.two_hop.mean > 0.60,
            "training takes at most 10 minutes": cell.minutes <= 10,
        }
    if "no tool" in results:
        cell = middle(results["no tool"])
        promises["without the tool it stays below 5%"] = cell.after.mean < 0.05
    return [f"NOT REACHED: {promise}" for promise, kept in promises.items() if not kept]


if __name__ == "__main__":
    main()
