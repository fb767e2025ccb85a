"""PPO on the classic control tasks of gymnasium, by the formulas of `tether.algo`.

    python examples/classic_control.py CartPole-v1 --seed 1

The GAE, whitening and clipped losses that train a language model, on tasks whose scores are known:
settings and score, the mean return of the last 100 episodes, are those of CleanRL's ppo.py
(vwxyzjn/cleanrl, docs/rl-algorithms/ppo.md: CartPole-v1 490.04 ± 6.12, Acrobot-v1 -86.36 ± 1.32).
"""

import argparse
from dataclasses import dataclass
from statistics import fmean

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from tether.algo.advantages import gae
from tether.algo.losses import LossInputs, clip_policy_loss, clip_value_loss
from tether.algo.masked import masked_moments, whiten
from tether.config import ClipUpdate


@dataclass(frozen=True)
class Settings:
    steps: int = 500_000
    envs: int = 4
    rollout_steps: int = 128  # per environment and iteration
    lr: float = 2.5e-4  # falls to 0 in equal steps
    adam_eps: float = 1e-5
    gamma: float = 0.99
    lam: float = 0.95
    minibatches: int = 4
    epochs: int = 4
    clip: float = 0.2  # of the ratio, and of the value
    entropy_coef: float = 0.01
    value_coef: float = 0.5
    max_grad_norm: float = 0.5
    width: int = 64  # two tanh layers, for actor and critic each


def network(inputs: int, width: int, outputs: int, last_gain: float) -> nn.Sequential:
    layers = [nn.Linear(inputs, width), nn.Linear(width, width), nn.Linear(width, outputs)]
    for layer, gain in zip(layers, (2**0.5, 2**0.5, last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class Environments:
    """Copies of one task; a finished episode starts anew, and its return is kept."""

    def __init__(self, task: str, count: int, seed: int) -> None:
        self.copies = [gymnasium.make(task) for _ in range(count)]
        if not hasattr(self.copies[0].action_space, "n"):
            raise SystemExit(f"{task} has no discrete actions; take CartPole-v1 or Acrobot-v1")
        self.num_actions = int(self.copies[0].action_space.n)
        states = [env.reset(seed=seed + i)[0] for i, env in enumerate(self.copies)]
        self.states = torch.from_numpy(np.stack(states)).float()
        self.running, self.steps = [0.0] * count, 0
        self.returns: list[tuple[int, float]] = []  # (steps taken so far, return)

    def step(self, actions: list[int]) -> tuple[Tensor, Tensor]:
        """Return rewards and ends, (envs,) each; an episode that was cut off counts as ended."""
        self.steps += len(self.copies)
        outcomes = []
        for i, (env, action) in enumerate(zip(self.copies, actions, strict=True)):
            state, reward, terminated, truncated, _ = env.step(action)
            self.running[i] += float(reward)
            if terminated or truncated:
                self.returns.append((self.steps, self.running[i]))
                self.running[i], state = 0.0, env.reset()[0]
            outcomes.append((state, float(reward), terminated or truncated))
        states, rewards, ends = zip(*outcomes, strict=True)
        self.states = torch.from_numpy(np.stack(states)).float()
        return torch.tensor(rewards), torch.tensor(ends)


def advantages_of(
    rewards: Tensor, values: Tensor, ends: Tensor, next_values: Tensor, gamma: float, lam: float
) -> Tensor:
    """Estimate by GAE, (envs, steps). A row is what the rollout has of one episode, and the value
    after it is 0 where the episode ended, the critic's where only the rollout did."""
    steps, last = ends.shape[1], ends.clone()
    last[:, -1] = True
    lasts = last.flatten().nonzero()[:, 0]
    lengths = torch.diff(lasts, prepend=torch.tensor([-1]))
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    final_values = torch.where(ends.flatten()[lasts], 0.0, next_values[lasts // steps])
    of_rows = [torch.zeros(mask.shape).masked_scatter(mask, x) for x in (rewards, values)]
    return gae(*of_rows, final_values, mask, gamma, lam)[mask].view_as(rewards)


def train(task: str, seed: int, settings: Settings = Settings()) -> list[tuple[int, float]]:  # noqa: B008
    """Return every finished episode as (steps taken so far, return)."""
    s, worlds = settings, Environments(task, settings.envs, seed)
    torch.manual_seed(seed)
    actor = network(worlds.states.shape[1], s.width, worlds.num_actions, last_gain=0.01)
    critic = network(worlds.states.shape[1], s.width, 1, last_gain=1.0)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=s.lr, eps=s.adam_eps)
    update = ClipUpdate(eps_low=s.clip, eps_high=s.clip)
    iterations = s.steps // (s.envs * s.rollout_steps)
    for iteration in range(iterations):
        optimizer.param_groups[0]["lr"] = s.lr * (1 - iteration / iterations)
        columns = []
        with torch.no_grad():
            for _ in range(s.rollout_steps):
                states, log_probs = worlds.states, actor(worlds.states).log_softmax(-1)
                actions = torch.multinomial(log_probs.exp(), 1)
                outcome = worlds.step(actions[:, 0].tolist())
                per_step = actions, log_probs.gather(1, actions), critic(states)
                columns.append((states, *(x[:, 0] for x in per_step), *outcome))
            stacked = (torch.stack(x, dim=1) for x in zip(*columns, strict=True))
            states, actions, old, values, rewards, ends = stacked  # (envs, steps), states wider
            steps = rewards, values, ends, critic(worlds.states)[:, 0]
            advantages = advantages_of(*steps, s.gamma, s.lam)
        batch = [x.flatten(0, 1) for x in (states, actions, old, values, advantages)]
        for _ in range(s.epochs):
            for rows in torch.randperm(len(batch[0])).chunk(s.minibatches):
                at, actions, *numbers = (x[rows] for x in batch)
                old, values, advantages = (x[None] for x in numbers)  # one row of many cells
                everywhere = torch.ones_like(advantages, dtype=torch.bool)
                whitened = whiten(advantages, everywhere, masked_moments(advantages, everywhere))
                log_probs = actor(at).log_softmax(-1)
                new = log_probs.gather(1, actions[:, None]).T
                loss = clip_policy_loss(update, LossInputs(new, old, whitened, everywhere))
                value_loss = clip_value_loss(critic(at).T, values, advantages + values, s.clip)
                entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
                total = loss.per_token.mean() + s.value_coef * value_loss.per_token.mean()
                optimizer.zero_grad()
                (total - s.entropy_coef * entropy).backward()
                nn.utils.clip_grad_norm_(parameters, s.max_grad_norm)
                optimizer.step()
    return worlds.returns


def score_of(episodes: list[tuple[int, float]]) -> float:
    """Return the mean return of the last 100 episodes."""
    return fmean(score for _, score in episodes[-100:])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="PPO on a classic control task")
    parser.add_argument("task", nargs="?", default="CartPole-v1")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{chosen.task}, seed {chosen.seed}: {score_of(train(chosen.task, chosen.seed)):.2f}")
