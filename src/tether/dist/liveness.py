"""Who still answers, when some do not: by a roll beside the groups that failed, which each that
waited signs, and where whoever leaves early says why."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as torch_dist

from tether.dist.world import World, world
from tether.errors import OthersLost, RunStopped, UserError, one_line

ROLL_CALL_SECONDS = 5.0


@contextmanager
def naming_lost_processes() -> Iterator[None]:
    """Who keeps the others waiting too long, or is gone, is named by each that is left."""
    try:
        yield
    except RuntimeError as error:
        if world().size == 1 or not _is_of_a_collective(error):
            raise
        raise _what_happened(world(), error) from None


@contextmanager
def reporting_exit_reason() -> Iterator[None]:
    """A process that ends for a reason of its own leaves it to the others."""
    try:
        yield
    except OthersLost:
        raise
    except (UserError, RunStopped) as error:
        here = world()
        if here.roll is not None:
            kind = "user" if isinstance(error, UserError) else "run"
            here.roll.set(f"left/{here.rank}", f"{kind} {error}")
        raise


def _is_of_a_collective(error: RuntimeError) -> bool:
    return isinstance(error, torch_dist.DistBackendError) or "gloo" in str(error)


def _what_happened(here: World, error: RuntimeError) -> Exception:
    missing, reasons = [0], []  # the first keeps the roll, and may not answer at all
    caller = threading.Thread(target=_call, args=(here, missing, reasons), daemon=True)
    caller.start()
    caller.join(2 * ROLL_CALL_SECONDS)
    if reasons:
        kind, _, reason = reasons[0].partition(" ")
        return (UserError if kind == "user" else RunStopped)(reason)
    me = f"Process {here.rank} of {here.size}"
    if not missing:
        return OthersLost(f"{me} failed together with all the others: {one_line(error)}")
    who, seconds = ", ".join(map(str, missing)), here.timeout.total_seconds()
    return OthersLost(
        f"{me} cannot go on: no answer from process {who} (launch.timeout_seconds = {seconds:g})."
    )


def _call(here: World, missing: list[int], reasons: list[str]) -> None:
    """Leaves in `missing` who did not sign, and in `reasons` why, where they said so."""
    deadline = time.monotonic() + ROLL_CALL_SECONDS
    here.roll.set(f"here/{here.rank}", "")
    silent = list(range(here.size))
    while silent and not reasons and time.monotonic() < deadline:
        silent = [rank for rank in silent if not here.roll.check([f"here/{rank}"])]
        left = [f"left/{rank}" for rank in silent if here.roll.check([f"left/{rank}"])]
        reasons += [here.roll.get(name).decode() for name in left]
        time.sleep(0.05)
    missing[:] = silent
