"""How weights go over to vLLM's process: tensor by tensor, and never as a file of all of them.

Where both are on one GPU, vLLM reads the trainer's own memory through its weight transfer (CUDA
IPC): what is sent are handles. Elsewhere a named pipe carries one tensor after the other to vLLM's
loader. vLLM keeps what it was handed until a layer is complete, so nothing here is reused.
"""

import base64
import contextlib
import errno
import fcntl
import json
import os
import select
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from tether.errors import RunStopped, UserError

LENGTH = struct.Struct("<Q")  # of the header that comes before a tensor; 0 at the end
PIPE_BYTES = 1 << 20
TICK_SECONDS = 0.05
SHOWN = 3  # names of weights in a message


def write_tensors(
    path: Path, weights: Iterable[tuple[str, Tensor]], runs: Callable[[], bool]
) -> None:
    """Write tensors into a named pipe, one at a time, for `read_tensors` in another process.

    Stops where the other side has closed the pipe, or no longer `runs`: that side says why.
    """
    pipe = _open_to_write(path, runs)
    if pipe is None:
        return
    try:
        with contextlib.suppress(BrokenPipeError):
            for name, tensor in weights:
                flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                about = {"name": name, "shape": [*tensor.shape], "dtype": dtype_name(tensor)}
                header = json.dumps(about).encode()
                _write(pipe, LENGTH.pack(len(header)) + header, runs)
                if tensor.numel():
                    _write(pipe, flat.numpy(), runs)
            _write(pipe, LENGTH.pack(0), runs)
    finally:
        os.close(pipe)


def read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield what `write_tensors` writes into the pipe, each tensor in memory of its own."""
    with path.open("rb", buffering=0) as pipe:
        while size := LENGTH.unpack(_read(pipe, bytearray(LENGTH.size)))[0]:
            about = json.loads(_read(pipe, bytearray(size)))
            dtype = getattr(torch, about["dtype"])
            found = torch.empty(about["shape"], dtype=dtype)
            if found.numel():
                _read(pipe, found.view(-1).view(torch.uint8).numpy())
            yield about["name"], found


def dtype_name(tensor: Tensor) -> str:
    """Return the number format as torch's attribute is called: `bfloat16`."""
    return str(tensor.dtype).removeprefix("torch.")


def handle_of(name: str, tensor: Tensor) -> dict[str, Any]:
    """Return what vLLM's IPC transfer needs to read a tensor out of this process's GPU memory, as
    plain data.

    The tensor must stay as it is until the transfer is finished.
    """
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(tensor.detach())
    gpu = str(torch.cuda.get_device_properties(tensor.device).uuid)
    return {
        "names": [name],
        "dtype_names": [dtype_name(tensor)],
        "shapes": [[*tensor.shape]],
        "ipc_handles": [{gpu: [as_plain(part) for part in arguments]}],
    }


def update_of(handle: dict[str, Any]) -> dict[str, Any]:
    """Return the request for vLLM's `update_weights` out of what `handle_of` returned."""
    handles = [
        {gpu: tuple(map(from_plain, parts)) for gpu, parts in one.items()}
        for one in handle["ipc_handles"]
    ]
    return {"update_info": {**handle, "ipc_handles": handles}}


TYPES = {"Tensor": Tensor, "UntypedStorage": torch.UntypedStorage}  # that a handle may name


def as_plain(part: Any) -> Any:
    """Return a part of a handle as JSON can say it; what is not plain has its kind beside it."""
    if isinstance(part, bytes):
        return {"bytes": base64.b64encode(part).decode()}
    if isinstance(part, torch.dtype):
        return {"dtype": str(part).removeprefix("torch.")}
    if isinstance(part, type):
        [name] = [name for name, kind in TYPES.items() if kind is part]
        return {"type": name}
    return [*part] if isinstance(part, tuple) else part


def from_plain(part: Any) -> Any:
    """Return what `as_plain` was given; a tuple of sizes for a list."""
    if isinstance(part, list):
        return tuple(part)
    if not isinstance(part, dict):
        return part
    [(kind, value)] = part.items()
    if kind == "bytes":
        return base64.b64decode(value)
    return getattr(torch, value) if kind == "dtype" else TYPES[value]


def takes_handles(llm: Any) -> bool:
    """Tell whether this vLLM has the calls of a weight transfer."""
    calls = ("init_weight_transfer_engine", "start_weight_update", "update_weights")
    return all(hasattr(llm, name) for name in (*calls, "finish_weight_update"))


def note_weights(worker: Any) -> None:
    """In a process of vLLM: note the weights as they are, and the names of those that it loads."""
    model = worker.get_model()
    vars(model).pop("load_weights", None)
    load, loaded = model.load_weights, set()

    def load_and_note(*arguments: Any, **named: Any) -> Any:
        found = load(*arguments, **named)
        loaded.update(found or ())
        return found

    vars(model)["load_weights"] = load_and_note
    vars(model)["tether_noted"] = loaded, _sums(model)


def missing_weights(worker: Any) -> list[str]:
    """Name the weights that were not loaded since `note_weights`, and are what they were.

    A weight that vLLM computed out of others has moved with them.
    """
    model = worker.get_model()
    vars(model).pop("load_weights", None)
    loaded, before = vars(model).pop("tether_noted")
    now = _sums(model)
    return [n for n, old in before.items() if n not in loaded and now.get(n, old) == old]


def refuse_missing(found: Iterable[Iterable[str]]) -> None:
    """Refuse to sample with weights that nobody sent: vLLM starts with random ones."""
    missing = sorted({name for names in found or () for name in names or ()})
    if missing:
        named = ", ".join(missing[:SHOWN]) + (", …" if len(missing) > SHOWN else "")
        raise UserError(
            f"vLLM did not take {len(missing)} weights of this model ({named}), so it would sample "
            f"with random ones; use a version of vLLM that knows the model, or rollout.sampler "
            f"local"
        )


def _sums(model: Any) -> dict[str, float]:
    with torch.no_grad():
        return {name: float(weight.float().sum()) for name, weight in model.named_parameters()}


def _open_to_write(path: Path, runs: Callable[[], bool]) -> int | None:
    """Open the pipe once the other side reads; None if it does not run any more."""
    while runs():
        try:
            pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:  # nobody reads yet
                raise
            time.sleep(TICK_SECONDS)
            continue
        with contextlib.suppress(OSError, AttributeError):  # a system may allow less, or have none
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        return pipe
    return None


def _write(pipe: int, content: Any, runs: Callable[[], bool]) -> None:
    left = memoryview(content).cast("B")
    while left:
        _, ready, _ = select.select([], [pipe], [], TICK_SECONDS)
        if not ready and not runs():
            raise BrokenPipeError
        if ready:
            with contextlib.suppress(BlockingIOError):
                left = left[os.write(pipe, left[:PIPE_BYTES]) :]


def _read(pipe: IO[bytes], room: Any) -> Any:
    left = memoryview(room).cast("B")
    while left:
        count = pipe.readinto(left)  # type: ignore[attr-defined]
        if not count:
            raise RunStopped("the weights for vLLM ended before the last of them")
        left = left[count:]
    return room
