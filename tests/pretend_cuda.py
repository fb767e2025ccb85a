"""A pretend GPU: CPU tensors that say they are on cuda:N, with real numbers.

`install(count)` makes torch believe in `count` GPUs for the rest of the process. What CUDA refuses
is refused here: tensors of two devices in one operation, CPU tensors beside GPU ones (but for
numbers without dimensions), a CPU tensor indexed by GPU indices, `.numpy()`. What costs on a GPU is
counted, by the line of tether that asked for it: operations, copies from memory that is not pinned,
and reads that wait for the GPU. NCCL is gloo underneath.

Tensors have storages of their own, so FSDP can resize them, and Python sees the device of
`Pretend.device`; C++ sees a CPU. So what C++ itself allocates for an operation (a mask of the
attention) is on the CPU; `HELPERS` names the operations that are handed such tensors.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import PreTrainedModel

aten = torch.ops.aten
CPU = torch.device("cpu")
CURRENT = {"device": 0}  # of torch.cuda.current_device
FREE_BYTES = 80 << 30

INDEXING = {
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._unsafe_index.Tensor,
    aten._index_put_impl_.default,
    aten._unsafe_index_put.default,
}
# The host waits for the numbers of these, or for the shape of their result.
READS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
}
BETWEEN_DEVICES = {aten.copy_.default, aten._to_copy.default, aten.set_.source_Tensor}
HELPERS = {aten.where.self, aten.masked_fill.Scalar, aten.add.Tensor, aten.mul.Tensor}
VIEWS = {aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.view.default}


class MixedDevicesError(RuntimeError):
    """What CUDA would have refused."""


class Counts:
    """What was asked of the pretend devices, by line of tether."""

    def __init__(self) -> None:
        self.by_line: dict[str, Counter[str]] = defaultdict(Counter)

    def add(self, kind: str) -> None:
        self.by_line[kind][asking_line()] += 1

    def total(self, kind: str, within: str = "") -> int:
        lines = self.by_line[kind].items()
        return sum(number for line, number in lines if within in line)

    def told(self, kind: str) -> str:
        return ", ".join(f"{line} x{n}" for line, n in self.by_line[kind].most_common())


COUNTS = Counts()


@contextmanager
def counting() -> Iterator[Counts]:
    """Count afresh meanwhile."""
    global COUNTS
    before, COUNTS = COUNTS, Counts()
    try:
        yield COUNTS
    finally:
        COUNTS = before


def asking_line() -> str:
    """The innermost line of tether on the stack, as `models/forward.py:66`."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        _, found, place = frame.f_code.co_filename.rpartition("/src/tether/")
        if found:
            return f"{place}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


class Pretend(Tensor):
    """A CPU tensor that says it is on `where`."""

    where: torch.device
    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: self.where)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {}) if _all_ours(types) else NotImplemented

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Move or convert, as Tensor.to: C++ would take a move to the CPU for none."""
        device, dtype, non_blocking, copy = _read_to(*args, **kwargs)
        if device is None or device == self.where:
            with_type = Tensor.to(self, dtype or self.dtype, copy=copy)
            return with_type
        found = _Move.apply(self, device, non_blocking)
        return found if dtype is None else found.to(dtype)

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.to(CPU)

    def cuda(self, device: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        return self.to(_indexed(device if device is not None else "cuda"))

    def tolist(self) -> Any:
        COUNTS.add("read")
        return _plain(self).tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"can't convert {self.where} device type tensor to numpy")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.numpy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copied = pretend(_plain(self).clone(), self.where)
            if getattr(self, "_is_param", False):
                copied._is_param = True  # type: ignore[attr-defined]
            memo[id(self)] = copied.requires_grad_(self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return pretend, (_plain(self), self.where)  # as a storage: to the device that it left

    def __repr__(self, **kwargs: Any) -> str:
        return f"Pretend({_plain(self)}, {self.where})"


class _Move(torch.autograd.Function):
    """A copy to another device; its gradient is copied back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: torch.device, non_blocking: bool) -> Tensor:
        ctx.came_from = x.device
        return _moved(x, device, non_blocking)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _moved(grads[0], ctx.came_from, True), None, None


def _moved(x: Tensor, device: torch.device, non_blocking: bool) -> Tensor:
    if device.type == "meta":
        return _plain(x).to(device)
    COUNTS.add("operation")
    COUNTS.add("read" if device.type == "cpu" else "between GPUs")
    found = _plain(x).clone()
    return pretend(found, device) if device.type == "cuda" else found


def _plain(x: Tensor) -> Tensor:
    """The same storage as a CPU tensor without gradients."""
    with torch._C._DisableTorchDispatch():
        return Tensor._make_subclass(Tensor, x.detach())


def pretend(x: Tensor, where: torch.device) -> "Pretend":
    made = Tensor._make_subclass(Pretend, x)
    made.where = where
    return made


def _indexed(device: Any) -> torch.device:
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", CURRENT["device"])
    return found


def _read_to(*args: Any, **kwargs: Any) -> tuple[torch.device | None, Any, bool, bool]:
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    flags = [x for x in args if isinstance(x, bool)]
    for x in args:
        match x:
            case Tensor():
                device, dtype = x.device, x.dtype
            case torch.dtype():
                dtype = x
            case str() | torch.device():
                device = x
    waits, copy = (*flags, False, False)[:2]
    return (
        None if device is None else _indexed(device),
        dtype,
        kwargs.get("non_blocking", waits),
        kwargs.get("copy", copy),
    )


def dispatch(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU, if CUDA would; its results are on the devices of its inputs."""
    tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
    asked = kwargs.get("device")
    asked = None if asked is None else _indexed(asked)
    gpus = {x.where for x in tensors if isinstance(x, Pretend)}
    if not gpus and (asked is None or asked.type != "cuda"):
        return _run(func, args, kwargs)
    if not func.is_view and func not in VIEWS:
        COUNTS.add("operation")
    _refuse_mixed(func, args, tensors, gpus)
    _count_waits(func, args, asked)
    where = next(iter(gpus)) if gpus else asked
    if asked is not None and asked.type == "cuda":
        where = asked
    if func in (aten.copy_.default,):
        where = args[0].device
    if asked is not None and asked.type == "cuda":
        kwargs = kwargs | {"device": CPU, "pin_memory": False}
    return _placed(_run(func, args, kwargs), args, where)


def _run(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    with torch._C._DisableTorchDispatch():
        return func(*args, **kwargs)


def _pin_memory(x: Tensor) -> Tensor:
    copied = x.clone()
    copied.pinned = True  # type: ignore[attr-defined]
    return copied


def _refuse_mixed(func: Any, args: tuple, tensors: list[Tensor], gpus: set[torch.device]) -> None:
    if func in BETWEEN_DEVICES or str(func).startswith("c10d"):
        return
    if len(gpus) > 1:
        _refuse(func, f"tensors on {sorted(map(str, gpus))}")
    shaped = [x for x in tensors if not isinstance(x, Pretend) and x.ndim]
    if not gpus or not shaped:
        return
    if func not in INDEXING:
        if func not in HELPERS or "elsewhere" in asking_line():
            _refuse(func, f"CPU tensors {[tuple(x.shape) for x in shaped]} beside GPU ones")
    elif not isinstance(args[0], Pretend):
        _refuse(func, "a CPU tensor indexed by GPU indices")
    elif len(args) > 2 and not isinstance(args[2], Pretend) and args[2].ndim:
        _refuse(func, "CPU values put into a GPU tensor")
    else:
        COUNTS.add("pageable copy")  # CUDA copies indices of the CPU


def _refuse(func: Any, why: str) -> None:
    raise MixedDevicesError(
        f"Expected all tensors to be on the same device: {func}, {why}, at {asking_line()}"
    )


def _count_waits(func: Any, args: tuple, asked: torch.device | None) -> None:
    if func in READS:
        COUNTS.add("read")
    if func in INDEXING and any(
        isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1]
    ):
        COUNTS.add("read")  # of how many there are
    if func is aten._to_copy.default and not isinstance(args[0], Pretend):
        _count_upload(args[0])
    if func is aten.copy_.default:
        to, source = args[:2]
        if isinstance(source, Pretend) and not isinstance(to, Pretend):
            COUNTS.add("read")
        elif isinstance(to, Pretend) and not isinstance(source, Pretend):
            _count_upload(source)


def _count_upload(source: Tensor) -> None:
    pinned = getattr(source, "pinned", False) or not source.ndim
    COUNTS.add("pinned copy" if pinned else "pageable copy")


def _placed(found: Any, args: tuple, where: torch.device | None) -> Any:
    """The results as tensors of a device; an argument that comes back is itself."""
    if isinstance(found, AsyncCollectiveTensor):
        found = found.trigger_wait()
    if isinstance(found, (tuple, list)):
        return type(found)(_placed(x, args, where) for x in found)
    if not isinstance(found, Tensor) or isinstance(found, Pretend) or where is None:
        return found
    if where.type == "cpu" or any(found is x for x in args):
        return found
    return pretend(found, where)


class Mode(TorchDispatchMode):
    """Sees what has no GPU tensor among its arguments: `torch.zeros(2, device="cuda")`."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {}) if _all_ours(types) else NotImplemented


def _all_ours(types: Iterable[type]) -> bool:
    """Whether there is none of another kind: a DTensor comes back with what is inside."""
    return all(kind in (Tensor, torch.nn.Parameter, Pretend) for kind in types)


def install(count: int) -> None:
    """Pretend that this machine has `count` GPUs, until the process ends."""
    cuda: Any = torch.cuda
    cuda._lazy_init = lambda: None
    cuda.is_available = lambda: True
    cuda.is_initialized = lambda: True
    cuda.device_count = lambda: count
    cuda.current_device = lambda: CURRENT["device"]
    cuda.set_device = lambda device: CURRENT.update(device=_indexed(device).index)
    cuda.get_device_capability = lambda *a: (9, 0)
    cuda.mem_get_info = lambda *a: (FREE_BYTES, FREE_BYTES)
    cuda.synchronize = lambda *a: None
    cuda.Stream, cuda.stream = torch.cpu.Stream, torch.cpu.stream
    cuda.current_stream = torch.cpu.current_stream
    cuda.Event = torch.cpu.Event
    usual_tensor, torch.tensor = torch.tensor, _tensor_maker(torch.tensor)
    torch.utils._device._device_constructors().add(usual_tensor)  # for `with torch.device`
    # `param.data = ...` would leave the Python object, and with it the device, as they were.
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    Tensor.to = _with_index(Tensor.to)  # type: ignore[method-assign]
    Tensor.pin_memory = _pin_memory  # type: ignore[method-assign]
    Tensor.is_pinned = lambda x: getattr(x, "pinned", False)  # type: ignore[method-assign]
    torch_dist.init_process_group = _with_gloo(torch_dist.init_process_group)
    move = PreTrainedModel.to

    def keep_tied(self: PreTrainedModel, *args: Any, **kwargs: Any) -> PreTrainedModel:
        # A parameter becomes another object here, on a GPU it does not.
        found = move(self, *args, **kwargs)
        found.tie_weights()
        return found

    PreTrainedModel.to = keep_tied  # type: ignore[method-assign]
    Mode().__enter__()


def _tensor_maker(usual: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.tensor` on a GPU: made on the CPU, then copied."""

    def tensor(data: Any, **options: Any) -> Tensor:
        device = options.get("device")
        if device is None or _indexed(device).type != "cuda":
            return usual(data, **options)
        made = usual(data, **options | {"device": CPU})
        COUNTS.add("operation")
        _count_upload(made)
        return pretend(made, _indexed(device))

    return tensor


def _with_index(usual: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`Tensor.to` of a CPU tensor: C++ does not know which GPU is the current one."""

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        args = tuple(_indexed(x) if isinstance(x, (str, torch.device)) else x for x in args)
        if args and isinstance(args[0], Pretend):
            args = (args[0].device, args[0].dtype, *args[1:])
        if kwargs.get("device") is not None:
            kwargs["device"] = _indexed(kwargs["device"])
        return usual(self, *args, **kwargs)

    return to


GROUP: dict[str, Any] = {}  # what the process group was begun with


def _with_gloo(usual: Callable[..., None]) -> Callable[..., None]:
    def init_process_group(backend: str, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
        GROUP.update(backend=backend, device_id=device_id, device_then=CURRENT["device"])
        usual("gloo", *args, **kwargs)

    return init_process_group
