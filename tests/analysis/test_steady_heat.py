# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Steady heat against harmonic functions, a naive relaxation, and the maximum principle."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from qbheat_det.analysis.steady_heat import (
    FloatMap,
    compare_maps,
    compare_with_heat,
    interpolate_corners,
    mark_border,
    solve_steady_heat,
)


def sample(function: Callable[[FloatMap, FloatMap], FloatMap], rows: int, columns: int) -> FloatMap:
    y, x = np.mgrid[0:rows, 0:columns].astype(np.float64)
    return np.asarray(function(x, y))


def relax(values: FloatMap, fixed: npt.NDArray[np.bool_], sweeps: int = 4000) -> FloatMap:
    """Gauss–Seidel: each position in turn becomes the mean of the neighbours that there are."""
    u = np.where(fixed, values, 0.0)
    rows, columns = u.shape
    for _ in range(sweeps):
        before = u.copy()
        for i in range(rows):
            for j in range(columns):
                if not fixed[i, j]:
                    around = [(i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)]
                    known = [u[a, b] for a, b in around if 0 <= a < rows and 0 <= b < columns]
                    u[i, j] = sum(known) / len(known)
        if np.abs(u - before).max() < 1e-14:
            break
    return u


@pytest.mark.parametrize(
    "harmonic",
    [
        lambda x, y: 3 * x - 2 * y + 1,
        lambda x, y: x**2 - y**2,
        lambda x, y: x * y,
        lambda x, y: x**3 - 3 * x * y**2,
    ],
)
def test_harmonic_polynomials_are_recovered_from_their_border(
    harmonic: Callable[[FloatMap, FloatMap], FloatMap],
) -> None:
    true = sample(harmonic, 7, 11)
    nothing_inside = np.where(mark_border(7, 11), true, np.nan)
    np.testing.assert_allclose(solve_steady_heat(nothing_inside), true, atol=1e-9)


def test_it_is_where_gauss_and_seidel_end_with_a_source_inside_or_an_edge_that_is_not_fixed() -> (
    None
):
    generator = np.random.default_rng(0)
    values = generator.normal(size=(6, 8))
    border = mark_border(6, 8)
    with_source, open_edge = border.copy(), border.copy()
    with_source[2, 5] = True
    open_edge[:, -1] = False
    lone = np.zeros_like(border)
    lone[3, 0] = lone[0, 7] = True
    for fixed in (border, with_source, open_edge, lone):
        np.testing.assert_allclose(
            solve_steady_heat(values, fixed), relax(values, fixed), atol=1e-10
        )


def test_the_hottest_and_the_coldest_lie_on_the_border() -> None:
    maps = np.random.default_rng(1).normal(size=(20, 9, 7))
    solved = solve_steady_heat(maps)
    border = mark_border(9, 7)
    inside = solved[:, ~border]
    assert (inside.max(axis=1) < maps[:, border].max(axis=1)).all()
    assert (inside.min(axis=1) > maps[:, border].min(axis=1)).all()


def test_a_stack_is_its_maps_one_by_one_and_one_heat_plus_another_is_that_of_the_sum() -> None:
    maps = np.random.default_rng(2).normal(size=(2, 3, 5, 6))
    solved = solve_steady_heat(maps)
    for index in np.ndindex(2, 3):
        np.testing.assert_allclose(solved[index], solve_steady_heat(maps[index]), atol=1e-12)
    together = solve_steady_heat(2 * maps[0] - maps[1])
    np.testing.assert_allclose(together, 2 * solved[0] - solved[1], atol=1e-12)


@pytest.mark.parametrize(
    ("values", "fixed"),
    [
        (np.zeros((2, 5)), None),
        (np.zeros((4, 4)), np.zeros((4, 4), dtype=np.bool_)),
        (np.full((4, 4), np.nan), None),
    ],
)
def test_maps_without_inside_or_fixed_values_are_refused(
    values: FloatMap, fixed: npt.NDArray[np.bool_] | None
) -> None:
    with pytest.raises(ValueError, match=r"border|fixed"):
        solve_steady_heat(values, fixed)


def test_agreement_is_one_for_the_same_map_and_the_error_one_for_its_mean() -> None:
    true = np.random.default_rng(3).normal(size=(4, 5))
    inside = ~mark_border(4, 5)
    same = compare_maps(true, true, inside)
    assert (same.correlation, same.relative_error) == (pytest.approx(1.0), 0.0)
    opposite = compare_maps(-3 * true + 2, true, inside)
    assert opposite.correlation == pytest.approx(-1.0)
    mean = compare_maps(np.full((4, 5), true[inside].mean()), true, inside)
    assert np.isnan(mean.correlation)
    assert mean.relative_error == pytest.approx(1.0)
    constant = compare_maps(true, np.full((4, 5), 0.1), inside)
    assert np.isnan([constant.correlation, constant.relative_error]).all()


def test_bilinear_maps_are_their_corners_and_others_are_not() -> None:
    bilinear = sample(lambda x, y: 2 * x * y - x + 4, 5, 8)
    np.testing.assert_allclose(interpolate_corners(bilinear), bilinear, atol=1e-12)
    bent = sample(lambda x, y: x**2 - y**2, 5, 8)
    assert np.abs(interpolate_corners(bent) - bent).max() > 1


def test_a_harmonic_map_agrees_with_its_steady_heat_and_shuffling_destroys_that() -> None:
    harmonic = sample(lambda x, y: x**3 - 3 * x * y**2, 12, 12)
    found = compare_with_heat(harmonic).agreements
    assert found["steady"].correlation == pytest.approx(1.0)
    assert found["steady"].relative_error == pytest.approx(0.0, abs=1e-9)
    shuffled = found["shuffled"]
    assert abs(shuffled.correlation) < 0.3
    assert shuffled.relative_error > 0.9
    assert np.isnan(found["border_mean"].correlation)


def test_a_peak_inside_is_met_only_with_a_source_there() -> None:
    distance = sample(lambda x, y: np.hypot(x - 6, y - 5), 11, 13)
    comparison = compare_with_heat(
        -np.log(distance + 0.3)
    )  # what a point source gives, far from its border
    assert comparison.source == (5, 6)
    assert comparison.with_source[5, 6] == pytest.approx(-np.log(0.3))
    steady, source = comparison.agreements["steady"], comparison.agreements["with_source"]
    assert source.relative_error < 0.5 < steady.relative_error
    assert source.correlation > 0.95
    smallest = compare_with_heat(np.eye(3)).agreements[
        "with_source"
    ]  # the source is all of its inside
    assert np.isnan([smallest.correlation, smallest.relative_error]).all()
