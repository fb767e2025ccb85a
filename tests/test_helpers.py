"""What the tests stand on: tables that name every failing row, and shapes checked at run time."""

import pytest
import torch
from helpers import table
from jaxtyping import TypeCheckError

from tether.algo.kl import k1


def test_every_row_that_fails_is_named_and_the_others_run_too():
    seen = []

    @table(("number", "limit"), [(1, 3), (4, 3), (2, 3), (9, 3)])
    def check(number, limit):
        seen.append(number)
        assert number < limit

    with pytest.raises(pytest.fail.Exception) as failure:
        check()
    assert seen == [1, 4, 2, 9]
    said = str(failure.value)
    assert said.startswith("2 of 4 rows\n4, 3: test_helpers.py:")
    assert "\n9, 3: " in said
    assert "\n1, 3: " not in said


@pytest.mark.parametrize(
    ("ids", "named"), [(None, "'b'"), (str.upper, "B"), (["one", "two"], "two")]
)
def test_a_row_is_named_as_parametrize_would(ids, named):
    @table("letter", ["a", "b"], ids=ids)
    def check(letter):
        assert letter == "a"

    with pytest.raises(pytest.fail.Exception, match=rf"1 of 2 rows\n{named}: "):
        check()


def test_an_empty_table_fails():
    @table("letter", [])
    def check(letter): ...

    with pytest.raises(AssertionError, match="proves nothing"):
        check()


@table("outer", [1, 2])
@table(("inner", "twice"), [(1, 2), pytest.param(3, 6, id="three")])
def test_tables_can_be_stacked_and_take_fixtures(outer, inner, twice, tmp_path):
    assert twice == 2 * inner
    assert outer in (1, 2)
    assert tmp_path.is_dir()


def test_a_tensor_of_another_shape_is_refused_while_tests_run():
    cells, more = torch.zeros(2, 3), torch.zeros(2, 4)
    mask = torch.ones(2, 3, dtype=torch.bool)
    assert k1(cells, cells, mask).shape == (2, 3)
    with pytest.raises(TypeCheckError, match="ref_log_probs"):
        k1(cells, more, mask)
