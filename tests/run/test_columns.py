"""The one list of per-token columns."""

import subprocess
import sys
from dataclasses import fields

import pytest

from tether.run.columns import COLUMNS, WRITTEN, Column
from tether.run.directory import SCHEMA
from tether.types import Experience


def test_a_column_added_later_says_what_older_rows_mean():
    """Otherwise every older run would lose its what-if."""
    with pytest.raises(ValueError, match="if_absent"):
        Column("staleness", "", "", since=2)
    with pytest.raises(ValueError, match="if_absent"):
        Column("staleness", "", "", only_with="rollout.may_mismatch")
    Column("staleness", "", "", since=2, if_absent=0.0)
    Column("staleness", "", "", since=2, for_what_if=False)


def test_every_written_column_has_a_tensor_and_every_column_a_line_in_both_languages():
    elsewhere = {"rollout_log_probs", "new_log_probs"}  # of the rollout and the actor's report
    assert {c.name for c in WRITTEN} - elsewhere <= {field.name for field in fields(Experience)}
    assert all(column.english and column.chinese for column in COLUMNS)
    assert len({column.name for column in COLUMNS}) == len(COLUMNS)
    assert all(1 <= column.since <= SCHEMA for column in COLUMNS)


def test_the_list_is_read_without_torch():
    code = "import sys, tether.run.columns; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
