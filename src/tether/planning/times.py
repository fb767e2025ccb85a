"""The time of an iteration: operations, steps of decoding and bytes, over what a device does."""

from dataclasses import dataclass

from tether.config import Config
from tether.config.devices import REACHED_BYTES, REACHED_PRODUCTS
from tether.planning.cost import (
    Cost,
    decoding,
    memory_bandwidth,
    operations,
    reading_prompts,
    sent,
)
from tether.planning.machine import Machine
from tether.planning.workload import Demand
from tether.support.units import byte_text, si, time_text

Line = tuple[str, str, str]  # what, how much, and the arithmetic behind it
Time = tuple[str, float, str]  # what, seconds, and the same


@dataclass(frozen=True)
class Rates:
    """What a device does per second; None where it is not known."""

    teraflops: float | None  # 1e12 operations
    bandwidth: float | None  # bytes of its own memory
    link: float | None  # bytes sent to another one
    whence: str


def time_lines(d: Demand, machine: Machine | None) -> list[Line]:
    """Return the stages of an iteration, one after the other, and their sum."""
    rates = rates_of(d.config, machine if d.workers == 1 else None)
    times: list[Time] = []
    if rates.teraflops is not None:
        rate = d.workers * rates.teraflops * 1e12
        times = [(c.what, c.amount / rate, _operations(c)) for c in operations(d)]
        times[0] = _sampling(d, rates.teraflops, rates.bandwidth, times[0])
    if rates.link is not None and d.workers > 1:
        amount = sum(cost.amount for cost in sent(d))
        because = f"{byte_text(amount)} at {rates.link / 1e9:.4g} GB/s"
        times.append(("sending", amount / rates.link, because))
    lines = [(what, time_text(seconds), because) for what, seconds, because in times]
    total = sum(seconds for _, seconds, _ in times)
    if rates.teraflops is not None and d.config.launch.samplers:
        apart, total = _apart(d.config, times[0][1], total)
        lines += apart
    return [*lines, ("in all", time_text(total), rates.whence)] if lines else []


def _apart(config: Config, sampling: float, together: float) -> tuple[list[Line], float]:
    """Return what samplers apart and the trainer take of an iteration, and its seconds.

    Each sampler is taken to be as fast as the trainer.
    """
    samplers, lag = config.launch.samplers, config.rollout.lag
    apart, training = sampling / samplers, together - sampling
    overlapped = max(apart, training)
    seconds = overlapped if lag else apart + training
    how = f"rollout.lag = {lag} overlaps them"
    if not lag:
        how = f"in turn; with rollout.lag: 1 an iteration takes {time_text(overlapped)}"
    lines = [
        ("samplers apart", time_text(apart), f"{samplers}, idle {1 - apart / seconds:.0%}"),
        ("trainer", time_text(training), f"idle {1 - training / seconds:.0%}; {how}"),
    ]
    return lines, seconds


def rates_of(config: Config, machine: Machine | None) -> Rates:
    """Return what a device does: by `launch`, by the device that it names, or as measured here."""
    launch = config.launch
    given = launch.teraflops, _giga(launch.bandwidth_gigabytes), _giga(launch.link_gigabytes)
    if launch.device is None:
        if given[0] is not None or machine is None:
            return Rates(*given, whence="one after the other")
        rate = f"{1000 * machine.teraflops:.0f} GFLOP/s"
        whence = f"rough: at {rate}, measured here; rows at their longest"
        return Rates(machine.teraflops, *given[1:], whence=whence)
    device = launch.device
    peak = peak_teraflops(config)
    usual = (
        REACHED_PRODUCTS * peak,
        REACHED_BYTES * device.bandwidth_gigabytes * 1e9,
        REACHED_BYTES * device.link_gigabytes * 1e9,
    )
    share = f"{REACHED_BYTES:.0%} of"
    told = (
        f"{REACHED_PRODUCTS:.0%} of {peak:g} TFLOP/s in {number_format(config)}",
        f"{share} {device.bandwidth_gigabytes:g} GB/s of memory",
        f"{share} {device.link_gigabytes:g} GB/s between devices",
    )
    taken = ", ".join(text for text, rate in zip(told, given, strict=True) if rate is None)
    whence = f"{taken} ({device.source})" if taken else "one after the other"
    return Rates(*(a or b for a, b in zip(given, usual, strict=True)), whence=whence)


def number_format(config: Config) -> str:
    """Return the format in which products are computed."""
    return "bfloat16" if "bfloat16" in (config.model.dtype, config.model.compute) else "float32"


def peak_teraflops(config: Config) -> float:
    """Return what the data sheet of the named device says of the format that is computed in."""
    device = config.launch.device
    assert device is not None
    coarse = number_format(config) == "bfloat16"
    return device.bfloat16_teraflops if coarse else device.float32_teraflops


def stated_peak(config: Config) -> float | None:
    """Return the 1e12 operations per second that a device can do at most: by `launch.teraflops`,
    by the data sheet of the device that is named, or None."""
    if config.launch.teraflops is not None or config.launch.device is None:
        return config.launch.teraflops
    return peak_teraflops(config)


def _giga(amount: float | None) -> float | None:
    return None if amount is None else amount * 1e9


def _sampling(d: Demand, teraflops: float, bandwidth: float | None, by_operations: Time) -> Time:
    """Return the time of reading prompts and of decoding step by step; where nothing is known of
    the memory's bandwidth, that of the operations."""
    if bandwidth is None:
        what, seconds, because = by_operations
        least = memory_bandwidth(d, seconds)
        slow = f"; bound by memory below {least / 1e9:.0f} GB/s" if least >= 1e9 else ""
        return what, seconds, because + slow
    found = decoding(d)
    seconds, bound = found.seconds(teraflops, bandwidth)
    if d.config.advantage.traits.needs_greedy:  # one more row per prompt
        seconds += seconds / d.config.rollout.samples_per_prompt
    seconds += reading_prompts(d) / (d.workers * teraflops * 1e12)
    steps = f"{found.steps} steps, each reads {byte_text(found.step_bytes)}"
    return "sampling", seconds, f"{steps}; bound by {bound}"


def _operations(cost: Cost) -> str:
    amount = cost.amount / 1e12
    what = f"{si(amount)} TFLOP" if amount >= 1 else f"{1000 * amount:.3g} GFLOP"
    return f"{what}: {cost.because}"
