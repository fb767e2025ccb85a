"""What every program of the benchmark has in common: a JSON job in, one JSON line out.

Only the standard library, as peers import it from environments of their own.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

Job = dict[str, Any]
Result = dict[str, Any]


def read_job() -> Job:
    """The job on standard input. Whatever libraries print goes to standard error from here on,
    so that standard output holds the result alone."""
    job = json.load(sys.stdin)
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    job["_out"] = kept
    return job


def write_result(job: Job, result: Result) -> None:
    line = json.dumps({**result, "peak_mib": peak_mib()}) + "\n"
    os.write(job["_out"], line.encode())


def timed(work: Callable[[], int], repeats: int) -> Result:
    """Run once to warm up and then `repeats` times; `work` returns how many tokens it made."""
    stamps, tokens = [stamp()], 0
    for _ in range(repeats + 1):
        tokens = work()
        stamps.append(stamp())
    return {**laps(stamps), "tokens": tokens}


def stamp() -> tuple[float, float]:
    """The time, and the processor time of all threads so far. The second suffers less from
    whatever else the machine does."""
    return time.perf_counter(), time.process_time()


def stamp_with_children() -> tuple[float, float]:
    """The same, with the processor time of child processes that are running: a reward's worker."""
    wall, used = stamp()
    ticks = os.sysconf("SC_CLK_TCK")
    for children in Path("/proc/self/task").glob("*/children"):  # there is none but on Linux
        for child in children.read_text().split():
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            used += (int(fields[11]) + int(fields[12])) / ticks  # in user and in system mode
    return wall, used


def laps(stamps: list[tuple[float, float]]) -> Result:
    """Seconds between stamps, the first lap apart."""
    seconds, cpu = ([b - a for a, b in pairwise(column)] for column in zip(*stamps, strict=True))
    return {"warm_up": seconds[0], "seconds": seconds[1:], "cpu_seconds": cpu[1:]}


def peak_mib() -> float:
    """The most memory this process has held. The kernel's high-water mark where there is one, as
    getrusage's also remembers the parent from before exec."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
