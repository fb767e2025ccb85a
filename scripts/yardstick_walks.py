"""Y2: trlx's random walks by tether's SFT and PPO, and beside them TRL's PPO and GRPO.

All sides get the same supervised model, the same files, as many rows and optimizer steps, one
thread, and the same evaluation: every start 25 times, sampled. Clocks stand still meanwhile.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from yardstick_store import ROOT, Curve, NotThere, Outcome, Row, Store, minutes

from tether.config.load import load_config

SOURCE = ROOT / "examples" / "random_walks"
CODE = ("examples/random_walks", "bench/walks", "src/tether")
SEEDS = (0, 1, 2)
PROMISED = 0.9
OWN_CRITIC = "tether_ppo-own-critic"
NAMES = {
    "tether_ppo": "tether PPO",
    "trl_ppo": "TRL 1.12 PPO",
    "trl_grpo": "TRL GRPO",
    OWN_CRITIC: "tether PPO, a critic of its own",
}
# trlx has its value head on the actor's trunk, TRL a second model: tether is measured as both.
FIELDS = {OWN_CRITIC: {"critic.shared_trunk": False, "critic.lr": 3e-4}}
SAMPLES_PER_PROMPT = 8  # of GRPO's groups; PPO has one response to a prompt


def run(store: Store) -> Outcome:
    sides: dict[str, list[dict[str, Any]]] = {}
    missing: dict[str, str] = {}
    for side in NAMES:
        try:
            sides[side] = [one_run(store, side, seed) for seed in SEEDS]
        except NotThere as reason:
            missing[side] = str(reason)
    if missing.keys() & {"tether_ppo", OWN_CRITIC}:
        raise NotThere("; ".join(missing.values()))
    rows = [row_of_trlx(sides), row_of_trl(sides, missing)]
    curves = [
        Curve("random walks", NAMES[side], mean_curve(results)) for side, results in sides.items()
    ]
    return Outcome(rows, curves)


def prepare(folder: Path) -> None:
    """Make data and model, and train the model on the walks: `sft` in the folder."""
    if (folder / "sft").is_dir():  # made last
        return
    shutil.rmtree(folder, ignore_errors=True)
    call([sys.executable, str(SOURCE / "make.py"), str(folder)], ROOT)
    for name in ("reward.py", "sft.yaml", "ppo.yaml"):
        shutil.copy(SOURCE / name, folder)
    tether = [sys.executable, "-m", "tether"]
    call([*tether, "sft", "sft.yaml", "--run.dir", "sft-run", "--threads", "1"], folder)
    newest = sorted((folder / "sft-run" / "checkpoints").glob("*/actor"))[-1]
    shutil.copytree(newest, folder / "sft")


def one_run(store: Store, side: str, seed: int) -> dict[str, Any]:
    names = ("make.py", "sft.yaml", "reward.py", "ppo.yaml")
    files = {name: (SOURCE / name).read_text(encoding="utf-8") for name in names}
    settings = {"side": side, "seed": seed, "torch": version("torch"), **files}
    if side in FIELDS:
        settings["fields"] = FIELDS[side]
    folder = store.work / "walks"
    return store.measured(
        f"Y2-{side}-seed{seed}", settings, lambda: measure(folder, side, seed), CODE
    )


def measure(folder: Path, side: str, seed: int) -> dict[str, Any]:
    sys.path.insert(0, str(ROOT))
    from bench import environments

    program = side.partition("-")[0]
    try:
        python = environments.python_of(program)  # tether's side has none of its own
    except environments.NotThere as reason:
        raise NotThere(str(reason)) from None
    prepare(folder)
    config = load_config(folder / "ppo.yaml")
    job = {
        "folder": str(folder),
        "model": str(folder / "sft"),
        "train": read_jsonl(folder / "train.jsonl"),
        "heldout": read_jsonl(folder / "heldout.jsonl"),
        "rows": config.rows,
        "samples_per_prompt": SAMPLES_PER_PROMPT,
        "response_tokens": config.rollout.max_response_tokens,
        "minibatch_rows": config.actor.minibatch_rows,
        "epochs": config.actor.epochs,
        "iterations": config.train.iterations,
        "eval_every": config.train.eval_every,
        "lr": config.actor.lr,
        "value_coef": config.critic.coef,
        "fields": FIELDS.get(side, {}),
        "scratch": str(folder / f"scratch-{side}-seed{seed}"),
        "threads": 1,
        "seed": seed,
    }
    out = call([str(python), "-m", f"bench.walks.{program}"], ROOT, json.dumps(job))
    return {"curve": json.loads(out.strip().splitlines()[-1])["curve"]}


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def call(command: list[str], folder: Path, given: str = "") -> str:
    """Run to the end and return what was printed; with one thread, as all sides have."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(
        command, cwd=folder, env=environment, input=given, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr.strip()[-2000:]}")
    return done.stdout


def mean_curve(results: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return the mean optimality over the seeds by iteration."""
    columns = zip(*(result["curve"] for result in results), strict=True)
    return [(column[0][0], statistics.fmean(point[2] for point in column)) for column in columns]


def last(results: list[dict[str, Any]]) -> tuple[float, float]:
    """Return optimality and training seconds at the end, means over the seeds.

    Seconds are those of the processor: with one thread and nothing else running they are the
    clock's, and they stay what they are when there is.
    """
    ends = [result["curve"][-1] for result in results]
    return statistics.fmean(e[2] for e in ends), statistics.fmean(e[3] for e in ends)


def shown(results: list[dict[str, Any]]) -> str:
    optimality, seconds = last(results)
    spread = statistics.pstdev(result["curve"][-1][2] for result in results)
    return f"{optimality:.3f} ± {spread:.3f} in {seconds:.0f} s"


def row_of_trlx(sides: dict[str, list[dict[str, Any]]]) -> Row:
    ours = sides["tether_ppo"]
    before = statistics.fmean(result["curve"][0][2] for result in ours)
    return Row(
        part="Y2",
        task={
            "en": "random walks, optimality after 100 × 128 rows; trlx's layout",
            "zh": "随机游走，100 × 128 行之后的最优度；trlx 的结构",
        },
        known="1.0 by construction",
        ours=shown(ours),
        reached=last(ours)[0] >= PROMISED,
        minutes=minutes(ours),
        note={"en": f"before PPO {before:.3f}", "zh": f"PPO 之前 {before:.3f}"},
    )


def row_of_trl(sides: dict[str, list[dict[str, Any]]], missing: dict[str, str]) -> Row:
    """Return the row beside TRL, whose critic is a model of its own."""
    optimality, seconds = last(sides[OWN_CRITIC])
    others = {side: results for side, results in sides.items() if side.startswith("trl")}
    known = [f"{NAMES[side]} {shown(results)}" for side, results in others.items()]
    known += [f"{NAMES[side]}: {reason}" for side, reason in missing.items()]
    ends = [last(results) for results in others.values()]
    return Row(
        part="Y2",
        task={
            "en": "random walks, as TRL has it: a critic of its own",
            "zh": "随机游走，与 TRL 相同：Critic 是单独的模型",
        },
        known="; ".join(known),
        ours=shown(sides[OWN_CRITIC]),
        reached=all(optimality >= o and seconds <= s for o, s in ends) if ends else None,
        minutes=minutes(r for side in (OWN_CRITIC, *others) for r in sides[side]),
        note={
            "en": "this layout was added when trlx's had been seen",
            "zh": "看过 trlx 结构的结果之后才加上的",
        },
    )
