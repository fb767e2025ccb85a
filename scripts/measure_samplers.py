"""Measure samplers apart from training (docs/samplers.md): are the bits the same, does it learn,
does it overlap, is nothing left behind.

    python scripts/measure_samplers.py [--only equal kills elastic lag overlap handed left]
                                       [--seeds 3] [--threads 2] [--write]

What has been measured is in FOLDER/NAME.json and is not measured again; runs that were broken off
go on where they stopped. Exits 1 if something that must hold does not. With --write the figures of
all that has been measured go into docs/samplers.md.
"""

import argparse
import hashlib
import json
import os
import random
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

from measure import machine, paste

from tether import api, assets
from tether.cli.terminal import table
from tether.config.load import load_config
from tether.run.directory import METRICS, SAMPLERS, TIMINGS
from tether.run.reader import read_lines

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "samplers.md"
MARKER = "{}: made by `python scripts/measure_samplers.py --write`"
LAGS, RECIPES = (0, 1, 2, 4), ("arithmetic", "search_qa")
SMALL = {  # what is killed: some seconds of work per iteration, in chunks small enough to be lost
    "threads": 1,
    "rollout.lag": 1,
    "rollout.chunk_tokens": 1024,
    "train.iterations": 8,
    "train.eval_every": 0,
    "train.eval_prompts": 64,
    "train.checkpoint_every": 2,
    "launch.max_restarts": 20,
}
GONE_SECONDS = 30.0
WAIT_SECONDS = 0.2  # of the slow retrieval server
Found = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/measure-samplers"))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="of the learning runs")
    parser.add_argument("--write", action="store_true", help="paste into docs/samplers.md")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    failed = False
    for name, (measure, describe) in PARTS.items():
        kept = args.folder / f"{name}.json"
        if name in args.only and not kept.exists():
            print(f"{name} …", flush=True)
            found = measure(args)
            kept.write_text(json.dumps({**found, "machine": machine()}, indent=1))
        if not kept.exists():
            continue
        found = json.loads(kept.read_text())
        lines = [*describe(found), "", f"  {found['machine']}"]
        print("\n".join([f"\n== {name}: {'holds' if found['holds'] else 'FAILS'}", *lines]))
        failed |= not found["holds"]
        if args.write:
            paste(DOCUMENT, MARKER.format(name), lines)
    sys.exit(1 if failed else 0)


# 1: the same numbers with samplers and without


def measure_equal(args: argparse.Namespace) -> Found:
    fields = {"threads": 1, "train.iterations": 10, "train.eval_prompts": 64}
    runs = {
        "none": {"model.dtype": "float64"},
        "1": {"model.dtype": "float64", "launch.samplers": 1},
        "2": {"model.dtype": "float64", "launch.samplers": 2},
        "none, same chunks": {"rollout.chunk_tokens": 2048},
        "1, same chunks": {"rollout.chunk_tokens": 2048, "launch.samplers": 1},
        "2, same chunks": {"rollout.chunk_tokens": 2048, "launch.samplers": 2},
    }
    done = {
        name: train(args.folder / f"equal-{number}", "arithmetic", {**fields, **own})
        for number, (name, own) in enumerate(runs.items())
    }
    gaps = {name: largest_gap(done["none"], done[name]) for name in ("1", "2")}
    same = {n: hashes(done[n]) == hashes(done["none, same chunks"]) for n in runs if "same" in n}
    return {
        "gaps": gaps,
        "same": same,
        "holds": all(gap <= 1e-9 for gap in gaps.values()) and all(same.values()),
    }


def describe_equal(found: Found) -> list[str]:
    rows = [["launch.samplers", "float64, rows in other chunks", "the same chunks"]]
    for name, gap in found["gaps"].items():
        equal = "every bit" if found["same"][f"{name}, same chunks"] else "DIFFERS"
        rows.append([name, f"metrics within {gap:.1e}", equal])
    return [*table(rows).splitlines(), "  Against no samplers apart; 10 iterations of arithmetic."]


# 2: kills, and samplers that come and go


def measure_kills(args: argparse.Namespace) -> Found:
    smooth = train(args.folder / "kills-smooth", "arithmetic", {**SMALL, "launch.samplers": 2})
    seconds = sum_of(smooth, "time/iteration")
    again = train(args.folder / "kills-again", "arithmetic", {**SMALL, "launch.samplers": 2})
    expected = hashes(smooth)
    trials = [("sampler", i) for i in range(20)] + [("trainer", i) for i in range(10)]
    trials += [("both", i) for i in range(5)]
    kept = args.folder / "kills-trials.json"
    outcomes = json.loads(kept.read_text()) if kept.exists() else {}
    for kind, number in trials:
        name = f"{kind} {number}"
        if name not in outcomes:
            run = args.folder / f"kills-{kind}-{number}"
            equal, moment = killed(run, kind, random.Random(name), seconds, expected)
            outcomes[name] = {"equal": equal, "moment": moment}
            print(f"  {name}: {moment}, {'equal' if equal else 'OTHER NUMBERS'}", flush=True)
            kept.write_text(json.dumps(outcomes, indent=1))
    repeats = hashes(again) == expected
    return {
        "repeats": repeats,
        "outcomes": outcomes,
        "holds": repeats and all(one["equal"] for one in outcomes.values()),
    }


def killed(
    run: Path, kind: str, rng: random.Random, seconds: float, expected: Mapping[str, str]
) -> tuple[bool, str]:
    """Kill at a random moment of a run, let it end, and compare what it has written."""
    command = start(run, "arithmetic", {**SMALL, "launch.samplers": 2, "run.overwrite": True})
    wait_for_samplers(command, 2)
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


def measure_elastic(args: argparse.Namespace) -> Found:
    """A node with room for a second sampler joins in mid-run, and later leaves."""
    from ray.cluster_utils import Cluster

    fields = {**SMALL, "train.iterations": 24, "launch.samplers": 2}
    smooth = train(args.folder / "elastic-smooth", "arithmetic", fields)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        run = args.folder / "elastic"
        own = {**fields, "launch.address": cluster.address, "run.overwrite": True}
        command = start(run, "arithmetic", own)
        wait_for_iterations(run, 4, command)
        node = cluster.add_node(num_cpus=1)
        wait_for_iterations(run, 12, command)
        ready = max(line["samplers/ready"] for line in read_lines(run / TIMINGS))
        cluster.remove_node(node, allow_graceful=False)
        command.communicate()
    finally:
        cluster.shutdown()
    timings = read_lines(run / TIMINGS)
    first, last = timings[0]["samplers/ready"], timings[-1]["samplers/ready"]
    equal = command.returncode == 0 and hashes(run) == hashes(smooth)
    seen = [first, ready, last]
    return {"ready": seen, "equal": equal, "holds": equal and seen == [1, 2, 1]}


def describe_elastic(found: Found) -> list[str]:
    ready = ", then ".join(f"{n:.0f}" for n in found["ready"])
    said = "every bit equal" if found["equal"] else "OTHER NUMBERS"
    return [f"  Samplers at work: {ready}. Against 2 from beginning to end: {said}."]


# 3: does it learn


def measure_lag(args: argparse.Namespace) -> Found:
    """On one process: samplers apart change no number of it."""
    cells: list[Found] = []
    for recipe in RECIPES:
        for lag in LAGS:
            for kind in ("token", "none") if lag else ("none",):
                for seed in range(args.seeds):
                    run = args.folder / f"lag-{recipe}-{lag}-{kind}-{seed}"
                    fields = {"seed": seed, "threads": args.threads, "rollout.lag": lag}
                    fields |= {"rollout.correction.kind": kind}
                    print(f"  {run.name}", flush=True)
                    train(run, recipe, fields)
                    scores = [e["sampled"]["mean"] for e in read_lines(run / "evals.jsonl")]
                    gap = statistics.mean(
                        line.get("rollout/mismatch_kl", 0.0) for line in read_lines(run / METRICS)
                    )
                    cell = {"recipe": recipe, "lag": lag, "kind": kind, "seed": seed}
                    cells.append({**cell, "scores": scores, "mismatch": gap})
    return {"cells": cells, "holds": True}


def describe_lag(found: Found) -> list[str]:
    rows = [["recipe", "lag", "correction", "held-out, sampled", "by seed", "KL to the sampler"]]
    for recipe in RECIPES:
        for lag in LAGS:
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


def measure_overlap(args: argparse.Namespace) -> Found:
    url = slow_retriever(WAIT_SECONDS)
    tool = [{"kind": "search", "url": url, "topk": 1}]
    short = {"train.iterations": 8, "train.eval_prompts": 8, "train.checkpoint_every": 0}
    apart = {"launch.samplers": 1, "threads": 1}
    slow = {**short, **apart, "rollout.tools": tool}
    runs = {
        "search_qa, lag 0": ("search_qa", slow),
        "search_qa, lag 1": ("search_qa", {**slow, "rollout.lag": 1}),
        "arithmetic, one process": ("arithmetic", {**short, "threads": 2}),
        "arithmetic, lag 1": ("arithmetic", {**short, **apart, "rollout.lag": 1}),
    }
    seconds, charts = {}, {}
    for number, (name, (recipe, fields)) in enumerate(runs.items()):
        # A run that was broken off would be timed in two parts.
        run = args.folder / f"overlap-{number}"
        train(run, recipe, {**fields, "run.overwrite": True}, resume=False)
        lines = read_lines(run / TIMINGS)[2:-1]  # without filling and emptying the pipeline
        seconds[name] = statistics.median(line["time/iteration"] for line in lines)
        if (run / SAMPLERS).exists():
            charts[name] = chart(run)
    slow_ratio = seconds["search_qa, lag 1"] / seconds["search_qa, lag 0"]
    free_ratio = seconds["arithmetic, lag 1"] / seconds["arithmetic, one process"]
    return {
        "seconds": seconds,
        "charts": charts,
        "slow": slow_ratio,
        "free": free_ratio,
        "holds": slow_ratio <= 0.6 and free_ratio <= 0.85,
    }


def describe_overlap(found: Found) -> list[str]:
    rows = [["run", "seconds per iteration"]]
    rows += [[name, f"{seconds:.2f}"] for name, seconds in found["seconds"].items()]
    lines = table(rows).splitlines()
    lines += [
        f"  A retrieval server that takes {WAIT_SECONDS:g} s: lag 1 takes {found['slow']:.0%} of "
        f"lag 0 (at most 60% wanted).",
        f"  Tools that cost nothing, a thread for each side: {found['free']:.0%} of one process "
        f"with two threads (at most 85% wanted).",
    ]
    for name, drawn in found["charts"].items():
        lines += ["", f"  {name}, two iterations:", *drawn]
    return lines


def chart(run: Path, width: int = 84) -> list[str]:
    """Draw two neighbouring iterations: a letter per stage, a digit per iteration sampled for."""
    lines = read_lines(run / SAMPLERS)
    middle = len(lines) // 2
    lanes: dict[str, list[tuple[float, float, str]]] = {"trainer": []}
    offset = 0.0
    for line in lines[middle : middle + 2]:
        at = offset
        for stage, seconds in line["stages"].items():
            lanes["trainer"].append((at, at + seconds, stage[0] if stage != "rollout" else "."))
            at += seconds
        for chunk in line["chunks"]:
            mark = "e" if chunk["iteration"] is None else str(chunk["iteration"] % 10)
            spans = lanes.setdefault(chunk["sampler"], [])
            spans.append((offset + chunk["began"], offset + chunk["ended"], mark))
        offset = at
    drawn = []
    for lane, spans in lanes.items():
        cells = [" "] * width
        for begin, end, mark in spans:
            first, last = (round(x / offset * width) for x in (begin, end))
            for cell in range(max(first, 0), min(max(last, first + 1), width)):
                cells[cell] = mark
        drawn.append(f"  {lane:>10} |{''.join(cells)}| {offset:.1f} s")
    legend = ". waits for rows, r reward, f forward, u update; digits: the iteration sampled for"
    return [*drawn, f"  {'':>10}  {legend}"]


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

    def load(self, version: int, weights: Any) -> None: ...

    def sample(self, chunk: Any) -> Any:
        import torch

        from tether.types import Rollout

        rows, tokens = len(chunk.prompt_ids), 1024
        return Rollout(
            prompt_ids=torch.ones(rows, 64, dtype=torch.long),
            prompt_lengths=torch.full((rows,), 64),
            response_ids=torch.ones(rows, tokens, dtype=torch.long),
            response_lengths=torch.full((rows,), tokens),
            response_mask=torch.ones(rows, tokens, dtype=torch.bool),
            rollout_log_probs=torch.rand(rows, tokens),
            finish_reasons=("eos",) * rows,
        )


def measure_handed(args: argparse.Namespace) -> Found:
    """Time the way of 2048 rows of 1024 tokens, and hold it against an iteration of as many tokens
    at the rate of the recipe `arithmetic`."""
    import pickle

    from tether.config import LaunchSection
    from tether.dist.ray_samplers import RayFleet
    from tether.rollout.chunks import Chunk
    from tether.rollout.pool import SamplerPool, Weights
    from tether.rollout.sampler import Greedy

    rows, tokens = 2048, 1024
    launch = LaunchSection(samplers=1)
    fleet = RayFleet(Blank, launch)
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
    size = len(pickle.dumps(found, protocol=5))
    rate = train(args.folder / "handed", "arithmetic", {"threads": 1, "train.iterations": 4})
    per_second = statistics.median(
        line["throughput/tokens_per_second"] for line in read_lines(rate / TIMINGS)
    )
    share = seconds / (rows * tokens / per_second)
    holds = size < 2 << 30 and share < 0.05
    return {"bytes": size, "seconds": seconds, "share": share, "holds": holds}


def describe_handed(found: Found) -> list[str]:
    return [
        f"  2048 rows of 1024 tokens: {found['bytes'] / 2**20:.0f} MiB in {found['seconds']:.2f} s "
        f"in 128 chunks, {found['share']:.2%} of an iteration",
        "  of as many tokens at the rate at which arithmetic trains with one thread.",
    ]


# 6: what is left behind


def measure_left(args: argparse.Namespace) -> Found:
    ways: dict[str, Found] = {}
    for way in ("normal end", "error", "Ctrl-C", "kill -9"):
        run = args.folder / f"left-{way.replace(' ', '-')}"
        endless = {} if way == "normal end" else {"train.iterations": 100_000}
        broken = {"reward.kind": f"{broken_reward(args.folder)}:score"} if way == "error" else {}
        fields = {**SMALL, **endless, **broken, "launch.samplers": 2, "run.overwrite": True}
        command = start(run, "arithmetic", fields)
        wait_for_samplers(command, 2)
        below = descendants(command.pid)
        ports = listening([command.pid, *below])
        if way in ("Ctrl-C", "kill -9"):
            wait_for_iterations(run, 2, command)
            below = descendants(command.pid)
            if way == "Ctrl-C":  # a terminal sends it to all of the group
                os.killpg(command.pid, signal.SIGINT)
            else:
                command.kill()
        command.communicate()
        began = time.monotonic()
        left = wait_until_gone(below)
        ways[way] = {
            "processes": len(below),
            "left": len(left),
            "seconds": time.monotonic() - began,
            "open": sorted({p for p in ports if not p.startswith(("127.", "[::1]"))}),
            "code": command.returncode,
        }
    return {"ways": ways, "holds": not any(w["left"] or w["open"] for w in ways.values())}


def describe_left(found: Found) -> list[str]:
    rows = [["end", "exit", "processes", "left", "gone after", "ports beyond loopback"]]
    for way, one in found["ways"].items():
        seconds = f"{one['seconds']:.1f} s"
        ports = ", ".join(one["open"]) or "none"
        numbers = [str(one[name]) for name in ("code", "processes", "left")]
        rows.append([way, *numbers, seconds, ports])
    return table(rows).splitlines()


def broken_reward(folder: Path) -> Path:
    """Return a reward that fails for good after a while."""
    file = folder.absolute() / "broken_reward.py"
    file.write_text(
        "seen = []\n\n\ndef score(response):\n    seen.append(1)\n"
        "    if len(seen) > 1200:\n        raise ValueError('no more')\n    return 1.0\n"
    )
    return file


# Runs, as commands and in this process


TETHER = [sys.executable, "-m", "tether"]


def train(run: Path, recipe: str, fields: Mapping[str, Any], resume: bool = True) -> Path:
    config = load_config(recipe, {"run.dir": str(run), **fields})
    api.train(config, resume=resume)
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


PARTS: dict[str, tuple[Callable[[argparse.Namespace], Found], Callable[[Found], list[str]]]] = {
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
