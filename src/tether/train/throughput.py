"""What an operator asks of an iteration: tokens per process, use of the device, memory, waiting."""

import resource

import torch

from tether.dist.collectives import gather
from tether.dist.world import world
from tether.planning.cost import model_operations
from tether.planning.plan import Plan
from tether.planning.times import stated_peak
from tether.types import Rollout


def operator_timings(
    rollout: Rollout, seconds: float, waited: float, plan: Plan, device: torch.device
) -> dict[str, float]:
    """Return numbers of an iteration that took `seconds`, of which this process spent `waited` in
    collectives. The memory is the largest of any process, the waiting their mean."""
    here, everyone = world(), rollout.rows.everyone
    responses = int(everyone(rollout.response_lengths).sum())
    tokens = responses + int(everyone(rollout.prompt_lengths).sum())
    told = gather((waited, peak_bytes(device)))
    found = {"throughput/tokens_per_second_per_process": responses / seconds / here.size}
    peak = stated_peak(plan.config)
    if peak is not None:
        done = model_operations(plan.demand, tokens, responses)
        found["throughput/mfu"] = done / (seconds * here.size * peak * 1e12)
    found["memory/peak_gigabytes"] = max(peak for _, peak in told) / 1e9
    if here.size > 1:
        found["time/collectives"] = sum(seconds for seconds, _ in told) / here.size
    return found


def peak_bytes(device: torch.device) -> int:
    """Return the most memory that this process has had: of its GPU as torch's allocator counts it,
    else the kernel's high-water mark."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
