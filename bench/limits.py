"""What the machine can do: transformers' own forward of one token per row, and a matrix product."""

import time

import torch
from transformers import AutoModelForCausalLM

from bench.protocol import Job, Result, read_job, timed, write_result

GEMM = (1024, 576, 1536)  # rows x SmolLM2's width x its hidden layer
GEMM_SECONDS = 1.0


def main() -> None:
    job = read_job()
    torch.set_num_threads(job["threads"])
    write_result(job, bare_forward(job) if job["what"] == "forward" else gemm(job))


@torch.no_grad()
def bare_forward(job: Job) -> Result:
    """One token per row, no cache, no sampling: what a decoding step cannot go below."""
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    ids = torch.tensor([prompt[:1] for prompt in job["prompts"]])

    def work() -> int:
        for _ in range(job["steps"]):
            model(input_ids=ids, use_cache=False)
        return job["steps"] * len(ids)

    return timed(work, job["repeats"])


@torch.no_grad()
def gemm(job: Job) -> Result:
    """Seconds of one float32 matrix product; `tokens` are its floating-point operations."""
    rows, width, hidden = GEMM
    a, b = torch.randn(rows, width), torch.randn(hidden, width)

    def seconds_of_one() -> float:
        done, began = 0, time.perf_counter()
        while time.perf_counter() - began < GEMM_SECONDS:
            torch.nn.functional.linear(a, b)
            done += 1
        return (time.perf_counter() - began) / done

    seconds = [seconds_of_one() for _ in range(job["repeats"] + 1)]
    return {"warm_up": seconds[0], "seconds": seconds[1:], "tokens": 2 * rows * width * hidden}


if __name__ == "__main__":
    main()
