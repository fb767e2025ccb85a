"""Send objects as JSON between the processes of a run. Nothing is ever unpickled: a program that
can reach the sockets of a run could otherwise make its processes run code.

Plain values, lists, tuples, dicts, sets, paths, signals, tensors, exceptions, and the dataclasses
and named tuples of tether itself can be sent. A float comes back with the same bits.
"""

import base64
import builtins
import dataclasses
import importlib
import json
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

KIND = "!"  # marks what JSON has no word for


def pack(value: Any) -> bytes:
    """Return the bytes of a value."""
    return json.dumps(_plain(value)).encode()


def unpack(content: bytes) -> Any:
    """Return the value of `pack`'s bytes."""
    return _restored(json.loads(content))


def _plain(value: Any) -> Any:
    match value:
        case signal.Signals():
            return {KIND: "signal", "number": int(value)}
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [_plain(item) for item in value]
        case tuple() if hasattr(value, "_fields"):
            return {KIND: "named", **_class_of(value), "fields": [_plain(item) for item in value]}
        case tuple() | set() | frozenset():
            kind = type(value).__name__
            return {KIND: kind, "items": [_plain(item) for item in value]}
        case dict():
            return {KIND: "dict", "items": [[_plain(k), _plain(v)] for k, v in value.items()]}
        case Path():
            return {KIND: "path", "path": str(value)}
        case Tensor():
            return _plain_tensor(value)
        case BaseException():
            return _plain_error(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: _plain(vars(value)[field.name]) for field in dataclasses.fields(value)
        }
        return {KIND: "dataclass", **_class_of(value), "fields": fields}
    raise TypeError(f"{type(value).__name__} cannot be sent between processes")


def _plain_tensor(value: Tensor) -> dict[str, Any]:
    content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    dtype = str(value.dtype).removeprefix("torch.")
    coded = base64.b64encode(content).decode()
    return {KIND: "tensor", "dtype": dtype, "shape": list(value.shape), "content": coded}


def _plain_error(error: BaseException) -> dict[str, Any]:
    """Return an exception of Python or tether as it is, of any other kind only its message."""
    where = type(error).__module__
    if where != "builtins" and not where.startswith("tether."):
        error = RuntimeError(f"{type(error).__name__}: {error}")
    said = [arg if isinstance(arg, str | int | None) else str(arg) for arg in error.args]
    state = {name: _plain(value) for name, value in vars(error).items() if name != "__notes__"}
    return {KIND: "error", **_class_of(error), "args": said, "state": state}


def _class_of(value: Any) -> dict[str, str]:
    return {"module": type(value).__module__, "class": type(value).__qualname__}


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value[KIND]:
        case "signal":
            return signal.Signals(value["number"])
        case "tuple" | "set" | "frozenset" as kind:
            return getattr(builtins, kind)(_restored(value["items"]))
        case "dict":
            return {_restored(k): _restored(v) for k, v in value["items"]}
        case "path":
            return Path(value["path"])
        case "tensor":
            content = bytearray(base64.b64decode(value["content"]))
            dtype = getattr(torch, value["dtype"])
            flat = (
                torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
            )
            return flat.reshape(value["shape"])
        case "named":
            return _find_class(value, tuple)(*_restored(value["fields"]))
        case "dataclass":
            made = object.__new__(_find_class(value, object))
            for name, inner in value["fields"].items():
                object.__setattr__(made, name, _restored(inner))
            return made
        case "error":
            made = _find_class(value, Exception)(*value["args"])
            vars(made).update({name: _restored(inner) for name, inner in value["state"].items()})
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
