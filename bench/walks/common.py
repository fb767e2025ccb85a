"""What TRL's two programs share: the reward on ids, an evaluation, a clock that stops for it."""

import importlib.util
import time
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from bench.protocol import Job


class Walks:
    """The score of sampled ids, by the reward file that tether is given."""

    __name__ = "optimality"  # GRPO asks for it

    def __init__(self, job: Job, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.rows = {row["prompt"]: row for row in job["heldout"]}
        spec = importlib.util.spec_from_file_location("reward", Path(job["folder"]) / "reward.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.optimality = module.optimality

    def score(self, prompt: str, ids: list[int]) -> float:
        """Return the score of a response; what follows its end token is not read."""
        end = self.tokenizer.eos_token_id
        text = self.tokenizer.decode(ids[: ids.index(end)] if end in ids else ids)
        row = self.rows[prompt]
        return self.optimality(prompt, text, row["edges"], row["shortest"])

    def __call__(
        self, prompts: list[str], completion_ids: list[list[int]], **_: object
    ) -> list[float]:
        return [self.score(p, ids) for p, ids in zip(prompts, completion_ids, strict=True)]


class Stopwatch(TrainerCallback):
    """Evaluates by transformers' own sampling every so many steps; its clock stands still then."""

    def __init__(self, job: Job, walks: Walks, model: PreTrainedModel, steps: int) -> None:
        self.job, self.walks, self.model = job, walks, model
        self.steps = steps  # of an iteration, as the trainer counts them
        self.seconds = self.began = 0.0
        self.curve: list[tuple[int, float, float]] = []  # iteration, seconds, optimality

    def on_train_begin(self, *_: object, **__: object) -> None:
        self.look(0)
        self.began = time.perf_counter()

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        if state.global_step % (self.steps * self.job["eval_every"]):
            return
        self.seconds += time.perf_counter() - self.began
        self.look(state.global_step // self.steps)
        self.began = time.perf_counter()

    def look(self, iteration: int) -> None:
        prompts = [row["prompt"] for row in self.job["heldout"]]
        ids = self.walks.tokenizer(prompts, return_tensors="pt")["input_ids"]
        was_training, state = self.model.training, torch.get_rng_state()
        self.model.eval()
        torch.manual_seed(self.job["seed"])
        with torch.no_grad():
            sampled = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                max_new_tokens=self.job["response_tokens"],
            )
        self.model.train(was_training)
        torch.set_rng_state(state)  # training draws what it would have drawn
        scores = self.walks(prompts, sampled[:, ids.shape[1] :].tolist())
        self.curve.append((iteration, self.seconds, sum(scores) / len(scores)))
