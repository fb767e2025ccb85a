"""A signal among several processes: all learn of it at the same place, whenever it comes."""

import os
import signal

import pytest

from tether.dist import interrupt as interrupts
from tether.dist import world as worlds
from tether.dist.interrupt import Dropped, Interrupt
from tether.dist.world import World


@pytest.fixture
def first_of_two(monkeypatch):
    """Be rank 0 of two, without a process group; return how to set what stands for `gather`."""
    monkeypatch.setattr(worlds, "_now", World(0, 2))
    return lambda gather: monkeypatch.setattr(interrupts, "gather", gather)


def answered_with(other):
    return lambda mine: [mine, other]


def test_a_signal_received_while_processes_agree_is_known_at_the_next_time(first_of_two):
    def gather(mine):
        os.kill(os.getpid(), signal.SIGTERM)  # after this process has said that it has none
        return [mine, None]

    with Interrupt() as interrupt:
        first_of_two(gather)
        interrupt.agree()
        assert interrupt.signal is None  # as on the other process
        first_of_two(answered_with(None))
        interrupt.agree()
        assert interrupt.signal == signal.SIGTERM


def test_a_signal_of_one_process_is_not_acted_on_before_all_know_it(first_of_two):
    first_of_two(answered_with(None))
    with Interrupt() as interrupt:
        with interrupt.droppable():
            os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.signal is None
        with pytest.raises(Dropped), interrupt.droppable():
            pytest.fail("the work must not begin")
        assert interrupt.signal == signal.SIGTERM


def test_the_launchers_copy_of_a_signal_that_another_process_told_of_ends_nothing(first_of_two):
    first_of_two(answered_with(signal.SIGTERM))
    with Interrupt() as interrupt:
        interrupt.agree()
        os.kill(os.getpid(), signal.SIGTERM)  # a moment later: not a second one
        assert interrupt.signal == signal.SIGTERM


def test_alone_a_signal_is_known_at_once_and_drops_the_work():
    with Interrupt() as interrupt:
        with pytest.raises(Dropped), interrupt.droppable():
            os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.signal == signal.SIGTERM
