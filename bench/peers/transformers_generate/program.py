"""transformers' generate on the prompts of a job, each row stopped at its own number of tokens.

How settings are matched to ours: one batch of all rows; sampling at temperature 1 from the whole
vocabulary (top_k 0, top_p 1); no EOS; a stopping criterion that ends a row at its own length, which
is how generate stops rows one by one. Weights and products in the job's number format. Rows that
have ended stay in the batch, as generate has no way to take them out.
"""

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria

from bench.protocol import Job, Result, read_job, timed, write_result


class OwnLength(StoppingCriteria):
    def __init__(self, prompt_width: int, lengths: list[int]) -> None:
        self.ends = prompt_width + torch.tensor(lengths)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        return input_ids.shape[1] >= self.ends


def main() -> None:
    job = read_job()
    torch.set_num_threads(job["threads"])
    write_result(job, run(job))


@torch.no_grad()
def run(job: Job) -> Result:
    dtype = getattr(torch, job["compute"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype).eval()
    model.generation_config = GenerationConfig()
    ids, lengths = torch.tensor(job["prompts"]), job["lengths"]
    settings = GenerationConfig(
        max_new_tokens=max(lengths),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        pad_token_id=0,
        eos_token_id=None,
    )

    def work() -> int:
        torch.manual_seed(0)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=settings,
            stopping_criteria=[OwnLength(ids.shape[1], lengths)],
        )
        if output.shape[1] != ids.shape[1] + max(lengths):
            raise ValueError("the batch did not get the length that the job asks for")
        return sum(lengths)

    return timed(work, job["repeats"])


if __name__ == "__main__":
    main()
