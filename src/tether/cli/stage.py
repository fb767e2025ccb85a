"""What a person sees of `tether sft` and `tether reward-model`."""

from pathlib import Path

import typer
from rich.console import Console

from tether.cli.display import training_bar
from tether.cli.text import printable, table
from tether.train.stage import Record, StageResult, StageWatcher

PLAIN_LINES = 10  # progress lines in the course of a stage, where there is no terminal


class StageDisplay(StageWatcher):
    """A bar on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self.progress = training_bar(self.console)
        self.steps = 0

    def __enter__(self) -> "StageDisplay":
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.stop()

    def started(self, run: Path, steps: int) -> None:
        self.steps = steps
        self._say(f"run        {printable(str(run))}, {steps} steps")
        self.task = self.progress.add_task("training", total=steps, numbers="")
        self.progress.start()

    def stepped(self, step: int, metrics: Record) -> None:
        numbers = f"loss {metrics['loss']:.4f}"
        if "accuracy" in metrics:
            numbers += f"  accuracy {metrics['accuracy']:.1%}"
        done = step + 1
        self.progress.update(self.task, completed=done, numbers=numbers)
        due = done == self.steps or done % max(1, self.steps // PLAIN_LINES) == 0
        if due and not self.console.is_terminal:
            self._say(f"{done:>5}/{self.steps}  {numbers}")

    def waiting(self, problem: str) -> None:
        self._say(f"waiting    {printable(problem)}")

    def evaluated(self, step: int, evaluation: Record) -> None:
        text = f"held-out   after {step} steps: loss {evaluation['loss']:.4f}"
        if "accuracy" in evaluation:
            text += (
                f", accuracy {evaluation['accuracy']:.1%}, calibration error "
                f"{evaluation['calibration_error']:.3f}"
            )
        self._say(text)

    def conclude(self, result: StageResult, role: str) -> None:
        """The closing lines, and the exit code that says how it ended."""
        self.progress.stop()
        if result.after is not None and "bins" in result.after:
            self._say("")
            self.console.print(reliability_table(result.after), markup=False)
            self._say("")
        if result.interrupted is not None:
            self._say(f"stopped by {result.interrupted.name}; saved as it is, not to be resumed")
        self._say(f"{result.steps_done} steps in {result.train_seconds:.0f} s of training")
        self._say(f"model      {result.checkpoint / role}")
        if result.interrupted is not None:
            raise typer.Exit(128 + result.interrupted)

    def _say(self, text: str) -> None:
        self.console.print(f"  {text}" if text else "", markup=False)


def reliability_table(evaluation: Record) -> str:
    """What the model said about held-out pairs, and how it was."""
    rows = [["pairs", "how sure it was", "how often right"]]
    for one in evaluation["bins"]:
        rows.append([str(one["count"]), f"{one['confidence']:.1%}", f"{one['accuracy']:.1%}"])
    return table(rows, numbers_from=0)
