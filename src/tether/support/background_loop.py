"""Run coroutines from threads, on one event loop per process. Imports no torch.

Connections belong to the loop that opened them, so that all calls of an async environment or client
have to run on the same one.
"""

import asyncio
import inspect
import os
import threading
from collections.abc import Awaitable
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}  # by process: a fork has no thread of its own


def wait_for(value: Any, seconds: float | None = None) -> Any:
    """Return a value as it is, or what a coroutine returns within so many seconds.

    It may be called where another event loop runs already, as in a notebook.
    """
    if not inspect.isawaitable(value):
        return value
    future = asyncio.run_coroutine_threadsafe(_awaited(value), _loop())
    try:
        return future.result(seconds)
    except BaseException as error:  # a signal too: nobody waits for it any more
        if not future.cancel() or not isinstance(error, FutureTimeout):
            raise
        raise TimeoutError(f"it took longer than {seconds:g} s") from None


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _loop() -> asyncio.AbstractEventLoop:
    with _lock:
        if os.getpid() not in _loops:
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, daemon=True, name="tether loop").start()
            _loops[os.getpid()] = loop
        return _loops[os.getpid()]
