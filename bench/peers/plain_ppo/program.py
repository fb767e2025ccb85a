"""PPO as a reader would write it from a blog post: torch and transformers, one loop, no library.

It answers "why not 200 lines?" in numbers: the task, model and settings of the recipe
`arithmetic`, until the sampled held-out score is reached. Nothing here is wrong on purpose. What it
leaves out is what such loops leave out: prompts are padded to one width and all rows are sampled
until the longest is done, nothing is saved, so a stopped run begins anew, and no number is checked.

Evaluation is tether's own sampler with the recipe's draws, as on every side, off the clock.
"""

import copy
import random
import time

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from bench.protocol import Job, Result, read_job, write_result
from tether.rewards.rules import exact_answer
from tether.rollout.local import LocalSampler
from tether.rollout.sampler import Draw, SingleTurn

CLIP, LAMBDA, MAX_GRAD_NORM = 0.2, 0.95, 1.0


def read(network: nn.Module, ids: Tensor, attention: Tensor, width: int) -> Tensor:
    """The outputs before each of the last `width` tokens."""
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    output = network(ids, attention_mask=attention, position_ids=positions)[0]
    return output[:, -width - 1 : -1]


def log_probs(model: nn.Module, ids: Tensor, attention: Tensor, width: int) -> Tensor:
    logits = read(model, ids, attention, width)
    return logits.log_softmax(-1).gather(2, ids[:, -width:, None])[:, :, 0]


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum() / mask.sum()


class Loop:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
        self.actor = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
        self.reference = copy.deepcopy(self.actor)
        self.critic = copy.deepcopy(self.actor.base_model)
        self.head = nn.Linear(self.actor.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        self.critic_parameters = [*self.critic.parameters(), *self.head.parameters()]
        self.adam = torch.optim.Adam(self.actor.parameters(), job["lr"])
        self.critic_adam = torch.optim.Adam(self.critic_parameters, job["critic_lr"])

    def values(self, ids: Tensor, attention: Tensor, width: int) -> Tensor:
        return self.head(read(self.critic, ids, attention, width))[:, :, 0]

    @torch.no_grad()
    def rollout(self) -> tuple[Tensor, ...]:
        """Sample, score, and work out advantages and returns."""
        job, end = self.job, self.tokenizer.eos_token_id
        prompts = job["rows"] // job["samples_per_prompt"]
        drawn = random.sample(job["train"], prompts) * job["samples_per_prompt"]
        padded = self.tokenizer.pad({"input_ids": [r["ids"] for r in drawn]}, return_tensors="pt")
        ids = self.actor.generate(
            **padded, do_sample=True, top_k=0, max_new_tokens=job["response_tokens"]
        )
        responses = ids[:, padded["input_ids"].shape[1] :]
        ends = responses == end
        mask = (ends.cumsum(1) - ends.long() == 0).float()
        attention = torch.cat([padded["attention_mask"], mask.long()], dim=1)
        width = responses.shape[1]
        scores = torch.tensor(
            [
                judge(self.tokenizer, row[kept > 0].tolist(), task["answer"])
                for row, kept, task in zip(responses, mask, drawn, strict=True)
            ]
        )
        old = log_probs(self.actor, ids, attention, width)
        kl = (old - log_probs(self.reference, ids, attention, width)) * mask
        values = self.values(ids, attention, width) * mask
        rewards = -job["beta"] * kl
        rewards[torch.arange(len(ids)), mask.sum(1).long() - 1] += scores
        advantages, following = torch.zeros_like(rewards), torch.zeros(len(ids))
        for t in reversed(range(width)):
            after = values[:, t + 1] if t + 1 < width else torch.zeros(len(ids))
            following = rewards[:, t] + after - values[:, t] + LAMBDA * following
            following = advantages[:, t] = following * mask[:, t]
        returns = advantages + values
        mean = masked_mean(advantages, mask)
        deviation = masked_mean((advantages - mean) ** 2, mask).sqrt()
        return ids, attention, mask, old, values, returns, (advantages - mean) / deviation

    def update(self, batch: tuple[Tensor, ...]) -> None:
        for _ in range(self.job["epochs"]):
            for rows in torch.randperm(len(batch[0])).split(self.job["minibatch_rows"]):
                ids, attention, mask, old, values, returns, advantages = (x[rows] for x in batch)
                width = mask.shape[1]
                ratio = (log_probs(self.actor, ids, attention, width) - old).exp()
                clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                objective = torch.minimum(ratio * advantages, clipped * advantages)
                step(-masked_mean(objective, mask), self.adam, self.actor.parameters())
                new = self.values(ids, attention, width)
                held = values + (new - values).clamp(-CLIP, CLIP)
                errors = [functional.mse_loss(v, returns, reduction="none") for v in (new, held)]
                loss = 0.5 * masked_mean(torch.maximum(*errors), mask)
                step(loss, self.critic_adam, self.critic_parameters)


def step(loss: Tensor, adam: torch.optim.Optimizer, parameters) -> None:
    adam.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
    adam.step()


def judge(tokenizer: PreTrainedTokenizerBase, ids: list[int], answer: str) -> float:
    finished = bool(ids) and ids[-1] == tokenizer.eos_token_id
    text = tokenizer.decode(ids[:-1] if finished else ids, skip_special_tokens=False)
    return exact_answer(text, answer, finished)


@torch.no_grad()
def look(loop: Loop, iteration: int) -> tuple[float, float]:
    """The sampled held-out score, and the mean KL of a response to the reference."""
    job, end = loop.job, frozenset([loop.tokenizer.eos_token_id])
    sampler = LocalSampler(end, job["response_tokens"], temperature=1.0)
    sampler.sync(loop.actor, iteration)
    found = sampler.run(
        [SingleTurn(row["ids"]) for row in job["heldout"]], Draw(job["turn"], "evaluate", 0)
    )
    rows = list(zip(found.response_ids.tolist(), found.response_lengths.tolist(), strict=True))
    scores = [
        judge(loop.tokenizer, ids[:length], task["answer"])
        for (ids, length), task in zip(rows, job["heldout"], strict=True)
    ]
    whole = [
        task["ids"] + ids[:length] for (ids, length), task in zip(rows, job["heldout"], strict=True)
    ]
    padded = loop.tokenizer.pad({"input_ids": whole}, return_tensors="pt")
    ids, attention = padded["input_ids"], padded["attention_mask"]
    width = max(length for _, length in rows)
    lengths = torch.tensor([length for _, length in rows])[:, None]
    mask = torch.arange(width) >= width - lengths
    both = [log_probs(m, ids, attention, width) for m in (loop.actor, loop.reference)]
    kl = torch.where(mask, both[0] - both[1], 0.0).sum(1).mean()
    return sum(scores) / len(scores), float(kl)


def run(job: Job) -> Result:
    random.seed(job["turn"])
    torch.manual_seed(job["turn"])
    loop, seconds, curve = Loop(job), 0.0, []
    score, kl = look(loop, 0)
    curve.append((0, seconds, score))
    for iteration in range(1, job["iterations"] + 1):
        began = time.perf_counter()
        share = 1 - (iteration - 1) / job["iterations"]
        for adam, lr in ((loop.adam, job["lr"]), (loop.critic_adam, job["critic_lr"])):
            adam.param_groups[0]["lr"] = lr * share
        loop.update(loop.rollout())
        seconds += time.perf_counter() - began
        score, kl = look(loop, iteration)
        curve.append((iteration, seconds, score))
        if score >= job["score"]:
            break
    reached = [seconds] if score >= job["score"] else []
    return {"seconds": reached, "curve": curve, "tokens": 0, "kl": kl}


if __name__ == "__main__":
    the_job = read_job()
    torch.set_num_threads(the_job["threads"])
    write_result(the_job, run(the_job))
