# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Spectra in rows: Table 3 of QB-Heat, arXiv:2211.13228, with what else tells matrices apart.

Beside each row of learned matrices stand two controls. What "untrained" matrices show, random ones
of the same size, is no sign of learning; nor is what "rotated" ones do, which have the learned
singular values in random directions.
"""

import math
from collections.abc import Iterable, Mapping
from statistics import fmean

import torch
from torch import Tensor

from .html_report import Table
from .spectrum import AXES, NAMES, MatrixSpectrum, ScaleSpectrum, Spectrum

Models = Mapping[str, tuple[float, Mapping[str, Tensor]]]
"""For each scale its offset, and M (C, C) by name."""


def draw_untrained(models: Models, seed: int = 0) -> dict[str, tuple[float, dict[str, Tensor]]]:
    """Returns matrices such as a predictor with a random start has: independent normal entries.

    All of a scale have one Frobenius norm, the mean of the learned ones': norms of their own would
    lend the control E(A)/E(B), which is what was learned. Where that is zero, it is 1, for nothing
    but energies depends on it. What opposite directions share by construction (Eq. 9), these do
    too.

    Args:
        models: the learned ones.
        seed: of the entries.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn: dict[str, tuple[float, dict[str, Tensor]]] = {}
    for scale, (offset, matrices) in models.items():
        found = {}
        norm = fmean(float(matrices[name].norm()) for name in NAMES) or 1.0
        for name in NAMES:
            entries = torch.randn(matrices[name].shape, generator=generator)
            found[name] = entries * (norm / entries.norm())
        for one, other in AXES.values():
            if float(matrices[one].norm()) and torch.equal(matrices[other], -matrices[one]):
                found[other] = -found[one]
        drawn[scale] = offset, found
    return drawn


def summarize(spectrum: Spectrum) -> dict[str, float]:
    """Returns the figures of a row by name; nan where they are undefined.

    Of several matrices these are: the least rank, the greatest condition number of I + M, and the
    mean of all else. Energies and their ratio are given for each scale.
    """
    found: dict[str, float] = {}
    for name, scale in spectrum.scales.items():
        found[f"energy_ratio_{name}"] = scale.energy_ratio
        for axis, pair in AXES.items():
            found[f"energy_{axis}_{name}"] = sum(scale.matrices[key].energy for key in pair)
    scales = list(spectrum.scales.values())
    matrices = [matrix for scale in scales for matrix in scale.matrices.values()]
    found["correlation"] = _mean(spectrum.correlations.values())
    found["cosine"] = _mean(spectrum.cosines.values())
    found["rank"] = min(matrix.rank for matrix in matrices)
    found["effective_rank"] = _mean(matrix.effective_rank for matrix in matrices)
    found["condition"] = max(matrix.condition for matrix in matrices)
    found["commutator"] = _mean(value for scale in scales for value in scale.commutators.values())
    found["inverse_error"] = _mean(
        value for scale in scales for value in scale.inverse_errors.values()
    )
    return found


def tabulate(spectra: Mapping[str, Spectrum]) -> Table:
    """Returns a table with a row for each spectrum, those of one scale without the other's cells.

    Args:
        spectra: by the row's name.
    """
    scales: dict[str, ScaleSpectrum] = {}
    for spectrum in spectra.values():
        scales |= spectrum.scales
    # The smaller offset first, as in Table 3.
    names = sorted(scales, key=lambda name: scales[name].offset)
    header = [
        "matrices",
        *(f"E(A)/E(B) at Δx = {scales[name].offset:g} W" for name in names),
        "spectra of the scales, correlation",
        "matrices of the scales, cosine",
        "rank of C",
        "effective rank",
        "condition of I + M",
        "commutator",
        "inverse error",
    ]
    rows = []
    for row, spectrum in spectra.items():
        figures = summarize(spectrum)
        dim = len(_first_matrix(spectrum).eigenvalues)
        rows.append(
            [
                row,
                *(_write(figures.get(f"energy_ratio_{name}", math.nan), ".4f") for name in names),
                _write(figures["correlation"], ".4f"),
                _write(figures["cosine"], ".3f"),
                f"{figures['rank']:.0f} of {dim}",
                _write(figures["effective_rank"], ".1f"),
                _write(figures["condition"], ".3g"),
                _write(figures["commutator"], ".3f"),
                _write(figures["inverse_error"], ".3f"),
            ]
        )
    return Table(header, rows)


def _first_matrix(spectrum: Spectrum) -> MatrixSpectrum:
    return next(iter(next(iter(spectrum.scales.values())).matrices.values()))


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return fmean(known) if known else math.nan


def _write(value: float, form: str) -> str:
    if math.isinf(value):
        return "∞"
    return "n/a" if math.isnan(value) else format(value, form)
