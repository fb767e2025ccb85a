"""Coroutines run from threads: within their time, and not after nobody waits for them."""

import asyncio
import signal
import threading

import pytest

from tether.support.background_loop import wait_for


async def _double(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


def test_a_value_is_returned_as_it_is_and_a_coroutine_is_awaited():
    assert wait_for(3) == 3
    assert wait_for(_double(3), 5.0) == 6


def test_it_works_where_a_loop_runs_already():
    async def in_a_notebook() -> int:
        return wait_for(_double(4))

    assert asyncio.run(in_a_notebook()) == 8


def test_what_takes_too_long_is_cancelled_and_named():
    cancelled = threading.Event()

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(TimeoutError, match=r"^it took longer than 0\.05 s$"):
        wait_for(slow(), 0.05)
    assert cancelled.wait(5)


def test_a_time_out_of_its_own_is_its_own():
    async def gives_up() -> None:
        raise TimeoutError("the server is slow")

    with pytest.raises(TimeoutError, match="the server is slow"):
        wait_for(gives_up(), 5.0)


def test_a_signal_while_one_waits_cancels_the_work():
    cancelled = threading.Event()

    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stop

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(Stop):
            wait_for(slow())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert cancelled.wait(5)
