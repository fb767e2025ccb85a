"""The fault table's rows about what comes from outside, with fewer tries than `make faults`."""

import pytest
from helpers import few_or_many

from faults import hostile_inputs, no_network, spelt_tokens
from faults.world import World, make_world


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def hold(row) -> None:
    assert row.holds, f"{row.held} of {row.tries}: {row.remark}"


@few_or_many("tries", 1, 2)
def test_a_reward_that_fails_costs_its_row_and_nothing_else(world, tmp_path, tries):
    hold(hostile_inputs.row_i1(world, tmp_path, tries, seed=0))


@few_or_many("tries", 2, 8)
def test_a_number_that_is_not_finite_reaches_no_weight(world, tmp_path, tries):
    hold(hostile_inputs.row_i2(world, tmp_path, tries, seed=0))


@few_or_many("tries", 1, 10)
def test_odd_models_prompts_and_batches_train_to_finite_numbers_or_are_refused(
    world, tmp_path, tries
):
    hold(hostile_inputs.row_i3(world, tmp_path, tries, seed=0))


@few_or_many("tries", 200, 500)
def test_broken_data_rows_are_named_and_good_ones_kept(world, tmp_path, tries):
    hold(hostile_inputs.row_i4(world, tmp_path, tries, seed=0))


@few_or_many("tries", 1, 4)
def test_what_rewards_and_environments_leave_or_spoil_costs_their_own_row_alone(
    world, tmp_path, tries
):
    hold(hostile_inputs.row_i5(world, tmp_path, tries, seed=0))


def test_special_tokens_spelt_in_text_stay_text(world, tmp_path):
    assert [case() for case in spelt_tokens.special_token_cases(world, tmp_path)] == [None] * 6


@few_or_many("tries", 1, 12)
def test_no_pickle_is_ever_loaded(world, tmp_path, tries):
    hold(hostile_inputs.row_s5(world, tmp_path, tries, seed=0))


@few_or_many("tries", 1, 20)
def test_a_hostile_model_directory_gets_none_of_its_wishes(world, tmp_path, tries):
    hold(hostile_inputs.row_s6(world, tmp_path, tries, seed=0))


@pytest.mark.long
def test_a_hostile_retrieval_server_costs_single_rows_an_event(world, tmp_path):
    hold(hostile_inputs.row_s7(world, tmp_path, tries=4, seed=0))


def test_training_and_talking_need_no_network(world, tmp_path):
    if lacking := no_network.why_not_here():
        pytest.skip(lacking)
    hold(hostile_inputs.row_s8(world, tmp_path, tries=1, seed=0))


@few_or_many("tries", 1, 4)
def test_a_copied_run_runs_nothing_and_no_secret_leaks(world, tmp_path, tries):
    hold(hostile_inputs.row_s9(world, tmp_path, tries, seed=0))


@few_or_many("tries", 1, 3)
def test_templates_sizes_and_fifos_beyond_all_bounds_cost_a_sentence(world, tmp_path, tries):
    hold(hostile_inputs.row_s10(world, tmp_path, tries, seed=0))
