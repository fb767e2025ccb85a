"""Measure on-policy distillation against PPO on the score, and paste it into docs/distillation.md.

    python scripts/measure_distillation.py            # print
    python scripts/measure_distillation.py --write    # and paste

A teacher is trained by PPO on the recipe `arithmetic`, as it ships. A student that begins where the
teacher began learns from the teacher's log-probs alone, for a third of the iterations. Counted are
the sampled rows until the held-out score (sampled) has closed 95% of the gap between the start and
the teacher; for PPO on the way to being the teacher. Runs that are done are kept in runs/. Exits 1
if the student needs more than a third of PPO's rows.

The settings below were written before the first run. One thread; some 4 minutes on a quiet core.
"""

import argparse
import sys
from pathlib import Path

from measure import machine, paste

import tether
from tether.cli.terminal import table
from tether.config import Config
from tether.config.load import load_config
from tether.ppo.evaluate import Evaluation, read_evaluations

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs" / "distillation"
CLOSED, MOST_ROWS = 0.95, 1 / 3
ITERATIONS = 40  # of PPO, the recipe's own
COMMON = {"threads": 1, "train.eval_prompts": 500}
PPO = {**COMMON, "train.eval_every": 4}
STUDENT = {
    **COMMON,
    "train.iterations": ITERATIONS // 3,
    "train.eval_every": 2,
    "advantage.estimator": "distillation",
    "kl.in_reward.coef": 1.0,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="paste into docs/distillation.md")
    arguments = parser.parse_args()
    config = load_config("arithmetic", {**PPO, "run.dir": str(RUNS / "ppo")})
    ppo = measured(config)
    teacher = RUNS / "teacher"
    if not teacher.is_dir():
        tether.export(RUNS / "ppo", teacher)
    fields = {**STUDENT, "model.reference": str(teacher), "run.dir": str(RUNS / "student")}
    student = measured(load_config("arithmetic", fields))
    start, goal = ppo[0].sampled.mean, ppo[-1].sampled.mean
    wanted = start + CLOSED * (goal - start)
    needed = {
        "PPO": rows_until(wanted, ppo, config),
        "student": rows_until(wanted, student, config),
    }
    rows = [["run", "rows", "held-out, sampled", "rows until 95% of the gap"]]
    for name, found in (("start", ppo[:1]), ("PPO, the teacher", ppo), ("student", student)):
        until = needed.get("PPO" if name.startswith("PPO") else name)
        told = "–" if name == "start" else "not reached" if until is None else f"{until}"
        rows.append([name, f"{found[-1].iteration * config.rows}", str(found[-1].sampled), told])
    text = table(rows)
    print(text)
    reached = needed["student"] is not None and needed["PPO"] is not None
    share = needed["student"] / needed["PPO"] if reached else None
    verdict = "  The student did not close the gap." if share is None else (
        f"  The student needed {share:.0%} of PPO's rows; the aim was a third."
    )  # fmt: skip
    print(verdict)
    if arguments.write:
        marker = "distillation: made by `python scripts/measure_distillation.py --write`"
        paste(ROOT / "docs" / "distillation.md", marker, [text, "", verdict, f"  {machine()}"])
    sys.exit(0 if share is not None and share <= MOST_ROWS else 1)


def measured(config: Config) -> list[Evaluation]:
    """Train, or go on, or read what is there."""
    tether.train(config, resume=True, quiet=True)
    assert config.run.dir is not None
    return read_evaluations(config.run.dir)


def rows_until(wanted: float, found: list[Evaluation], config: Config) -> int | None:
    """Return the sampled rows of the first evaluation with this score."""
    reached = [e.iteration for e in found if e.sampled.mean >= wanted]
    return reached[0] * config.rows if reached else None


if __name__ == "__main__":
    main()
