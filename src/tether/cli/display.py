"""What a person sees while a run trains: a bar on a terminal, plain lines elsewhere."""

import shlex
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from tether.cli.doctor import closing_line
from tether.cli.terminal import ReadingLines, printable, probe_table, score_text, sparkline, table
from tether.config import Config
from tether.dist.environment import launched_rank, launched_size
from tether.planning.plan import processes_text
from tether.ppo.evaluate import Evaluation, SetScores
from tether.ppo.scoring import Trial
from tether.run.directory import is_run
from tether.run.trust import FLAG, code_and_addresses
from tether.stages.rlhf import PipelineWatcher, Report, Standing
from tether.stages.training import Record
from tether.train.training import Result
from tether.train.watch import IterationRecord, Watcher

CURVES = {  # drawn under the bar, and in a line at the end
    "score": "score/mean",
    "KL": "kl/sequence_mean",
    "entropy": "actor/entropy",
    "length": "response/length_mean",
}
CURVE_WIDTH = 12  # characters; four of them fit a terminal of 80
SAMPLES_SHOWN = 10  # sample responses in the course of a run
EVENTS_SHOWN = 3  # per iteration
PLAIN_LINES = 20  # progress lines in the course of a run, where there is no terminal


class Display(Watcher[Evaluation]):
    """Show a run of PPO."""

    def __init__(self, config: Config) -> None:
        self.config = config
        # Rank 0 prints for all processes.
        self.console = Console(highlight=False, soft_wrap=True, quiet=launched_rank() > 0)
        self.progress = training_bar(self.console)
        self.task: TaskID | None = None
        self.prompt = "Hello"
        self.score: float | None = None
        self.curves: dict[str, list[float | None]] = {label: [] for label in CURVES}
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
        workers = c.launch.num_workers or launched_size()
        if workers > 1:
            self._say(f"processes  {workers}, {processes_text(c, workers)}")
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

    def evaluating(self, rows: int) -> None:
        if self.task is None:
            files = [file.path for file in self.config.data.files("heldout")]
            self._say(f"evaluating {rows} held-out prompts of {', '.join(files)} …")

    def evaluated(self, evaluation: Evaluation) -> None:
        greedy, sampled = evaluation.greedy, evaluation.sampled
        self._say(
            f"held-out   after {evaluation.iteration} iterations: sampled "
            f"{score_text(sampled.mean, sampled.binary)}, greedy "
            f"{score_text(greedy.mean, greedy.binary)}, KL {_kl(evaluation.kl)}"
        )

    def iterated(self, record: IterationRecord) -> None:
        total, metrics = self.config.train.iterations, record.metrics
        speed = record.timings["throughput/tokens_per_second"]
        numbers = (
            f"score {metrics['score/mean']:.3f}  KL {_kl(metrics.get('kl/sequence_mean'))}  "
            f"entropy {_kl(metrics.get('actor/entropy'))}  {speed:,.0f} tokens/s"
        )
        done, self.score = record.iteration + 1, metrics["score/mean"]
        for label, name in CURVES.items():
            self.curves[label].append(metrics.get(name))
        if self.task is None:
            self.progress.start()
            self.task = self.progress.add_task("training", total=total, numbers="")
        self.progress.curves = f"  {self.drawn_curves()}"
        self.progress.update(self.task, completed=done, numbers=numbers)
        if not self.console.is_terminal and (done == total or _due(done, total, PLAIN_LINES)):
            self._say(f"{done:>5}/{total}  {numbers}")
        sample = record.sample
        if sample is not None and _due(done, total, SAMPLES_SHOWN):
            score = "–" if sample.score is None else f"{sample.score:g}"
            self.prompt = printable(sample.prompt)
            self._say(f"sample     {self.prompt} → {printable(sample.response)}   (score {score})")
        for event in record.events[:EVENTS_SHOWN]:
            self._say(f"event      {event.kind}, row {event.row}: {printable(event.message)}")
        if len(record.events) > EVENTS_SHOWN:
            more = len(record.events) - EVENTS_SHOWN
            self._say(f"event      and {more} more, in events.jsonl")

    def drawn_curves(self) -> str:
        """Return the curves of this attempt, without those that have no number yet."""
        return "  ".join(
            f"{label} {sparkline(values, CURVE_WIDTH)}"
            for label, values in self.curves.items()
            if any(value is not None for value in values)
        )

    def summary(self, result: Result[Evaluation]) -> None:
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
            if result.after.price is not None:
                self.console.print(f"\n  {result.after.price}", markup=False)
            before, after = result.before.probe, result.after.probe
            if before is not None and after is not None:
                shown = probe_table({"before": before, "after": after})
                self.console.print(f"\n{shown}", markup=False)
            self.console.print()
        if len(self.curves["score"]) > 1:
            self._say(f"curves     {self.drawn_curves()}")
        self._say(f"{done} in {seconds} of training; everything is in {result.run}")
        if launched_rank() == 0 and is_run(result.run):
            self._say(f"doctor     {closing_line(result.run)}")
        trusted = f" {FLAG}" if any(code_and_addresses({"rollout": c.to_dict()["rollout"]})) else ""
        prompt = shlex.quote(self.prompt)
        self._say(f"Next: tether generate {prompt} --model {result.run}{trusted}")

    def _say(self, line: str) -> None:
        self.console.print(printable(line), markup=False)


class BarWithCurves(Progress):
    """A bar, and under it the curves of the run so far."""

    curves = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self.curves:
            yield Text(self.curves, no_wrap=True, overflow="crop")


def training_bar(console: Console) -> BarWithCurves:
    """Return a bar with the numbers that matter; it shows nothing without a terminal."""
    return BarWithCurves(
        TextColumn("  {task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[numbers]}"),
        console=console,
        disable=not console.is_terminal,
    )


def results_table(before: Evaluation, after: Evaluation) -> str:
    """Return a table of before and after on held-out prompts, with 95% intervals and the KL; last
    the same of each set, where sets have names."""
    rows = [["held-out", "before", "95% interval", "after", "95% interval", "change"]]
    rows += _score_rows("", before.scores(), after.scores())
    rows.append(["KL spent", _kl(before.kl), "", _kl(after.kl), "", "nats per response"])
    if before.calls is not None and after.calls is not None:
        rows.append(
            ["tool calls", f"{before.calls:.2f}", "", f"{after.calls:.2f}", "", "per response"]
        )
    for name in [name for name in after.sets if name in before.sets]:
        old, new = before.sets[name], after.sets[name]
        rows += _score_rows(f"{name}: ", old, new)
        rows.append([f"{name}: KL", _kl(old.kl), "", _kl(new.kl), "", "nats per response"])
    return table(rows)


def _score_rows(label: str, before: SetScores, after: SetScores) -> list[list[str]]:
    """Return a row for each mean score that both have."""
    olds = {"sampled": before.sampled, "greedy": before.greedy, **before.at_k}
    news = {"sampled": after.sampled, "greedy": after.greedy, **after.at_k}
    rows = []
    for name in [name for name in news if name in olds]:
        old, new = olds[name], news[name]
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
        rows.append([f"{label}{name}", *cells, change])
    return rows


def _kl(nats: float | None) -> str:
    """Format nats; without a reference there is no KL, in a warm-up no entropy yet."""
    return "–" if nats is None else f"{nats:.3f}"


def _due(done: int, total: int, times: int) -> bool:
    return done % max(1, total // times) == 0


STAGE_LINES = 10  # progress lines in the course of a stage, where there is no terminal


class StageDisplay(Watcher[Record]):
    """Show a run of SFT or of a reward model."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True, quiet=launched_rank() > 0)
        self.progress = training_bar(self.console)
        self.task: TaskID | None = None
        self.steps = 0

    def __enter__(self) -> "StageDisplay":
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.stop()

    def preparing(self, what: str) -> None:
        self._say(f"preparing  {what}")

    def started(self, run: Path, iterations: int) -> None:
        self.steps = iterations
        self._say(f"run        {run}, {iterations} steps")

    def resumed(self, iterations_done: int, checkpoint: Path | None) -> None:
        where = "there is no checkpoint yet" if checkpoint is None else f"checkpoint {checkpoint}"
        self._say(f"resuming   after {iterations_done} steps: {where}")

    def warned(self, warning: str) -> None:
        self._say(f"warning    {warning}")

    def iterated(self, record: IterationRecord) -> None:
        metrics, done = record.metrics, record.iteration + 1
        numbers = f"loss {metrics['loss']:.4f}"
        if "accuracy" in metrics:
            numbers += f"  accuracy {metrics['accuracy']:.1%}"
        if self.task is None:
            self.progress.start()
            self.task = self.progress.add_task("training", total=self.steps, numbers="")
        self.progress.update(self.task, completed=done, numbers=numbers)
        due = done == self.steps or _due(done, self.steps, STAGE_LINES)
        if due and not self.console.is_terminal:
            self._say(f"{done:>5}/{self.steps}  {numbers}")
        for event in record.events:
            self._say(f"event      {event.kind}: {event.message}")

    def evaluated(self, evaluation: Record) -> None:
        text = f"held-out   after {evaluation['iteration']} steps: loss {evaluation['loss']:.4f}"
        if "accuracy" in evaluation:
            text += (
                f", accuracy {evaluation['accuracy']:.1%}, calibration error "
                f"{evaluation['calibration_error']:.3f}"
            )
        self._say(text)

    def summary(self, result: Result[Record]) -> None:
        self.progress.stop()
        done = f"{result.iterations_done} steps"
        if result.resumed_from == result.iterations_done and result.interrupted is None:
            self._say(f"{result.run} is finished: {done} were done already.")
        elif result.interrupted is not None:
            self._say(f"stopped by {result.interrupted.name} after {done}; all saved.")
            self._say(f"Go on:     tether resume {result.run}")
        if result.after is not None and "bins" in result.after:
            self._say("")
            self.console.print(reliability_table(result.after), markup=False)
            self._say("")
        self._say(f"{done}; {result.train_seconds:.0f} s of training in this attempt")
        self._say(f"model      {newest_model(result)}")

    def _say(self, text: str) -> None:
        self.console.print(f"  {printable(text)}" if text else "", markup=False)


def newest_model(result: Result[Record]) -> Path:
    """Return the Hugging Face directory in a stage's newest checkpoint."""
    return next(result.checkpoint.glob("*/config.json")).parent


def reliability_table(evaluation: Record) -> str:
    """Return, per bin, how sure the model was about held-out pairs and how often it was right."""
    rows = [["pairs", "how sure it was", "how often right"]]
    for one in evaluation["bins"]:
        rows.append([str(one["count"]), f"{one['confidence']:.1%}", f"{one['accuracy']:.1%}"])
    return table(rows, numbers_from=0)


class PipelineDisplay(PipelineWatcher):
    """Number the stages and show each."""

    def __init__(self) -> None:
        self.number = 0

    def began(self, what: str) -> None:
        self.number += 1
        print(f"\n{self.number}. {what}", flush=True)

    def skipped(self) -> None:
        print("  done by an earlier attempt", flush=True)

    def stage(self) -> StageDisplay:
        return StageDisplay()

    def ppo(self, config: Config) -> Display:
        return Display(config)

    def summary(self, report: Report) -> None:
        print(f"\n{standings(report)}\n\n  everything is in {printable(str(report.run))}")


def standings(report: Report) -> str:
    heading = ["", "reward", "KL", "true utility", "right", "yes", "wins over SFT", "95%"]
    return table([heading, _row("SFT", report.sft), _row("PPO", report.ppo)])


def _row(name: str, s: Standing) -> list[str]:
    kl = "–" if s.kl is None else f"{s.kl:.2f}"
    interval = f"{s.wins_low:.1%} – {s.wins_high:.1%}"
    shares = [f"{share:.1%}" for share in (s.right, s.greeted, s.wins)]
    return [name, f"{s.reward:.2f}", kl, f"{s.utility:.2f}", *shares, interval]
