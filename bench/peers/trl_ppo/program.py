"""A PPO step of TRL 1.12 (trl.experimental.ppo), timed by its own callback.

How settings are matched to ours:
    rows           per_device_train_batch_size, one rollout batch and one minibatch an epoch
    epochs         num_ppo_epochs
    response       response_length; stop_token None leaves the model without an EOS, so that
                   every row has this many tokens
    KL             kl_coef, k1: the reference is read once per step, as in ours
    critic         a sequence classifier of the same model: the trunk and a head of width 1
    LoRA           rank, alpha and all linear layers, on policy and critic; the reference is the
                   policy with its adapter off
    reward         a model without weights that answers 0 at once
    numbers        float32 weights; products in float32, or in bfloat16 by autocast, as ours by
                   `model.compute`. TRL's `bf16` alone does not reach this trainer's Accelerator,
                   which reads the variable that `accelerate launch --mixed_precision bf16` sets.
                   No gradient checkpointing, no saving, no sample generations
TRL does not clip gradients here; ours does, and the time it takes is ours.
"""

import os
from types import SimpleNamespace

import torch
from datasets import Dataset
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer

from bench.protocol import Job, Result, laps, read_job, stamp, write_result


class FreeReward(nn.Module):
    """Has the shape of a reward model as TRL calls it, and costs nothing."""

    base_model_prefix = "trunk"

    def trunk(self, input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
        return SimpleNamespace(hidden_states=[torch.zeros(*input_ids.shape, 1)])

    def score(self, states: torch.Tensor) -> torch.Tensor:
        return states


class Clock(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.stamps: list[tuple[float, float]] = []

    def on_train_begin(self, *_: object, **__: object) -> None:
        self.stamps.append(stamp())

    on_step_end = on_train_begin


def main() -> None:
    job = read_job()
    torch.set_num_threads(job["threads"])
    write_result(job, run(job))


def run(job: Job) -> Result:
    rows, steps = len(job["prompts"]), job["repeats"] + 1
    in_bfloat16 = job["compute"] == "bfloat16"
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16" if in_bfloat16 else "no"
    args = PPOConfig(
        output_dir=job["scratch"],
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=1,
        num_mini_batches=1,
        num_ppo_epochs=job["epochs"],
        total_episodes=rows * steps,
        local_rollout_forward_batch_size=rows,
        response_length=job["response_tokens"],
        stop_token=None,
        temperature=1.0,
        kl_coef=job["beta"],
        kl_estimator="k1",
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        num_sample_generations=0,
        gradient_checkpointing=False,
        bf16=in_bfloat16,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    policy = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    critic = AutoModelForSequenceClassification.from_pretrained(
        job["model"], dtype=torch.float32, num_labels=1
    )
    lora = None
    if job["lora_rank"]:
        lora = LoraConfig(
            r=job["lora_rank"], lora_alpha=2 * job["lora_rank"], target_modules="all-linear"
        )
        layers = sorted(
            {
                name.rpartition(".")[2]
                for name, module in policy.base_model.named_modules()
                if isinstance(module, nn.Linear)
            }
        )
        on_critic = LoraConfig(
            r=lora.r,
            lora_alpha=lora.lora_alpha,
            target_modules=layers,
            modules_to_save=["score"],
        )
        inject_adapter_in_model(on_critic, critic)
    clock = Clock()
    trainer = PPOTrainer(
        args=args,
        processing_class=tokenizer,
        model=policy,
        ref_model=None,
        reward_model=FreeReward(),
        value_model=critic,
        train_dataset=Dataset.from_list([{"input_ids": ids} for ids in job["prompts"]]),
        # It builds a loader for it, though nothing is evaluated.
        eval_dataset=Dataset.from_list([{"input_ids": ids} for ids in job["prompts"][:1]]),
        callbacks=[clock],
        peft_config=lora,
    )
    trainer.train()
    return {**laps(clock.stamps), "tokens": rows * job["response_tokens"]}


if __name__ == "__main__":
    main()
