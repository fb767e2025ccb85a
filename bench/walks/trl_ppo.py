"""TRL 1.12's PPO on the random walks.

How settings are matched to examples/random_walks/ppo.yaml:
    rows           per_device_train_batch_size 128: what TRL samples in one step
    steps          num_mini_batches 2 of 64 rows each, num_ppo_epochs 4
    loss           cliprange, cliprange_value 0.2, vf_coef 1.2, gamma 1, lam 0.95, kl_coef 0
    critic         a network of its own, the same model with a value head: TRL has no shared trunk
    end            stop_token eos; a response without one is not punished, as in ours
    reward         the same file, on the same ids
"""

from types import SimpleNamespace

import torch
from datasets import Dataset
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer

from bench.protocol import Job, Result, read_job, write_result
from bench.walks.common import Stopwatch, Walks


class RuleReward(nn.Module):
    """Has the shape of a reward model as TRL calls it: the score of the row, at every position."""

    base_model_prefix = "trunk"

    def __init__(self, walks: Walks) -> None:
        super().__init__()
        self.walks = walks

    def trunk(self, input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
        pad = self.walks.tokenizer.pad_token_id
        scores = []
        for ids in input_ids.tolist():
            prompt, response = self.walks.tokenizer.decode(ids[:1]), ids[1:]
            kept = response[: response.index(pad)] if pad in response else response
            scores.append(self.walks.score(prompt, kept))
        states = torch.tensor(scores)[:, None, None].expand(*input_ids.shape, 1)
        return SimpleNamespace(hidden_states=[states])

    def score(self, states: torch.Tensor) -> torch.Tensor:
        return states


def run(job: Job) -> Result:
    rows = job["rows"]
    args = PPOConfig(
        output_dir=job["scratch"],
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=1,
        num_mini_batches=rows // job["minibatch_rows"],
        num_ppo_epochs=job["epochs"],
        total_episodes=rows * job["iterations"],
        local_rollout_forward_batch_size=rows,
        response_length=job["response_tokens"],
        stop_token="eos",
        missing_eos_penalty=None,
        temperature=1.0,
        kl_coef=0.0,
        cliprange=0.2,
        cliprange_value=0.2,
        vf_coef=job["value_coef"],
        gamma=1.0,
        lam=0.95,
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        num_sample_generations=0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=job["seed"],
    )
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    policy = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    critic = AutoModelForSequenceClassification.from_pretrained(
        job["model"], dtype=torch.float32, num_labels=1
    )
    walks = Walks(job, tokenizer)
    watch = Stopwatch(job, walks, policy, steps=1)  # TRL counts a whole rollout as one step
    prompts = [{"input_ids": tokenizer(row["prompt"])["input_ids"]} for row in job["train"]]
    trainer = PPOTrainer(
        args=args,
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=RuleReward(walks),
        value_model=critic,
        train_dataset=Dataset.from_list(prompts),
        eval_dataset=Dataset.from_list(prompts[:1]),  # it builds a loader for it
        callbacks=[watch],
    )
    trainer.train()
    return {"curve": watch.curve}


if __name__ == "__main__":
    the_job = read_job()
    torch.set_num_threads(the_job["threads"])
    write_result(the_job, run(the_job))
