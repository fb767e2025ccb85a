"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere."""

import shlex
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tether.cli.text import ReadingLines, printable, score_text, table
from tether.config import Config
from tether.dist.environment import launched_rank
from tether.run.trust import FLAG, code_and_addresses
from tether.train.evaluate import Evaluation
from tether.train.loop import Result
from tether.train.outcome import Outcome
from tether.train.trial import Trial
from tether.train.watch import Watcher

SAMPLES_SHOWN = 10  # sample responses in the course of a run
EVENTS_SHOWN = 3  # an iteration
PLAIN_LINES = 20  # progress lines in the course of a run, where there is no terminal


class Display(Watcher):
    """The silent watcher's methods, each shown."""

    def __init__(self, config: Config) -> None:
        self.config = config
        # One of several processes speaks for all.
        self.console = Console(highlight=False, soft_wrap=True, quiet=launched_rank() > 0)
        self.progress = training_bar(self.console)
        self.task = None
        self.prompt = "Hello"
        self.score: float | None = None
        self.reading_lines = ReadingLines(self._say)

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.stop()

    def reading(self, path: str, rows: int) -> None:
        self.reading_lines(path, rows)

    def started(self, run: Path, iterations: int) -> None:
        c = self.config
        self._say(f"run        {run}")
        self._say(
            f"plan       {iterations} iterations, each {c.rollout.prompts} prompts x "
            f"{c.rollout.samples_per_prompt} samples = {c.rows} rows; "
            f"actor {c.model.actor}, threads {c.threads}, seed {c.seed}"
        )
        if c.data.heldout is None:
            self._say("held-out   none: data.heldout is not set, so nothing is evaluated")

    def preparing(self, what: str) -> None:
        self._say(f"preparing  {what}")

    def resumed(self, iterations_done: int, checkpoint: Path | None) -> None:
        where = "there is no checkpoint yet" if checkpoint is None else f"checkpoint {checkpoint}"
        self._say(f"resuming   after {iterations_done} iterations: {where}")

    def warned(self, warning: str) -> None:
        self._say(f"warning    {warning}")

    def checked(self, findings: str) -> None:
        self._say(f"self-check {findings}")

    def tried(self, trial: Trial) -> None:
        self._say(f"reward     {printable(f'{trial.result} {trial.why} ({trial.where})')}")

    def evaluating(self, prompts: int) -> None:
        if self.task is None:
            files = [file.path for file in self.config.data.files("heldout")]
            self._say(f"evaluating {prompts} held-out prompts of {', '.join(files)} …")

    def evaluated(self, evaluation: Evaluation) -> None:
        greedy, sampled = evaluation.greedy, evaluation.sampled
        self._say(
            f"held-out   after {evaluation.iteration} iterations: sampled "
            f"{score_text(sampled.mean, sampled.binary)}, greedy "
            f"{score_text(greedy.mean, greedy.binary)}, KL {_kl(evaluation.kl)}"
        )

    def iterated(self, outcome: Outcome, metrics: dict[str, float], texts: list[str]) -> None:
        total = self.config.train.iterations
        speed = outcome.timings()["throughput/tokens_per_second"]
        numbers = (
            f"score {metrics['score/mean']:.3f}  KL {_kl(metrics.get('kl/sequence_mean'))}  "
            f"entropy {_kl(metrics.get('actor/entropy'))}  {speed:,.0f} tokens/s"
        )
        done, self.score = outcome.iteration + 1, metrics["score/mean"]
        if self.task is None:
            self.progress.start()
            self.task = self.progress.add_task("training", total=total, numbers="")
        self.progress.update(self.task, completed=done, numbers=numbers)
        if not self.console.is_terminal and (done == total or _due(done, total, PLAIN_LINES)):
            self._say(f"{done:>5}/{total}  {numbers}")
        if _due(done, total, SAMPLES_SHOWN):
            row = done % len(texts)
            score = f"{float(outcome.scores.values[row]):g}" if outcome.scores.scored[row] else "–"
            self.prompt = printable(outcome.prompts.texts[row])
            self._say(f"sample     {self.prompt} → {printable(texts[row])}   (score {score})")
        for event in outcome.events[:EVENTS_SHOWN]:
            self._say(f"event      {event.kind}, row {event.row}: {printable(event.message)}")
        if len(outcome.events) > EVENTS_SHOWN:
            more = len(outcome.events) - EVENTS_SHOWN
            self._say(f"event      and {more} more, in events.jsonl")

    def summary(self, result: Result) -> None:
        c, seconds = self.config, f"{result.train_seconds:.0f} s"
        done = f"{result.iterations_done} of {c.train.iterations} iterations"
        if result.resumed_from == result.iterations_done and result.interrupted is None:
            self._say(f"{result.run} is finished: {done} were done already.")
            return
        if result.interrupted is not None:
            reached = "" if self.score is None else f" at a score of {self.score:.3f}"
            self._say(f"stopped by {result.interrupted.name} after {done}{reached}; all saved.")
            self._say(f"Go on:     tether resume {result.run}")
        if result.before is not None and result.after is not None and result.iterations_done:
            self.console.print()
            self.console.print(results_table(result.before, result.after), markup=False)
            self.console.print()
        self._say(f"{done} in {seconds} of training; everything is in {result.run}")
        trusted = f" {FLAG}" if any(code_and_addresses({"rollout": c.to_dict()["rollout"]})) else ""
        prompt = shlex.quote(self.prompt)
        self._say(f"Next: tether generate {prompt} --model {result.run}{trusted}")

    def _say(self, line: str) -> None:
        self.console.print(printable(line), markup=False)


def training_bar(console: Console) -> Progress:
    """A bar with the numbers that matter; nothing where there is no terminal."""
    return Progress(
        TextColumn("  {task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[numbers]}"),
        console=console,
        disable=not console.is_terminal,
    )


def results_table(before: Evaluation, after: Evaluation) -> str:
    """Before and after on held-out prompts, with 95% intervals, and what it cost in KL."""
    rows = [["held-out", "before", "95% interval", "after", "95% interval", "change"]]
    for name in ("sampled", "greedy"):
        old, new = getattr(before, name), getattr(after, name)
        binary = old.binary and new.binary
        cells = [
            text
            for e in (old, new)
            for text in (
                score_text(e.mean, binary),
                f"{score_text(e.low, binary)} – {score_text(e.high, binary)}"
                if e.has_interval
                else "–",
            )
        ]
        change = (
            f"{100 * (new.mean - old.mean):+.1f} points"
            if binary
            else f"{new.mean - old.mean:+.3f}"
        )
        rows.append([name, *cells, change])
    rows.append(["KL spent", _kl(before.kl), "", _kl(after.kl), "", "nats a response"])
    if before.calls is not None and after.calls is not None:
        rows.append(
            ["tool calls", f"{before.calls:.2f}", "", f"{after.calls:.2f}", "", "a response"]
        )
    return table(rows)


def _kl(nats: float | None) -> str:
    """Without a reference there is no KL; in a warm-up there is no entropy yet."""
    return "–" if nats is None else f"{nats:.3f}"


def _due(done: int, total: int, times: int) -> bool:
    return done % max(1, total // times) == 0
