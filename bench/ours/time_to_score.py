"""Train a recipe until its sampled score on the held-out problems is reached.

The clock stands still while the run evaluates; everything else that a run does, writing its files
included, is counted.
"""

import time
from contextlib import suppress
from pathlib import Path

from bench.protocol import Job, Result, read_job, write_result
from tether import api
from tether.config.load import load_config
from tether.ppo.evaluate import Evaluation
from tether.train.watch import Watcher


class Reached(Exception):
    """The score is reached: the rest of the run is not needed."""


class Stopwatch(Watcher[Evaluation]):
    def __init__(self, score: float) -> None:
        self.score = score
        self.seconds = 0.0
        self.began: float | None = None
        self.curve: list[tuple[int, float, float]] = []  # iteration, seconds, sampled score
        self.kl: float | None = None  # of a held-out response to the reference, at the last look

    def evaluating(self, rows: int) -> None:
        if self.began is not None:
            self.seconds += time.perf_counter() - self.began

    def evaluated(self, evaluation: Evaluation) -> None:
        self.curve.append((evaluation.iteration, self.seconds, evaluation.sampled.mean))
        self.kl = evaluation.kl
        if evaluation.sampled.mean >= self.score:
            raise Reached
        self.began = time.perf_counter()


def main() -> None:
    job = read_job()
    write_result(job, run(job))


def run(job: Job) -> Result:
    config = load_config(
        job["recipe"],
        {
            "seed": job["turn"],
            "threads": job["threads"],
            "run.dir": str(Path(job["scratch"]) / "run"),
            "run.overwrite": True,
            "train.eval_every": job["eval_every"],
            **job["overrides"],
        },
    )
    watch = Stopwatch(job["score"])
    with suppress(Reached):
        api.train(config, watch=watch)
    reached = watch.curve[-1][2] >= job["score"]
    seconds = [watch.seconds] if reached else []
    return {"seconds": seconds, "curve": watch.curve, "tokens": 0, "kl": watch.kl}


if __name__ == "__main__":
    main()
