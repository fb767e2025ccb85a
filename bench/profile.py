"""Where the time of one iteration goes: torch's profiler, operators grouped by what they serve.
Pastes its table into docs/performance.md.

An operator's own time counts, without that of the operators that it calls; what no operator
accounts for is Python: the interpreter between operators, and the profiler's own cost in it.
"""

import argparse
import sys
import time
from collections import Counter

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bench.jobs import THREADS, ppo_job, prompts
from bench.models import ROOT, model_directory
from bench.ours.ppo import build
from tether.cli.terminal import table
from tether.config import Config
from tether.config.load import load_config
from tether.ppo.iteration import run_iteration
from tether.ppo.result import first_controls
from tether.ppo.roles import Roles, build_roles

sys.path.append(str(ROOT / "scripts"))
from measure import machine, paste

DOCUMENT = ROOT / "docs" / "performance.md"
MARKER = "profile: made by `make profile`"

# The first group one of whose words stands in an operator's name.
GROUPS = {
    "optimizer": ("adam", "optimizer", "foreach", "clip_grad", "_norm"),
    "attention": ("scaled_dot_product", "flash", "attention", "bmm", "baddbmm"),
    "GEMM": ("addmm", "aten::mm", "linear", "matmul", "mkldnn"),
    "softmax and head": ("softmax", "logsumexp", "exp", "gather", "log_prob"),
    "sampling": ("cumsum", "searchsorted", "argmax", "multinomial"),
    "copies": ("copy_", "cat", "index", "clone", "contiguous", "fill_", "zero_", "select"),
}
OTHER, PYTHON = "other operators", "Python"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-write", action="store_true", help="print, and leave the document")
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    lines = []
    for title, make in (("arithmetic demo", arithmetic), ("SmolLM2-135M step", smollm2)):
        config, roles = make()
        try:
            found = describe(title, config, roles)
        finally:
            roles.reward.close()
        print("\n".join(found), flush=True)
        lines += found
    lines.append(machine())
    if not args.no_write:
        paste(DOCUMENT, MARKER, lines)


def arithmetic() -> tuple[Config, Roles]:
    config = load_config("arithmetic", {"threads": THREADS})
    return config, build_roles(config)


def smollm2() -> tuple[Config, Roles]:
    return build(
        ppo_job(
            model_directory("smollm2"), prompts(rows=16, tokens=32), response_tokens=32, repeats=1
        )
    )


def describe(title: str, config: Config, roles: Roles) -> list[str]:
    """One warm iteration, then one under the profiler, and the same once more without it."""
    controls = first_controls(config)
    run_iteration(0, controls, roles, config)
    began = time.perf_counter()
    stages = run_iteration(1, controls, roles, config).seconds
    plain = time.perf_counter() - began
    with profile(activities=[ProfilerActivity.CPU]) as recording, record_function("iteration"):
        run_iteration(2, controls, roles, config)
    groups, largest = grouped(recording.key_averages())
    whole = sum(groups.values())
    shares = [["", "share"], *([name, f"{s / whole:.0%}"] for name, s in groups.most_common())]
    laps = ", ".join(f"{name} {seconds:.2f}" for name, seconds in stages.items())
    return [
        f"{title}: {plain:.2f} s per iteration ({laps}); under the profiler {whole:.2f} s",
        *table(shares).split("\n"),
        f"  largest operators: {largest}",
        "",
    ]


def grouped(events: list) -> tuple[Counter, str]:
    """Own seconds by group, and the five largest operators by name."""
    groups, operators = Counter(), Counter()
    for event in events:
        seconds = event.self_cpu_time_total / 1e6
        if event.key == "iteration":  # what is left of the whole once all operators are taken off
            groups[PYTHON] += seconds
        else:
            groups[group_of(event.key)] += seconds
            operators[event.key] += seconds
    whole = sum(groups.values())
    top = ", ".join(f"{name} {s / whole:.0%}" for name, s in operators.most_common(5))
    return groups, top


def group_of(operator: str) -> str:
    name = operator.lower()
    return next((g for g, words in GROUPS.items() if any(w in name for w in words)), OTHER)


if __name__ == "__main__":
    main()
