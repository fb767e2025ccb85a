"""Send objects as JSON between the processes of a run. Nothing is ever unpickled: a program that
can reach the sockets of a run could otherwise make its processes run code.

Plain values, lists, tuples, dicts, sets, paths, signals, tensors, exceptions, and the dataclasses
and named tuples of tether itself can be sent. A float comes back with the same bits. What tensors
hold follows the JSON as it is in memory: a rollout is large, and as text it would be held several
times over.
"""

import builtins
import dataclasses
import importlib
import json
import math
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

KIND = "!"  # marks what JSON has no word for
ALIGNED = 16  # bytes: where tensors begin, so that they can be read in place
HEAD = 8  # bytes, which say how long the JSON is


def pack(value: Any) -> Tensor:
    """Return the bytes of a value (uint8)."""
    blobs: list[Tensor] = []
    text = json.dumps(_plain(value, blobs)).encode()
    text += b" " * (-(HEAD + len(text)) % ALIGNED)
    head = bytearray(len(text).to_bytes(HEAD, "little") + text)
    return torch.cat([torch.frombuffer(head, dtype=torch.uint8), *blobs])


def unpack(content: Tensor) -> Any:
    """Return the value of `pack`'s bytes. Its tensors share their memory."""
    length = int.from_bytes(content[:HEAD].numpy().tobytes(), "little")
    text = content[HEAD : HEAD + length].numpy().tobytes()
    return _restored(json.loads(text), content[HEAD + length :])


def _plain(value: Any, blobs: list[Tensor]) -> Any:
    match value:
        case signal.Signals():
            return {KIND: "signal", "number": int(value)}
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [_plain(item, blobs) for item in value]
        case tuple() if hasattr(value, "_fields"):
            items = [_plain(item, blobs) for item in value]
            return {KIND: "named", **_class_of(value), "fields": items}
        case tuple() | set() | frozenset():
            kind = type(value).__name__
            return {KIND: kind, "items": [_plain(item, blobs) for item in value]}
        case dict():
            items = [[_plain(k, blobs), _plain(v, blobs)] for k, v in value.items()]
            return {KIND: "dict", "items": items}
        case Path():
            return {KIND: "path", "path": str(value)}
        case Tensor():
            return _plain_tensor(value, blobs)
        case BaseException():
            return _plain_error(value, blobs)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: _plain(vars(value)[field.name], blobs)
            for field in dataclasses.fields(value)
        }
        return {KIND: "dataclass", **_class_of(value), "fields": fields}
    raise TypeError(f"{type(value).__name__} cannot be sent between processes")


def _plain_tensor(value: Tensor, blobs: list[Tensor]) -> dict[str, Any]:
    content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    start = sum(map(len, blobs))
    blobs += [content, torch.zeros(-len(content) % ALIGNED, dtype=torch.uint8)]
    dtype = str(value.dtype).removeprefix("torch.")
    return {KIND: "tensor", "dtype": dtype, "shape": list(value.shape), "start": start}


def _plain_error(error: BaseException, blobs: list[Tensor]) -> dict[str, Any]:
    """Return an exception of Python or tether as it is, of any other kind only its message."""
    where = type(error).__module__
    if where != "builtins" and not where.startswith("tether."):
        error = RuntimeError(f"{type(error).__name__}: {error}")
    said = [arg if isinstance(arg, str | int | None) else str(arg) for arg in error.args]
    state = {
        name: _plain(value, blobs) for name, value in vars(error).items() if name != "__notes__"
    }
    return {KIND: "error", **_class_of(error), "args": said, "state": state}


def _class_of(value: Any) -> dict[str, str]:
    return {"module": type(value).__module__, "class": type(value).__qualname__}


def _restored(value: Any, blobs: Tensor) -> Any:
    if isinstance(value, list):
        return [_restored(item, blobs) for item in value]
    if not isinstance(value, dict):
        return value
    match value[KIND]:
        case "signal":
            return signal.Signals(value["number"])
        case "tuple" | "set" | "frozenset" as kind:
            return getattr(builtins, kind)(_restored(value["items"], blobs))
        case "dict":
            return {_restored(k, blobs): _restored(v, blobs) for k, v in value["items"]}
        case "path":
            return Path(value["path"])
        case "tensor":
            dtype, shape, start = getattr(torch, value["dtype"]), value["shape"], value["start"]
            size = math.prod(shape) * dtype.itemsize
            return blobs[start : start + size].view(dtype).reshape(shape)
        case "named":
            return _find_class(value, tuple)(*_restored(value["fields"], blobs))
        case "dataclass":
            made = object.__new__(_find_class(value, object))
            for name, inner in value["fields"].items():
                object.__setattr__(made, name, _restored(inner, blobs))
            return made
        case "error":
            made = _find_class(value, Exception)(*value["args"])
            vars(made).update(
                {name: _restored(inner, blobs) for name, inner in value["state"].items()}
            )
            return made
    raise ValueError(f"{value[KIND]!r} is not a kind of object that is sent")


def _find_class(value: dict[str, Any], base: type) -> type:
    """Return a class of tether or an exception of Python; refuse anything else."""
    where = value["module"]
    if not where.startswith("tether.") and not (where == "builtins" and base is Exception):
        raise ValueError(f"{where} is not a module whose objects are sent")
    found = importlib.import_module(where)
    for name in value["class"].split("."):
        found = getattr(found, name)
    sent = base is not object or dataclasses.is_dataclass(found)
    if not (isinstance(found, type) and issubclass(found, base) and sent):
        raise ValueError(f"{where}.{value['class']} is not sent between processes")
    return found
