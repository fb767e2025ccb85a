"""Y4: the law of Gao et al. 2022 (2210.10760) on the recipe `rlhf`: true utility against sqrt(KL).

From one SFT model and one reward model, PPO with several betas, looked at every few iterations, and
best-of-n of the SFT model by the same reward model. `utility` of `tasks/courtesy.py` is the gold
reward, that of SFT's responses subtracted; d is the square root of the KL to SFT in nats per
response, for best-of-n that of log n - (n - 1)/n.
"""

import math
import shutil
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from yardstick_store import ROOT, Curve, Details, Outcome, Store, minutes, row_of_signs

from tether import api
from tether.config.load import load_config
from tether.config.stages import PipelineConfig
from tether.data.files import read_rows
from tether.models.reward_model import load_reward_model
from tether.ppo.estimates import Z95
from tether.ppo.evaluate import read_evaluations
from tether.rewards.learned import LearnedScorer
from tether.rewards.scorers import Scale
from tether.run.checkpoint_store import all_checkpoints
from tether.run.directory import CONFIG, is_pipeline, is_run
from tether.stages.rlhf import Layout, sample_texts
from tether.tasks.courtesy import Question, utility

RECIPE = ROOT / "src" / "tether" / "recipes" / "rlhf.yaml"
CODE = ("scripts/yardstick_gao.py", "src/tether")
SEEDS = (0, 1, 2)
BETAS = (0.0, 0.05, 0.2, 0.5)
ITERATIONS, EVERY, LR = 36, 3, 3e-4  # of every beta; the rate is the recipe's, held constant
PIPELINE = {"ppo.train.iterations": 1, "ppo.train.eval_every": 0}  # its PPO is not used
RESPONSES = 4  # to each held-out question, of every policy
MOST, BEST_OF = 64, (1, 2, 4, 8, 16, 32, 64)
Point = tuple[float, float, float]  # d, gold, gold's standard error
KNOWN = (
    "RL: d(α − β ln d); best-of-n: d(α − βd), for less KL; a KL penalty acts like early stopping"
)
HEAD = {
    "en": ["seed", "", "α", "β", "R²", "best gold", "at KL", "gold at the end", "KL at the end"],
    "zh": ["种子", "", "α", "β", "R²", "最高真实得分", "当时 KL", "结束时真实得分", "结束时 KL"],
}


def run(store: Store) -> Outcome:
    found = {seed: one_seed(store, seed) for seed in SEEDS}
    signs = signs_of(found)
    row = row_of_signs(
        part="Y4",
        task={
            "en": "over-optimisation of a reward model, recipe `rlhf`",
            "zh": "奖励模型的过度优化，配方 `rlhf`",
        },
        known=KNOWN,
        signs=signs,
        minutes=minutes(result for parts in found.values() for result in parts),
    )
    lines = [line for seed, parts in found.items() for line in lines_of(seed, parts)]
    first = found[SEEDS[0]]
    curves = [
        Curve("gold against d, seed 0", label, [(d, gold) for d, gold, _ in points])
        for label, points in [
            *((f"β = {beta:g}", points_of(part)) for beta, part in zip(BETAS, first, strict=False)),
            ("best of n", points_of(first[-1])),
        ]
    ]
    return Outcome([row], curves, Details(HEAD, lines))


def one_seed(store: Store, seed: int) -> list[dict[str, Any]]:
    """Return the course of each beta, and best-of-n."""
    settings = {"recipe": RECIPE.read_text(encoding="utf-8"), "seed": seed}
    settings |= {"torch": version("torch"), "responses": RESPONSES}
    of_ppo = {"iterations": ITERATIONS, "every": EVERY, "lr": LR}
    parts = [
        store.measured(
            f"Y4-beta-{beta:g}-seed{seed}",
            {**settings, **of_ppo, "beta": beta},
            lambda beta=beta: {"points": course(prepare(store.work, seed), beta)},
            CODE,
        )
        for beta in BETAS
    ]
    best = store.measured(
        f"Y4-best-of-n-seed{seed}",
        {**settings, "most": MOST},
        lambda: {"points": best_of_n(prepare(store.work, seed))},
        CODE,
    )
    return [*parts, best]


def prepare(work: Path, seed: int) -> Layout:
    """Run the pipeline up to its PPO, which is not used; what has been done is not done again."""
    run = work / f"rlhf-seed{seed}"
    fields = {"seed": seed, "threads": 1, "run.dir": str(run), **PIPELINE}
    config = load_config("rlhf", fields, PipelineConfig)
    if not is_pipeline(run):
        shutil.rmtree(run, ignore_errors=True)
    api.rlhf(config, resume=True)
    return Layout(config, run)


def sft_model(layout: Layout) -> Path:
    return Path(api.model_path(str(layout.sft)))


def course(layout: Layout, beta: float) -> list[list[float]]:
    """Return KL, gold, its standard error and the reward every few iterations of PPO."""
    sft = sft_model(layout)
    run = layout.run.parent / f"{layout.run.name}-beta-{beta:g}"
    settings = layout.ppo_config(sft, all_checkpoints(layout.reward_model)[0] / "reward").to_dict()
    settings["run"]["dir"] = str(run)
    settings["kl"]["in_reward"]["coef"] = beta
    if beta == 0:  # without a beta there is no reference; a term of no weight still measures the KL
        settings["kl"]["in_loss"]["coef"] = 1e-12
    settings["actor"] |= {"schedule": "constant", "lr": LR}
    settings["train"] |= {
        "iterations": ITERATIONS,
        "eval_every": EVERY,
        "eval_prompts": 500,
        "checkpoint_every": EVERY,
        "keep_last": ITERATIONS,
    }
    if is_run(run) and load_config(run / CONFIG).to_dict() != load_config_of(settings):
        shutil.rmtree(run)
    result = api.train(settings, resume=True)
    if result.interrupted is not None:
        raise SystemExit("stopped; the same command goes on where it is")
    evaluations = {e.iteration: e for e in read_evaluations(run)}
    policies = {0: sft} | {int(path.name): path / "actor" for path in all_checkpoints(run)}
    points = []
    for iteration in sorted(policies):
        found = evaluations[iteration]
        gold = golds(layout, policies[iteration])
        points.append([found.kl or 0.0, *mean_and_error(gold), found.sampled.mean])
    return points


def load_config_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    return api.as_config(settings).to_dict()


def asked(layout: Layout) -> list[Question]:
    return [Question(**row) for row in read_rows(str(layout.file("questions", "heldout")))]


def golds(layout: Layout, policy: Path) -> list[float]:
    """Return the mean true utility of each held-out question's sampled responses."""
    questions = [question for question in asked(layout) for _ in range(RESPONSES)]
    texts = sample_texts(layout.config, policy, questions, "gold")
    scores = [utility(text, q) for text, q in zip(texts, questions, strict=True)]
    return [statistics.fmean(scores[i : i + RESPONSES]) for i in range(0, len(scores), RESPONSES)]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def best_of_n(layout: Layout) -> list[list[float]]:
    """Return KL, gold, its standard error and the reward for each n, from the same samples."""
    reward = load_reward_model(
        str(all_checkpoints(layout.reward_model)[0] / "reward"),
        "float32",
        torch.device("cpu"),
        microbatch_tokens=16_384,
    )
    scorer = LearnedScorer(reward, None, Scale())
    questions = [question for question in asked(layout) for _ in range(MOST)]
    texts = sample_texts(layout.config, sft_model(layout), questions, "best of n")
    rows = [
        {"prompt": q.prompt, "response": text, "finished": True}
        for q, text in zip(questions, texts, strict=True)
    ]
    raw = np.array([float(score) for score in scorer.raw_scores(rows)]).reshape(-1, MOST)
    gold = np.array([utility(text, q) for text, q in zip(texts, questions, strict=True)])
    order = raw.argsort(axis=1)
    ranked = np.take_along_axis(gold.reshape(-1, MOST), order, axis=1)
    rewards = np.take_along_axis((raw - raw.mean()) / raw.std(), order, axis=1)
    points = []
    for n in BEST_OF:
        weights = chances(MOST, n)
        kl = math.log(n) - (n - 1) / n
        points.append(
            [kl, *mean_and_error((ranked @ weights).tolist()), (rewards @ weights).mean()]
        )
    return points


def chances(count: int, n: int) -> np.ndarray:
    """Return for each of so many samples, worst first, how often it is the best of n of them."""
    return np.array([math.comb(rank, n - 1) / math.comb(count, n) for rank in range(count)])


def points_of(part: Mapping[str, Any]) -> list[Point]:
    """Return (d, gold above SFT's, its standard error), without the starting point."""
    start = part["points"][0][1]
    return [(math.sqrt(max(kl, 0.0)), gold - start, e) for kl, gold, e, _ in part["points"][1:]]


def fit(points: Sequence[Point], bent: Any) -> tuple[float, float, float]:
    """Return alpha, beta of d(alpha - beta·bent(d)) by least squares, and R²."""
    d, gold, _ = (np.array(column) for column in zip(*points, strict=True))
    columns = np.stack([d, -d * bent(d)], axis=1)
    (alpha, beta), *_ = np.linalg.lstsq(columns, gold, rcond=None)
    rest = gold - columns @ np.array([alpha, beta])
    return float(alpha), float(beta), float(1 - (rest**2).sum() / ((gold - gold.mean()) ** 2).sum())


def lines_of(seed: int, parts: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a line for each beta, for all of them together, and for best-of-n."""
    named = [(f"PPO, β = {beta:g}", points_of(p)) for beta, p in zip(BETAS, parts, strict=False)]
    together = [point for _, points in named for point in points]
    rows = [(name, points, np.log) for name, points in named]
    rows += [("PPO, all", together, np.log), ("best of n", points_of(parts[-1]), np.positive)]
    lines = []
    for name, points, bent in rows:
        alpha, beta, quality = fit(points, bent)
        best, end = max(points, key=lambda p: p[1]), points[-1]
        numbers = [best[1], best[0] ** 2, end[1], end[0] ** 2]
        if name == "PPO, all":
            numbers = numbers[:2]
        cells = [f"{x:.2f}" for x in (alpha, beta, quality, *numbers)]
        lines.append([str(seed), name, *cells, *[""] * (7 - len(cells))])
    return lines


def above(ones: Sequence[Point], others: Sequence[Point]) -> list[tuple[float, float]]:
    """Return by how much the first lie above the second at equal d, where both are, with the
    standard error; the second are joined by straight lines, from the origin on."""
    others = [(0.0, 0.0, others[0][2]), *others]
    ds, golds_, errors = (np.array(column) for column in zip(*sorted(others), strict=True))
    inside = [point for point in ones if ds[0] <= point[0] <= ds[-1]]
    return [
        (gold - float(np.interp(d, ds, golds_)), math.hypot(e, float(np.interp(d, ds, errors))))
        for d, gold, e in inside
    ]


def mean_above(gaps: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the mean gap and half its 95% interval; the points share their questions, so its
    error is taken to be that of one of them."""
    if not gaps:
        return math.nan, math.nan
    return statistics.fmean(g for g, _ in gaps), Z95 * statistics.fmean(e for _, e in gaps)


def signs_of(found: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[str, bool]:
    """Return what the paper says, and whether it was found with every seed."""
    forms, stopping, cheaper, turns = [], [], [], []
    for parts in found.values():
        *of_betas, best = [points_of(part) for part in parts]
        together = [point for points in of_betas for point in points]
        alpha, beta, quality = fit(together, np.log)
        forms.append(quality >= 0.8 and alpha > 0 and beta > 0)
        free = of_betas[0]
        turns.append(free[-1][1] < max(gold for _, gold, _ in free) - 2 * free[-1][2])
        for tied in of_betas[1:]:
            gap, half = mean_above(above(tied, free))
            stopping.append(bool(abs(gap) <= half))
        gap, half = mean_above(above(best, sorted(free)))
        cheaper.append(bool(gap > half))
    return {
        "RL's form fits all betas together (R² at least 0.8, both signs)": all(forms),
        "without a penalty gold turns down": all(turns),
        "a penalty acts like early stopping": all(stopping),
        "best-of-n has more gold than RL at equal KL": all(cheaper),
    }
