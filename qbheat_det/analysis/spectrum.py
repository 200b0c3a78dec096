# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The figure "spectrum": eigenvalues of the linear models of QB-Heat, compared with a control.

Paper: QB-Heat, arXiv:2211.13228, Eq. 6 to 8, Sec. 6.2, Table 3 and Fig. 7. A linear model predicts
the feature z at an offset Δx: z(x + Δx) = (I + M) z(x). The model learns M = Δx A, but the figure
shows eigenvalues and energies of A. Let A1 and A2 be the matrices A of two opposite directions. The
energy E(A1) is the sum of the magnitudes of the eigenvalues of A1, and E(A) = E(A1) + E(A2).

The control has "rotated" matrices: the learned singular values with random singular vectors.
Properties that learned and rotated matrices share do not depend on singular vectors. Undefined
values are nan.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import cast

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Chart
from torch import Tensor

from qbheat_det.checkpoint import read_weights
from qbheat_det.core.errors import UserError
from qbheat_det.modeling.pretrain import HeatPredictor
from qbheat_det.modeling.pretrain.qb_heat import LinearModels

from .figures import Figure, Image, NotApplicable, Table
from .plotting import COLORS, QUIET, chart_image, start_figure, themed
from .run import FigureOptions, Run, run_each

Models = Mapping[str, tuple[float, Mapping[str, Tensor]]]
"""Maps a scale ("corner", "centre") to a tuple: Δx, and the matrices M = Δx A (C, C) by name."""

AXES = {"A": ("A1", "A2"), "B": ("B1", "B2")}
"""The two opposite directions of each axis. A is horizontal, and B is vertical."""
NAMES = tuple(name for pair in AXES.values() for name in pair)
_PREFIX = "predictor."
_EQUAL = 1e-6  # relative spread of magnitudes that is considered a rounding error
_COLUMNS = {
    "correlation": ("correlation of the scales' spectra", ".4f"),
    "commutator": ("commutator", ".3f"),
    "inverse_error": ("inverse error", ".3f"),
}
_TITLE = "Spectrum of the linear models"
_EXPLANATION = (
    "Eigenvalues of A and B, which propagate features by z(x + Δx) = (I + Δx A) z(x). Rotated "
    "matrices, the control, also lie near the diagonal of Fig. 7 and have E(A)/E(B) near 1 (Table "
    "3). Differences from them are learned.",
    "The commutator is 0 if the order of right and down does not matter (Eq. 3). The inverse error "
    "is 0 if left inverts right (Eq. 8).",
)


@dataclass(frozen=True)
class Spectrum:
    """The spectra of the linear models of one or two scales."""

    offsets: Mapping[str, float]  # Δx by scale
    eigenvalues: Mapping[str, Mapping[str, Tensor]]  # (C,) of A, sorted, by scale and matrix
    summary: Mapping[str, float]  # the numbers in the figure's table


def describe_models(models: Models) -> Spectrum:
    """Computes the spectra of the linear models of one or two scales."""
    offsets = {scale: offset for scale, (offset, _) in models.items()}
    matrices = {scale: found for scale, (_, found) in models.items()}
    eigenvalues = {
        scale: {name: _sort_eigenvalues(own[name]) / offsets[scale] for name in NAMES}
        for scale, own in matrices.items()
    }
    magnitudes = [{name: own[name].abs() for name in NAMES} for own in eigenvalues.values()]
    summary: dict[str, float] = {}
    for scale, own in zip(models, magnitudes, strict=True):
        a, b = (float(sum(own[name].sum() for name in pair)) for pair in AXES.values())
        summary[f"energy_ratio_{scale}"] = a / b if a and b else math.nan
        summary |= {f"energy_A_{scale}": a, f"energy_B_{scale}": b}  # Eq. 7
    if len(models) == 2:
        one, other = magnitudes
        summary["correlation"] = fmean(magnitude_correlation(one[k], other[k]) for k in NAMES)
    for name, measure, groups in (
        ("commutator", commutator, list(product(*AXES.values()))),
        ("inverse_error", inverse_error, list(AXES.values())),
    ):
        values = [measure(*(own[k] for k in keys)) for own in matrices.values() for keys in groups]
        summary[name] = fmean(values)
    return Spectrum(offsets, eigenvalues, summary)


def read_linear_models(path: Path, label: str) -> Models:
    """Reads QB-Heat's linear models from a checkpoint, on the CPU. ``label`` is for messages.

    Raises:
        NotApplicable: the checkpoint has no linear models.
        UserError: the file cannot be read, or its linear models are incomplete.
    """
    weights, _ = read_weights(str(path))
    state = {
        key.removeprefix(_PREFIX): value
        for key, value in weights.items()
        if key.startswith(f"{_PREFIX}scales.")
    }
    if not state:
        raise NotApplicable(f"'{label}' has no linear models, which QB-Heat's pre-training has")
    scales = {key.split(".")[1] for key in state}
    try:
        predictor = HeatPredictor(
            dim=len(next(iter(state.values()))),
            num_models=len(state) // len(scales),
            visible="both" if len(scales) > 1 else scales.pop(),
        )
        predictor.load_state_dict(state)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"'{path}' has incomplete linear models: {error}") from error
    by_scale = cast(Mapping[str, LinearModels], predictor.requires_grad_(False).scales)
    return {scale: (models.offset, models.matrices()) for scale, models in by_scale.items()}


def rotate_models(models: Models) -> Models:
    """Returns the control: matrices with the same singular values and random singular vectors.

    If A2 = -A1 (Eq. 9), this also holds for the rotated matrices.
    """
    rotated = {}
    for index, (scale, (offset, matrices)) in enumerate(models.items()):
        generator = torch.Generator().manual_seed(index)
        found = {}
        for name in NAMES:
            left, right = (_draw_rotation(matrices[name], generator) for _ in range(2))
            found[name] = (left * torch.linalg.svdvals(matrices[name].float())) @ right
        for one, other in AXES.values():
            if matrices[one].any() and torch.equal(matrices[other], -matrices[one]):
                found[other] = -found[one]
        rotated[scale] = offset, found
    return rotated


def _draw_rotation(matrix: Tensor, generator: torch.Generator) -> Tensor:
    """Returns a random orthogonal matrix, uniform over all rotations and reflections."""
    q, r = torch.linalg.qr(torch.randn(matrix.shape, generator=generator))
    return q * r.diagonal().sign()


def _sort_eigenvalues(matrix: Tensor) -> Tensor:
    """Returns the complex eigenvalues (C,) of a matrix (C, C), sorted by descending magnitude."""
    eigenvalues = torch.linalg.eigvals(matrix)
    return eigenvalues[eigenvalues.abs().argsort(descending=True, stable=True)]


def commutator(a: Tensor, b: Tensor) -> float:
    """Returns ‖AB - BA‖ / (‖A‖‖B‖) in the Frobenius norm, which is 0 if A and B commute."""
    return _ratio((a @ b - b @ a).norm(), a.norm() * b.norm())


def inverse_error(forth: Tensor, back: Tensor) -> float:
    """Returns ‖(I + M1)(I + M2) - I‖ / (‖M1‖ + ‖M2‖) in the Frobenius norm.

    The error is 0 if I + M1 and I + M2 are inverse to each other (Eq. 8), about 0.7 for small
    unrelated matrices, and 1 for small equal matrices. Without the denominator, the error would be
    small for all small matrices.
    """
    # The product is expanded, because adding the identity would round small matrices to zero.
    return _ratio((forth + back + forth @ back).norm(), forth.norm() + back.norm())


def magnitude_correlation(a: Tensor, b: Tensor) -> float:
    """Returns Pearson's correlation of two sorted vectors (C,), or nan if one is constant."""
    if any(float(x.std()) <= _EQUAL * float(x.norm()) for x in (a, b)):
        return math.nan
    return float(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1])


def _ratio(numerator: Tensor, denominator: Tensor) -> float:
    return float(numerator / denominator) if float(denominator) > 0 else math.nan


def draw_spectrum(runs: Sequence[Run], options: FigureOptions) -> Figure:
    """Draws the eigenvalues and singular values of the linear models of each QB-Heat run.

    Rotated models are the control. The table has the rows of the paper's Table 3.
    """

    def compute(run: Run) -> dict[str, Spectrum]:
        models = read_linear_models(run.weights, run.label)
        control = rotate_models(models)
        return {"": describe_models(models), "rotated": describe_models(control)}

    results = run_each(runs, compute, nothing="no spectrum")
    images: dict[str, Image] = {}
    rows: dict[str, Spectrum] = {}
    for index, (label, found) in enumerate(results.found.items(), 1):
        images[f"magnitudes_{index}"] = chart_image(
            plot_magnitudes(found[""], found["rotated"]),
            caption=f"{label}: magnitudes of eigenvalues. Gray: rotated matrices.",
        )
        rows |= {f"{label}, {name}".removesuffix(", "): one for name, one in found.items()}
    return results.draw(
        "spectrum",
        _TITLE,
        _EXPLANATION,
        images,
        _tabulate(rows),
        eigenvalues={label: found[""].eigenvalues for label, found in results.found.items()},
        rows={name: spectrum.summary for name, spectrum in rows.items()},
    )


@themed
def plot_magnitudes(learned: Spectrum, control: Spectrum) -> Chart:
    """Draws magnitudes of eigenvalues at each scale, and compares the two scales."""
    panels = len(learned.offsets) + (len(learned.offsets) == 2)
    figure = start_figure(height=3.4, width=4 * panels)
    for index, (scale, values) in enumerate(learned.eigenvalues.items(), 1):
        axes = figure.add_subplot(1, panels, index)
        for name, matrix in control.eigenvalues[scale].items():
            label = "rotated" if name == NAMES[0] else "_nolegend_"
            axes.plot(matrix.abs(), color=COLORS[-1], lw=0.9, label=label)
        for name, color in zip(NAMES, COLORS, strict=False):
            axes.plot(values[name].abs(), color=color, label=name)
        if any(matrix.any() for matrix in values.values()):
            axes.set_yscale("log")  # before training, all eigenvalues are zero
        axes.set_title(f"{scale}, Δx = {learned.offsets[scale]:g} W")
        axes.set_xlabel("eigenvalue, by magnitude")
        axes.set_ylabel("|eigenvalue| of A, B")
        axes.legend(loc="lower left")
    if len(learned.offsets) == 2:
        axes = figure.add_subplot(1, panels, panels)
        _draw_across_scales(axes, control, [COLORS[-1]] * len(NAMES), 1.5)
        _draw_across_scales(axes, learned, COLORS, 2.5)
        first, second = learned.offsets
        axes.set_title("one scale against the other")
        axes.set_xlabel(f"{first}: share of its energy")
        axes.set_ylabel(f"{second}: share of its energy")
    return figure


def _draw_across_scales(axes: Axes, spectrum: Spectrum, colors: Sequence[str], size: float) -> None:
    for name, color in zip(NAMES, colors, strict=False):
        x, y = (own[name].abs() for own in spectrum.eigenvalues.values())
        if x.any() and y.any():
            # Rasterized, because thousands of points would make the file large.
            axes.plot(x / x.sum(), y / y.sum(), ".", ms=size, rasterized=True, color=color)
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.axline((1e-3, 1e-3), (1e-2, 1e-2), color=QUIET, lw=0.8)


def _tabulate(spectra: Mapping[str, Spectrum]) -> Table:
    offsets = {name: offset for one in spectra.values() for name, offset in one.offsets.items()}
    columns = {  # the smaller offset first, as in Table 3
        f"energy_ratio_{name}": (f"E(A)/E(B) at Δx = {offsets[name]:g} W", ".4f")
        for name in sorted(offsets, key=offsets.__getitem__)
    } | _COLUMNS
    rows = []
    for label, spectrum in spectra.items():
        cells = (format(spectrum.summary.get(key, math.nan), form)
                 for key, (_, form) in columns.items())  # fmt: skip
        rows.append([label, *cells])
    return Table(["matrices", *(title for title, _ in columns.values())], rows)
