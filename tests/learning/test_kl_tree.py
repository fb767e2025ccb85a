"""Each KL estimator, in each place, on responses of two tokens: see explain/kl_tree.

Fixed points are solved first, then trained cells are compared with them.
"""

import math

import pytest
import torch
from helpers import first_or_all, table

from tether.explain.kl_tree import (
    BETA,
    CELLS,
    FIRST,
    ITERATIONS,
    LEAF_REWARDS,
    SECOND,
    TreeCell,
    distances,
    largest_gradient,
    optimum,
    partial_optimum,
    solve,
    train,
)

RIGHT, PARTIAL, WRONG = (
    [cell for cell in CELLS if cell.verdict == verdict] for verdict in ("right", "partial", "wrong")
)


def name(cell: TreeCell) -> str:
    return f"{cell.estimator} in the {cell.place} is {cell.verdict}"


def leaves_by_hand(tree: int) -> list[list[float]]:
    """pi_ref(a) pi_ref(b|a) exp(r/beta), leaf by leaf, over their sum."""
    beta = float(BETA[tree])
    weights = [
        [
            float(FIRST[a] * SECOND[a, b]) * math.exp(float(LEAF_REWARDS[tree, a, b]) / beta)
            for b in range(3)
        ]
        for a in range(3)
    ]
    total = sum(map(sum, weights))
    return [[w / total for w in row] for row in weights]


def test_the_optimum_by_hand():
    expected = torch.tensor([leaves_by_hand(tree) for tree in range(4)], dtype=torch.float64)
    torch.testing.assert_close(optimum().leaves(), expected)


def test_what_a_kl_per_token_leaves_out_by_hand():
    """pi(a) ~ pi*(a) exp(KL after a): the first token is too fond of what is dear to exploit."""
    for tree in range(4):
        leaves = leaves_by_hand(tree)
        weights = []
        for a, row in enumerate(leaves):
            after = [x / sum(row) for x in row]
            terms = zip(after, SECOND[a].tolist(), strict=True)
            weights.append(sum(row) * math.exp(sum(p * math.log(p / q) for p, q in terms)))
        expected = [w / sum(weights) for w in weights]
        found = partial_optimum().leaves()[tree].sum(dim=1).tolist()
        assert found == pytest.approx(expected, abs=1e-12)


def test_the_two_fixed_points_are_far_enough_apart_to_tell():
    assert min(distances(partial_optimum(), optimum())) > 0.06


@table("cell", RIGHT, ids=name)
def test_the_optimum_is_a_fixed_point_of_the_right_cells(cell):
    assert largest_gradient(cell, optimum()) < 1e-12
    assert largest_gradient(cell, partial_optimum()) > 1e-3


@table("cell", PARTIAL, ids=name)
def test_every_estimator_that_is_right_for_one_token_ends_at_the_partial_optimum(cell):
    assert largest_gradient(cell, partial_optimum()) < 1e-12
    assert largest_gradient(cell, optimum()) > 1e-3


@table("cell", WRONG, ids=name)
def test_the_optimum_is_no_fixed_point_of_the_wrong_cells(cell):
    assert largest_gradient(cell, optimum()) > 1e-3
    assert largest_gradient(cell, partial_optimum()) > 1e-3


def test_there_is_a_verdict_on_every_cell():
    assert len(CELLS) == 7 + 7 + 6 + 1
    assert (len(RIGHT), len(PARTIAL), len(WRONG)) == (3, 6, 12)


@pytest.mark.long
@pytest.mark.parametrize("cell", CELLS, ids=name)
def test_the_mean_gradient_leads_where_theory_says(cell):
    solved = solve(cell)
    if cell.verdict == "right":
        assert max(distances(solved, optimum())) < 1e-3
    else:
        assert min(distances(solved, optimum())) > 0.06
    if cell.verdict == "partial":
        assert max(distances(solved, partial_optimum())) < 1e-3


DECISIVE = [
    TreeCell("loss, sequence", "k2", "right"),
    TreeCell("reward", "k1", "right"),
    TreeCell("loss, by ratio", "k3", "partial"),
]


@pytest.mark.parametrize("cell", first_or_all(DECISIVE, quick=0), ids=name)
def test_the_decisive_cells_end_there_when_trained(cell):
    assert cell in CELLS
    assert_ends_where_it_should(cell, ITERATIONS // 2)


@pytest.mark.long
@pytest.mark.parametrize("cell", CELLS, ids=name)
def test_every_cell_ends_where_theory_says_when_trained(cell):
    assert_ends_where_it_should(cell, ITERATIONS)


def assert_ends_where_it_should(cell: TreeCell, iterations: int) -> None:
    found = distances(train(cell, iterations), optimum())
    assert len(found) == 4
    if cell.verdict == "right":
        assert max(found) < 0.02, found
    else:
        assert min(found) > 0.06, found
