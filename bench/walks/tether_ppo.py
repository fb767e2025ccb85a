"""tether's PPO on the random walks: what `tether train ppo.yaml` runs, with a clock."""

import os

import tether
from bench.protocol import Job, Result, read_job, write_result
from bench.walks.common import Clock
from tether.ppo.evaluate import Evaluation
from tether.train.watch import Watcher


class Stopwatch(Watcher[Evaluation]):
    """The clock stands still while held-out starts are sampled."""

    def __init__(self) -> None:
        self.clock = Clock()
        # iteration, seconds, optimality, processor seconds
        self.curve: list[tuple[int, float, float, float]] = []

    def evaluating(self, rows: int) -> None:
        self.clock.stop()

    def evaluated(self, evaluation: Evaluation) -> None:
        numbers = self.clock.seconds, evaluation.sampled.mean, self.clock.processor
        self.curve.append((evaluation.iteration, *numbers))
        self.clock.start()


def run(job: Job) -> Result:
    os.chdir(job["folder"])  # the recipe names its files from there
    changes = {
        "seed": job["seed"],
        "threads": job["threads"],
        "run.dir": job["scratch"],
        "run.overwrite": True,
        **job["fields"],
    }
    watch = Stopwatch()
    tether.train(tether.load_config("ppo.yaml", changes), watch=watch)
    return {"curve": watch.curve}


if __name__ == "__main__":
    the_job = read_job()
    write_result(the_job, run(the_job))
