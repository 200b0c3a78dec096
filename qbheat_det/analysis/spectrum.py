# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What the linear models of QB-Heat have learned: eigenvalues, energy, commutators, inverses.

Paper: QB-Heat, arXiv:2211.13228, Eq. 6 to 8, Sec. 6.2, Table 3 and Fig. 7. Models are learned as
M = Δx A; ``Δx`` is the offset of their scale, 1/2 for a visible corner and 1/4 for the centre.
Eigenvalues and energies here are those of A = M / Δx; what a common factor does not change is
taken of M. A figure that is undefined, as most are while M is zero, is nan; ``Spectrum.to_dict``
leaves it out and says why.

Chosen here: the energies of the two directions of an axis count together, E(A) = E(A1) + E(A2),
and the control of every figure is matrices of the same singular values in random directions,
because M starts at zero and has no spectrum before training. Random matrices, too, have E(A)/E(B)
near 1 at both scales where their norms agree, and sorted magnitudes that all but coincide across
scales: what is to be read as learned must differ from that.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

AXES = {"A": ("A1", "A2"), "B": ("B1", "B2")}
"""The two opposite directions of each axis; A is horizontal, B vertical."""
NAMES = tuple(name for pair in AXES.values() for name in pair)
_DIGITS = 7  # of the numbers in files
_EQUAL = 1e-6  # spread of magnitudes, relative to them, that is rounding
_REASONS = {
    "nan": "undefined: a matrix is zero, or its eigenvalues are all of one magnitude",
    "inf": "I + M is singular",
}


@dataclass(frozen=True)
class MatrixSpectrum:
    """Figures of one linear model.

    Attributes:
        eigenvalues: (C,), complex, of A, by falling magnitude.
        rank: numerical, see ``rank``.
        effective_rank: see there.
        condition: of I + M, in the spectral norm; infinite where it is singular.
    """

    eigenvalues: Tensor
    rank: int
    effective_rank: float
    condition: float

    @property
    def magnitudes(self) -> Tensor:
        """(C,), falling."""
        return self.eigenvalues.abs()

    @property
    def energy(self) -> float:
        """E(A), the sum of the magnitudes of the eigenvalues, Eq. 7."""
        return float(self.magnitudes.sum())


@dataclass(frozen=True)
class ScaleSpectrum:
    """Figures of the models of one scale.

    Attributes:
        offset: Δx as a part of the image's side.
        matrices: by name, A1, A2, B1 and B2.
        energy_ratio: (E(A1) + E(A2)) / (E(B1) + E(B2)).
        commutators: of "A1 B1" and so on, see ``commutator``.
        inverse_errors: of "A" and "B", see ``inverse_error``.
    """

    offset: float
    matrices: Mapping[str, MatrixSpectrum]
    energy_ratio: float
    commutators: Mapping[str, float]
    inverse_errors: Mapping[str, float]


@dataclass(frozen=True)
class Spectrum:
    """Figures of all scales, and of each two of one name.

    Attributes:
        scales: by name, such as "corner" and "centre".
        cosines: of the angle between the two scales' M, by the name of the matrix.
        correlations: of the sorted, normalised magnitudes of the two scales (Fig. 7), likewise.
    """

    scales: Mapping[str, ScaleSpectrum]
    cosines: Mapping[str, float] = field(default_factory=dict)
    correlations: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns all figures for a JSON file: eigenvalues as [real, imaginary].

        Figures that are not finite are not there, but under "left_out", with the reason.
        """
        content: dict[str, Any] = {"scales": {}}
        for name, scale in self.scales.items():
            content["scales"][name] = {
                "offset": scale.offset,
                "matrices": {key: _describe(matrix) for key, matrix in scale.matrices.items()},
                "energy_ratio": scale.energy_ratio,
                "commutators": dict(scale.commutators),
                "inverse_errors": dict(scale.inverse_errors),
            }
        if len(self.scales) == 2:
            content |= {"cosines": dict(self.cosines), "correlations": dict(self.correlations)}
        left_out: dict[str, str] = {}
        return {**_finite(content, "", left_out), "left_out": left_out}


def describe_models(models: Mapping[str, tuple[float, Mapping[str, Tensor]]]) -> Spectrum:
    """Returns the figures of one or two scales.

    Args:
        models: for each scale its offset, and M (C, C) by the names of ``NAMES``; others are
            passed over.
    """
    matrices = {
        scale: {name: found[name].detach().cpu() for name in NAMES}
        for scale, (_, found) in models.items()
    }
    scales = {
        scale: _describe_scale(matrices[scale], offset) for scale, (offset, _) in models.items()
    }
    if len(models) != 2:
        return Spectrum(scales)
    first, second = matrices.values()
    one, other = (scale.matrices for scale in scales.values())
    return Spectrum(
        scales,
        cosines={name: cosine(first[name], second[name]) for name in NAMES},
        correlations={
            name: magnitude_correlation(one[name].magnitudes, other[name].magnitudes)
            for name in NAMES
        },
    )


class RotatedControl:
    """Matrices of the same singular values, in directions drawn once: what size and rank alone do.

    Whatever depends on how the directions of several matrices, or of rows and columns of one, lie
    to each other is chance in them; they commute as matrices of chance do, whatever their rank.
    What opposite directions share by construction (Eq. 9), the control shares too.
    """

    def __init__(self, seed: int = 0) -> None:
        """
        Args:
            seed: of the directions.
        """
        self._seed = seed
        self._directions: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}  # by scale and name

    def describe(self, models: Mapping[str, tuple[float, Mapping[str, Tensor]]]) -> Spectrum:
        """Returns the figures of rotated ``models``."""
        rotated: dict[str, tuple[float, Mapping[str, Tensor]]] = {}
        for index, (scale, (offset, matrices)) in enumerate(models.items()):
            if scale not in self._directions:
                self._directions[scale] = self._draw(matrices, index)
            found = {
                name: (left * torch.linalg.svdvals(matrices[name].detach().float().cpu())) @ right
                for name, (left, right) in self._directions[scale].items()
            }
            for one, other in AXES.values():
                if torch.equal(matrices[other], -matrices[one]):
                    found[other] = -found[one]
            rotated[scale] = offset, found
        return describe_models(rotated)

    def _draw(self, matrices: Mapping[str, Tensor], index: int) -> dict[str, tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(2 * self._seed + index)

        def draw(dim: int) -> Tensor:  # uniform over all rotations and reflections
            q, r = torch.linalg.qr(torch.randn(dim, dim, generator=generator))
            return q * r.diagonal().sign()

        return {name: (draw(len(matrices[name])), draw(len(matrices[name]))) for name in NAMES}


def sort_eigenvalues(matrix: Tensor) -> Tensor:
    """Returns the eigenvalues of a matrix (C, C), (C,), complex, by falling magnitude."""
    eigenvalues = torch.linalg.eigvals(matrix.detach().cpu())
    order = eigenvalues.abs().argsort(descending=True, stable=True)
    return eigenvalues[order]


def rank(matrix: Tensor) -> int:
    """Returns the number of singular values above C times the rounding error of the largest.

    Args:
        matrix: (C, C).
    """
    singular = torch.linalg.svdvals(matrix.detach().cpu())
    tolerance = singular.max() * len(matrix) * torch.finfo(matrix.dtype).eps
    return int((singular > tolerance).sum())


def effective_rank(matrix: Tensor) -> float:
    """Returns the exponential of the entropy of the singular values, each divided by their sum.

    Between 1 and C: how many directions share what the matrix does (Roy and Vetterli, 2007). nan
    if the matrix is zero.
    """
    singular = torch.linalg.svdvals(matrix.detach().cpu())
    if float(singular.sum()) == 0:
        return math.nan
    return float(torch.special.entr(singular / singular.sum()).sum().exp())


def condition(matrix: Tensor) -> float:
    """Returns the largest singular value over the smallest; infinite where that is zero."""
    singular = torch.linalg.svdvals(matrix.detach().cpu()).tolist()
    return singular[0] / singular[-1] if singular[-1] > 0 else math.inf


def commutator(a: Tensor, b: Tensor) -> float:
    """Returns ‖AB - BA‖ / (‖A‖‖B‖) of two (C, C), in the Frobenius norm: 0 if they commute.

    Clairaut's theorem asks for 0. A common factor does not change it; nan if a matrix is zero.
    """
    return _ratio((a @ b - b @ a).norm(), a.norm() * b.norm())


def inverse_error(forth: Tensor, back: Tensor) -> float:
    """Returns ‖(I + M1)(I + M2) - I‖ / (‖M1‖ + ‖M2‖) of two (C, C), in the Frobenius norm.

    There and back again is the identity by Eq. 8: 0 if they are inverse to each other. Small
    matrices that have nothing to do with each other give 0.7, small equal ones 1; nan if both are
    zero. The size of M is divided out because near M = 0 any two would pass.
    """
    # (I + M1)(I + M2) - I without the identity, in which small matrices would be lost.
    return _ratio((forth + back + forth @ back).norm(), forth.norm() + back.norm())


def cosine(a: Tensor, b: Tensor) -> float:
    """Returns the cosine of the angle between two matrices as vectors; nan if one is zero."""
    return _ratio((a * b).sum(), a.norm() * b.norm())


def magnitude_correlation(a: Tensor, b: Tensor) -> float:
    """Returns Pearson's correlation of two (C,) sorted magnitudes, each divided by its sum.

    It is nan where one sum is zero, or all magnitudes of one are equal.
    """
    spreads = []
    for magnitudes in (a.double(), b.double()):
        spread = magnitudes - magnitudes.mean()
        if float(spread.norm()) <= _EQUAL * float(magnitudes.norm()):
            return math.nan
        spreads.append(spread / magnitudes.sum())
    a, b = spreads
    return _ratio((a * b).sum(), a.norm() * b.norm())


def _describe_scale(matrices: Mapping[str, Tensor], offset: float) -> ScaleSpectrum:
    described = {
        name: MatrixSpectrum(
            eigenvalues=sort_eigenvalues(matrix) / offset,
            rank=rank(matrix),
            effective_rank=effective_rank(matrix),
            condition=condition(torch.eye(len(matrix), dtype=matrix.dtype) + matrix),
        )
        for name, matrix in matrices.items()
    }
    energy = {axis: sum(described[name].energy for name in pair) for axis, pair in AXES.items()}
    return ScaleSpectrum(
        offset=offset,
        matrices=described,
        energy_ratio=energy["A"] / energy["B"] if energy["A"] and energy["B"] else math.nan,
        commutators={
            f"{a} {b}": commutator(matrices[a], matrices[b])
            for a, b in product(AXES["A"], AXES["B"])
        },
        inverse_errors={
            axis: inverse_error(matrices[forth], matrices[back])
            for axis, (forth, back) in AXES.items()
        },
    )


def _ratio(numerator: Tensor, denominator: Tensor) -> float:
    return float(numerator / denominator) if float(denominator) > 0 else math.nan


def _describe(matrix: MatrixSpectrum) -> dict[str, Any]:
    pairs = torch.view_as_real(matrix.eigenvalues).tolist()
    return {
        "eigenvalues": pairs,
        "energy": matrix.energy,
        "rank": matrix.rank,
        "effective_rank": matrix.effective_rank,
        "condition": matrix.condition,
    }


def _finite(value: Any, path: str, left_out: dict[str, str]) -> Any:
    """Returns a tree of dicts without the numbers that are not finite, which it notes."""
    if isinstance(value, dict):
        tree = {key: _finite(item, f"{path}/{key}", left_out) for key, item in value.items()}
        return {key: item for key, item in tree.items() if item is not None}
    if isinstance(value, list):
        return [_finite(item, path, left_out) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        left_out[path[1:]] = _REASONS["nan" if math.isnan(value) else "inf"]
        return None
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
