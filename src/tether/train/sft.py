"""Supervised fine-tuning: maximise the likelihood of given responses to given prompts."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

IGNORE = -100  # cross_entropy's own ignore_index


@dataclass(frozen=True)
class SFTSettings:
    num_steps: int = 1000  # optimiser steps
    batch_size: int = 64  # rows a step
    lr: float = 1e-3  # peak learning rate
    warmup_steps: int = 50  # steps of linear rise to the peak, before the cosine fall to zero
    weight_decay: float = 0.0  # AdamW's decoupled decay
    max_grad_norm: float = 1.0  # global norm the gradient is clipped to
    seed: int = 0  # order of the rows


@dataclass(frozen=True)
class Example:
    token_ids: list[int]
    prompt_len: int


def encode_example(tokenizer: PreTrainedTokenizerBase, prompt: str, response: str) -> Example:
    """One dialogue turn as token ids, through the tokenizer's chat template.

    The turn ends at its EOS: what some templates put behind it (a newline) is never sampled, and
    so must not be trained on.
    """
    messages = [{"role": "user", "content": prompt}]
    prompt_text = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    prompt_ids = tokenizer.encode(prompt_text, add_special_tokens=False)
    response_ids = tokenizer.encode(response, add_special_tokens=False)
    # Encoded apart from its prompt, as at generation time, so no token can straddle the border.
    return Example([*prompt_ids, *response_ids, tokenizer.eos_token_id], len(prompt_ids))


def collate(examples: Sequence[Example], pad_id: int) -> tuple[Tensor, Tensor]:
    """Right-padded inputs and targets, both (B, T). Targets are IGNORE outside the response."""
    max_len = max(len(e.token_ids) for e in examples)
    inputs = torch.full((len(examples), max_len - 1), pad_id)
    targets = torch.full((len(examples), max_len - 1), IGNORE)
    for row, e in enumerate(examples):
        ids = torch.tensor(e.token_ids)
        inputs[row, : len(ids) - 1] = ids[:-1]
        targets[row, e.prompt_len - 1 : len(ids) - 1] = ids[e.prompt_len :]
    return inputs, targets


def lr_scale(step: int, settings: SFTSettings) -> float:
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    progress = (step - settings.warmup_steps) / max(1, settings.num_steps - settings.warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * progress))


def train_sft(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[tuple[str, str]],
    settings: SFTSettings,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Train `model` in place on (prompt, response) rows; `on_step` hears each step's loss.

    Rows are visited in a fresh random order each epoch. The loss is a mean over response tokens.
    """
    examples = [encode_example(tokenizer, prompt, response) for prompt, response in rows]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay, betas=(0.9, 0.95)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_scale(step, settings))
    rng = random.Random(settings.seed)
    queue: list[Example] = []
    model.train()
    for step in range(settings.num_steps):
        while len(queue) < settings.batch_size:
            queue += rng.sample(examples, len(examples))
        batch, queue = queue[: settings.batch_size], queue[settings.batch_size :]
        inputs, targets = collate(batch, tokenizer.pad_token_id)
        # No attention mask: padding is on the right, where causal attention never looks back from.
        logits = model(input_ids=inputs).logits  # (B, T, V)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        schedule.step()
        on_step(step, loss.item())
    model.eval()
