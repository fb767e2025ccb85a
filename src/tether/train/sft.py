"""Supervised fine-tuning: make given responses to given prompts likelier."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tether.algo.aggregation import cell_weights, weighted_sum
from tether.algo.random import permutation
from tether.data.collate import join_pairs, length_mask
from tether.data.templates import render_prompt
from tether.models.loading import Vocabulary
from tether.models.policy import Policy
from tether.train.optimizer import Optimizer


@dataclass(frozen=True)
class SFTSettings:
    num_steps: int
    lr: float  # at the peak
    rows: int = 64  # of one step
    warmup_steps: int = 50  # linear rise to the peak, before the cosine fall to zero
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    seed: int = 0  # of the order of the rows


def train_sft(
    policy: Policy,
    vocabulary: Vocabulary,
    dialogues: Sequence[tuple[str, str]],
    settings: SFTSettings,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Train the policy in place on (prompt, response) pairs; `on_step` hears each step's loss.

    The loss is the mean of -log pi over response tokens, EOS included; prompts are only read.
    """
    pairs = [_encode(vocabulary, prompt, response) for prompt, response in dialogues]
    optimizer = Optimizer(
        policy.model.parameters(),
        settings.lr,
        settings.max_grad_norm,
        settings.weight_decay,
        betas=(0.9, 0.95),  # a short memory suits a loss that falls fast
    )
    for step, rows in enumerate(_row_slices(len(pairs), settings)):
        sequences = join_pairs([pairs[row] for row in rows])
        mask = length_mask(sequences.response_lengths, sequences.width)
        log_probs, _ = policy.read(policy.states(sequences), sequences, mask)
        loss = -weighted_sum(log_probs, cell_weights("token_mean", mask, 1, log_probs.dtype))
        loss.backward()
        optimizer.set_factor(_schedule_factor(step, settings))
        optimizer.step()
        on_step(step, loss.item())


def _encode(vocabulary: Vocabulary, prompt: str, response: str) -> tuple[list[int], list[int]]:
    """Encoded apart, as in sampling, so that no token straddles the border."""
    ids = vocabulary.tokenizer(response, add_special_tokens=False).input_ids
    return render_prompt(vocabulary.tokenizer, prompt), [*ids, vocabulary.tokenizer.eos_token_id]


def _row_slices(count: int, settings: SFTSettings) -> Iterator[list[int]]:
    """Rows of each step: a window on fresh permutations laid end to end."""
    queue: list[int] = []
    data_pass = 0
    for _ in range(settings.num_steps):
        while len(queue) < settings.rows:
            queue += permutation(count, settings.seed, "sft", data_pass).tolist()
            data_pass += 1
        yield queue[: settings.rows]
        queue = queue[settings.rows :]


def _schedule_factor(step: int, settings: SFTSettings) -> float:
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    progress = (step - settings.warmup_steps) / (settings.num_steps - settings.warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * progress))
