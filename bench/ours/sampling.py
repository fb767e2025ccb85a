"""Our sampler on the prompts of a job, each row stopped at its own number of tokens."""

from dataclasses import dataclass

import torch

from bench.protocol import Job, Result, read_job, timed, write_result
from tether.models.loading import load_causal_lm
from tether.rollout.local import LocalSampler
from tether.rollout.sampler import Done, Draw, Observe


@dataclass
class Limited:
    """A prompt whose response ends after `limit` tokens, whatever they are."""

    prompt_ids: list[int]
    limit: int
    taken: int = 0

    def add_token(self, token: int) -> bool:
        self.taken += 1
        return self.taken >= self.limit

    def answer(self) -> Observe | Done:
        return Done()


def main() -> None:
    job = read_job()
    torch.set_num_threads(job["threads"])
    write_result(job, run(job))


def run(job: Job) -> Result:
    other = {} if job["compute"] == "float32" else {"compute": job["compute"]}
    model = load_causal_lm(job["model"], "float32", torch.device("cpu"), **other)
    sampler = LocalSampler(frozenset(), max(job["lengths"]), temperature=1.0)
    sampler.sync(model, 0)

    def work() -> int:
        rows = zip(job["prompts"], job["lengths"], strict=True)
        rollout = sampler.run([Limited(ids, limit) for ids, limit in rows], Draw(0, "bench", 0))
        if rollout.response_lengths.tolist() != job["lengths"]:
            raise ValueError("the rows did not get the lengths that the job asks for")
        return int(rollout.response_lengths.sum())

    return timed(work, job["repeats"])


if __name__ == "__main__":
    main()
