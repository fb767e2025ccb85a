"""One iteration of ours on the prompts of a job: a PPO step as the peers mean it."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from bench.protocol import Job, Result, read_job, timed, write_result
from tether.config import Config
from tether.config.load import validate_config
from tether.data.prompts import PromptSet
from tether.ppo.iteration import run_iteration
from tether.ppo.result import first_controls
from tether.ppo.roles import Roles, build_roles
from tether.rollout.local import LocalSampler
from tether.types import Prompts


def main() -> None:
    job = read_job()
    torch.set_num_threads(job["threads"])
    write_result(job, run(job))


def run(job: Job) -> Result:
    config, roles = build(job)
    controls, iterations = first_controls(config), iter(range(job["repeats"] + 1))

    def work() -> int:
        outcome = run_iteration(next(iterations), controls, roles, config)
        return int(outcome.rollout.response_lengths.sum())

    return timed(work, job["repeats"])


def build(job: Job) -> tuple[Config, Roles]:
    """Roles as a run has them; only the prompts are the job's ids, and no EOS ends a row."""
    scratch = Path(job["scratch"])
    scratch.mkdir(parents=True, exist_ok=True)
    data = scratch / "prompts.jsonl"
    data.write_text(json.dumps({"prompt": "w"}) + "\n", encoding="utf-8")
    config = validate_config(settings(job, data))
    roles = build_roles(config, reward=lambda response: 0.0)
    ids, count = job["prompts"], len(job["prompts"])
    prompts = Prompts(
        texts=[""] * count,
        ids=ids,
        columns=[{} for _ in ids],
        positions=list(range(count)),
        files=[str(data)] * count,
        messages=[None] * count,
    )
    sampler = LocalSampler(frozenset(), job["response_tokens"], temperature=1.0)
    return config, replace(roles, train_prompts=PromptSet(prompts, [count], [1.0]), sampler=sampler)


def settings(job: Job, data: Path) -> dict:
    rank = job["lora_rank"]
    wanted = {"compute": job["compute"], "learn_layers": job["learn_layers"]}
    usual = {"compute": "float32", "learn_layers": None}
    samples = job.get("samples_per_prompt", 1)
    return {
        "threads": job["threads"],
        "model": {
            "actor": job["model"],
            "lora": {"rank": rank, "alpha": 2 * rank} if rank else None,
            "share_prompts": job.get("share_prompts", True),
            **{name: value for name, value in wanted.items() if value != usual[name]},
        },
        "data": {"train": str(data)},
        "rollout": {
            "prompts": len(job["prompts"]),
            "samples_per_prompt": samples,
            "max_response_tokens": job["response_tokens"],
        },
        "reward": {"kind": "length", "arguments": {"at_most": 1}},  # a free function replaces it
        "kl": {"in_reward": {"coef": job["beta"]}},
        "actor": {
            "lr": job["lr"],
            "epochs": job["epochs"],
            "minibatch_rows": samples * len(job["prompts"]),
        },
        "critic": {"shared_trunk": job["shared_trunk"]},
    }


if __name__ == "__main__":
    main()
