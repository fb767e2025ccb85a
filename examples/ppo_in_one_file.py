"""PPO for a language model in one file: actor, critic, reference and reward, from top to bottom.

    python examples/ppo_in_one_file.py

A model of a million parameters that ships with tether learns to carry when it adds, on a CPU, in a
minute or two. The formulas are those of `tether.algo`; the rest is plain torch and transformers.
`tether train arithmetic` does the same; its loop is `src/tether/ppo/iteration.py`.

Shapes: `rows` are the responses sampled in one iteration, `response` is the width of the longest.
Column t of every (rows, response) tensor is about response token t. Masked cells hold 0.
"""

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from statistics import fmean

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from tether.algo.advantages import gae, place_scores, shape_rewards
from tether.algo.kl import k1
from tether.algo.losses import LossInputs, clip_policy_loss, clip_value_loss
from tether.algo.masked import masked_mean, masked_moments, whiten
from tether.assets import resolve
from tether.config import ClipUpdate

BETA = 0.01  # the price of one nat of KL to the reference
GAMMA, LAMBDA = 1.0, 0.95
CLIP, VALUE_CLIP = ClipUpdate(eps_low=0.2, eps_high=0.2), 0.2
EPOCHS, MINIBATCH_ROWS = 2, 64
ACTOR_LR, CRITIC_LR, MAX_GRAD_NORM = 4e-4, 1e-3, 1.0
MAX_RESPONSE_TOKENS = 16


@dataclass(frozen=True)
class Rollout:
    """Prompts, padded on the left, and the responses after them, padded on the right."""

    ids: Tensor  # (rows, prompt + response)
    attention: Tensor  # (rows, prompt + response), True = not padding
    mask: Tensor  # (rows, response), True = sampled by the actor, the end token included

    @property
    def response_ids(self) -> Tensor:
        return self.ids[:, -self.mask.shape[1] :]


@dataclass(frozen=True)
class Experience(Rollout):
    """A rollout with all that the updates need, as the networks were before them."""

    old_log_probs: Tensor  # (rows, response), as all that follow
    kl: Tensor
    values: Tensor
    returns: Tensor
    policy_advantages: Tensor

    def select(self, rows: Tensor) -> "Experience":
        return Experience(*(getattr(self, field.name)[rows] for field in fields(self)))


# ---- The networks: actor and reference are language models, the critic has another head on one.
def read(network: nn.Module, rollout: Rollout) -> Tensor:
    """Return what a network says about each response token, (rows, response, width).

    The output at position t - 1 has read everything before token t, and nothing after it.
    """
    positions = (rollout.attention.cumsum(dim=1) - 1).clamp(min=0)
    output = network(rollout.ids, attention_mask=rollout.attention, position_ids=positions)
    return output[0][:, -rollout.mask.shape[1] - 1 : -1]


def log_probs(model: nn.Module, rollout: Rollout) -> Tensor:
    """Return the log-prob of every sampled token, (rows, response)."""
    every_token = read(model, rollout).log_softmax(dim=-1)
    sampled = every_token.gather(2, rollout.response_ids[:, :, None]).squeeze(2)
    return torch.where(rollout.mask, sampled, 0.0)


class Critic(nn.Module):
    """V(everything before token t): a copy of the actor's trunk, and a head that starts at 0."""

    def __init__(self, actor: nn.Module) -> None:
        super().__init__()
        self.trunk = copy.deepcopy(actor.base_model)
        self.head = nn.Linear(actor.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, rollout: Rollout) -> Tensor:
        values = self.head(read(self.trunk, rollout)).squeeze(2)
        return torch.where(rollout.mask, values, 0.0)


# ---- From prompts to advantages.
@torch.no_grad()
def sample(actor: nn.Module, tokenizer, prompts: list[str]) -> Rollout:
    """Let the actor respond to every prompt, token by token from its own distribution."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    encoded = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    ids = actor.generate(
        **encoded, do_sample=True, top_k=0, top_p=1.0, max_new_tokens=MAX_RESPONSE_TOKENS
    )
    ends = ids[:, encoded["input_ids"].shape[1] :] == tokenizer.eos_token_id
    mask = ends.cumsum(dim=1) - ends.long() == 0  # True as long as no earlier token was the end
    return Rollout(ids, torch.cat([encoded["attention_mask"].bool(), mask], dim=1), mask)


def score(rollout: Rollout, tokenizer, answers: list[str]) -> Tensor:
    """Reward each row with 1 for exactly the answer and then the end, with 0 for all else."""
    responses = [ids[mask] for ids, mask in zip(rollout.response_ids, rollout.mask, strict=True)]
    right = [answer + tokenizer.eos_token for answer in answers]
    return torch.tensor([tokenizer.decode(r) == a for r, a in zip(responses, right, strict=True)])


@torch.no_grad()
def evaluate(
    rollout: Rollout, scores: Tensor, actor: nn.Module, reference: nn.Module, critic: Critic
) -> Experience:
    """Let every network read the rows, and turn scores into advantages."""
    mask, old_log_probs, values = rollout.mask, log_probs(actor, rollout), critic(rollout)

    # The score lands on the last token; every token pays for leaving the reference.
    kl = k1(old_log_probs, log_probs(reference, rollout), mask)
    rewards = shape_rewards(place_scores(scores, mask), kl, BETA)

    # Was each token better than the critic expected? Returns teach it, advantages the actor.
    value_after_the_end = torch.zeros_like(scores)
    advantages = gae(rewards, values, value_after_the_end, mask, GAMMA, LAMBDA)
    returns = advantages + values
    policy_advantages = whiten(advantages, mask, masked_moments(advantages, mask))
    numbers = old_log_probs, kl, values, returns, policy_advantages
    return Experience(rollout.ids, rollout.attention, mask, *numbers)


# ---- From advantages to new weights.
def actor_loss(actor: nn.Module, batch: Experience) -> Tensor:
    """PPO-Clip: make better tokens likelier, worse ones less so, each by a fifth at most."""
    new = log_probs(actor, batch)
    inputs = LossInputs(new, batch.old_log_probs, batch.policy_advantages, batch.mask)
    return masked_mean(clip_policy_loss(CLIP, inputs).per_token, batch.mask)


def critic_loss(critic: Critic, batch: Experience) -> Tensor:
    """Half the squared error against the returns, clipped near the old values."""
    loss = clip_value_loss(critic(batch), batch.values, batch.returns, VALUE_CLIP)
    return masked_mean(loss.per_token, batch.mask)


def minibatches(experience: Experience) -> Iterator[Experience]:
    """Yield every row once per epoch, in a fresh order."""
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(experience.ids)).split(MINIBATCH_ROWS):
            yield experience.select(rows)


def step(loss: Tensor, optimizer: torch.optim.Optimizer) -> float:
    """Take one optimizer step; return the loss before it."""
    loss.backward()
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# ---- The loop.
def train(iterations: int, rows: int) -> None:
    """Run PPO and print one line per iteration."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(resolve("tether:starter"), padding_side="left")
    actor = AutoModelForCausalLM.from_pretrained(resolve("tether:starter")).eval()  # no dropout
    reference, critic = copy.deepcopy(actor), Critic(actor)
    actor_optimizer = torch.optim.AdamW(actor.parameters(), ACTOR_LR, weight_decay=0.0)
    critic_optimizer = torch.optim.AdamW(critic.parameters(), CRITIC_LR, weight_decay=0.0)
    with resolve("tether:arithmetic/train.jsonl").open(encoding="utf-8") as file:
        tasks = [json.loads(line) for line in file]

    for iteration in range(iterations):
        drawn = [tasks[i] for i in torch.randint(len(tasks), (rows,)).tolist()]
        rollout = sample(actor, tokenizer, [task["prompt"] for task in drawn])
        scores = score(rollout, tokenizer, [task["answer"] for task in drawn]).float()
        experience = evaluate(rollout, scores, actor, reference, critic)
        batches = list(minibatches(experience))
        value = [step(critic_loss(critic, batch), critic_optimizer) for batch in batches]
        policy = [step(actor_loss(actor, batch), actor_optimizer) for batch in batches]

        print(
            f"iteration {iteration:2}   score {scores.mean():.3f}   "
            f"KL {experience.kl.sum(dim=1).mean():.3f}   "
            f"policy loss {fmean(policy):+.4f}   value loss {fmean(value):.4f}"
        )


if __name__ == "__main__":
    train(iterations=20, rows=256)
