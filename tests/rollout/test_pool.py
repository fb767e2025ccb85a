"""Chunks of rows on samplers apart: whatever happens to those, the rows are the same."""

import random
import threading

import pytest
import torch
from helpers import table, tiny_llama
from hypothesis import given
from hypothesis import strategies as st

from rollout.fleets import Threads
from tether.errors import RunStopped, UserError
from tether.models.weights import load_trainable_parameters, trainable_parameters
from tether.rollout.apart import SamplersApart
from tether.rollout.chunks import ChunkedSampler, cut_chunks
from tether.rollout.local import LocalSampler
from tether.rollout.pool import SamplerPool
from tether.rollout.sampler import Draw, Greedy, SingleTurn

PROMPTS = [[5, 9, 200, 4], [1], [11, 12], [0, 0, 0, 0, 0, 21], [7, 7], [250], [3, 2, 1]] * 2
EOS = frozenset(range(0, 256, 8))
LIMIT, BUDGET = 9, 40


@table(
    ("lengths", "most_new", "budget", "chunks"),
    [
        ([3, 3, 3], 7, 20, [(0, 2), (2, 3)]),
        ([3, 3, 3], 7, 19, [(0, 1), (1, 2), (2, 3)]),
        ([3, 3, 3], 7, None, [(0, 3)]),
        ([99, 1, 1], 7, 20, [(0, 1), (1, 3)]),  # beyond the budget: alone
        ([1], 7, 1, [(0, 1)]),
    ],
)
def test_chunks_are_cut_where_the_next_row_would_not_fit(lengths, most_new, budget, chunks):
    assert cut_chunks(lengths, most_new, budget) == [range(*chunk) for chunk in chunks]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.integers(1, 60))
def test_chunks_are_all_rows_in_order_and_none_is_empty(lengths, budget):
    chunks = cut_chunks(lengths, 5, budget)
    assert [row for chunk in chunks for row in chunk] == [*range(len(lengths))]
    assert all(len(chunk) for chunk in chunks)


class Host:
    """A local sampler with a model of its own, which is given weights from time to time."""

    def __init__(self) -> None:
        self.model = tiny_llama(260, 256)
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.zero_()  # nothing but what is sent counts
        self.sampler = LocalSampler(EOS, LIMIT, 1.0, 60)

    def load(self, version, weights) -> None:
        load_trainable_parameters(self.model, weights)
        self.sampler.sync(self.model, version)

    def sample(self, chunk):
        episodes = [SingleTurn(ids) for ids in chunk.prompt_ids]
        return self.sampler.run(episodes, chunk.choice, chunk.numbers)


def sent(model) -> dict:
    return {name: w.detach().clone() for name, w in trainable_parameters(model).items()}


@pytest.fixture
def started():
    """A function that starts samplers apart over a fleet."""
    pools = []

    def start(fleet, size=2, timeout_seconds=60.0, start_seconds=60.0, max_lost=2):
        pools.append(SamplerPool(fleet, size, timeout_seconds, start_seconds, max_lost))
        pools[-1].start()
        return SamplersApart(pools[-1], sent, LIMIT, BUDGET)

    yield start
    for pool in pools:
        pool.close()


@pytest.fixture(scope="module")
def model():
    return tiny_llama(260, 256, seed=3)


@pytest.fixture(scope="module")
def expected(model):
    """The same rows, decoded chunk by chunk in this process."""
    alone = ChunkedSampler(LocalSampler(EOS, LIMIT, 1.0, 60), LIMIT, BUDGET)
    alone.sync(model, 0)
    return alone.run(EPISODES, Draw(7, "token", 0), NUMBERS)


EPISODES = [SingleTurn(ids) for ids in PROMPTS]
NUMBERS = [*range(20, 20 + len(PROMPTS))]


def assert_same(found, expected) -> None:
    for name in ("prompt_ids", "response_ids", "response_mask", "rollout_log_probs"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert torch.equal(found.response_lengths, expected.response_lengths)
    assert found.finish_reasons == expected.finish_reasons


@pytest.mark.parametrize("size", [1, 2, 5])
def test_any_number_of_samplers_gives_the_bits_of_one_process(model, expected, started, size):
    fleet = Threads(Host)
    samplers = started(fleet, size)
    samplers.sync(model, 0)
    assert_same(samplers.run(EPISODES, Draw(7, "token", 0), NUMBERS), expected)
    assert len(fleet.asked) == len(cut_chunks([*map(len, PROMPTS)], LIMIT, BUDGET)) > 4
    assert fleet.shared == [0]


def test_one_chunk_of_all_rows_is_the_batch_of_the_plain_sampler(model, started):
    samplers = started(Threads(Host))
    samplers.chunk_tokens = 10_000
    samplers.sync(model, 0)
    plain = LocalSampler(EOS, LIMIT, 1.0, 60)
    plain.sync(model, 0)
    found = samplers.run(EPISODES, Greedy())
    assert_same(found, plain.run(EPISODES, Greedy()))


def test_samplers_that_die_hang_or_come_late_change_no_bit(model, expected, started):
    """Of each chunk the first sampler dies; of one the second hangs. Another comes late."""
    begun: dict[int, int] = {}
    late = threading.Event()

    def fault(number, chunk):
        begun[chunk.first] = begun.get(chunk.first, 0) + 1
        late.set()
        hangs = begun[chunk.first] == 2 and chunk.first == 0
        return "hang" if hangs else "die" if begun[chunk.first] == 1 else None

    fleet = Threads(Host, fault, lambda number: late.wait() if number == 1 else None)
    samplers = started(fleet, timeout_seconds=4.0, max_lost=20)
    samplers.sync(model, 0)
    assert_same(samplers.run(EPISODES, Draw(7, "token", 0), NUMBERS), expected)
    tally = samplers.take_tally()
    assert min(begun.values()) >= 2
    assert begun[0] >= 3
    assert min(c.lost for c in tally.chunks) >= 1
    assert any("no answer in 4 s" in e.message for e in tally.events)
    assert sum("it died" in e.message for e in tally.events) >= len(begun)
    assert sorted(c.first_row for c in tally.chunks) == sorted(begun)


def test_random_kills_change_no_bit(model, expected, started):
    rng = random.Random(0)
    fleet = Threads(Host, lambda number, chunk: "die" if rng.random() < 0.4 else None)
    samplers = started(fleet, size=3, max_lost=50)
    samplers.sync(model, 0)
    for _ in range(2):
        assert_same(samplers.run(EPISODES, Draw(7, "token", 0), NUMBERS), expected)
    assert len(fleet.seats) > 4


def test_work_of_two_versions_under_way_keeps_each_to_its_own(model, expected, started):
    """The weights move between the two calls, and the first one's rows are those of before."""
    fleet = Threads(Host)
    samplers = started(fleet, size=1)
    other = tiny_llama(260, 256)
    load_trainable_parameters(other, sent(model))
    samplers.sync(other, 0)
    first = samplers.begin(EPISODES, Draw(7, "token", 0), NUMBERS)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.5)
    samplers.sync(other, 1)
    second = samplers.begin(EPISODES, Draw(7, "token", 0), NUMBERS)
    assert_same(first.result(), expected)
    alone = ChunkedSampler(LocalSampler(EOS, LIMIT, 1.0, 60), LIMIT, BUDGET)
    alone.sync(other, 0)
    changed = alone.run(EPISODES, Draw(7, "token", 0), NUMBERS)
    assert_same(second.result(), changed)
    assert not torch.equal(changed.rollout_log_probs, expected.rollout_log_probs)
    assert fleet.shared == [0, 1]
    versions = [version for _, version, _ in fleet.asked]
    assert versions == sorted(versions)  # rows that are needed first come first


def test_weights_that_did_not_move_are_sent_once(model, started):
    fleet = Threads(Host)
    samplers = started(fleet)
    for _ in range(3):
        samplers.sync(model, 4)
        samplers.run(EPISODES[:2], Greedy())
    assert fleet.shared == [4]


def test_rows_that_end_every_sampler_end_the_run_by_name(model, started):
    fleet = Threads(Host, lambda n, chunk: "die" if PROMPTS[0] in chunk.prompt_ids else None)
    samplers = started(fleet, max_lost=2)
    samplers.sync(model, 0)
    # Two chunks hold that prompt; either may be the first to be lost for the third time.
    of_both = r"Rows (0 to 2|6 to 8) were begun 3 times.*restarts = 2\); .*it"
    with pytest.raises(RunStopped, match=of_both):
        samplers.run(EPISODES, Draw(7, "token", 0))
    assert samplers.run(EPISODES[1:7], Greedy()).finish_reasons  # the others go on


def test_what_a_sampler_refuses_is_what_the_run_says(started):
    def refuse():
        raise UserError("model.actor is not there; put it there.")

    with pytest.raises(UserError, match=r"model\.actor is not there"):
        started(Threads(refuse))


def test_no_room_for_any_sampler_is_said(started):
    stuck = Threads(Host, wait_to_start=lambda number: threading.Event().wait())
    with pytest.raises(RunStopped, match=r"launch\.samplers = 2, and there is room for none"):
        started(stuck, start_seconds=0.1)


def test_a_fault_of_the_program_reaches_who_waits(model, started):
    class Broken(Host):
        def sample(self, chunk):
            raise ZeroDivisionError("here")

    samplers = started(Threads(Broken))
    samplers.sync(model, 0)
    with pytest.raises(ZeroDivisionError, match="here"):
        samplers.run(EPISODES, Greedy())


def test_a_closed_pool_has_ended_its_samplers(model):
    fleet = Threads(Host)
    pool = SamplerPool(fleet, 2, 60.0, 60.0, 2)
    pool.start()
    pool.close()
    assert fleet.closed
    assert not pool.thread.is_alive()
