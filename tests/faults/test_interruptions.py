"""The quick form of `make faults`, rows R1 to R9."""

import pytest
from helpers import few_or_many

from faults import interruptions
from faults.stage_kills import row_r9
from faults.world import make_world

R9_CASES = (("sft", 4), ("reward-model", 4), ("rlhf", 6))


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    return interruptions.Bench(make_world(folder / "world"), folder, seed=1)


def assert_held(*rows) -> None:
    for row in rows:
        assert row.holds, f"{row.number}: {row.held} of {row.tries} held; {row.remark}"


@few_or_many("tries", 1, 5)
def test_a_run_killed_at_a_random_moment_ends_as_one_that_was_not(bench, tries):
    assert_held(*interruptions.r1_kills(bench, tries))


@few_or_many("every", 80, 13)
def test_a_kill_inside_a_save_leaves_the_newest_whole_checkpoint(bench, every):
    assert_held(interruptions.r2_kills_in_save(bench, rounds=1, every=every))


@pytest.mark.long
def test_ten_kills_in_one_run_change_nothing(bench):
    assert_held(interruptions.r3_ten_kills(bench, 1))


@pytest.mark.long
def test_signals_finish_or_drop_an_iteration_whole_and_save(bench):
    assert_held(interruptions.r4_signals(bench, 1))


@few_or_many("tries", 1, 6)
def test_a_disk_that_is_full_limited_or_broken_costs_no_checkpoint(bench, tries):
    assert_held(interruptions.r5_disk(bench, tries))


@few_or_many(("tries", "resumed"), (4, 1), (48, 2))
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_used(bench, tries, resumed):
    assert_held(interruptions.r6_damage(bench, tries, resumed))


@few_or_many("iterations", (1,), (0, 1, 4))
def test_a_resume_at_any_iteration_uses_the_same_prompts_and_ends_the_same(bench, iterations):
    assert_held(interruptions.r7_every_iteration(bench, iterations))


@pytest.mark.parametrize(
    ("kind", "kills"),
    [("sft", 1), *(pytest.param(*case, marks=pytest.mark.long) for case in R9_CASES)],
)
def test_a_stage_killed_at_a_random_moment_ends_as_one_that_was_not(bench, kind, kills):
    folder = bench.folder / f"R9-{kind}-{kills}"
    assert_held(row_r9(bench.world, folder, kills, bench.seed, (kind,)))
