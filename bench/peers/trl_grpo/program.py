"""TRL's newest GRPO on the arithmetic problems, until the sampled held-out score is reached.

How settings are matched to the recipe `arithmetic`:
    rows             generation_batch_size: as many sampled responses per iteration
    minibatches      per_device_train_batch_size rows per step, `num_iterations` passes: as many
                     optimizer steps per iteration
    learning rate    the same, falling linearly over as many iterations
    KL               beta is the recipe's; GRPO has it in the loss, where PPO has it in the reward
    response         max_completion_length, temperature 1, the whole vocabulary
    reward           tether's own rule on the same ids
    evaluation       tether's own sampler with the recipe's draws, on the same held-out problems;
                     the clock stands still meanwhile, as in ours
    numbers          float32 weights; products in float32, or in bfloat16 by TRL's `bf16`, as ours
                     by `model.compute`; no gradient checkpointing, no saving, nothing reported
"""

import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench.protocol import Job, Result, read_job, write_result
from tether.rewards.rules import exact_answer
from tether.rollout.local import LocalSampler
from tether.rollout.sampler import Draw, SingleTurn


class Judge:
    """The rule on sampled ids, for training and for evaluation."""

    __name__ = "exact_answer"  # TRL asks for it

    def __init__(self, tokenizer: object) -> None:
        self.tokenizer = tokenizer

    def score(self, ids: list[int], answer: str) -> float:
        finished = bool(ids) and ids[-1] == self.tokenizer.eos_token_id
        text = self.tokenizer.decode(ids[:-1] if finished else ids, skip_special_tokens=False)
        return exact_answer(text, answer, finished)

    def __call__(
        self, completion_ids: list[list[int]], answer: list[str], **_: object
    ) -> list[float]:
        return [self.score(ids, right) for ids, right in zip(completion_ids, answer, strict=True)]


class Stopwatch(TrainerCallback):
    def __init__(self, job: Job, judge: Judge, model: torch.nn.Module) -> None:
        self.job, self.judge, self.model = job, judge, model
        steps = job["rows"] // job["minibatch_rows"] * job["epochs"]
        self.every = steps * job["eval_every"]
        self.steps_an_iteration = steps
        self.seconds, self.began = 0.0, 0.0
        self.curve: list[tuple[int, float, float]] = []
        tokenizer = judge.tokenizer
        eos_ids = frozenset([tokenizer.eos_token_id])
        self.sampler = LocalSampler(eos_ids, job["response_tokens"], temperature=1.0)

    def on_train_begin(self, *_: object, **__: object) -> None:
        self._look(0)
        self.began = time.perf_counter()

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        if state.global_step % self.every:
            return
        self.seconds += time.perf_counter() - self.began
        if self._look(state.global_step // self.steps_an_iteration) >= self.job["score"]:
            control.should_training_stop = True
        self.began = time.perf_counter()

    def _look(self, iteration: int) -> float:
        heldout = self.job["heldout"]
        self.sampler.sync(self.model, iteration)
        draw = Draw(self.job["turn"], "evaluate", 0)
        rollout = self.sampler.run([SingleTurn(row["ids"]) for row in heldout], draw)
        responses = zip(
            rollout.response_ids.tolist(), rollout.response_lengths.tolist(), strict=True
        )
        ids = [row[:length] for row, length in responses]
        scores = self.judge(ids, [row["answer"] for row in heldout])
        score = sum(scores) / len(scores)
        self.curve.append((iteration, self.seconds, score))
        print(f"iteration {iteration}, {self.seconds:.1f} s: {score:.3f}", flush=True)
        return score


def main() -> None:
    job = read_job()
    torch.set_num_threads(job["threads"])
    write_result(job, run(job))


def run(job: Job) -> Result:
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    for row in job["train"][:8]:
        if tokenizer(row["prompt"])["input_ids"] != row["ids"]:
            raise ValueError(f"TRL would read other ids than tether for {row['prompt']!r}")
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    judge = Judge(tokenizer)
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
        beta=job["beta"],
        learning_rate=job["lr"],
        lr_scheduler_type="linear",
        gradient_checkpointing=False,
        bf16=job["compute"] == "bfloat16",
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=job["turn"],
    )
    rows = [{"prompt": row["prompt"], "answer": row["answer"]} for row in job["train"]]
    watch = Stopwatch(job, judge, model)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=judge,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[watch],
    )
    trainer.train()
    reached = watch.curve[-1][2] >= job["score"]
    return {"seconds": [watch.seconds] if reached else [], "curve": watch.curve, "tokens": 0}


if __name__ == "__main__":
    main()
