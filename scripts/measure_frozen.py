"""A PPO step in which 8 of SmolLM2's 30 layers learn against one in which all do, side by side.

Two processes hold a run each (own critic, reference, 4 epochs, float32) and take turns, so that
both see the same machine. Printed, and with --write pasted into docs/performance.md: seconds and
processor seconds of the step and of its training part, and the peak memory of each process from its
models on. Exits 1 if the second is not 2.5 times as fast, or takes more than 60% of the memory.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from measure import machine, paste

from tether.algo.random import uniform
from tether.config.load import validate_config
from tether.data.prompts import PromptSet
from tether.errors import UserError
from tether.models.locate import find_model
from tether.ppo.iteration import run_iteration
from tether.ppo.result import first_controls
from tether.ppo.roles import build_roles
from tether.rollout.local import LocalSampler
from tether.types import Prompts

DOCS = Path(__file__).resolve().parent.parent / "docs"
MODEL = "models/SmolLM2-135M-Instruct.Q4_1.gguf"
ROWS, PROMPT_TOKENS, RESPONSE_TOKENS, EPOCHS, LEARNING = 16, 32, 32, 4, 8
FASTER, MEMORY = 2.5, 0.6  # at least, at most
WORK = {"step": ("rollout", "reward", "forward", "update"), "training": ("forward", "update")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--write", action="store_true", help="paste into docs/performance.md")
    args = parser.parse_args()
    try:
        find_model(args.model)
    except UserError as error:
        sys.exit(str(error))
    context = multiprocessing.get_context("spawn")
    sides = {"all layers": None, f"top {LEARNING} layers": LEARNING}
    with tempfile.TemporaryDirectory() as folder:
        children = {}
        for name, layers in sides.items():
            here, there = context.Pipe()
            given = (there, args.model, layers, args.threads, folder)
            child = context.Process(target=serve, args=given, daemon=True)
            child.start()
            children[name] = (child, here)
        found = take_turns({name: pipe for name, (_, pipe) in children.items()}, args.rounds)
        for child, pipe in children.values():
            pipe.send(None)
            child.join(10)
    lines, ratios = report(found, args)
    print("\n".join(lines))
    if args.write:
        marker = "frozen layers: made by `scripts/measure_frozen.py --write`"
        paste(DOCS / "performance.md", marker, lines)
    sys.exit(0 if ratios["training"] >= FASTER and ratios["memory"] <= MEMORY else 1)


def take_turns(pipes: dict[str, Connection], rounds: int) -> dict[str, list[dict[str, float]]]:
    """Let each process do one iteration at a time; the first of each is not counted."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in pipes}
    for number in range(rounds + 1):
        for name, pipe in pipes.items():
            pipe.send(number)
            said = pipe.recv()
            if number:
                found[name].append(said)
    return found


def serve(pipe: Connection, model: str, layers: int | None, threads: int, folder: str) -> None:
    """Build a run, then do an iteration for each number that comes."""
    torch.set_num_threads(threads)
    data = Path(folder) / f"{layers}.jsonl"
    data.write_text(json.dumps({"prompt": "w"}) + "\n", encoding="utf-8")
    config = validate_config(settings(model, layers, threads, data))
    roles = build_roles(config, reward=lambda response: 0.0)
    cells = uniform(0, "prompts", 0, torch.arange(ROWS * PROMPT_TOKENS).numpy())
    ids = (cells * 40_000).long().view(ROWS, PROMPT_TOKENS).tolist()
    prompts = Prompts(
        [""] * ROWS, ids, [{}] * ROWS, list(range(ROWS)), [str(data)] * ROWS, [None] * ROWS
    )
    sampler = LocalSampler(frozenset(), RESPONSE_TOKENS, temperature=1.0)
    asked = PromptSet(prompts, [ROWS], [1.0])
    roles = replace(roles, train_prompts=asked, sampler=sampler)
    Path("/proc/self/clear_refs").write_text("5")  # what loading took is not counted
    controls = first_controls(config)
    while (iteration := pipe.recv()) is not None:
        began = time.process_time()
        outcome = run_iteration(iteration, controls, roles, config)
        pipe.send({**outcome.seconds, "cpu": time.process_time() - began, "bytes": peak_bytes()})


def peak_bytes() -> int:
    """Return the kernel's high-water mark of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 2**10 for line in lines if line.startswith("VmHWM"))


def settings(model: str, layers: int | None, threads: int, data: Path) -> dict[str, Any]:
    return {
        "threads": threads,
        "model": {"actor": model, "learn_layers": layers},
        "data": {"train": str(data)},
        "rollout": {
            "prompts": ROWS,
            "samples_per_prompt": 1,
            "max_response_tokens": RESPONSE_TOKENS,
        },
        "reward": {"kind": "length", "arguments": {"at_most": 1}},  # a free function replaces it
        "kl": {"in_reward": {"coef": 0.05}},
        "actor": {"lr": 1e-6, "epochs": EPOCHS, "minibatch_rows": ROWS},
    }


def report(
    found: dict[str, list[dict[str, float]]], args: argparse.Namespace
) -> tuple[list[str], dict[str, float]]:
    """Return the lines to paste, and by what the second side is better."""
    (whole, rounds), (part, part_rounds) = found.items()
    rows = {
        what: [median(sum(r[lap] for lap in laps) for r in rs) for rs in (rounds, part_rounds)]
        for what, laps in WORK.items()
    }
    rows["processor"] = [median(r["cpu"] for r in rs) for rs in (rounds, part_rounds)]
    memory = [max(r["bytes"] for r in rs) / 2**20 for rs in (rounds, part_rounds)]
    ratios = {what: a / b for what, (a, b) in rows.items()} | {"memory": memory[1] / memory[0]}
    words = {
        "step": "PPO step with sampling, s",
        "training": "its passes and updates, s",
        "processor": "processor seconds of the step",
    }
    lines = [
        f"SmolLM2-135M, {ROWS} rows of {PROMPT_TOKENS} + {RESPONSE_TOKENS} tokens, "
        f"{EPOCHS} epochs, float32, {args.threads} threads",
        f"{'':32}{whole:>14}{part:>14}",
        *(
            f"{words[what]:32}{a:14.1f}{b:14.1f}   {ratios[what]:.2f} x faster"
            for what, (a, b) in rows.items()
        ),
        f"{'peak memory, MiB':32}{memory[0]:14.0f}{memory[1]:14.0f}   {ratios['memory']:.0%}",
        f"Median of {args.rounds} rounds, taken in turns.",
        machine(),
    ]
    return lines, ratios


if __name__ == "__main__":
    main()
