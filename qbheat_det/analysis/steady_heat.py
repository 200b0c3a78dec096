# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Steady heat on a grid: Laplace's equation with some positions held, and how near a map is to it.

Paper: QB-Heat, arXiv:2211.13228, Sec. 1 and the left of Fig. 1, where a categorical heatmap stands
beside a physical one. The heat equation there is u_t = u_xx + u_yy; heat is steady where u_t = 0,
that is u_xx + u_yy = 0 wherever the temperature is not held. The paper shows pictures alone; how
the physical map is made, and all figures here, are choices of this package.

A steady map has no peak where nothing is held (the maximum principle): with the border alone held,
what is hottest or coldest lies on the border. A map that peaks inside can at best be steady around
a source, which is why positions inside can be held as well.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
        raise ValueError(
            f"a map of {height} x {width} has no position inside its border; 3 x 3 is the smallest"
        )
    border = np.ones((height, width), dtype=np.bool_)
    border[1:-1, 1:-1] = False
    return border


def solve_steady_heat(values: npt.ArrayLike, held: BoolMap | None = None) -> FloatMap:
    """Solves Laplace's equation by the five-point stencil, all maps at once.

    Everywhere else, the temperature is the mean of that of its neighbours, of which there are four
    inside the map and fewer at an edge that is not held, across which no heat flows. The stencil
    is exact for polynomials of the third degree.

    Args:
        values: (..., H, W); read where they are held.
        held: (H, W), True where the temperature is given (Dirichlet's condition); None for the
            border.

    Returns:
        (..., H, W), the values where they are held.

    Raises:
        ValueError: nothing is held, a held value is not finite, or the shapes do not fit.
    """
    maps = np.asarray(values, dtype=np.float64)
    height, width = maps.shape[-2:]
    held = mark_border(height, width) if held is None else held
    if held.shape != (height, width):
        raise ValueError(f"'held' has shape {held.shape}, but maps have {(height, width)}")
    if not held.any():
        raise ValueError("steady heat needs a temperature that is held somewhere")
    flat, given = maps.reshape(-1, height * width), held.ravel()
    if not np.isfinite(flat[:, given]).all():
        raise ValueError("a temperature that is held is not finite")
    solved = np.where(given, flat, 0.0)
    if not given.all():
        stencil = _build_stencil(height, width)[~given]
        towards = -(stencil[:, given] @ flat[:, given].T)
        solved[:, ~given] = splu(stencil[:, ~given].tocsc()).solve(towards).T
    return solved.reshape(maps.shape)


def interpolate_corners(values: npt.ArrayLike) -> FloatMap:
    """Returns (H, W), bilinear between the four corners of ``values`` (H, W)."""
    corners = np.asarray(values, dtype=np.float64)[np.ix_((0, -1), (0, -1))]
    height, width = np.shape(values)
    down, along = np.linspace(0, 1, height)[:, None], np.linspace(0, 1, width)[None]
    top = corners[0, 0] * (1 - along) + corners[0, 1] * along
    bottom = corners[1, 0] * (1 - along) + corners[1, 1] * along
    return top * (1 - down) + bottom * down


@dataclass(frozen=True)
class Agreement:
    """How near one map comes to another, over the positions that are compared.

    Attributes:
        correlation: Pearson's, in [-1, 1]; None where either map is constant, or nothing compared.
        relative_error: ‖made - true‖ / ‖true - mean of true‖: 0 for the same map, 1 for what the
            mean alone would give; None where the true map is constant.
    """

    correlation: float | None
    relative_error: float | None

    def to_dict(self) -> dict[str, float | None]:
        """Returns what JSON can hold."""
        return {"correlation": self.correlation, "relative_error": self.relative_error}


def compare_maps(made: npt.ArrayLike, true: npt.ArrayLike, where: BoolMap) -> Agreement:
    """Compares maps (H, W) at the positions of ``where`` (H, W)."""
    first, second = (np.asarray(values, dtype=np.float64)[where] for values in (made, true))
    if not first.size:
        return Agreement(None, None)
    deviations = first - first.mean(), second - second.mean()
    norms = [float(np.linalg.norm(values)) for values in deviations]
    vary = [
        norm > _ROUNDING * max(1e-300, float(np.linalg.norm(values)))
        for norm, values in zip(norms, (first, second), strict=True)
    ]
    correlation = float(deviations[0] @ deviations[1]) / (norms[0] * norms[1]) if all(vary) else 0.0
    return Agreement(
        correlation=min(1.0, max(-1.0, correlation)) if all(vary) else None,
        relative_error=float(np.linalg.norm(first - second)) / norms[1] if vary[1] else None,
    )


@dataclass(frozen=True)
class HeatStudy:
    """A map, the steady heat inside its border, and what costs nothing beside it.

    Attributes:
        steady: (H, W), the border held.
        with_source: (H, W), the border and ``source`` held.
        source: row and column of the map's largest value inside the border.
        agreements: of the map with each, over the inside: "steady", "with_source" (the source
            itself left out), "corners" (bilinear between the corners), "border_mean" (constant,
            hence without correlation) and "shuffled" (the map's positions shuffled, beside the
            steady heat inside its own border; mean of several shuffles).
    """

    steady: FloatMap
    with_source: FloatMap
    source: tuple[int, int]
    agreements: Mapping[str, Agreement]

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures without the maps: what JSON can hold."""
        return {
            "source": list(self.source),
            **{name: found.to_dict() for name, found in self.agreements.items()},
        }


def study_map(values: npt.ArrayLike, *, seed: int = 0) -> HeatStudy:
    """Compares a map (H, W) with the steady heat inside its border, and with controls.

    Args:
        values: the map.
        seed: of the shuffles.

    Raises:
        ValueError: the map has nothing inside its border, or a value that is not finite.
    """
    true = np.asarray(values, dtype=np.float64)
    border = mark_border(*true.shape)
    inside = ~border
    hottest = np.unravel_index(np.argmax(np.where(inside, true, -np.inf)), true.shape)
    source = int(hottest[0]), int(hottest[1])
    held = border.copy()
    held[source] = True
    steady, with_source = solve_steady_heat(true), solve_steady_heat(true, held)
    constant = np.full_like(true, true[border].mean())
    return HeatStudy(
        steady=steady,
        with_source=with_source,
        source=source,
        agreements={
            "steady": compare_maps(steady, true, inside),
            "with_source": compare_maps(with_source, true, ~held),
            "corners": compare_maps(interpolate_corners(true), true, inside),
            "border_mean": compare_maps(constant, true, inside),
            "shuffled": _study_shuffled(true, inside, seed),
        },
    )


def _study_shuffled(true: FloatMap, inside: BoolMap, seed: int) -> Agreement:
    generator = np.random.default_rng(seed)
    shuffled = np.stack(
        [generator.permutation(true.ravel()).reshape(true.shape) for _ in range(_SHUFFLES)]
    )
    solved = solve_steady_heat(shuffled)
    found = [compare_maps(*pair, inside) for pair in zip(solved, shuffled, strict=True)]
    return Agreement(
        correlation=mean_of([one.correlation for one in found]),
        relative_error=mean_of([one.relative_error for one in found]),
    )


def mean_of(values: list[float | None]) -> float | None:
    """Returns the mean of those that are not None; None where there are none."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _build_stencil(height: int, width: int) -> sparse.csr_array:
    """Returns the Laplacian (HW, HW) of the grid as a graph: neighbours' number, and -1 for each.

    That is -h² times the five-point stencil, at the edge with no flow across it.
    """
    numbers = np.arange(height * width).reshape(height, width)
    pairs = np.concatenate(
        [
            np.stack([numbers[:, :-1].ravel(), numbers[:, 1:].ravel()]),
            np.stack([numbers[:-1].ravel(), numbers[1:].ravel()]),
        ],
        axis=1,
    )
    joined = sparse.coo_array(
        (np.ones(pairs.shape[1]), (pairs[0], pairs[1])), shape=(numbers.size, numbers.size)
    )
    return laplacian((joined + joined.T).tocsr()).tocsr()
