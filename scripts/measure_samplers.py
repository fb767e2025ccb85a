"""Measure samplers apart from training (docs/samplers.md): are the bits the same, does it learn,
does it overlap, is nothing left behind.

    python scripts/measure_samplers.py [--only equal kills elastic lag overlap handed left]
                                       [--seeds 3] [--threads 2] [--write] [--tiny]

What has been measured is kept under docs/results by a hash of its settings, one file for each kill
and each learning run, and is not measured again, on this machine or on another; runs that were
broken off go on where they stopped. Exits 1 if something that must hold does not. With --write
the figures of all that has been measured go into docs/samplers.md; `--only` without a name measures
nothing. --tiny tries every part in some minutes, in a folder of its own.
"""

import argparse
import hashlib
import html
import json
import math
import os
import random
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

from measure import paste, paste_markdown
from yardstick_store import KEPT, NotThere, Store, commit

from tether import api, assets
from tether.cli.terminal import table
from tether.config.load import load_config
from tether.run.directory import METRICS, SAMPLERS, TIMINGS
from tether.run.reader import read_lines
from tether.view.metric_table import Table
from tether.view.timeline import SamplerLines, draw_timeline

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "samplers.md"
FIGURE = DOCUMENT.parent / "figures" / "samplers.svg"
CODE = ("scripts/measure_samplers.py", "src/tether")
MARKER = "{}: made by `python scripts/measure_samplers.py --write`"
LAGS, RECIPES = (0, 1, 2, 4), ("arithmetic", "search_qa")
SMALL = {  # what is killed: some seconds of work per iteration, in chunks small enough to be lost
    "threads": 1,
    "rollout.lag": 1,
    "rollout.chunk_tokens": 1024,
    "train.eval_every": 0,
    "train.eval_prompts": 64,
    "train.checkpoint_every": 2,
    "launch.max_restarts": 20,
}
GONE_SECONDS = 30.0
Found = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """How much of each part."""

    small: Mapping[str, Any]  # of the runs that are killed
    kills: Mapping[str, int]
    elastic: tuple[int, int, int]  # iterations: when a node joins, when it leaves, in all
    equal: Mapping[str, Any]
    lags: Sequence[int]
    recipes: Sequence[str]
    learning: Mapping[str, Any]  # beside the recipe
    overlap: Mapping[str, Any]
    wait_seconds: float  # of the slow retrieval server
    handed: tuple[int, int]  # rows, and tokens of each


FULL = Sizes(
    small={**SMALL, "train.iterations": 8},
    kills={"sampler": 20, "trainer": 10, "both": 5},
    elastic=(4, 12, 24),
    equal={"threads": 1, "train.iterations": 10, "train.eval_prompts": 64},
    lags=LAGS,
    recipes=RECIPES,
    learning={},
    overlap={"train.iterations": 8, "train.eval_prompts": 8, "train.checkpoint_every": 0},
    wait_seconds=0.2,
    handed=(2048, 1024),
)
FEW = {"rollout.prompts": 4, "actor.minibatch_rows": 4, "train.eval_prompts": 4}
TINY = Sizes(
    small={**SMALL, **FEW, "rollout.chunk_tokens": 64, "train.iterations": 4},
    kills={"sampler": 1, "trainer": 1, "both": 1},
    elastic=(2, 6, 10),
    equal={"threads": 1, **FEW, "train.iterations": 2},
    lags=(0, 1),
    recipes=("arithmetic",),
    learning={**FEW, "train.iterations": 2},
    overlap={**FEW, "train.iterations": 4, "train.checkpoint_every": 0},
    wait_seconds=0.05,
    handed=(64, 64),
)


@dataclass(frozen=True)
class Bench:
    """What a part is given: where results are kept and runs are, and how much to do."""

    store: Store
    sizes: Sizes
    seeds: int
    threads: int

    def kept(
        self, name: str, settings: Mapping[str, Any], measure: Callable[[Path], Found]
    ) -> Found:
        """Return what `measure` gave under these settings, now or earlier. It gets a path for its
        runs that nothing else has."""
        path = self.store.path(f"samplers-{name}", settings)
        runs = self.store.work / path.stem
        return self.store.measured(f"samplers-{name}", settings, lambda: measure(runs), CODE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/measure-samplers"), help="runs")
    parser.add_argument("--results", type=Path, default=KEPT, help="one file a measurement")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=[*PARTS])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="of the learning runs")
    parser.add_argument("--tiny", action="store_true", help="only try whether all parts work")
    parser.add_argument("--write", action="store_true", help="paste into docs/samplers.md")
    args = parser.parse_args()
    if args.tiny and args.write:
        parser.error("--tiny measures nothing that could be written")
    folder = args.folder / "tiny" if args.tiny else args.folder
    results = folder / "results" if args.tiny else args.results
    folder.mkdir(parents=True, exist_ok=True)
    failed = False
    for name, (measure, describe) in PARTS.items():
        store = Store(results, folder, only_kept=name not in args.only)
        sizes = TINY if args.tiny else FULL
        bench = Bench(store, sizes, 1 if args.tiny else args.seeds, args.threads)
        try:
            found = measure(bench)
        except NotThere:
            continue
        lines = [*describe(found), "", *(f"  {machine}" for machine in store.machines)]
        print("\n".join([f"\n== {name}: {'holds' if found['holds'] else 'FAILS'}", *lines]))
        failed |= not found["holds"]
        if args.write:
            paste(DOCUMENT, MARKER.format(name), lines)
            if name == "overlap":
                FIGURE.write_text(draw_figure(found["timelines"]), encoding="utf-8")
                shown = f"![Samplers, rewards and trainer in time](figures/{FIGURE.name})"
                paste_markdown(DOCUMENT, MARKER.format("gantt"), [shown])
    sys.exit(1 if failed else 0)


# 1: the same numbers with samplers and without


def measure_equal(bench: Bench) -> Found:
    fields = bench.sizes.equal
    runs = {
        "none": {"model.dtype": "float64"},
        "1": {"model.dtype": "float64", "launch.samplers": 1},
        "2": {"model.dtype": "float64", "launch.samplers": 2},
        "none, same chunks": {"rollout.chunk_tokens": 2048},
        "1, same chunks": {"rollout.chunk_tokens": 2048, "launch.samplers": 1},
        "2, same chunks": {"rollout.chunk_tokens": 2048, "launch.samplers": 2},
    }

    def measure(path: Path) -> Found:
        done = {
            name: train(path / str(number), "arithmetic", {**fields, **own})
            for number, (name, own) in enumerate(runs.items())
        }
        gaps = {name: largest_gap(done["none"], done[name]) for name in ("1", "2")}
        plain = hashes(done["none, same chunks"])
        return {"gaps": gaps, "same": {n: hashes(done[n]) == plain for n in runs if "same" in n}}

    found = bench.kept("equal", {"fields": dict(fields), "runs": runs}, measure)
    holds = all(gap <= 1e-9 for gap in found["gaps"].values()) and all(found["same"].values())
    return {**found, "holds": holds}


def describe_equal(found: Found) -> list[str]:
    iterations = found["settings"]["fields"]["train.iterations"]
    rows = [["launch.samplers", "float64, rows in other chunks", "the same chunks"]]
    for name, gap in found["gaps"].items():
        equal = "every bit" if found["same"][f"{name}, same chunks"] else "DIFFERS"
        rows.append([name, f"metrics within {gap:.1e}", equal])
    said = f"  Against no samplers apart; {iterations} iterations of arithmetic."
    return [*table(rows).splitlines(), said]


# 2: kills, and samplers that come and go


def measure_kills(bench: Bench) -> Found:
    """Every kill is a measurement of its own. What it must equal is made on each machine anew, as
    machines round differently."""
    small = {**bench.sizes.small, "launch.samplers": 2}

    def repeat(path: Path) -> Found:
        one, other = (train(path / name, "arithmetic", small) for name in ("one", "other"))
        return {"equal": hashes(one) == hashes(other)}

    found: Found = {"repeats": bench.kept("undisturbed", {"fields": small}, repeat)["equal"]}
    outcomes: dict[str, Found] = {}
    for kind, trials in bench.sizes.kills.items():
        for number in range(trials):
            settings = {"fields": small, "kind": kind, "number": number}
            try:
                outcomes[f"{kind} {number}"] = bench.kept(
                    f"kill-{kind}-{number}", settings, partial(one_kill, bench, settings)
                )
            except NotThere:
                continue  # the table says how many there are
    if not outcomes:
        raise NotThere("no kills")
    whole = len(outcomes) == sum(bench.sizes.kills.values())
    equal = all(one["equal"] for one in outcomes.values())
    return {**found, "outcomes": outcomes, "holds": found["repeats"] and whole and equal}


def one_kill(bench: Bench, settings: Found, run: Path) -> Found:
    small, kind = settings["fields"], settings["kind"]
    undisturbed = bench.store.work / "undisturbed" / version_of(small)
    smooth = train(undisturbed, "arithmetic", small)
    seconds, expected = sum_of(smooth, "time/iteration"), hashes(smooth)
    rng = random.Random(f"{kind} {settings['number']}")
    equal, moment = killed(run, small, kind, rng, seconds, expected)
    print(f"  {kind} {settings['number']}: {moment}, {'equal' if equal else 'OTHER NUMBERS'}")
    return {"equal": equal, "moment": moment}


def version_of(fields: Mapping[str, Any]) -> str:
    """Return a name for the runs of these fields by this code: after a change they are others."""
    text = json.dumps([dict(fields), commit(CODE[1:])], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def killed(
    run: Path,
    small: Mapping[str, Any],
    kind: str,
    rng: random.Random,
    seconds: float,
    expected: Mapping[str, str],
) -> tuple[bool, str]:
    """Kill at a random moment of a run, let it end, and compare what it has written."""
    shutil.rmtree(run, ignore_errors=True)  # of an earlier attempt, which would look like this one
    command = start(run, "arithmetic", small)
    wait_for_samplers(command, 2)
    wait(lambda: (run / METRICS).exists(), command)
    time.sleep(rng.uniform(0, 0.9) * seconds)
    moment = f"after {len(read_lines(run / METRICS))} iterations"
    seats = sampler_pids(command.pid)
    if kind in ("sampler", "both") and seats:
        kill(rng.choice(seats))
        time.sleep(rng.uniform(0, 1) if kind == "both" else 0)
    if kind in ("trainer", "both"):
        below = descendants(command.pid)
        command.kill()
        command.wait()
        wait_until_gone(below)
        resumed = subprocess.run([*TETHER, "resume", str(run)], capture_output=True, text=True)
        return resumed.returncode == 0 and hashes(run) == expected, moment
    command.communicate()
    lost = sum(line["samplers/lost"] for line in read_lines(run / TIMINGS))
    return command.returncode == 0 and hashes(run) == expected, f"{moment}, {lost:.0f} lost"


def describe_kills(found: Found) -> list[str]:
    rows = [["kill -9 of", "trials", "equal in every bit"]]
    for kind in ("sampler", "trainer", "both"):
        own = [one for name, one in found["outcomes"].items() if name.startswith(kind)]
        rows.append([kind, str(len(own)), str(sum(one["equal"] for one in own))])
    said = "yes" if found["repeats"] else "NO"
    return [*table(rows).splitlines(), f"  Two undisturbed runs equal: {said}. Lag 1, 2 samplers."]


def measure_elastic(bench: Bench) -> Found:
    """A node with room for a second sampler joins in mid-run, and later leaves."""
    joins, leaves, iterations = bench.sizes.elastic
    fields = {**bench.sizes.small, "train.iterations": iterations, "launch.samplers": 2}

    def measure(path: Path) -> Found:
        from ray.cluster_utils import Cluster

        smooth = train(path / "smooth", "arithmetic", fields)
        run = path / "elastic"
        shutil.rmtree(run, ignore_errors=True)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        try:
            command = start(run, "arithmetic", {**fields, "launch.address": cluster.address})
            wait_for_iterations(run, joins, command)
            node = cluster.add_node(num_cpus=1)
            wait_for_iterations(run, leaves, command)
            ready = max(line["samplers/ready"] for line in read_lines(run / TIMINGS))
            cluster.remove_node(node, allow_graceful=False)
            command.communicate()
        finally:
            cluster.shutdown()
        timings = read_lines(run / TIMINGS)
        first, last = timings[0]["samplers/ready"], timings[-1]["samplers/ready"]
        equal = command.returncode == 0 and hashes(run) == hashes(smooth)
        return {"ready": [first, ready, last], "equal": equal}

    settings = {"fields": fields, "joins": joins, "leaves": leaves}
    found = bench.kept("elastic", settings, measure)
    return {**found, "holds": found["equal"] and found["ready"] == [1, 2, 1]}


def describe_elastic(found: Found) -> list[str]:
    ready = ", then ".join(f"{n:.0f}" for n in found["ready"])
    said = "every bit equal" if found["equal"] else "OTHER NUMBERS"
    return [f"  Samplers at work: {ready}. Against 2 from beginning to end: {said}."]


# 3: does it learn


def measure_lag(bench: Bench) -> Found:
    """On one process: samplers apart change no number of it. Every run is a measurement."""
    cells: list[Found] = []
    for recipe in bench.sizes.recipes:
        for lag in bench.sizes.lags:
            for kind in ("token", "none") if lag else ("none",):
                for seed in range(bench.seeds):
                    fields = {**bench.sizes.learning, "seed": seed, "threads": bench.threads}
                    fields |= {"rollout.lag": lag, "rollout.correction.kind": kind}
                    settings = {"recipe": recipe, "fields": fields}
                    name = f"lag-{recipe}-{lag}-{kind}-seed{seed}"
                    try:
                        found = bench.kept(name, settings, partial(learn, recipe, fields))
                    except NotThere:
                        continue  # the table shows those that are there
                    cell = {"recipe": recipe, "lag": lag, "kind": kind, "seed": seed}
                    cells.append({**found, **cell})
    if not cells:
        raise NotThere("no learning runs")
    return {"cells": cells, "holds": True}


def learn(recipe: str, fields: Mapping[str, Any], run: Path) -> Found:
    train(run, recipe, fields)
    gaps = [line.get("rollout/mismatch_kl", 0.0) for line in read_lines(run / METRICS)]
    scores = [e["sampled"]["mean"] for e in read_lines(run / "evals.jsonl")]
    return {"scores": scores, "mismatch": statistics.mean(gaps)}


def describe_lag(found: Found) -> list[str]:
    rows = [["recipe", "lag", "correction", "held-out, sampled", "by seed", "KL to the sampler"]]
    for recipe in dict.fromkeys(cell["recipe"] for cell in found["cells"]):
        for lag in sorted({cell["lag"] for cell in found["cells"]}):
            for kind in ("token", "none"):
                own = [
                    c
                    for c in found["cells"]
                    if (c["recipe"], c["lag"], c["kind"]) == (recipe, lag, kind)
                ]
                if not own:
                    continue
                last = [cell["scores"][-1] for cell in own]
                gap = statistics.mean(cell["mismatch"] for cell in own)
                by_seed = " ".join(f"{score:.3f}" for score in last)
                mean = f"{statistics.mean(last):.3f}"
                rows.append([recipe, str(lag), kind if lag else "–", mean, by_seed, f"{gap:.1e}"])
    return table(rows).splitlines()


# 4: does it overlap


def measure_overlap(bench: Bench) -> Found:
    """All in one measurement: the shares compare runs of one machine."""
    wait, short = bench.sizes.wait_seconds, bench.sizes.overlap
    apart = {"launch.samplers": 1, "threads": 1}
    runs: dict[str, tuple[str, Found]] = {
        "search_qa, lag 0": ("search_qa", {**short, **apart}),
        "search_qa, lag 1": ("search_qa", {**short, **apart, "rollout.lag": 1}),
        "arithmetic, one process": ("arithmetic", {**short, "threads": 2}),
        "arithmetic, lag 1": ("arithmetic", {**short, **apart, "rollout.lag": 1}),
    }

    def measure(path: Path) -> Found:
        tool = [{"kind": "search", "url": slow_retriever(wait), "topk": 1}]
        seconds: dict[str, float] = {}
        timelines: dict[str, list[Found]] = {}
        for number, (name, (recipe, fields)) in enumerate(runs.items()):
            slow = {"rollout.tools": tool} if recipe == "search_qa" else {}
            run = path / str(number)
            shutil.rmtree(run, ignore_errors=True)  # one that was broken off has two parts
            train(run, recipe, {**fields, **slow})
            lines = read_lines(run / TIMINGS)[2:-1] or read_lines(run / TIMINGS)
            # Without filling and emptying the pipeline.
            seconds[name] = statistics.median(line["time/iteration"] for line in lines)
            if (run / SAMPLERS).exists():
                timelines[name] = two_timelines(run)
        return {"seconds": seconds, "timelines": timelines}

    found = bench.kept("overlap", {"runs": runs, "wait": wait}, measure)
    seconds = found["seconds"]
    slow = seconds["search_qa, lag 1"] / seconds["search_qa, lag 0"]
    free = seconds["arithmetic, lag 1"] / seconds["arithmetic, one process"]
    return {**found, "slow": slow, "free": free, "holds": slow <= 0.6 and free <= 0.85}


def two_timelines(run: Path) -> list[Found]:
    """Return the timelines of two neighbouring iterations in the middle of a run, as the page has
    them."""
    lines = SamplerLines(run.resolve().parent, run.resolve())
    lines.refresh()
    middle = len(lines.places) // 2
    drawn = (draw_timeline(iteration, lines, Table()) for iteration in (middle - 1, middle))
    return [one for one in drawn if one is not None]


def describe_overlap(found: Found) -> list[str]:
    wait = found["settings"]["wait"]
    rows = [["run", "seconds per iteration"]]
    rows += [[name, f"{seconds:.2f}"] for name, seconds in found["seconds"].items()]
    return [
        *table(rows).splitlines(),
        f"  A retrieval server that takes {wait:g} s: lag 1 takes {found['slow']:.0%} of "
        f"lag 0 (at most 60% wanted).",
        f"  Tools that cost nothing, a thread for each side: {found['free']:.0%} of one process "
        f"with two threads (at most 85% wanted).",
    ]


# The figure: two iterations of each run with samplers apart

HUES = ("#0072B2", "#009E73", "#CC79A7", "#56B4E9")  # Okabe and Ito, by the iteration that learns
STAGE_HUES = {"rollout": "none", "reward": "#E69F00", "forward": "#F0B48A", "update": "#D55E00"}
WIDTH, LEFT, LANE = 860, 110, 24


def draw_figure(timelines: Mapping[str, Sequence[Found]]) -> str:
    """Draw a Gantt of samplers, rewards and trainer for each run, all on one scale, as SVG."""
    longest = max(sum(one["seconds"] for one in found) for found in timelines.values())
    scale = (WIDTH - LEFT - 20) / longest
    drawn: list[str] = []
    top = 8
    for name, found in timelines.items():
        length = sum(one["seconds"] for one in found)
        drawn.append(text_at(LEFT, top + 14, f"{name}: two iterations, {length:.1f} s", bold=True))
        top += 24
        lanes = [*dict.fromkeys((x["kind"], x["name"]) for one in found for x in one["lanes"])]
        lanes.sort(key=lambda lane: lane[0] != "sampler")
        for kind, named in lanes:
            label = named or kind
            drawn.append(text_at(LEFT - 8, top + 15, label, anchor="end"))
            drawn.append(box(LEFT, top, length * scale, LANE - 5, "#f1f1ee", "none"))
            began = 0.0
            for one in found:
                for lane in one["lanes"]:
                    if (lane["kind"], lane["name"]) == (kind, named):
                        drawn += blocks(lane, one["seconds"], began, scale, top)
                began += one["seconds"]
            top += LANE
        for second in range(0, math.ceil(length), max(1, round(length / 8))):
            drawn.append(text_at(LEFT + second * scale, top + 10, f"{second} s", "middle"))
        top += 30
    legend = "sampler: the iteration that learns from the rows · the version of the weights"
    drawn.append(text_at(LEFT, top + 4, f"{legend};  e: evaluation", colour="#6b6b6b"))
    x = LEFT
    for stage, said in (("rollout", "waits for rows"), ("reward", "scores"),
                        ("forward", "forward"), ("update", "update")):  # fmt: skip
        drawn.append(box(x, top + 14, 12, 12, STAGE_HUES[stage], "#6b6b6b"))
        drawn.append(text_at(x + 18, top + 24, said, colour="#6b6b6b"))
        x += 130
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 36}" '
        f'font-family="system-ui, sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n'
    )
    return head + "\n".join(drawn) + "\n</svg>\n"


def blocks(lane: Found, seconds: float, began: float, scale: float, top: float) -> list[str]:
    """Draw what a lane did in an iteration that began at that second."""
    drawn = []
    for span in lane["spans"]:
        first, last = max(span["from"], 0.0), min(span["to"], seconds)
        stage = span.get("stage")
        if stage == "between" or last <= first:
            continue
        learns = span.get("iteration") if span.get("trains") else None
        hue = STAGE_HUES[stage] if stage else "#b9b9b4" if learns is None else HUES[learns % 4]
        x, width = LEFT + (began + first) * scale, (last - first) * scale
        edge = "#9a9a94" if hue == "none" else "#ffffff"
        drawn.append(box(x, top, width, LANE - 5, hue, edge))
        if stage is None and width > 34:
            words = "e" if learns is None else f"{learns} · v{span['version']}"
            drawn.append(text_at(x + width / 2, top + 14, words, "middle", "#ffffff"))
    return drawn


def box(x: float, y: float, width: float, height: float, fill: str, edge: str) -> str:
    dashed = ' stroke-dasharray="3 2"' if fill == "none" else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" rx="2" '
        f'fill="{fill}" stroke="{edge}"{dashed}/>'
    )


def text_at(
    x: float,
    y: float,
    text: str,
    anchor: str = "start",
    colour: str = "#222222",
    bold: bool = False,
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{weight}>'
        f"{html.escape(text)}</text>"
    )


def slow_retriever(seconds: float) -> str:
    """Serve the recipe's corpus from a thread; every search takes so long."""
    from tether.rollout.tools.search import Bm25, read_corpus
    from tether.rollout.tools.search_server import make_app, serve

    corpus = str(assets.resolve("tether:search/corpus.jsonl"))
    quick = Bm25(read_corpus(corpus))

    class Slow:
        def search(self, query: str, topk: int) -> Any:
            time.sleep(seconds)
            return quick.search(query, topk)

    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, args=(make_app(Slow()), listener), daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}/retrieve"


# 5: what it costs to hand rows over


class Blank:
    """Samples nothing: rows of the right size at once."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def load(self, version: int, weights: Any) -> None: ...

    def sample(self, chunk: Any) -> Any:
        import torch

        from tether.types import Rollout

        rows, tokens = len(chunk.prompt_ids), self.tokens
        return Rollout(
            prompt_ids=torch.ones(rows, 64, dtype=torch.long),
            prompt_lengths=torch.full((rows,), 64),
            response_ids=torch.ones(rows, tokens, dtype=torch.long),
            response_lengths=torch.full((rows,), tokens),
            response_mask=torch.ones(rows, tokens, dtype=torch.bool),
            rollout_log_probs=torch.rand(rows, tokens),
            finish_reasons=("eos",) * rows,
        )


def measure_handed(bench: Bench) -> Found:
    """Time the way of all rows, and hold it against an iteration of as many tokens at the rate of
    the recipe `arithmetic`."""
    rows, tokens = bench.sizes.handed

    def measure(path: Path) -> Found:
        size, seconds = hand_over(rows, tokens)
        rate = train(path, "arithmetic", {"threads": 1, "train.iterations": 4})
        per_second = statistics.median(
            line["throughput/tokens_per_second"] for line in read_lines(rate / TIMINGS)
        )
        share = seconds / (rows * tokens / per_second)
        return {"bytes": size, "handing_seconds": seconds, "share": share}

    found = bench.kept("handed", {"rows": rows, "tokens": tokens}, measure)
    return {**found, "holds": found["bytes"] < 2 << 30 and found["share"] < 0.05}


def hand_over(rows: int, tokens: int) -> tuple[int, float]:
    """Return the bytes of these rows and the seconds in which they came from a sampler."""
    import pickle

    from tether.config import LaunchSection
    from tether.dist.ray_samplers import RayFleet
    from tether.rollout.chunks import Chunk
    from tether.rollout.pool import SamplerPool, Weights
    from tether.rollout.sampler import Greedy

    fleet = RayFleet(partial(Blank, tokens), LaunchSection(samplers=1))
    fleet.connect()
    pool = SamplerPool(fleet, 1, 600.0, 600.0, 2)
    try:
        pool.start()
        chunks = [
            Chunk(first, [[1] * 64] * 16, [*range(first, first + 16)], Greedy())
            for first in range(0, rows, 16)
        ]
        pool.begin(Weights(0, 0, {}), chunks[:4]).result()
        before = time.monotonic()
        found = pool.begin(Weights(0, 0, {}), chunks).result()
        seconds = time.monotonic() - before
    finally:
        pool.close()
    return len(pickle.dumps(found, protocol=5)), seconds


def describe_handed(found: Found) -> list[str]:
    return [
        f"  {found['settings']['rows']} rows of {found['settings']['tokens']} tokens: "
        f"{found['bytes'] / 2**20:.0f} MiB in {found['handing_seconds']:.2f} s in chunks of 16, "
        f"{found['share']:.2%} of an iteration",
        "  of as many tokens at the rate at which arithmetic trains with one thread.",
    ]


# 6: what is left behind


def measure_left(bench: Bench) -> Found:
    ways: dict[str, Found] = {}
    for way in ("normal end", "error", "Ctrl-C", "kill -9"):
        settings = {"fields": {**bench.sizes.small, "launch.samplers": 2}, "way": way}
        name = f"left-{way.replace(' ', '-')}"
        ways[way] = bench.kept(name, settings, partial(end_one, way, settings["fields"]))
    return {"ways": ways, "holds": not any(w["left"] or w["open"] for w in ways.values())}


def end_one(way: str, fields: Mapping[str, Any], run: Path) -> Found:
    """Let a run end in that way, and see what it has left behind."""
    shutil.rmtree(run, ignore_errors=True)
    endless = {} if way == "normal end" else {"train.iterations": 100_000}
    broken = {"reward.kind": f"{broken_reward(run.parent)}:score"} if way == "error" else {}
    command = start(run, "arithmetic", {**fields, **endless, **broken})
    wait_for_samplers(command, 2)
    below = descendants(command.pid)
    ports = listening([command.pid, *below])
    if way in ("Ctrl-C", "kill -9"):
        wait_for_iterations(run, 2, command)
        below = descendants(command.pid)
        ports += listening([command.pid, *below])
        if way == "Ctrl-C":  # a terminal sends it to all of the group
            os.killpg(command.pid, signal.SIGINT)
        else:
            command.kill()
    command.communicate()
    began = time.monotonic()
    left = wait_until_gone(below)
    return {
        "processes": len(below),
        "left": len(left),
        "gone_seconds": time.monotonic() - began,
        "open": sorted({p for p in ports if not p.startswith(("127.", "[::1]"))}),
        "code": command.returncode,
    }


def describe_left(found: Found) -> list[str]:
    rows = [["end", "exit", "processes", "left", "gone after", "ports beyond loopback"]]
    for way, one in found["ways"].items():
        seconds = f"{one['gone_seconds']:.1f} s"
        ports = ", ".join(one["open"]) or "none"
        numbers = [str(one[name]) for name in ("code", "processes", "left")]
        rows.append([way, *numbers, seconds, ports])
    return table(rows).splitlines()


def broken_reward(folder: Path) -> Path:
    """Return a reward that fails for good after a while."""
    file = folder.absolute() / "broken_reward.py"
    file.write_text(
        "seen = []\n\n\ndef score(response):\n    seen.append(1)\n"
        "    if len(seen) > 600:\n        raise ValueError('no more')\n    return 1.0\n"
    )
    return file


# Runs, as commands and in this process


TETHER = [sys.executable, "-m", "tether"]


def train(run: Path, recipe: str, fields: Mapping[str, Any]) -> Path:
    """Train a run, or what is left of it."""
    config = load_config(recipe, {"run.dir": str(run), **fields})
    if api.train(config, resume=True).interrupted is not None:
        raise SystemExit(f"{run} was stopped; the same command goes on.")
    return run


def start(run: Path, recipe: str, fields: Mapping[str, Any]) -> subprocess.Popen[str]:
    given = {"run.dir": str(run), **fields}
    options = [text for name, value in given.items() for text in (f"--{name}", json.dumps(value))]
    options = [text.strip('"') for text in options]
    return subprocess.Popen(
        [*TETHER, "train", recipe, *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def hashes(run: Path) -> dict[str, str]:
    """Hash what a run must repeat to the bit: metrics, and the weights at its end."""
    newest = run / "checkpoints" / (run / "checkpoints/LATEST").read_text().strip()
    files = [run / METRICS, *sorted(newest.rglob("*.safetensors"))]
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
        if file.name != "pending.safetensors"
    }


def largest_gap(one: Path, other: Path) -> float:
    pairs = zip(read_lines(one / METRICS), read_lines(other / METRICS), strict=True)
    return max(abs(a[name] - b[name]) / max(1.0, abs(a[name])) for a, b in pairs for name in a)


def sum_of(run: Path, name: str) -> float:
    return sum(line[name] for line in read_lines(run / TIMINGS))


def sampler_pids(pid: int) -> list[int]:
    return [p for p in descendants(pid) if read_proc(p, "cmdline").startswith(b"ray::Seat")]


def wait_for_samplers(command: subprocess.Popen[str], count: int) -> None:
    wait(lambda: len(sampler_pids(command.pid)) >= count, command)


def wait_for_iterations(run: Path, count: int, command: subprocess.Popen[str]) -> None:
    wait(lambda: (run / METRICS).exists() and len(read_lines(run / METRICS)) >= count, command)


def wait(happened: Callable[[], bool], command: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 600
    while not happened():
        if command.poll() is not None or time.monotonic() > deadline:
            command.kill()
            raise SystemExit(f"the run did not come so far:\n{command.communicate()[1]}")
        time.sleep(0.1)


def descendants(pid: int) -> list[int]:
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        fields = read_proc(int(folder.name), "stat").rpartition(b")")[2].split()
        if fields:
            parents[int(folder.name)] = int(fields[1])
    found = [pid]
    for parent in found:
        found += [child for child, of in parents.items() if of == parent]
    return found[1:]


def read_proc(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    fields = read_proc(pid, "stat").rpartition(b")")[2].split()
    return bool(fields) and fields[0] != b"Z"


def wait_until_gone(pids: list[int]) -> list[int]:
    """Wait for processes to end; return those that are still there after `GONE_SECONDS`."""
    deadline = time.monotonic() + GONE_SECONDS
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def listening(pids: list[int]) -> list[str]:
    """Return the addresses on which processes listen."""
    inodes = set()
    for pid in pids:
        with suppress(OSError):
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    inodes.add(os.readlink(file))
    found = []
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] != "0A" or f"socket:[{fields[9]}]" not in inodes:
                continue
            digits, port = fields[1].split(":")
            words = [bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8)]
            host = socket.inet_ntop(family, b"".join(words))
            host = f"[{host}]" if ":" in host else host
            found.append(f"{host.replace('[::ffff:127', '127')}:{int(port, 16)}")
    return found


PARTS: dict[str, tuple[Callable[[Bench], Found], Callable[[Found], list[str]]]] = {
    "equal": (measure_equal, describe_equal),
    "kills": (measure_kills, describe_kills),
    "elastic": (measure_elastic, describe_elastic),
    "overlap": (measure_overlap, describe_overlap),
    "handed": (measure_handed, describe_handed),
    "left": (measure_left, describe_left),
    "lag": (measure_lag, describe_lag),
}


if __name__ == "__main__":
    main()
