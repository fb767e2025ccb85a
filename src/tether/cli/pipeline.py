"""`tether train rlhf`: three stages, and the table at the end."""

from typing import Any

from tether.cli.display import Display
from tether.cli.stage import StageDisplay
from tether.cli.text import table
from tether.config import Config
from tether.pipeline.report import Standing
from tether.pipeline.run import PipelineWatcher, Report, run_pipeline
from tether.recipes import load_config
from tether.stages import PipelineConfig


class PipelineDisplay(PipelineWatcher):
    def __init__(self) -> None:
        self.number = 0

    def began(self, what: str) -> None:
        self.number += 1
        print(f"\n{self.number}. {what}", flush=True)

    def stage(self) -> StageDisplay:
        return StageDisplay()

    def ppo(self, config: Config) -> Display:
        return Display(config)


def train_all(recipe: str, overrides: dict[str, Any]) -> None:
    report = run_pipeline(load_config(recipe, overrides, PipelineConfig), PipelineDisplay())
    print(f"\n{standings(report)}\n\n  everything is in {report.run}")


def standings(report: Report) -> str:
    heading = ["", "reward", "KL", "true utility", "right", "yes", "wins over SFT", "95%"]
    return table([heading, _row("SFT", report.sft), _row("PPO", report.ppo)])


def _row(name: str, s: Standing) -> list[str]:
    kl = "–" if s.kl is None else f"{s.kl:.2f}"
    interval = f"{s.wins_low:.1%} – {s.wins_high:.1%}"
    shares = [f"{share:.1%}" for share in (s.right, s.greeted, s.wins)]
    return [name, f"{s.reward:.2f}", kl, f"{s.utility:.2f}", *shares, interval]
