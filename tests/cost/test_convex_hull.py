"""A point is inside if it is a convex combination of the others, for any number of points and flat sets."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.cost.convex_hull import is_in_convex_hull

CUBE = np.array(list(itertools.product([0.0, 1.0], repeat=3)))


def test_a_cube_contains_its_middle_corners_and_faces_only():
    assert is_in_convex_hull(CUBE, np.full(3, 0.5))
    assert all(is_in_convex_hull(CUBE, corner) for corner in CUBE)
    assert is_in_convex_hull(CUBE, np.array([1.0, 0.3, 0.7]))
    assert not is_in_convex_hull(CUBE, np.array([1.001, 0.3, 0.7]))


def test_a_point_in_the_box_of_a_simplex_can_be_outside():
    """X + y + z <= 1 is the simplex of the unit vectors and zero; its box is the unit cube."""
    simplex = np.vstack([np.zeros(3), np.eye(3)])
    assert is_in_convex_hull(simplex, np.full(3, 0.33))
    assert not is_in_convex_hull(simplex, np.full(3, 0.34))


def test_points_with_a_common_coordinate_contain_only_those_that_have_it():
    flat = np.array([[0.0, 0.0, 5.0], [1.0, 0.0, 5.0], [0.0, 1.0, 5.0]])
    assert is_in_convex_hull(flat, np.array([0.25, 0.25, 5.0]))
    assert not is_in_convex_hull(flat, np.array([0.25, 0.25, 5.01]))


def test_a_single_point_contains_itself_and_no_points_contain_nothing():
    assert is_in_convex_hull(np.array([[1.0, 2.0]]), np.array([1.0, 2.0]))
    assert not is_in_convex_hull(np.array([[1.0, 2.0]]), np.array([1.0, 2.1]))
    assert not is_in_convex_hull(np.zeros((0, 2)), np.zeros(2))


def test_a_segment_contains_its_points_only():
    line = np.linspace([0.0, 0.0], [2.0, 4.0], 7)
    assert is_in_convex_hull(line, np.array([0.5, 1.0]))
    assert not is_in_convex_hull(line, np.array([0.5, 1.1]))
    assert not is_in_convex_hull(line, np.array([2.1, 4.2]))


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 60))
@pytest.mark.filterwarnings("error")
def test_weighted_means_are_inside_and_points_past_the_farthest_are_not(seed: int, dimensions: int, count: int):
    """A linear function is never larger inside than at the point where it is largest."""
    generator = np.random.default_rng(seed)
    points = np.log(generator.integers(1, 200_000, (count, dimensions)).astype(float))
    weights = generator.dirichlet(np.full(count, 0.3))
    assert is_in_convex_hull(points, weights @ points)
    direction = generator.normal(size=dimensions)
    farthest = points[(points @ direction).argmax()]
    assert not is_in_convex_hull(points, farthest + 1e-3 * direction / np.linalg.norm(direction))
