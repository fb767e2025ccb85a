"""TRL's newest GRPO on the random walks, as many rows and optimizer steps as PPO has.

How settings are matched to examples/random_walks/ppo.yaml:
    rows           generation_batch_size 128: 16 prompts, 8 responses to each
    steps          per_device_train_batch_size 64, num_iterations 4
    loss           epsilon 0.2, beta 0, the learning rate constant
    reward         the same file, on the same ids
"""

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from bench.protocol import Job, Result, read_job, write_result
from bench.walks.common import Stopwatch, Walks


def run(job: Job) -> Result:
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    walks = Walks(job, tokenizer)
    steps = job["rows"] // job["minibatch_rows"] * job["epochs"]
    args = GRPOConfig(
        output_dir=job["scratch"],
        per_device_train_batch_size=job["minibatch_rows"],
        gradient_accumulation_steps=1,
        generation_batch_size=job["rows"],
        num_generations=job["samples_per_prompt"],
        num_iterations=job["epochs"],
        max_steps=job["iterations"] * steps,
        max_completion_length=job["response_tokens"],
        temperature=1.0,
        epsilon=0.2,
        beta=0.0,
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=job["seed"],
    )
    watch = Stopwatch(job, walks, model, steps)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=walks,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in job["train"]]),
        processing_class=tokenizer,
        callbacks=[watch],
    )
    trainer.train()
    return {"curve": watch.curve}


if __name__ == "__main__":
    the_job = read_job()
    torch.set_num_threads(the_job["threads"])
    write_result(the_job, run(the_job))
