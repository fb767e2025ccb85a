"""Y1: CartPole-v1 and Acrobot-v1 by `examples/classic_control.py`, with CleanRL's settings."""

import importlib.util
import statistics
import sys
from dataclasses import asdict
from importlib.metadata import version
from types import ModuleType

from yardstick_store import ROOT, Curve, NotThere, Outcome, Row, Store, minutes

SEEDS = (1, 2, 3)
# Mean and deviation over three seeds: vwxyzjn/cleanrl fe8d8a0, docs/rl-algorithms/ppo.md.
CLEANRL = {"CartPole-v1": (490.04, 6.12), "Acrobot-v1": (-86.36, 1.32)}
BASELINES = {"CartPole-v1": (497.54, 4.02), "Acrobot-v1": (-81.82, 5.58)}
CODE = ("examples/classic_control.py", "src/tether/algo")
POINTS = 100  # of a curve


def run(store: Store) -> Outcome:
    example = load_example()
    rows, curves = [], []
    for task, known in CLEANRL.items():
        results = [one_run(store, example, task, seed) for seed in SEEDS]
        scores = [result["score"] for result in results]
        mean, spread = statistics.fmean(scores), statistics.pstdev(scores)
        each = ", ".join(f"{score:.2f}" for score in scores)
        baselines = "{:.2f} ± {:.2f}".format(*BASELINES[task])
        rows.append(
            Row(
                part="Y1",
                task={
                    "en": f"{task}, 500k steps, three seeds",
                    "zh": f"{task}，50 万步，三个种子",
                },
                known=f"CleanRL {known[0]:.2f} ± {known[1]:.2f}; openai/baselines {baselines}",
                ours=f"{mean:.2f} ± {spread:.2f}",
                reached=all(
                    overlaps_or_better((mean, spread), figure)
                    for figure in (known, BASELINES[task])
                ),
                minutes=minutes(results),
                note={"en": f"seeds {each}", "zh": f"各种子 {each}"},
            )
        )
        curves += [
            Curve(task, f"seed {seed}", result["curve"])
            for seed, result in zip(SEEDS, results, strict=True)
        ]
    return Outcome(rows, curves, bands=CLEANRL)


def overlaps_or_better(ours: tuple[float, float], known: tuple[float, float]) -> bool:
    """Return whether our interval reaches up to the known one; higher is better."""
    return ours[0] + ours[1] >= known[0] - known[1]


def load_example() -> ModuleType:
    if importlib.util.find_spec("gymnasium") is None:
        raise NotThere("gymnasium is not installed: pip install -e '.[yardsticks]'")
    path = ROOT / "examples" / "classic_control.py"
    spec = importlib.util.spec_from_file_location("classic_control", path)
    assert spec
    assert spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def one_run(store: Store, example: ModuleType, task: str, seed: int) -> dict:
    def measure() -> dict:
        episodes = example.train(task, seed, settings)
        return {
            "score": example.score_of(episodes),
            "episodes": len(episodes),
            "curve": curve_of(example, episodes, settings.steps),
        }

    settings = example.Settings()
    versions = {name: version(name) for name in ("gymnasium", "torch")}
    key = {"task": task, "seed": seed, **asdict(settings), **versions}
    return store.measured(f"Y1-{task}-seed{seed}", key, measure, CODE)


def curve_of(example: ModuleType, episodes: list, steps: int) -> list[tuple[float, float]]:
    """Return the score as it would have been had training stopped there, at even steps."""
    points = []
    for i in range(1, POINTS + 1):
        so_far = [episode for episode in episodes if episode[0] <= steps * i / POINTS]
        if so_far:
            points.append((steps * i / POINTS, example.score_of(so_far)))
    return points
