"""Run the recipe `rlhf`, then PPO with three betas on its reward model; paste into docs/rlhf.md.

The first part is what `tether train rlhf` prints, with its time. The second shows what too much
optimisation does: each beta's run is judged as it goes on, by the reward model and by the true
preference, and both are drawn against the KL spent. Exits 1 if PPO wins less than 70% of its
comparisons with SFT.
"""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

from measure import machine, paste

from tether import api
from tether.cli.display import PipelineDisplay, standings
from tether.cli.terminal import table
from tether.config.load import load_config
from tether.config.stages import PipelineConfig
from tether.ppo.evaluate import read_evaluations
from tether.run.checkpoint_store import all_checkpoints
from tether.stages.rlhf import Layout, Report, Standing, run_pipeline, stand

DOCS = Path(__file__).resolve().parent.parent / "docs"
BETAS = (0.3, 0.05, 0.0)
ITERATIONS, EVERY, LR = 35, 5, 6e-4  # of the study: longer and faster than the recipe
WANTED_WINS = 0.70


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/measure-rlhf"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="paste into docs/rlhf.md")
    args = parser.parse_args()
    folder: Path = args.folder
    folder.mkdir(parents=True, exist_ok=True)

    fields = {"run.dir": str(folder / "recipe"), "threads": args.threads}
    config = load_config("rlhf", fields, PipelineConfig)
    seconds = recipe(config, folder)
    layout = Layout(config, folder / "recipe")
    report = read_report(layout.run)
    courses = {beta: course(layout, folder / f"beta-{beta:g}", beta) for beta in BETAS}
    shown = study(courses)
    print(f"\n{standings(report)}\n\n{shown}")
    if args.write:
        lines = [standings(report), "", took(seconds, args.threads)]
        paste(DOCS / "rlhf.md", "recipe table: made by `scripts/measure_rlhf.py`", lines)
        paste(
            DOCS / "rlhf.md",
            "study table: made by `scripts/measure_rlhf.py`",
            [shown, "", f"  {machine()}"],
        )
        draw(courses, DOCS / "figures" / "rlhf.svg")
    if report.ppo.wins < WANTED_WINS:
        sys.exit(f"PPO wins {report.ppo.wins:.1%}, less than {WANTED_WINS:.0%}.")


def took(seconds: float, threads: int) -> str:
    return f"  All of it in {seconds / 60:.1f} minutes, threads {threads}. {machine()}"


def recipe(config: PipelineConfig, folder: Path) -> float:
    """Seconds that the recipe takes; one that has been run already is not run again."""
    clock = folder / "seconds"
    if clock.is_file():
        return float(clock.read_text())
    shutil.rmtree(folder / "recipe", ignore_errors=True)
    began = time.monotonic()
    run_pipeline(config, PipelineDisplay())
    clock.write_text(f"{time.monotonic() - began}")
    return float(clock.read_text())


def read_report(run: Path) -> Report:
    found = json.loads((run / "report.json").read_text())
    return Report(run, Standing(**found["sft"]), Standing(**found["ppo"]))


def course(layout: Layout, run: Path, beta: float) -> list[Standing]:
    """How a policy stands every few iterations of a longer PPO run at a constant rate."""
    sft = Path(api.model_path(str(layout.sft)))
    reward = all_checkpoints(layout.reward_model)[0] / "reward"
    settings = layout.ppo_config(sft, reward).to_dict()
    settings["run"]["dir"] = str(run)
    settings["kl"]["in_reward"]["coef"] = beta
    if beta == 0:  # without a beta there is no reference; a term of no weight still measures the KL
        settings["kl"]["in_loss"]["coef"] = 1e-12
    settings["actor"] |= {"schedule": "constant", "lr": LR}
    settings["train"] |= {
        "iterations": ITERATIONS,
        "eval_every": EVERY,
        "checkpoint_every": EVERY,
        "keep_last": ITERATIONS,
    }
    api.train(settings, resume=True)
    evaluations = {e.iteration: e for e in read_evaluations(run)}
    policies = {0: sft} | {int(path.name): path / "actor" for path in all_checkpoints(run)}
    return [stand(layout, policies[i], sft, evaluations[i]) for i in sorted(policies)]


def study(courses: dict[float, list[Standing]]) -> str:
    """Each beta at its best true moment and at its end."""
    rows = [["beta", "", "KL", "reward", "true utility", "right", "yes", "wins over SFT"]]
    for beta, standings_ in courses.items():
        best = max(standings_, key=lambda s: s.utility)
        for name, s in (("best", best), ("end", standings_[-1])):
            shares = [f"{share:.1%}" for share in (s.right, s.greeted, s.wins)]
            rows.append(
                [f"{beta:g}", name, f"{s.kl:.2f}", f"{s.reward:.2f}", f"{s.utility:.2f}", *shares]
            )
    return table(rows)


def draw(courses: dict[float, list[Standing]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tether"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for number, (beta, standings_) in enumerate(courses.items()):
        spent = [s.kl for s in standings_]
        for axis, name in zip(axes, ("reward", "utility"), strict=True):
            heights = [getattr(s, name) for s in standings_]
            axis.plot(spent, heights, "o-", markersize=3, color=f"C{number}", label=f"β = {beta:g}")
    axes[0].set(title="what the reward model sees", ylabel="learned reward")
    axes[1].set(title="what people truly think", ylabel="true utility")
    for axis in axes:
        axis.set_xlabel("KL to SFT, nats per response")
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
