"""TRPO's linear algebra on problems with known answers."""

import pytest
import torch
from helpers import table

from tether.algo.trust_region import conjugate_gradient, line_search, longest_step


def test_conjugate_gradient_solves_a_positive_definite_system():
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(8, 8, generator=generator, dtype=torch.float64)
    matrix, target = root @ root.T + torch.eye(8), torch.randn(8, generator=generator).double()
    solution = conjugate_gradient(lambda v: matrix @ v, target, iterations=8)
    torch.testing.assert_close(solution, torch.linalg.solve(matrix, target), atol=1e-4, rtol=1e-3)


def test_conjugate_gradient_stops_where_there_is_no_curvature():
    solution = conjugate_gradient(torch.zeros_like, torch.ones(3), iterations=5)
    assert solution.tolist() == [0.0, 0.0, 0.0]


def test_the_longest_step_has_exactly_the_quadratic_kl_asked_for():
    matrix = torch.diag(torch.tensor([1.0, 4.0]))
    direction = torch.tensor([1.0, 1.0])
    step = longest_step(direction, matrix @ direction, max_kl=0.1)
    assert float(step @ matrix @ step) / 2 == pytest.approx(0.1)


@table(
    ("curve", "expected"),
    [
        (lambda x: (x, 0.5 * x), (1.0, 1)),  # the whole step is fine
        (lambda x: (x, 2 * x), (0.5, 2)),  # too far: halved once
        (lambda x: (x * (0.3 - x), 0.0), (0.25, 3)),  # within the KL, but better only near 0
        (lambda x: (-x, 0.0), (0.0, 4)),  # never better
        (lambda x: (x, float("nan") if x else 0.0), (0.0, 4)),
        (lambda x: (float("nan") if x else 0.0, 0.0), (0.0, 4)),
    ],
)
def test_the_line_search_takes_the_longest_step_that_is_better_and_near(curve, expected):
    assert tuple(line_search(curve, max_kl=1.0, backtracks=3, ratio=0.5)) == expected
