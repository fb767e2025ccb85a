"""Whole runs on pretend GPUs: no tensor meets one of another device, and the host seldom waits."""

import inspect
from collections.abc import Callable
from typing import Any

import pretend_cuda
import pytest
import torch
from helpers import changed, configured
from torch import nn
from train.test_tool_runs import WORLD

from dist.processes import run_processes
from dist.test_runs import at, difference, letters, lines
from tether import api
from tether.models import forward, token_log_probs
from tether.ppo import iteration
from tether.ppo.result import first_controls
from tether.ppo.roles import build_roles
from tether.ppo.updates import minibatches, trpo
from tether.types import Rollout

GRPO = {"advantage__estimator": "grpo", "critic": {}}
KINDS = {
    "clip": {"actor__entropy_coef": 0.01},
    "penalty": {"actor__update": {"kind": "penalty"}},
    "trpo": {"actor__update": {"kind": "trpo"}},
    "cpi": {"actor__update": {"kind": "cpi"}},
    "reinforce": {"actor__update": {"kind": "reinforce"}},
    "gspo": {"actor__update": {"kind": "gspo"}},
    "cispo": {"actor__update": {"kind": "cispo"}},
    "dppo": {"actor__update": {"kind": "dppo"}},
    "grpo": GRPO | {"kl__in_loss": {"coef": 0.1}},
    "remax": GRPO | {"advantage__estimator": "remax"},
    "full KL": {"kl__in_loss": {"coef": 0.1, "estimator": "full"}},
    "lora": {"model__lora": {"rank": 2}, "model__critic_lora": {"rank": 2}},
    "shared trunk": {"critic": {"shared_trunk": True}},
    "frozen layers": {"model__learn_layers": 1, "kl__refresh_reference_every": 1},
    "recomputed": {"model__gradient_checkpointing": True},
    "bfloat16": {"model__compute": "bfloat16"},
    "turns": {
        "rollout__max_response_tokens": 60,
        "rollout__max_observation_tokens": 20,
        "rollout__max_turns": 3,
    },
}
# Rounding alone: two sharded CPUs are 0.09 (of a gradient's norm) from one CPU, GPUs here 0.12.
BFLOAT16 = 0.2
NOT_SHARDED = ("trpo",)
SPREADS = {"alone": (1, "replicated"), "two": (2, "replicated"), "sharded": (2, "sharded")}
IN_MAKE_TEST = [("sharded", "clip")]
ALL = [
    pytest.param(spread, kind, marks=[] if (spread, kind) in IN_MAKE_TEST else pytest.mark.long)
    for spread in SPREADS
    for kind in KINDS
    if not (spread == "sharded" and kind in NOT_SHARDED)
]


@pytest.fixture
def config(tiny_config, tmp_path) -> dict:
    (tmp_path / "world.py").write_text(WORLD)
    return changed(tiny_config, data__heldout=None, train__iterations=1)


def changed_to(config: dict, kind: str, tmp_path, weights: str = "replicated") -> dict:
    if kind == "turns":
        config = changed(config, rollout__environment=f"{tmp_path}/world.py:Letters")
    return changed(config, launch__weights=weights, **KINDS[kind])


def train(config: dict) -> str:
    return str(api.train(config, reward=letters).run)


def train_on_gpus(config: dict, change: Callable[[], None] | None = None) -> dict[str, Any]:
    pretend_cuda.install(2)
    if change is not None:
        change()
    run = train(changed(config, device="cuda"))
    return {"run": run, "current": pretend_cuda.CURRENT["device"], **pretend_cuda.GROUP}


@pytest.mark.parametrize(("spread", "kind"), ALL)
def test_an_iteration_on_gpus_has_the_numbers_of_cpus(config, tmp_path, spread, kind):
    size, weights = SPREADS[spread]
    config = changed_to(config, kind, tmp_path, weights)
    found = run_processes(size, train_on_gpus, at(config, "gpus"))
    [cpus] = run_processes(1, train, at(changed(config, launch__weights="replicated"), "cpus"))
    assert lines(found[0]["run"], "events.jsonl") == lines(cpus, "events.jsonl")
    gpus, expected = (lines(run, "metrics.jsonl") for run in (found[0]["run"], cpus))
    assert len(gpus) == 1
    assert difference(gpus, expected) < (BFLOAT16 if kind == "bfloat16" else 1e-3)
    if size > 1:
        assert [one["current"] for one in found] == [0, 1]
        assert [str(one["device_id"]) for one in found] == [f"cuda:{rank}" for rank in range(size)]
        assert {one["backend"] for one in found} == {"cpu:gloo,cuda:nccl"}


def leave_rollouts_on_the_cpu() -> None:
    Rollout.to = lambda self, device: self


def forget_the_current_device() -> None:
    torch.cuda.set_device = lambda device: None


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "weights", "said"),
    [
        (leave_rollouts_on_the_cpu, "replicated", "Expected all tensors to be on the same device"),
        (forget_the_current_device, "sharded", r"cuda:0.*cuda:1"),
    ],
)
def test_what_crashed_on_two_gpus_still_would(config, fault, weights, said):
    with pytest.raises(AssertionError, match=said):
        run_processes(2, train_on_gpus, changed(config, launch__weights=weights), fault)


def count_stages(config: dict) -> dict[str, tuple[int, int, str]]:
    """Microbatches, reads and their lines of each stage of one iteration on a GPU."""
    pretend_cuda.install(1)
    settings = configured(config, device="cuda")
    roles = build_roles(settings, reward=letters)
    found: dict[str, tuple[int, int, str]] = {}
    parts = []
    for module in (forward, minibatches, trpo):
        usual = module.lend
        module.lend = lambda *a, usual=usual: parts.append(usual(*a)) or parts[-1]

    def counted(name: str) -> Callable[..., Any]:
        usual = getattr(iteration, name)

        def run(*args: Any) -> Any:
            parts.clear()
            with pretend_cuda.counting() as counts:
                result = usual(*args)
            microbatches = sum(len(loan.microbatches) for loan in parts)
            found[name] = microbatches, counts.total("read"), counts.told("read")
            return result

        return run

    for name in ("make_experience", "update_critic", "update_actor"):
        setattr(iteration, name, counted(name))
    iteration.run_iteration(0, first_controls(settings), roles, settings)
    return found


def test_a_microbatch_makes_the_host_wait_at_most_once(config):
    """Rows in microbatches of one row, or of all rows, of which a step or a pass reads no more.

    The one is transformers': it looks at the positions, before the first layer, for packed rows.
    """
    sizes = {"one": 1, "all": 10_000}
    found = {}
    for name, tokens in sizes.items():
        limits = {"actor__microbatch_tokens": tokens, "critic__microbatch_tokens": tokens}
        [found[name]] = run_processes(1, count_stages, changed(config, **limits))
    for stage, (many, reads, told) in found["one"].items():
        few, fewer_reads, fewer_told = found["all"][stage]
        assert many >= few + 11
        assert reads - fewer_reads <= many - few, f"{stage}: {told}"
        outside = reads - trunk_reads(told) - (fewer_reads - trunk_reads(fewer_told))
        assert outside == 0, f"{stage}: {told}"


def trunk_reads(told: str) -> int:
    """Reads inside a call of the trunk: one line of models/forward.py."""
    code, first = inspect.getsourcelines(forward._call_trunk)
    calls = [f"models/forward.py:{first + i} " for i in range(len(code))]
    lines = [line for line in told.split(", ") if line.startswith(tuple(calls))]
    assert len(lines) == 1, told
    return int(lines[0].rpartition("x")[2])


TOKENS = 64


def operations_per_token(vocabulary: int, cache_sized: bool = False) -> tuple[float, float]:
    """Operations of the head per response token: in a pass without gradients, in an update."""
    pretend_cuda.install(1)
    if cache_sized:
        token_log_probs.logit_limits = lambda device: token_log_probs.CPU_LIMITS
    head = nn.Linear(4, vocabulary, bias=False).to("cuda")
    states = torch.zeros(4, TOKENS // 4, 4, device="cuda", requires_grad=True)
    ids = torch.zeros(4, TOKENS // 4, dtype=torch.long, device="cuda")
    mask = torch.ones(4, TOKENS // 4, dtype=torch.bool)
    found = []
    for grads in (False, True):
        with torch.set_grad_enabled(grads), pretend_cuda.counting() as counts:
            log_probs, entropies = token_log_probs.token_log_probs_and_entropies(
                head, states, ids, mask, 1.0
            )
            if grads:
                (log_probs.sum() + entropies.sum()).backward()
        assert counts.total("read") == 0
        found.append(counts.total("operation") / TOKENS)
    return found[0], found[1]


@pytest.mark.parametrize(
    "vocabulary", [32_000, *(pytest.param(n, marks=pytest.mark.long) for n in (128_256, 151_936))]
)
def test_the_head_starts_less_than_one_operation_per_token_on_a_gpu(vocabulary):
    [(reading, learning)] = run_processes(1, operations_per_token, vocabulary)
    assert reading <= 1
    assert learning <= 2  # a forward and a backward pass


@pytest.mark.long
def test_blocks_for_a_processors_cache_would_start_many_operations_on_a_gpu():
    [(reading, _)] = run_processes(1, operations_per_token, 151_936, True)
    assert reading > 10
