"""The quick form of `make faults`, rows R10 to R12."""

import pytest
from helpers import few_or_many

from faults.changed_inputs import row_r11
from faults.hangups import row_r12
from faults.unreadable_checkpoints import row_r10
from faults.world import make_world


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("refusals"))


def hold(row) -> None:
    assert row.holds, f"{row.held} of {row.tries}: {row.remark}"


@few_or_many("tries", 1, 4)
def test_a_checkpoint_that_cannot_be_read_is_never_passed_over(world, tmp_path, tries):
    hold(row_r10(world, tmp_path / "r10", tries, seed=0))


@few_or_many("tries", 1, 3)
def test_a_change_before_or_after_the_first_checkpoint_is_refused_by_name(world, tmp_path, tries):
    hold(row_r11(world, tmp_path / "r11", tries, seed=0))


@few_or_many("tries", 1, 4)
def test_a_hangup_saves_and_a_full_disk_is_waited_for(world, tmp_path, tries):
    hold(row_r12(world, tmp_path / "r12", tries, seed=0))
