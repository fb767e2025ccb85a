"""What the programs share: the reward on ids, an evaluation, a clock that stops for it."""

import importlib.util
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from bench.protocol import Job, stamp_with_children


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


class Clock:
    """Seconds and processor seconds while it runs."""

    def __init__(self) -> None:
        self.seconds = self.processor = 0.0
        self.began: tuple[float, float] | None = None

    def start(self) -> None:
        self.began = stamp_with_children()

    def stop(self) -> None:
        if self.began is not None:
            wall, used = stamp_with_children()
            self.seconds += wall - self.began[0]
            self.processor += used - self.began[1]
        self.began = None


class Stopwatch(TrainerCallback):
    """Evaluates by transformers' own sampling every so many steps; its clock stands still then."""

    def __init__(self, job: Job, walks: Walks, model: PreTrainedModel, steps: int) -> None:
        self.job, self.walks, self.model = job, walks, model
        self.steps = steps  # of an iteration, as the trainer counts them
        self.clock = Clock()
        # iteration, seconds, optimality, processor seconds
        self.curve: list[tuple[int, float, float, float]] = []

    def on_train_begin(self, *_: object, **__: object) -> None:
        self.look(0)
        self.clock.start()

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        if state.global_step % (self.steps * self.job["eval_every"]):
            return
        self.clock.stop()
        self.look(state.global_step // self.steps)
        self.clock.start()

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
        mean = sum(scores) / len(scores)
        self.curve.append((iteration, self.clock.seconds, mean, self.clock.processor))
