"""Measure how fast rewards run: `python scripts/measure_rewards.py [--write]`.

A function that computes for some 20 ms per row, by one and by two workers; and a judge over real
HTTP on loopback that answers after 0.5 s, asked about 256 rows. One and two workers take turns, so
that what else the machine does is shared by both.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import machine, paste

from tether.rewards.functions import RewardPart
from tether.rewards.scorers import Batch
from tether.rewards.servers import JudgeScorer
from tether.rewards.workers import ChildScorer

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "rewards.md"
ROWS, ROUNDS = 256, 5
SLOW = """
def f(response):
    total = 0
    for i in range(600_000):
        total += i * i % 7
    return float(total % 5)
"""
SERVER = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(0.5)
        content = json.dumps({"choices": [{"message": {"content": "Score: 7"}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
    def log_message(self, *_):
        pass

class Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 256

server = Server(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def rows(count: int) -> list[dict[str, object]]:
    return [
        {"prompt": f"p{i}", "response": f"r{i}", "policy_turns": [f"r{i}"]} for i in range(count)
    ]


def seconds_of(scorer: ChildScorer | JudgeScorer, count: int, iteration: int) -> float:
    began = time.perf_counter()
    verdicts = scorer.score(rows(count), Batch(range(count), iteration))
    assert all(verdict.score is not None for verdict in verdicts)
    return time.perf_counter() - began


def measure_workers(folder: Path) -> list[str]:
    file = folder / "slow.py"
    file.write_text(SLOW)
    scorers = {n: ChildScorer([RewardPart(f"{file}:f")], 10.0, workers=n) for n in (1, 2)}
    found: dict[int, list[float]] = {1: [], 2: []}
    for scorer in scorers.values():
        seconds_of(scorer, 4, 0)  # starts the processes
    for iteration in range(ROUNDS):
        for workers, scorer in scorers.items():
            found[workers].append(seconds_of(scorer, ROWS // 4, iteration))
    for scorer in scorers.values():
        scorer.close()
    ratios = [one / two for one, two in zip(found[1], found[2], strict=True)]
    return [
        f"{ROWS // 4} rows of a function that computes, {ROUNDS} rounds in turn",
        *(f"  {n} worker{'s' * (n > 1)}   {statistics.median(found[n]):6.2f} s" for n in (1, 2)),
        f"  faster by   {statistics.median(ratios):.2f} (median), {min(ratios):.2f} to "
        f"{max(ratios):.2f}",
    ]


def measure_judge(folder: Path) -> list[str]:
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
        arguments = {"url": url, "model": "m", "prompt": "{response}"}
        lines = []
        for concurrency in (1, 32, 128):
            scorer = JudgeScorer(RewardPart("judge", arguments), 60.0, concurrency)
            (folder / f"{concurrency}").mkdir()  # a record takes from those beside it
            scorer.record_in(folder / f"{concurrency}" / "verdicts.jsonl")
            count = 8 if concurrency == 1 else ROWS
            taken = seconds_of(scorer, count, 0)
            note = (
                f"   ({count} rows measured, so {taken * ROWS / count:.0f} s)"
                if count < ROWS
                else ""
            )
            lines.append(f"  {concurrency:4d}   {taken:6.2f} s for {count} rows{note}")
    finally:
        process.kill()
    return [f"A judge that answers after 0.5 s, {ROWS} rows, requests in flight:", *lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="paste into docs/rewards.md")
    write = parser.parse_args().write
    with tempfile.TemporaryDirectory() as folder:
        workers, judge = measure_workers(Path(folder)), measure_judge(Path(folder))
    for marker, lines in (("measured: workers", workers), ("measured: judge", judge)):
        print(*lines, sep="\n")
        if write:
            paste(DOCUMENT, marker, [*lines, "", machine()])


if __name__ == "__main__":
    main()
