"""What a run asks of each process: which share of the work, in batches of which size, at most."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from tether.config import Config
from tether.models.heads import cells_at_once
from tether.models.rehearsal import Batch
from tether.train.planning.networks import Networks, Size, critic_size, size_of

Learner = Literal["actor", "critic"]


@dataclass(frozen=True)
class Demand:
    """Every row is taken to be as long as it can be."""

    config: Config
    networks: Networks
    longest_prompt: int
    workers: int  # processes
    device: str  # its kind

    @cached_property
    def actor(self) -> Size:
        return size_of(self.networks.actor)

    @cached_property
    def critic(self) -> Size:
        return critic_size(self.config, self.networks)

    @cached_property
    def reference(self) -> Size:
        return size_of(self.networks.reference)

    @cached_property
    def reward(self) -> Size:
        return size_of(self.networks.reward)

    @property
    def roles(self) -> dict[str, Size]:
        names = ("actor", "critic", "reference", "reward")
        sizes = {name: getattr(self, name) for name in names}
        return {name: size for name, size in sizes.items() if size.parameters}

    @property
    def learners(self) -> dict[Learner, Size]:
        """Roles with an optimizer of their own; a shared trunk's value head is in the actor's."""
        own = self.config.has_critic and not self.config.critic.shared_trunk
        return {"actor": self.actor, **({"critic": self.critic} if own else {})}

    @property
    def layer_ways(self) -> int:
        """Processes that share each layer."""
        return self.config.launch.tensor_parallel

    @property
    def replicas(self) -> int:
        """Processes, or groups of them, that train on rows of their own."""
        return self.workers // self.layer_ways

    @property
    def shards(self) -> int:
        """Parts that weights, gradients and moments are cut into."""
        return self.replicas if self.config.launch.weights == "sharded" else 1

    def held(self, whole: int, linear: int) -> int:
        """What a process has of so many bytes, of which `linear` are the layers' matrices."""
        return math.ceil((whole - linear + linear / self.layer_ways) / self.shards)

    @property
    def longest_row(self) -> int:
        return self.longest_prompt + self.config.rollout.max_response_tokens

    @property
    def tokens(self) -> int:
        """Of an iteration, prompts and responses."""
        return self.config.rows * self.longest_row

    def step_rows(self, role: Learner) -> int:
        """Rows of one optimizer step."""
        c = self.config
        if role == "critic":
            return c.critic_minibatch_rows
        return c.rows if c.actor.update.kind == "trpo" else c.actor.minibatch_rows

    def steps(self, role: Learner) -> int:
        """Optimizer steps an iteration."""
        c = self.config
        if role == "actor" and c.actor.update.kind == "trpo":
            return 1
        epochs = c.actor.epochs if role == "actor" else c.critic_epochs
        return epochs * math.ceil(c.rows / self.step_rows(role))

    def microbatch(self, role: Learner) -> Batch:
        """A process's largest, as `data.collate.microbatches` makes them."""
        c = self.config
        rows = math.ceil(self.step_rows(role) / self.replicas)
        if role == "critic":
            return self._batch(rows, c.critic.microbatch_tokens)
        cells = cells_at_once(self.networks.actor.get_output_embeddings())
        rows = min(rows, max(1, cells // c.rollout.max_response_tokens))
        return self._batch(rows, c.actor.microbatch_tokens)

    def microbatches(self, role: Learner) -> int:
        """Backward passes of a process before a step."""
        rows = math.ceil(self.step_rows(role) / self.replicas)
        return math.ceil(rows / self.microbatch(role).rows)

    @property
    def reading(self) -> Batch:
        """The largest batch of a pass without gradients."""
        rows = math.ceil(self.config.rows / self.replicas)
        return self._batch(rows, self.config.actor.microbatch_tokens)

    @property
    def readings(self) -> int:
        """Batches of such a pass."""
        return math.ceil(math.ceil(self.config.rows / self.replicas) / self.reading.rows)

    def _batch(self, rows: int, tokens: int) -> Batch:
        rows = max(1, min(rows, tokens // self.longest_row))
        return Batch(rows, self.longest_row, self.config.rollout.max_response_tokens)

    @property
    def sampled_rows(self) -> int:
        """Rows that a process samples."""
        return math.ceil(self.config.rows / self.workers)

    @property
    def slots(self) -> int:
        """Rows that it samples at once."""
        room = self.config.rollout.cache_tokens // self.longest_row
        return max(1, min(self.sampled_rows, room))
