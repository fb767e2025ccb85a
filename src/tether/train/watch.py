"""What a run tells whoever watches it; this watcher is silent, a display overrides it."""

from pathlib import Path

from tether.ppo.evaluate import Evaluation
from tether.ppo.result import Outcome
from tether.ppo.scoring import Trial


class Watcher:
    def reading(self, path: str, rows: int) -> None:
        """Called while a data file is read; `rows` of it have been."""

    def preparing(self, what: str) -> None:
        """Called while files are hashed, if that takes long."""

    def started(self, run: Path, iterations: int) -> None: ...

    def resumed(self, iterations_done: int, checkpoint: Path | None) -> None: ...

    def warned(self, warning: str) -> None: ...

    def checked(self, findings: str) -> None: ...

    def tried(self, trial: Trial) -> None:
        """Called for each row that the reward was tried on before training."""

    def evaluating(self, prompts: int) -> None: ...

    def evaluated(self, evaluation: Evaluation) -> None: ...

    def iterated(self, outcome: Outcome, metrics: dict[str, float], texts: list[str]) -> None: ...
