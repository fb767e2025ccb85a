"""Explain a failed collective: every surviving process checks in to a shared `TCPStore`, and those
that do not are named in the error. A process that ends early leaves its reason there."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as torch_dist

from tether.dist.world import World, waited_for, world
from tether.errors import OthersLost, RunStopped, UserError, one_line

CHECK_IN_SECONDS = 5.0


@contextmanager
def naming_lost_processes() -> Iterator[None]:
    """Turn a failed collective into an error that names the processes that did not answer."""
    try:
        yield
    except RuntimeError as error:
        if world().size == 1 or not _is_of_a_collective(error):
            raise
        raise _what_happened(world(), error) from None


@contextmanager
def reporting_exit_reason() -> Iterator[None]:
    """Leave the reason why this process ends where the others can find it."""
    try:
        yield
    except OthersLost:
        raise
    except (UserError, RunStopped) as error:
        here = world()
        if here.store is not None:
            kind = "user" if isinstance(error, UserError) else "run"
            here.store.set(f"left/{here.rank}", f"{kind} {error}")
        raise


def _is_of_a_collective(error: RuntimeError) -> bool:
    return isinstance(error, torch_dist.DistBackendError) or "gloo" in str(error)


def _what_happened(here: World, error: RuntimeError) -> Exception:
    missing, reasons = [0], []  # rank 0 serves the store, and may not answer at all
    check = threading.Thread(target=_check_in, args=(here, missing, reasons), daemon=True)
    check.start()
    check.join(2 * CHECK_IN_SECONDS)
    if reasons:
        kind, _, reason = reasons[0].partition(" ")
        return (UserError if kind == "user" else RunStopped)(reason)
    me = f"Process {here.rank} of {here.size}"
    if not missing:
        return OthersLost(f"{me} failed together with all the others: {one_line(error)}")
    who, field = ", ".join(map(str, missing)), waited_for()
    return OthersLost(
        f"{me} cannot go on: no answer from process {who} (launch.{field} = "
        f"{here.limits[field]:g})."
    )


def _check_in(here: World, missing: list[int], reasons: list[str]) -> None:
    """Put the ranks that did not check in into `missing`, and their reasons into `reasons`."""
    store = here.store
    if store is None:
        return
    deadline = time.monotonic() + CHECK_IN_SECONDS
    store.set(f"here/{here.rank}", "")
    silent = list(range(here.size))
    while silent and not reasons and time.monotonic() < deadline:
        silent = [rank for rank in silent if not store.check([f"here/{rank}"])]
        left = [f"left/{rank}" for rank in silent if store.check([f"left/{rank}"])]
        reasons += [store.get(name).decode() for name in left]
        time.sleep(0.05)
    missing[:] = silent
