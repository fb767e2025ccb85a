"""The updates of one iteration of ours, again and again on the same rows."""

import torch

from bench.ours.ppo import build
from bench.protocol import Job, Result, read_job, timed, write_result
from tether.ppo.iteration import run_iteration
from tether.ppo.result import first_controls
from tether.ppo.updates.actor import update_actor
from tether.ppo.updates.critic import update_critic


def main() -> None:
    job = read_job()
    torch.set_num_threads(job["threads"])
    write_result(job, run(job))


def run(job: Job) -> Result:
    config, roles = build(job)
    controls = first_controls(config)
    rows = run_iteration(0, controls, roles, config).experience

    def work() -> int:
        update_critic(rows, roles, config, 1)
        update_actor(rows, roles, config, 1, controls)
        return int(rows.response_mask.sum())

    return timed(work, job["repeats"])


if __name__ == "__main__":
    main()
