"""Compare a reward per turn with the same total at the end, in the recipe `game`.

    python scripts/measure_game.py FOLDER [--iterations 10] [--prompts 256] [--seeds 0 1 2]

Trains PPO with either pay and GRPO beside them, on the same games, and evaluates after every second
iteration. Goes on where it stopped: runs that FOLDER has are not trained again.
"""

import argparse
from pathlib import Path

import tether
from tether.config.load import load_config
from tether.ppo.evaluate import read_evaluations

WAYS = {
    "PPO, reward per turn": {"pay": "turn"},
    "PPO, total at the end": {"pay": "end"},
    "GRPO, total": {"pay": "end", "grpo": True},
}


def overrides(way: dict, seed: int, args: argparse.Namespace, run: Path) -> dict:
    environment = {
        "kind": "tether.tasks.ladder:Ladder",
        "arguments": {"turns": 6, "pay": way["pay"]},
    }
    found = {
        "run.dir": str(run),
        "run.rollouts_every": 0,
        "rollout.environment": environment,
        "rollout.prompts": args.prompts,
        "train.iterations": args.iterations,
        "train.eval_every": 2,
        "train.checkpoint_every": 0,
        "seed": seed,
        "threads": 1,
    }
    if way.get("grpo"):
        found |= {
            "advantage.estimator": "grpo",
            "rollout.prompts": args.prompts // 8,
            "rollout.samples_per_prompt": 8,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    for seed in args.seeds:
        for name, way in WAYS.items():
            run = args.folder / f"{name.replace(',', '').replace(' ', '-')}-{seed}"
            if (
                not (run / "evals.jsonl").exists()
                or len(read_evaluations(run)) <= args.iterations // 2
            ):
                settings = overrides(way, seed, args, run)
                tether.train(load_config("game", {**settings, "run.overwrite": True}))
            shown = [
                f"{e.iteration}: {e.sampled.mean:.2f} ({e.sampled.low:.2f} to {e.sampled.high:.2f})"
                for e in read_evaluations(run)
            ]
            print(f"{name}, seed {seed}:  " + "  ".join(shown), flush=True)


if __name__ == "__main__":
    main()
