"""Processes on one machine: nobody else can reach them, and what they exchange is data."""

import os
import signal
from pathlib import Path

import pytest
import torch
from helpers import table

from dist.processes import run_processes
from tether.dist.collectives import gather, gather_results, on_first_process
from tether.dist.wire import pack, unpack
from tether.dist.world import entered
from tether.errors import RunStopped, UserError
from tether.rewards.scorers import Verdict
from tether.run.metrics import Event
from tether.types import Moments

LISTENING = "0A"
DTYPES = (torch.uint8, torch.float64, torch.int64, torch.bfloat16, torch.float32)


def listeners() -> list[str]:
    """Addresses on which this process listens, as /proc/net says them."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(os.readlink(entry))
        except OSError:
            continue
    found = []
    for sockets in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(sockets).read_text().splitlines()[1:]:
            cells = line.split()
            if cells[3] == LISTENING and f"socket:[{cells[9]}]" in inodes:
                found.append(cells[1].split(":")[0])
    return found


def _listen_and_exchange() -> tuple[list[str], list, str]:
    with entered("cpu", 1, 60.0) as here:
        found = listeners()
        mine = {"rank": here.rank, "tensor": torch.arange(here.rank + 1) / 3, "none": (None, 0.1)}
        gathered = gather(mine)
        lengths = [(one["rank"], one["tensor"].tolist(), one["none"]) for one in gathered]

        def fail():
            raise UserError("reward.kind is wrong")

        with pytest.raises(UserError, match=r"reward\.kind is wrong"):
            on_first_process(fail)
        with pytest.raises(UserError, match=r"reward\.kind is wrong"):
            gather_results(fail if here.rank else (lambda: 1))
        return found, lengths, str(on_first_process(lambda: Path("runs/x")))


@pytest.mark.skipif(not Path("/proc/net/tcp").is_file(), reason="listening sockets: Linux only")
def test_processes_of_one_machine_listen_on_loopback_alone_and_exchange_plain_data():
    for found, gathered, path in run_processes(2, _listen_and_exchange):
        assert found, "every process has a socket of gloo's"
        assert set(found) <= {"0100007F", "00000000000000000000000001000000"}, found
        third = (torch.arange(2) / 3).tolist()
        assert gathered == [(0, third[:1], (None, 0.1)), (1, third, (None, 0.1))]
        assert path == "runs/x"


def test_what_is_sent_comes_back_with_its_bits_and_its_types():
    events = [Event("odd", "a\ud800", row=7)]
    values = [
        None, True, -(2**70), 0.1, float("inf"), "a\u2028b", [1, (2.5, {3})], {1: "a", "b": {}},
        Path("a/b"), signal.SIGTERM, Verdict(0.5, None, {"a": 1.0}), events,
    ]  # fmt: skip
    for value in values:
        again = unpack(pack(value))
        assert again == value
        assert type(again) is type(value)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        tensor = torch.tensor([[0.1, 2.0], [3.0, 0.0]]).to(dtype)
        assert torch.equal(unpack(pack(tensor)), tensor)
        assert unpack(pack(tensor[:0])).shape == (0, 2)
    moments = unpack(pack(Moments(*(torch.tensor(x) for x in (1.0, 2.0, 3)))))
    assert (type(moments), moments.variance.item()) == (Moments, 2.0)


def test_errors_come_back_as_what_they_were():
    for error in (
        UserError("x"),
        RunStopped("y", [1]),
        OSError(28, "No space left"),
        KeyError("k"),
    ):
        again = unpack(pack(error))
        assert (type(again), again.args) == (type(error), error.args)
    assert unpack(pack(RunStopped("y", [1]))).events == [1]
    assert unpack(pack(OSError(28, "No space left"))).errno == 28
    foreign = unpack(pack(torch.OutOfMemoryError("too much")))
    assert type(foreign) is RuntimeError
    assert "too much" in str(foreign)


def test_tensors_of_odd_sizes_lie_side_by_side():
    """Each is read in place, so it must begin where its numbers may."""
    given = [torch.arange(n, dtype=dtype) for n in (1, 3, 17) for dtype in DTYPES]
    found = unpack(pack(given))
    for before, after in zip(given, found, strict=True):
        assert after.dtype == before.dtype
        assert after.tolist() == before.tolist()
    large = torch.rand(1000, 1000)
    assert len(pack(large)) < large.nbytes + 500  # not as text, which takes a third more


def framed(text: str) -> torch.Tensor:
    """What a foreign program could send: a length and JSON."""
    content = len(text).to_bytes(8, "little") + text.encode()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


@table(
    "content",
    [
        '{"!": "dataclass", "module": "subprocess", "class": "Popen", "fields": {}}',
        '{"!": "error", "module": "os", "class": "system", "args": ["true"], "state": {}}',
        '{"!": "error", "module": "builtins", "class": "exec", "args": ["1"], "state": {}}',
        '{"!": "dataclass", "module": "tether.api", "class": "train", "fields": {}}',
        '{"!": "error", "module": "tether.api", "class": "os.system", "args": [""], "state": {}}',
        '{"!": "other"}',
        '{"!": "tensor", "dtype": "float32", "shape": [9], "start": 0}',
    ],
)
def test_nothing_but_data_is_made_of_what_was_received(content):
    with pytest.raises((ValueError, AttributeError, RuntimeError)):
        unpack(framed(content))
    with pytest.raises(TypeError, match="cannot be sent"):
        pack(object())
