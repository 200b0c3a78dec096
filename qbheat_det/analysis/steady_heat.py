# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Steady heat on a grid: Laplace's equation with fixed positions, and how close a map is to it.

Paper: QB-Heat, arXiv:2211.13228, Sec. 1 and Fig. 1, which has pictures only. Heat is steady where
u_xx + u_yy = 0, and has no peak inside a fixed border (the maximum principle).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.sparse.csgraph import laplacian
from scipy.sparse.linalg import splu

FloatMap = npt.NDArray[np.float64]
BoolMap = npt.NDArray[np.bool_]

_SHUFFLES = 8  # of one map
_ROUNDING = 1e-9  # relative; below it, a map is constant


def mark_border(height: int, width: int) -> BoolMap:
    """Returns (H, W), True at the outermost positions.

    Raises:
        ValueError: there is nothing inside the border.
    """
    if height < 3 or width < 3:
        raise ValueError(f"a map of {height} x {width} has no position inside its border")
    border = np.ones((height, width), dtype=np.bool_)
    border[1:-1, 1:-1] = False
    return border


def solve_steady_heat(values: npt.ArrayLike, fixed: BoolMap | None = None) -> FloatMap:
    """Solves Laplace's equation on maps (..., H, W) by the five-point stencil.

    Where the temperature is not fixed it is the mean of its neighbours'; across an edge that is not
    fixed no heat flows.

    Args:
        values: (..., H, W); read where they are fixed.
        fixed: (H, W), True where the temperature is given; None for the border.

    Raises:
        ValueError: nothing is fixed, a fixed value is not finite, or there is no inside.
    """
    maps = np.asarray(values, dtype=np.float64)
    height, width = maps.shape[-2:]
    fixed = mark_border(height, width) if fixed is None else fixed
    flat, given = maps.reshape(-1, height * width), fixed.ravel()
    if not given.any() or not np.isfinite(flat[:, given]).all():
        raise ValueError("steady heat needs fixed temperatures that are finite")
    solved = np.where(given, flat, 0.0)
    if not given.all():
        stencil = _build_laplacian(height, width)[~given]
        inflow = -(stencil[:, given] @ flat[:, given].T)
        solved[:, ~given] = splu(stencil[:, ~given].tocsc()).solve(inflow).T
    return solved.reshape(maps.shape)


def interpolate_corners(values: npt.ArrayLike) -> FloatMap:
    """Returns (H, W), bilinear between the four corners of ``values`` (H, W)."""
    corners = np.asarray(values, dtype=np.float64)[np.ix_((0, -1), (0, -1))]
    down, along = (np.stack([1 - t, t]) for t in (np.linspace(0, 1, n) for n in np.shape(values)))
    return np.asarray(down.T @ corners @ along)


@dataclass(frozen=True)
class Agreement:
    """Pearson's correlation, and ‖predicted - true‖ / ‖true - its mean‖; nan where undefined."""

    correlation: float
    relative_error: float


def compare_maps(predicted: npt.ArrayLike, true: npt.ArrayLike, where: BoolMap) -> Agreement:
    """Compares maps (H, W) at the positions of ``where`` (H, W)."""
    first, second = (np.asarray(values, dtype=np.float64)[where] for values in (predicted, true))
    spreads = [
        values.std() * np.sqrt(values.size) if values.size else 0 for values in (first, second)
    ]
    vary = [
        s > _ROUNDING * np.linalg.norm(v) for s, v in zip(spreads, (first, second), strict=True)
    ]
    return Agreement(
        correlation=float(np.corrcoef(first, second)[0, 1]) if all(vary) else np.nan,
        relative_error=float(np.linalg.norm(first - second) / spreads[1]) if vary[1] else np.nan,
    )


@dataclass(frozen=True)
class HeatComparison:
    """A map beside the steady heat with its border, and beside controls.

    Attributes:
        steady: (H, W), the border fixed.
        with_source: (H, W), the border and ``source`` fixed.
        source: row and column of the map's largest value inside the border.
        agreements: over the inside, with "steady", "with_source", "corners" (bilinear between
            them), "border_mean", and of "shuffled" maps with their own steady heat.
    """

    steady: FloatMap
    with_source: FloatMap
    source: tuple[int, int]
    agreements: Mapping[str, Agreement]


def compare_with_heat(values: npt.ArrayLike, *, seed: int = 0) -> HeatComparison:
    """Compares a map (H, W) with the steady heat inside its border, and with controls.

    Raises:
        ValueError: the map has nothing inside its border, or a value is not finite.
    """
    true = np.asarray(values, dtype=np.float64)
    border = mark_border(*true.shape)
    inside = ~border
    hottest = np.unravel_index(np.argmax(np.where(inside, true, -np.inf)), true.shape)
    source = int(hottest[0]), int(hottest[1])
    fixed = border.copy()
    fixed[source] = True
    steady, with_source = solve_steady_heat(true), solve_steady_heat(true, fixed)
    constant = np.full_like(true, true[border].mean())
    generator = np.random.default_rng(seed)
    shuffled = [generator.permuted(true.ravel()).reshape(true.shape) for _ in range(_SHUFFLES)]
    pairs = zip(solve_steady_heat(np.stack(shuffled)), shuffled, strict=True)
    return HeatComparison(
        steady=steady,
        with_source=with_source,
        source=source,
        agreements={
            "steady": compare_maps(steady, true, inside),
            "with_source": compare_maps(with_source, true, ~fixed),
            "corners": compare_maps(interpolate_corners(true), true, inside),
            "border_mean": compare_maps(constant, true, inside),
            "shuffled": average([compare_maps(*pair, inside) for pair in pairs]),
        },
    )


def average(agreements: Sequence[Agreement]) -> Agreement:
    """Returns the mean of the values that are defined; nan where there are none."""
    columns = np.array([[one.correlation, one.relative_error] for one in agreements]).T
    known = [column[~np.isnan(column)] for column in columns]
    return Agreement(*(float(values.mean()) if values.size else np.nan for values in known))


def _build_laplacian(height: int, width: int) -> sparse.csr_array:
    """Returns the Laplacian (HW, HW) of the grid as a graph: number of neighbours, -1 for each."""
    numbers = np.arange(height * width).reshape(height, width)
    left, above = numbers[:, :-1].ravel(), numbers[:-1].ravel()
    one = np.concatenate([left, above])
    other = np.concatenate([left + 1, above + width])
    joined = sparse.coo_array((np.ones(len(one)), (one, other)), shape=(numbers.size,) * 2)
    return laplacian((joined + joined.T).tocsr()).tocsr()
