"""Train the recipes with real weights, measure them, and paste into docs/real-models.md.

    python scripts/measure_real_models.py --only sentiment-0 sentiment-1

Goes on where it stopped: a run that is there is resumed, and a measurement is kept under
docs/results by a hash of its settings, so that another machine goes on too. `--paste` only puts
what is there into the document. Tables say what is missing.
"""

import argparse
import math
import resource
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from measure import paste
from yardstick_store import KEPT, NotThere, Store

from tether import api
from tether.algo.masked import explained_variance
from tether.cli.display import Display
from tether.cli.terminal import printable, table
from tether.config.load import load_config
from tether.data.batching import join_pairs, length_mask
from tether.data.messages import without_chat_template
from tether.data.prompts import encode_prompts
from tether.models.policy import Policy
from tether.ppo.estimates import Interval
from tether.ppo.evaluate import read_evaluations
from tether.ppo.probe import ProbeResult
from tether.run.reader import read_lines

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "real-models.md"
FOLDER = Path("runs/real-models")
MADE = "made by `scripts/measure_real_models.py`"
SHOWN = 6  # held-out prompts shown side by side, evenly spaced
NO_CRITIC = {"advantage.estimator": "grpo", "advantage.lam": 0.95}
TRPO = {"actor.update.kind": "trpo", "actor.schedule": "constant"}

# Name of a run: its recipe and what differs from it.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"sentiment-{seed}": ("sentiment", {"seed": seed}) for seed in range(3)},
    "instructions-0": ("instructions", {"seed": 0}),
    "sentiment-kl-1.6": ("sentiment", {"seed": 0, "kl.in_reward.target": 1.6}),
    "sentiment-kl-6.4": ("sentiment", {"seed": 0, "kl.in_reward.target": 6.4}),
    "sentiment-grpo": ("sentiment", {"seed": 0, **NO_CRITIC}),
    "sentiment-trpo": ("sentiment", {"seed": 0, **TRPO}),
    **{f"instructions-{seed}": ("instructions", {"seed": seed}) for seed in (1, 2)},
    "instructions-kl-4": ("instructions", {"seed": 0, "kl.in_reward.target": 4.0}),
    "instructions-kl-16": ("instructions", {"seed": 0, "kl.in_reward.target": 16.0}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=RUNS, help="default: all, in order")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--results", type=Path, default=KEPT, help="one file a measurement")
    parser.add_argument("--paste", action="store_true", help="train and measure nothing")
    args = parser.parse_args()
    found = {}
    for name in RUNS:
        chosen = not args.only or name in args.only
        store = Store(args.results, FOLDER, only_kept=args.paste or not chosen)
        try:
            found[name] = measured(store, name, args.threads)
        except NotThere:
            continue
    if args.results == KEPT:
        write_page(found)
    else:
        for recipe, names in by_recipe(found).items():
            print(f"\n{recipe}\n" + "\n".join(numbers(names, [found[name] for name in names])))


def by_recipe(names: Iterable[str]) -> dict[str, list[str]]:
    recipes: dict[str, list[str]] = {}
    for name in names:
        recipes.setdefault(RUNS[name][0], []).append(name)
    return recipes


def measured(store: Store, name: str, threads: int) -> dict[str, Any]:
    recipe, fields = RUNS[name]
    text = files("tether.recipes").joinpath(f"{recipe}.yaml").read_text(encoding="utf-8")
    settings = {
        "recipe": text,
        "fields": fields,
        "threads": threads,
        "torch": version("torch"),
    }
    code = (f"src/tether/recipes/{recipe}.yaml", "scripts/measure_real_models.py", "src/tether")
    run = FOLDER / store.path(name, settings).stem

    def measure() -> dict[str, Any]:
        peak = train(load_config(recipe, {**fields, "threads": threads, "run.dir": str(run)}))
        return {"peak": peak, **read_run(run)}

    return store.measured(f"real-{name}", settings, measure, code)


def train(config: Any) -> int | None:
    """Train a run, or what is left of it; return the peak memory if all of it was trained here."""
    run = Path(config.run.dir)
    if (run / "evals.jsonl").is_file():
        done = [evaluation.iteration for evaluation in read_evaluations(run)]
        if config.train.iterations in done:
            return None
    with Display(config) as display:
        result = api.train(config, watch=display, resume=(run / "config.yaml").is_file())
    if result.interrupted is not None:
        sys.exit(f"{run} was stopped; the same command goes on.")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return peak if result.resumed_from == 0 else None


def read_run(run: Path) -> dict[str, Any]:
    """Return everything that the tables need, from a finished run's files."""
    config = load_config(run / "config.yaml")
    first, last = (sorted((run / "evals").glob("*.jsonl"))[i] for i in (0, -1))
    rows = {"before": read_lines(first), "after": read_lines(last)}
    evaluations = read_evaluations(run)
    before, after = evaluations[0], evaluations[-1]
    parts = config.reward.parts
    assert parts is not None
    main_part = parts[0].name
    metrics, timings = read_lines(run / "metrics.jsonl"), read_lines(run / "timings.jsonl")
    texts = {when: [row["sampled"]["response"] for row in found] for when, found in rows.items()}
    greedy = {when: [row["greedy"]["response"] for row in found] for when, found in rows.items()}
    prompts = [row["prompt"] for row in rows["before"]]
    return {
        "iterations": len(metrics),
        "rows": len(metrics) * config.rows,
        "minutes": sum(line["time/iteration"] for line in timings) / 60,
        "score": {when: scores(found, main_part) for when, found in rows.items()},
        "kept": {when: by_part(found) for when, found in rows.items()},
        "kl": {"before": before.kl, "after": after.kl},
        "distinct": {when: [distinct(found, n) for n in (1, 2)] for when, found in texts.items()},
        "greedy_different": {when: len(set(found)) / len(found) for when, found in greedy.items()},
        "perplexity": untouched_perplexity(config, prompts, texts),
        "explained": second_half_explained(run, len(metrics)) if config.has_critic else None,
        "probe": {
            when: None if one.probe is None else one.probe.record()
            for when, one in (("before", before), ("after", after))
        },
        "samples": [
            {"prompt": prompts[i], "before": texts["before"][i], "after": texts["after"][i]}
            for i in range(0, len(prompts), -(-len(prompts) // SHOWN))
        ],
        "curve": [[line[f"score/part/{main_part}"], line["kl/sequence_mean"]] for line in metrics],
    }


def scores(rows: Iterable[Mapping[str, Any]], part: str) -> list[float]:
    """Return the part's mean and 95% interval over the sampled responses."""
    values = [row["sampled"]["score_parts"][part] for row in rows]
    x = Interval.of_mean(values)
    return [x.mean, x.low, x.high]


def by_part(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the share of responses that keep all constraints, by what is held out of the row."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if "part" in row["columns"]:
            share = row["sampled"]["score_parts"]["kept"]
            found.setdefault(row["columns"]["part"], []).append(float(share == 1))
    intervals = {part: Interval.of_mean(values) for part, values in found.items()}
    return {part: [x.mean, x.low, x.high] for part, x in intervals.items()}


def distinct(texts: Sequence[str], size: int) -> float:
    """Return the share of runs of `size` words, over all texts, that are different ones (Li et al.
    2016)."""
    runs = [
        tuple(words[i : i + size])
        for words in (text.casefold().split() for text in texts)
        for i in range(len(words) - size + 1)
    ]
    return len(set(runs)) / len(runs) if runs else 0.0


def untouched_perplexity(
    config: Any, prompts: Sequence[str], texts: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """Return the perplexity of responses under the model before training, at temperature 1."""
    model, vocabulary = api.load_plain(config.model.actor)
    policy, tokenizer = Policy(model.eval(), 1.0, 4096), vocabulary.tokenizer
    if not config.data.chat_template:
        tokenizer = without_chat_template(tokenizer)
    encoded = encode_prompts(tokenizer, list(prompts), config.data.system_prompt)
    found = {}
    for when, responses in texts.items():
        pairs = [
            (prompt, tokenizer(text, add_special_tokens=False)["input_ids"])
            for prompt, text in zip(encoded, responses, strict=True)
        ]
        sequences = join_pairs([pair for pair in pairs if pair[1]])
        mask = length_mask(sequences.response_lengths, sequences.width)
        nats = -policy.log_probs(sequences, mask).double().sum() / mask.sum()
        found[when] = math.exp(float(nats))
    return found


def second_half_explained(run: Path, iterations: int) -> float:
    """Return the critic's explained variance of lambda = 1 returns in the second half.

    Values are from before the update, so on rows that were not trained on yet. Over all tokens of
    these iterations together, from the rows that the run has written.
    """
    values, returns = [], []
    for iteration in range(iterations // 2, iterations):
        path = run / "rollouts" / f"{iteration:06d}.jsonl"
        for row in read_lines(path) if path.is_file() else []:
            rewards, to_come = row["token_level_rewards"], 0.0
            found = []
            for reward in reversed(rewards):
                to_come += reward
                found.append(to_come)
            values += row["values"]
            returns += reversed(found)
    one, other = torch.tensor([values]), torch.tensor([returns])
    return float(explained_variance(one, other, torch.ones_like(one, dtype=torch.bool)))


def write_page(found: Mapping[str, Mapping[str, Any]]) -> None:
    there = by_recipe(found)
    for recipe, runs in by_recipe(RUNS).items():
        names = there.get(recipe, [])
        missing = [name for name in runs if name not in found]
        for page in (PAGE, DOCS / "zh" / "real-models.md"):
            put(page, recipe, [found[name] for name in names], names, missing)
        if names:
            draw({name: found[name] for name in names}, DOCS / "figures" / f"{recipe}.svg")


def draw(found: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw the score in training, and the held-out score against KL with what the probe says."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tether"
    from matplotlib import pyplot

    figure, (course, ends) = pyplot.subplots(1, 2, figsize=(10, 3.8))
    for name, result in found.items():
        scores = smoothed([score for score, _ in result["curve"]])
        line = course.plot(range(1, len(scores) + 1), scores, linewidth=1.2, label=name)[0]
        mean, low, high = result["score"]["after"]
        spent = result["kl"]["after"]
        error = [[mean - low], [high - mean]]
        ends.errorbar([spent], [mean], error, fmt="o", color=line.get_color(), label=name)
        if pairs := probe_pairs([result]):
            before, after = pairs[0]
            gained = 100 * after.facts_gained(before).mean
            ratio = after.perplexity_ratio(before).mean
            said = f" facts {gained:+.1f}, text x {ratio:.2f}"
            ends.annotate(said, (spent, mean), fontsize=7, va="top")
    before = [result["score"]["before"][0] for result in found.values()]
    ends.scatter([0] * len(before), before, marker="x", color="0.4", label="before")
    course.set_xlabel("iteration")
    course.set_ylabel("score in training, mean of 5")
    ends.set_xlabel("KL, nats per response")
    ends.set_ylabel("held-out score")
    ends.margins(x=0.25)
    ends.legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def smoothed(scores: Sequence[float], window: int = 5) -> list[float]:
    """Return means over the last `window` scores; fewer at the beginning."""
    parts = [scores[max(0, i + 1 - window) : i + 1] for i in range(len(scores))]
    return [sum(part) / len(part) for part in parts]


def put(
    page: Path,
    recipe: str,
    found: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    missing: Sequence[str],
) -> None:
    lines = ["  Nothing has been measured yet."]
    if found:
        lines = [*numbers(names, found), "", f"  {found[0]['machine']}"]
    if missing:
        lines.append(f"  Not run: {', '.join(missing)}.")
    paste(page, f"{recipe}: {MADE}", lines)
    lines = ["  Nothing has been measured yet."]
    if found:
        lines = [f"  Run {names[0]}, sampled:"]
        for one in found[0]["samples"]:
            lines += ["", f"  {printable(one['prompt'])}"]
            lines += [f"    {when:<6} {printable(one[when])}" for when in ("before", "after")]
    paste(page, f"samples of {recipe}: {MADE}", lines)


def numbers(names: Sequence[str], found: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [["", *names]]

    def add(label: str, cells: Iterable[str]) -> None:
        rows.append([label, *cells])

    for when in ("before", "after"):
        add(f"held-out score {when}", [f"{r['score'][when][0]:.3f}" for r in found])
        add("  95% interval", ["{1:.3f} – {2:.3f}".format(*r["score"][when]) for r in found])
    for part in found[0]["kept"]["before"]:
        for when in ("before", "after"):
            cells = ["{:.0%} ({:.0%} – {:.0%})".format(*r["kept"][when][part]) for r in found]
            add(f"all kept, {part}, {when}", cells)
    add("KL after, nats per response", [f"{r['kl']['after']:.2f}" for r in found])
    for i, label in enumerate(("distinct-1", "distinct-2")):
        add(f"{label} before → after", [arrow(r["distinct"], i) for r in found])
    add("greedy answers that differ", [arrow(r["greedy_different"]) for r in found])
    ratios = [r["perplexity"]["after"] / r["perplexity"]["before"] for r in found]
    add("perplexity under the untouched model", [f"x {ratio:.2f}" for ratio in ratios])
    explained = ["–" if r["explained"] is None else f"{r['explained']:.2f}" for r in found]
    add("explained variance, second half", explained)
    for label, cells in probe_rows(found):
        add(label, cells)
    add("iterations", [str(r["iterations"]) for r in found])
    add("minutes of training", [f"{r['minutes']:.1f}" for r in found])
    add("peak memory, GiB", ["–" if not r["peak"] else f"{r['peak'] / 2**30:.1f}" for r in found])
    return table(rows).split("\n")


def arrow(pair: Mapping[str, Any], index: int | None = None) -> str:
    before, after = (pair[when] if index is None else pair[when][index] for when in pair)
    return f"{before:.0%} → {after:.0%}"


def probe_pairs(found: Sequence[Mapping[str, Any]]) -> list[tuple[ProbeResult, ProbeResult]]:
    """Return the probes before and after of each run; nothing if a run has none."""
    pairs = [(r["probe"]["before"], r["probe"]["after"]) for r in found]
    if not all(before and after for before, after in pairs):
        return []
    return [(ProbeResult.from_record(a), ProbeResult.from_record(b)) for a, b in pairs]


def probe_rows(found: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    results = probe_pairs(found)
    gained = [after.facts_gained(before) for before, after in results]
    ratios = [after.perplexity_ratio(before) for before, after in results]
    rows = [
        ("probe: facts before → after", [f"{b.facts().mean:.1%} → {a.facts().mean:.1%}"
                                         for b, a in results]),
        ("  change, 95% interval, points", [f"{100 * x.low:+.1f} to {100 * x.high:+.1f}"
                                            for x in gained]),
        ("probe: plain-text perplexity", [f"{b.perplexity().mean:.2f} → {a.perplexity().mean:.2f}"
                                          for b, a in results]),
        ("  ratio, 95% interval", [f"{x.low:.3f} – {x.high:.3f}" for x in ratios]),
    ]  # fmt: skip
    return rows if results else []


if __name__ == "__main__":
    main()
