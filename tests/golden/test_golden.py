"""Ten tiny runs give the numbers on record; what a comparison would find is found."""

import copy
import json
import warnings

import pytest
import torch
from helpers import table

from golden import golden


@pytest.fixture(scope="module")
def stored() -> dict:
    return json.loads(golden.RECORD.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden")
    golden.build_world(folder)
    return folder


def assert_on_record(names: list[str], stored: dict, found: dict, make_again) -> None:
    """Bit for bit where the machine is alike; elsewhere their metrics, and some their own bits."""
    assert [said for name in names for said in golden.check(name, stored, found)] == []
    why = golden.unlike(stored)
    if why is not None and names == [next(iter(golden.CONFIGS))]:
        warnings.warn(why, stacklevel=2)
        again = make_again()
        assert [said for name in names for said in golden.check(name, found, again)] == []


@pytest.mark.parametrize("name", golden.CONFIGS)
def test_a_run_gives_the_numbers_on_record(name, stored, folder, tmp_path):
    def make(where) -> dict:
        golden.train(golden.config_of(name, where))
        return golden.record_of(where, [name])

    def again() -> dict:
        golden.build_world(tmp_path)
        return make(tmp_path)

    assert_on_record([name], stored, make(folder), again)


def test_runs_on_two_processes_give_the_numbers_on_record(stored, folder, tmp_path):
    names = [golden.run_name(name, 2) for name in golden.ON_TWO_PROCESSES]

    def make(where) -> dict:
        golden.train_on_two(where)
        return golden.record_of(where, names)

    def again() -> dict:
        golden.build_world(tmp_path)
        return make(tmp_path)

    assert_on_record(names, stored, make(folder), again)


def test_a_moved_number_is_named_with_both_values(stored):
    moved = copy.deepcopy(stored)
    metrics = moved["runs"]["grpo"]["metrics"]
    before = metrics["kl/sequence_mean"][1]
    metrics["kl/sequence_mean"][1] = before * (1 + 1e-3)
    [said] = golden.check("grpo", stored, moved)
    assert said == (
        f"grpo: metrics differ; iteration 1: kl/sequence_mean is {before * (1 + 1e-3)!r}, "
        f"was {before!r}"
    )
    elsewhere = moved | {"made_with": {**stored["made_with"], "capability": "another"}}
    assert golden.check("grpo", stored, elsewhere) == [said]
    metrics["kl/sequence_mean"][1] = before * (1 + 1e-7)
    assert golden.check("grpo", stored, elsewhere) == []
    assert golden.check("grpo", stored, moved) != []


def test_other_weights_are_seen_by_their_hash_alone():
    weights = {"actor/a": torch.zeros(3), "actor/b": torch.ones(2, 2)}
    one = {"metrics": [], "evals": [], "rollouts": [], "weights": weights}
    other = {**one, "weights": {**weights, "actor/b": torch.tensor([[1, 1], [1, 1.5]])}}
    a, b = golden.fingerprint(one), golden.fingerprint(other)
    assert [file for file in golden.FILES if a[file] != b[file]] == ["weights"]
    assert golden.first_difference(weights, other["weights"]) == " actor/b: by up to 0.5"


@table(
    ("a", "b", "said"),
    [
        ([{"x": 1.0, "y": 2.0}], [{"x": 1.0, "y": 2.5}], "[0] y: 2.0 and 2.5"),
        ([{"x": [1, 2]}], [{"x": [1, 3]}], "[0] x[1]: 2 and 3"),
        ([{"x": 1}], [{"x": 1, "z": 2}], "[0] z: only in the second"),
        ([1], [1, 2], ": 1 and 2 items"),
        ([1], [1.0], "[0]: 1 and 1.0"),
        ([{"x": 1}], [{"x": 1}], None),
    ],
)
def test_the_first_difference_of_two_files_is_named(a, b, said):
    assert golden.first_difference(a, b) == said
