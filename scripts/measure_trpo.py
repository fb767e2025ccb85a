"""Measure TRPO's step at its defaults against the step with exact Fisher products over all rows.

    python scripts/measure_trpo.py [--iterations 40] [--exact-every 4] [--seed 0] [--write]

Trains the recipe `arithmetic` with one thread. In every fourth iteration the step is made twice
from the same weights and rows: with products that differentiate the KL twice, measured and undone,
then at the defaults, which is kept. Every kept step's KL is computed again by transformers' own
forward. Exits 1 unless the median step backtracks at most 3 times, has 80% of the other's gain over
root KL, takes 60% of its seconds, and no KL is above the bound. With --write the figures go into
docs/updates.md.
"""

import argparse
import math
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import machine, paste
from torch.nn.attention import SDPBackend, sdpa_kernel

from tether import api
from tether.cli.terminal import table
from tether.config import Config
from tether.config.load import load_config
from tether.ppo.roles import Roles
from tether.ppo.updates import actor, trpo
from tether.ppo.updates.minibatches import UpdateReport
from tether.types import Experience

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "updates.md"
BACKTRACKS, GAIN, SECONDS = 3, 0.8, 0.6  # what must hold in the median
KL_ROUNDING = 1e-6  # of float32, between two ways to compute one KL


@dataclass(frozen=True)
class Step:
    """What one step gave."""

    gain: float  # of the surrogate
    kl: float
    backtracks: int
    seconds: float  # of this thread: the machine may be shared

    @property
    def gain_over_root_kl(self) -> float:
        return self.gain / math.sqrt(self.kl) if self.kl > 0 else 0.0


class ExactRegion(trpo.TrustRegion):
    """Fisher products over all rows as the first version had them: the KL differentiated twice."""

    def fisher_product(self, vector: torch.Tensor) -> torch.Tensor:
        image = torch.zeros_like(vector)
        for part in self.microbatches:
            kl = self._kl(self.actor.states(part.batch.sequences), part)
            slopes = torch.autograd.grad(kl, self.parameters, create_graph=True)
            along = torch.cat([slope.reshape(-1) for slope in slopes]) @ vector
            again = torch.autograd.grad(along, self.parameters)
            image += torch.cat([piece.reshape(-1) for piece in again])
        return image


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--exact-every", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="paste into docs/updates.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    exact, usual, excesses = measure(options.iterations, options.exact_every, options.seed)
    text, failed = describe(exact, usual, excesses)
    print(text)
    if options.write:
        where = f"Recipe arithmetic, seed {options.seed}, one thread. {machine()}"
        marker = "TRPO's step: made by `python scripts/measure_trpo.py --write`"
        paste(DOCUMENT, marker, [text, "", f"  {where}"])
    sys.exit(f"Not as it should be: {', '.join(failed)}" if failed else 0)


def measure(
    iterations: int, exact_every: int, seed: int
) -> tuple[dict[int, Step], list[Step], list[float]]:
    """Exact steps by iteration, steps at the defaults, how far each kept KL is above the bound."""
    exact: dict[int, Step] = {}
    usual: list[Step] = []
    excesses: list[float] = []
    update = actor.update_trpo

    def twice(experience: Experience, roles: Roles, config: Config) -> UpdateReport:
        model = roles.actor.model
        start = {name: weight.clone() for name, weight in model.state_dict().items()}
        old = distributions(model, experience)
        # Fused attention on a CPU has no second derivative; the plain one has.
        if len(usual) % exact_every == 0:
            with sdpa_kernel(SDPBackend.MATH):
                trpo.TrustRegion = ExactRegion
                exact[len(usual)], _ = timed(update, experience, roles, config)
                trpo.TrustRegion = ExactRegion.__base__
            model.load_state_dict(start)
        step, report = timed(update, experience, roles, config)
        usual.append(step)
        again = mean_kl(old, distributions(model, experience), experience)
        excesses.append(again - config.actor.update.max_kl)
        print(f"{len(usual)}: {step}; exact {exact.get(len(usual) - 1)}", flush=True)
        return report

    actor.update_trpo = twice
    with tempfile.TemporaryDirectory() as folder:
        overrides = {
            "seed": seed,
            "threads": 1,
            "run.dir": f"{folder}/run",
            "actor.update.kind": "trpo",
            "train.iterations": iterations,
            "train.checkpoint_every": 0,
            "data.heldout": None,
        }
        try:
            api.train(load_config("arithmetic", overrides))
        finally:
            actor.update_trpo = update
    return exact, usual, excesses


def timed(
    update: Any, experience: Experience, roles: Roles, config: Config
) -> tuple[Step, UpdateReport]:
    began = time.thread_time()
    report = update(experience, roles, config)
    seconds = time.thread_time() - began
    metrics = report.meter.values()
    mask = experience.response_mask
    before = float((experience.policy_advantages * mask).sum() / mask.sum())  # ratios of 1
    return Step(
        gain=-metrics["actor/pg_loss"] - before,
        kl=metrics["actor/exact_kl"],
        backtracks=max(0, int(metrics["actor/line_search_tries"]) - 1),
        seconds=seconds,
    ), report


@torch.no_grad()
def distributions(model: Any, experience: Experience) -> torch.Tensor:
    """Log-probs of the whole vocabulary before every response token, by the model's own forward."""
    sequences = experience.sequences
    logits = model(input_ids=sequences.ids, use_cache=False).logits.double()
    columns = sequences.prompt_lengths[:, None] - 1 + torch.arange(sequences.width)
    columns = columns.clamp(max=logits.shape[1] - 1)
    picked = logits.gather(1, columns[:, :, None].expand(-1, -1, logits.shape[2]))
    return torch.log_softmax(picked, dim=-1)


def mean_kl(old: torch.Tensor, new: torch.Tensor, experience: Experience) -> float:
    per_token = (old.exp() * (old - new)).sum(dim=-1)
    return float(per_token[experience.response_mask].mean())


def describe(
    by_iteration: dict[int, Step], usual: list[Step], excesses: list[float]
) -> tuple[str, list[str]]:
    def middle(steps: list[Step], name: str) -> float:
        return statistics.median(getattr(step, name) for step in steps)

    exact, paired = list(by_iteration.values()), [usual[i] for i in by_iteration]
    rows = [["median of a step", "exact", "default", "of it"]]
    named = {
        "surrogate gain": "gain",
        "KL": "kl",
        "gain / root KL": "gain_over_root_kl",
        "seconds": "seconds",
    }
    for label, name in named.items():
        a, b = middle(exact, name), middle(paired, name)
        rows.append([label, f"{a:.4f}", f"{b:.4f}", f"{b / a:.0%}"])
    tries = [f"{middle(steps, 'backtracks'):g}" for steps in (exact, paired)]
    rows.append(["backtracks", *tries, ""])
    gain = middle(paired, "gain_over_root_kl") / middle(exact, "gain_over_root_kl")
    seconds = middle(paired, "seconds") / middle(exact, "seconds")
    refused = sum(step.kl == 0 for step in usual)
    most = max(step.backtracks for step in usual)
    checks = {
        "backtracks": middle(usual, "backtracks") <= BACKTRACKS,
        "gain": gain >= GAIN,
        "seconds": seconds <= SECONDS,
        "KL": max(excesses) <= KL_ROUNDING,
    }
    lines = [
        table(rows),
        "",
        f"  {len(exact)} iterations of {len(usual)}. In all of them, at the defaults:",
        f"  {middle(usual, 'backtracks'):g} backtracks in the median, at most {most}; "
        f"{refused} steps refused.",
        f"  The largest KL by transformers' own forward was {max(excesses):+.1e} from the bound.",
    ]
    return "\n".join(lines), [name for name, fine in checks.items() if not fine]


if __name__ == "__main__":
    main()
