"""The rows of the fault table about what comes from outside: rewards, numbers, data, models."""

from faults.absurd_sizes import row_s10
from faults.copied_runs import row_s9
from faults.data_fuzz import row_i4
from faults.hostile_models import row_s6
from faults.hostile_retriever import row_s7
from faults.leftovers import row_i5
from faults.no_network import row_s8
from faults.number_faults import row_i2
from faults.odd_inputs import row_i3
from faults.pickle_slots import row_s5
from faults.reward_faults import row_i1

__all__ = [
    "row_i1",
    "row_i2",
    "row_i3",
    "row_i4",
    "row_i5",
    "row_s5",
    "row_s6",
    "row_s7",
    "row_s8",
    "row_s9",
    "row_s10",
]
