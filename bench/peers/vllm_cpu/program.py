"""vLLM's CPU build on the prompts of a job, each row stopped at its own number of tokens.

How settings are matched to ours: the job's number format, temperature 1, the whole vocabulary, EOS
ignored, and a `max_tokens` a row; log-probs of the sampled tokens are asked for, as our sampler
returns them. One process, eager mode, prefix caching off as all prompts differ.
"""

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch

from bench.protocol import Job, Result, read_job, timed, write_result


def main() -> None:
    job = read_job()
    torch.set_num_threads(job["threads"])
    write_result(job, run(job))


def run(job: Job) -> Result:
    from vllm import LLM, SamplingParams

    rows = len(job["prompts"])
    engine = LLM(
        model=job["model"],
        dtype=job["compute"],
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=max(map(len, job["prompts"])) + max(job["lengths"]) + 1,
        max_num_seqs=rows,
        disable_log_stats=True,
    )
    settings = [
        SamplingParams(
            temperature=1.0, max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False
        )
        for length in job["lengths"]
    ]
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]

    def work() -> int:
        outputs = engine.generate(prompts, settings, use_tqdm=False)
        made = [len(output.outputs[0].token_ids) for output in outputs]
        if made != job["lengths"]:
            raise ValueError("the rows did not get the lengths that the job asks for")
        return sum(made)

    return timed(work, job["repeats"])


if __name__ == "__main__":
    main()
