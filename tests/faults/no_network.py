"""S8: the commands in a network namespace of their own, with no way out, not even loopback."""

import ctypes
import os
import socket
import sys
from pathlib import Path

from faults.attempt import attempt, refused, train
from faults.row import Row, tally
from faults.world import World

CLONE_NEWNET = 0x40000000


def cut_network() -> None:
    """Called in the new process, as `unshare --net` would; it needs root."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare failed")
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ.pop(name, None)
    probe = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    probe.settimeout(2)
    if probe.connect_ex(("127.0.0.1", 9)) in (0, 111):  # 111: somebody was there to refuse
        raise OSError("the network is still there")


def why_not_here() -> str | None:
    """What this machine lacks for the row."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "cutting the network off takes Linux and root"
    return None


def row_s8(world: World, folder: Path, tries: int, seed: int) -> Row:
    name = "train and generate with the network cut off"
    if lacking := why_not_here():
        return Row("S8", name, 0, 0, f"not tried: {lacking}")
    return tally("S8", name, [_try(world, folder / str(i)) for i in range(tries)])


def _try(world: World, folder: Path) -> str | None:
    trained = train(folder, world.recipe, "--train.iterations", "2", sabotage=cut_network)
    if trained.code != 0:
        return f"train: code {trained.code}: {trained.said[-300:]!r}"
    say = ("generate", "1+1=?", "--max-tokens", "3", "--model", trained.run)
    said = attempt(folder / "generate", *say, sabotage=cut_network)
    if said.code != 0:
        return f"generate: code {said.code}: {said.said[-300:]!r}"
    hub = ("check", world.recipe, "--model.actor", "somebody/some-model")
    return refused(attempt(folder / "hub", *hub, sabotage=cut_network), "somebody/some-model")
