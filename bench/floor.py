"""The floating-point operations that a PPO step cannot do without, to hold against the GEMM rate.

Counted are the matrix products of the layers and of the head, two operations a weight and token;
attention, softmax, norms and the optimizer are left out, so the floor is a little too low.
"""

import json
from pathlib import Path

from bench.protocol import Job


def ppo_operations(job: Job) -> float:
    layers, head = weights(Path(job["model"]))
    rows, response = len(job["prompts"]), job["response_tokens"]
    read = sum(map(len, job["prompts"])) + rows * response  # tokens of all rows
    sampled = rows * response  # only these go through the head
    actor, critic = 2 * (layers * read + head * sampled), 2 * layers * read
    # A backward pass costs twice a forward one; weights that do not learn need half of that.
    learning = 2 if job["lora_rank"] else 3
    # Sampling, and the reference. Old log-probs are those of the first epoch's own forward.
    before = actor + actor
    if job["shared_trunk"]:
        return before + job["epochs"] * learning * actor
    return before + critic + job["epochs"] * learning * (actor + critic)


def weights(model: Path) -> tuple[int, int]:
    """Weights of all layers' matrices, and of the head, of a Llama."""
    c = json.loads((model / "config.json").read_text(encoding="utf-8"))
    width, heads, kv = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    attention = 2 * width * width + 2 * width * (width // heads) * kv
    feed_forward = 3 * width * c["intermediate_size"]
    return c["num_hidden_layers"] * (attention + feed_forward), width * c["vocab_size"]
