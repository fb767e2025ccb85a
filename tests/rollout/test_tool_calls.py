"""Calls made at the same time, with limits."""

import threading
import time

import pytest
from helpers import table

from tether.rollout import tool_calls
from tether.rollout.tool_calls import MAX_PARALLEL_CALLS, InvalidArguments, ToolRequest, call_all


def request(run, arguments: str = "", timeout_seconds: float = 5.0) -> ToolRequest:
    return ToolRequest("t", arguments, run, timeout_seconds, "{}")


@pytest.fixture
def gate():
    """Threads that hang on it end with the test."""
    event = threading.Event()
    yield event
    event.set()


def test_nothing_to_call_is_nothing_returned():
    assert call_all([]) == []


def test_results_stand_in_the_order_asked():
    def run(text):
        time.sleep((7 - int(text)) * 0.02)
        return text

    returned = call_all([request(run, str(i)) for i in range(8)])
    assert [one.value for one in returned] == [str(i) for i in range(8)]
    assert all(one.error is None for one in returned)


def test_calls_run_at_the_same_time_but_not_too_many():
    lock, now, most = threading.Lock(), 0, 0

    def run(text):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.2)
        with lock:
            now -= 1
        return text

    assert len(call_all([request(run) for _ in range(40)])) == 40
    assert 1 < most <= MAX_PARALLEL_CALLS


@table("error", [ValueError("x"), SystemExit(3), KeyboardInterrupt()])
def test_whatever_a_tool_raises_is_its_own_failure(error):
    def run(text):
        raise error

    [returned] = call_all([request(run)])
    assert returned.fault == "tool"
    assert returned.error.startswith(type(error).__name__)


def test_a_refusal_is_the_fault_of_the_arguments():
    def run(text):
        raise InvalidArguments("write a number")

    [returned] = call_all([request(run)])
    assert (returned.fault, returned.error) == ("policy", "write a number")


def test_hanging_calls_cost_their_limit_and_the_others_nothing(gate):
    """More hang than may run at once: they are abandoned, so the queue goes on."""
    hanging = [
        request(lambda _: gate.wait(), timeout_seconds=0.3) for _ in range(MAX_PARALLEL_CALLS + 4)
    ]
    began = time.perf_counter()
    returned = call_all([*hanging, request(lambda text: "fine")])
    assert time.perf_counter() - began < 3
    assert [one.fault for one in returned] == ["tool"] * (MAX_PARALLEL_CALLS + 4) + [None]
    assert returned[-1].value == "fine"


def test_what_an_abandoned_call_returns_later_is_never_used(gate):
    def late(text):
        gate.wait()
        return "late"

    [first] = call_all([request(late, timeout_seconds=0.1)])
    gate.set()
    time.sleep(0.1)
    [second] = call_all([request(lambda text: "mine")])
    assert (first.value, second.value) == (None, "mine")


def test_a_call_that_ends_after_its_limit_has_failed_though_others_still_run():
    def run(text):
        time.sleep(float(text))
        return text

    requests = [request(run, "0.3", timeout_seconds=0.1), request(run, "0.6")]
    late, fine = call_all(requests)
    assert (late.value, late.fault) == (None, "tool")
    assert (fine.value, fine.fault) == ("0.6", None)


def test_past_too_many_hanging_calls_nothing_is_called_until_they_end(gate, monkeypatch):
    monkeypatch.setattr(tool_calls, "MAX_STUCK", 2)
    call_all([request(lambda _: gate.wait(), timeout_seconds=0.1) for _ in range(2)])
    called = []
    [refused] = call_all([request(called.append)])
    assert refused.error == "it was not called, as 2 earlier calls still hang"
    assert called == []
    gate.set()
    time.sleep(0.2)
    [returned] = call_all([request(lambda text: "again")])
    assert returned.value == "again"
