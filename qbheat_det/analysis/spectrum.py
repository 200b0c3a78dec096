# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Spectra of the linear models of QB-Heat: eigenvalues, energies, commutators, inverses.

Paper: QB-Heat, arXiv:2211.13228, Eq. 6 to 8, Sec. 6.2, Table 3 and Fig. 7. M = Δx A is learned;
eigenvalues and energies are those of A. E(A) = E(A1) + E(A2). Undefined quantities are nan.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from statistics import fmean

import torch
from torch import Tensor

from .linear_models import AXES, NAMES, Models

_EQUAL = 1e-6  # relative spread of magnitudes that is rounding


@dataclass(frozen=True)
class MatrixSpectrum:
    """Of one matrix: eigenvalues (C,) of A by falling magnitude, ranks of A, condition of I + M."""

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
    """Of the matrices of one scale, by name: spectra, E(A)/E(B), commutators, inverse errors."""

    offset: float
    matrices: Mapping[str, MatrixSpectrum]
    energy_ratio: float
    commutators: Mapping[str, float]
    inverse_errors: Mapping[str, float]


@dataclass(frozen=True)
class Spectrum:
    """Of all scales; by matrix, cosine of two scales' M and correlation of their spectra."""

    scales: Mapping[str, ScaleSpectrum]
    cosines: Mapping[str, float] = field(default_factory=dict)
    correlations: Mapping[str, float] = field(default_factory=dict)

    def summarize(self) -> dict[str, float]:
        """Returns the numbers of a row of the table, by name."""
        found: dict[str, float] = {}
        for name, scale in self.scales.items():
            found[f"energy_ratio_{name}"] = scale.energy_ratio
            for axis, pair in AXES.items():
                found[f"energy_{axis}_{name}"] = sum(scale.matrices[key].energy for key in pair)
        scales = list(self.scales.values())
        matrices = [matrix for scale in scales for matrix in scale.matrices.values()]
        return found | {
            "correlation": _mean(self.correlations.values()),
            "cosine": _mean(self.cosines.values()),
            "rank": min(matrix.rank for matrix in matrices),
            "effective_rank": _mean(matrix.effective_rank for matrix in matrices),
            "condition": max(matrix.condition for matrix in matrices),
            "commutator": _mean(v for scale in scales for v in scale.commutators.values()),
            "inverse_error": _mean(v for scale in scales for v in scale.inverse_errors.values()),
        }


def describe_models(models: Models) -> Spectrum:
    """Computes the spectra of the linear models of one or two scales."""
    scales = {
        scale: _describe_scale({name: found[name] for name in NAMES}, offset)
        for scale, (offset, found) in models.items()
    }
    if len(models) != 2:
        return Spectrum(scales)
    (_, first), (_, second) = models.values()
    one, other = (scale.matrices for scale in scales.values())
    return Spectrum(
        scales,
        cosines={name: cosine(first[name], second[name]) for name in NAMES},
        correlations={
            name: magnitude_correlation(one[name].magnitudes, other[name].magnitudes)
            for name in NAMES
        },
    )


def _describe_scale(matrices: Mapping[str, Tensor], offset: float) -> ScaleSpectrum:
    described = {}
    for name, matrix in matrices.items():
        eye = torch.eye(len(matrix), dtype=matrix.dtype)
        described[name] = MatrixSpectrum(
            eigenvalues=sort_eigenvalues(matrix) / offset,
            rank=int(torch.linalg.matrix_rank(matrix)),
            effective_rank=effective_rank(matrix),
            condition=float(torch.linalg.cond(eye + matrix, 2)),
        )
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


def sort_eigenvalues(matrix: Tensor) -> Tensor:
    """Returns the eigenvalues of a matrix (C, C), (C,), complex, by falling magnitude."""
    eigenvalues = torch.linalg.eigvals(matrix)
    return eigenvalues[eigenvalues.abs().argsort(descending=True, stable=True)]


def effective_rank(matrix: Tensor) -> float:
    """Returns the exponential of the entropy of the normalised singular values, in [1, C]."""
    singular = torch.linalg.svdvals(matrix)
    return float(torch.special.entr(singular / singular.sum()).sum().exp())


def commutator(a: Tensor, b: Tensor) -> float:
    """Returns ‖AB - BA‖ / (‖A‖‖B‖) of two (C, C), in the Frobenius norm: 0 if they commute."""
    return _ratio((a @ b - b @ a).norm(), a.norm() * b.norm())


def inverse_error(forth: Tensor, back: Tensor) -> float:
    """Returns ‖(I + M1)(I + M2) - I‖ / (‖M1‖ + ‖M2‖) of two (C, C), in the Frobenius norm.

    0 if they are inverse to each other, as Eq. 8 has it. Small unrelated matrices give 0.7, small
    equal ones 1. Divided by the size of M, because near M = 0 any two would pass.
    """
    # Without the identity, in which small matrices would be lost.
    return _ratio((forth + back + forth @ back).norm(), forth.norm() + back.norm())


def cosine(a: Tensor, b: Tensor) -> float:
    """Returns the cosine of the angle between two matrices as vectors; nan if one is zero."""
    return _ratio((a * b).sum(), a.norm() * b.norm())


def magnitude_correlation(a: Tensor, b: Tensor) -> float:
    """Returns Pearson's correlation of sorted magnitudes (C,); nan if those of one are equal."""
    if any(float(x.std()) <= _EQUAL * float(x.norm()) for x in (a, b)):
        return math.nan
    return float(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1])


def _ratio(numerator: Tensor, denominator: Tensor) -> float:
    return float(numerator / denominator) if float(denominator) > 0 else math.nan


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return fmean(known) if known else math.nan
