# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The figure "spectrum": eigenvalues of the linear models of QB-Heat, compared with a control.

Paper: QB-Heat, arXiv:2211.13228, Eq. 6 to 8, Sec. 6.2, Table 3 and Fig. 7. A linear model predicts
the feature z at an offset Δx: z(x + Δx) = (I + M) z(x). The model learns M = Δx A, but the figure
shows eigenvalues and energies of A. A1 and A2 are the matrices A of the two horizontal directions,
B1 and B2 those of the vertical ones. The energy E(A1) is the sum of the magnitudes of the
eigenvalues of A1, and E(A) = E(A1) + E(A2).

The control has "rotated" matrices, with the learned singular values and random singular vectors.
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

from .figures import Figure, NotApplicable, Table
from .plotting import AXIS_COLOR, LINE_COLORS, chart_image, start_figure, themed
from .run import FigureOptions, Run, run_each

Models = Mapping[str, tuple[float, Mapping[str, Tensor]]]
"""Maps a scale ("corner", "centre") to (Δx, the matrices M = Δx A (C, C) by name)."""

AXES = {"A": ("A1", "A2"), "B": ("B1", "B2")}
"""The two opposite directions of each axis. A is horizontal, and B is vertical."""
NAMES = (*AXES["A"], *AXES["B"])
_PREFIX = "predictor."
_CONTROL_COLOR = LINE_COLORS[-1]
_ROUNDING_ERROR = 1e-6  # magnitudes with a smaller relative spread count as equal
_COLUMNS = {  # from the key in a summary to (header, number format)
    "channels": ("channels", ".0f"),
    "rank_A": ("rank of A", ".0f"),
    "rank_B": ("rank of B", ".0f"),
    "complex_A": ("complex eigenvalues of A", ".1%"),
    "complex_B": ("complex eigenvalues of B", ".1%"),
    "correlation": ("correlation of the scales' spectra", ".4f"),
    "commutator": ("commutator", ".3f"),
    "inverse_error": ("inverse error", ".3f"),
}
_EXPLANATION = (
    "Eigenvalues of A and B, which propagate features by z(x + Δx) = (I + Δx A) z(x). Rotated "
    "matrices, the control, also lie near the diagonal of Fig. 7 and have E(A)/E(B) near 1 (Table "
    "3). Differences from them are learned.",
    "Of both directions and all scales, the rank is the lowest, and the share of complex "
    "eigenvalues the mean. As in numpy.linalg.matrix_rank, singular values of at most C ε times "
    "the largest count as zero, with C channels and the precision ε of float32. Imaginary parts "
    "count as zero if they are at most C ε times the largest magnitude.",
    "The commutator is 0 if the order of right and down does not matter (Eq. 3). The inverse error "
    "is 0 if left inverts right (Eq. 8).",
)


@dataclass(frozen=True)
class Spectrum:
    """The spectra of the linear models of one or two scales.

    Attributes:
        offsets: Δx of each scale, as a share of the map's width W.
        eigenvalues: complex eigenvalues (C,) of A by scale and matrix name, in descending order of
            their magnitudes.
        summary: the numbers in the figure's table.
    """

    offsets: Mapping[str, float]
    eigenvalues: Mapping[str, Mapping[str, Tensor]]
    summary: Mapping[str, float]


def describe_models(models: Models) -> Spectrum:
    """Computes the spectra of the linear models of one or two scales."""
    offsets = {}
    eigenvalues = {}
    magnitudes = {}
    commutators = []
    inverse_errors = []
    ranks: dict[str, list[int]] = {axis: [] for axis in AXES}
    complex_shares: dict[str, list[float]] = {axis: [] for axis in AXES}
    summary: dict[str, float] = {}
    for scale, (offset, matrices) in models.items():
        offsets[scale] = offset
        summary["channels"] = len(matrices["A1"])
        eigenvalues[scale] = {name: _sort_eigenvalues(matrices[name]) / offset for name in NAMES}
        magnitudes[scale] = {name: values.abs() for name, values in eigenvalues[scale].items()}
        energy = {}
        for axis, directions in AXES.items():  # Eq. 7
            energy[axis] = float(sum(magnitudes[scale][name].sum() for name in directions))
            for name in directions:
                ranks[axis].append(int(torch.linalg.matrix_rank(matrices[name])))
                complex_shares[axis].append(complex_share(eigenvalues[scale][name]))
        ratio = math.nan
        if energy["A"] > 0 and energy["B"] > 0:
            ratio = energy["A"] / energy["B"]
        summary[f"energy_ratio_{scale}"] = ratio
        summary[f"energy_A_{scale}"] = energy["A"]
        summary[f"energy_B_{scale}"] = energy["B"]
        for a, b in product(AXES["A"], AXES["B"]):
            commutators.append(commutator(matrices[a], matrices[b]))
        for forth, back in AXES.values():
            inverse_errors.append(inverse_error(matrices[forth], matrices[back]))
    if len(models) == 2:
        first, second = magnitudes.values()
        summary["correlation"] = fmean(
            magnitude_correlation(first[name], second[name]) for name in NAMES
        )
    for axis in AXES:
        summary[f"rank_{axis}"] = min(ranks[axis])
        summary[f"complex_{axis}"] = fmean(complex_shares[axis])
    summary["commutator"] = fmean(commutators)
    summary["inverse_error"] = fmean(inverse_errors)
    return Spectrum(offsets, eigenvalues, summary)


def read_linear_models(path: Path, label: str) -> Models:
    """Reads QB-Heat's linear models from a checkpoint, on the CPU.

    ``label`` is the name of the run in messages.

    Raises:
        NotApplicable: the checkpoint has no linear models.
        UserError: the file cannot be read, or its linear models are incomplete.
    """
    weights, _ = read_weights(str(path))
    state = {}
    for key, tensor in weights.items():
        if key.startswith(f"{_PREFIX}scales."):
            state[key.removeprefix(_PREFIX)] = tensor
    if not state:
        raise NotApplicable(f"'{label}' has no linear models, which QB-Heat's pre-training has")
    scales = {key.split(".")[1] for key in state}  # keys are such as "scales.corner.A1"
    any_matrix = next(iter(state.values()))  # (C, C)
    visible = "both"
    if len(scales) == 1:
        (visible,) = scales
    try:
        predictor = HeatPredictor(
            dim=len(any_matrix), num_models=len(state) // len(scales), visible=visible
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
    rotated_models = {}
    for index, (scale, (offset, matrices)) in enumerate(models.items()):
        generator = torch.Generator().manual_seed(index)
        rotated = {}
        for name in NAMES:
            left = _draw_rotation(matrices[name], generator)
            right = _draw_rotation(matrices[name], generator)
            singular_values = torch.linalg.svdvals(matrices[name].float())
            rotated[name] = (left * singular_values) @ right  # U diag(s) V
        for forth, back in AXES.values():
            is_opposite = torch.equal(matrices[back], -matrices[forth])
            if is_opposite and matrices[forth].any():
                rotated[back] = -rotated[forth]
        rotated_models[scale] = (offset, rotated)
    return rotated_models


def _draw_rotation(matrix: Tensor, generator: torch.Generator) -> Tensor:
    """Returns a random orthogonal matrix of the shape of ``matrix``.

    Its distribution is uniform over all rotations and reflections.
    """
    q, r = torch.linalg.qr(torch.randn(matrix.shape, generator=generator))
    # Without the signs, the distribution would not be uniform.
    return q * r.diagonal().sign()


def _sort_eigenvalues(matrix: Tensor) -> Tensor:
    """Returns the complex eigenvalues (C,) of a matrix (C, C), sorted by descending magnitude."""
    eigenvalues = torch.linalg.eigvals(matrix)
    return eigenvalues[eigenvalues.abs().argsort(descending=True, stable=True)]


def complex_share(eigenvalues: Tensor) -> float:
    """Returns the share of eigenvalues (C,) that are not real, in [0, 1].

    An imaginary part is rounding error if it is at most C ε max |λ|, where ε is that of the dtype.
    """
    largest = eigenvalues.abs().max()
    tolerance = len(eigenvalues) * torch.finfo(eigenvalues.dtype).eps * largest
    return float((eigenvalues.imag.abs() > tolerance).double().mean())


def commutator(a: Tensor, b: Tensor) -> float:
    """Returns ‖AB - BA‖ / (‖A‖‖B‖) in the Frobenius norm, which is 0 if A and B commute."""
    return _ratio((a @ b - b @ a).norm(), a.norm() * b.norm())


def inverse_error(forth: Tensor, back: Tensor) -> float:
    """Returns ‖(I + M1)(I + M2) - I‖ / (‖M1‖ + ‖M2‖) in the Frobenius norm.

    M1 is ``forth``, and M2 is ``back``. The error is 0 if I + M1 and I + M2 are inverse to each
    other (Eq. 8), about 0.7 for small unrelated matrices, and 1 for small equal matrices. Without
    the denominator, the error would be small for all small matrices.
    """
    # The product minus I, expanded. Adding I first would round small matrices to zero.
    difference = forth + back + forth @ back
    return _ratio(difference.norm(), forth.norm() + back.norm())


def magnitude_correlation(a: Tensor, b: Tensor) -> float:
    """Returns Pearson's correlation of two sorted vectors (C,), or nan if either is constant."""
    for vector in (a, b):
        if float(vector.std()) <= _ROUNDING_ERROR * float(vector.norm()):
            return math.nan
    return float(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1])


def _ratio(numerator: Tensor, denominator: Tensor) -> float:
    """Returns the quotient of two numbers that are not negative, or nan if the second is 0."""
    if float(denominator) <= 0:
        return math.nan
    return float(numerator / denominator)


def draw_spectrum(runs: Sequence[Run], options: FigureOptions) -> Figure:
    """Draws the eigenvalues and singular values of the linear models of each QB-Heat run.

    Rotated models are the control. The table has the rows of the paper's Table 3.
    """

    def compute(run: Run) -> tuple[Spectrum, Spectrum]:
        models = read_linear_models(run.weights, run.label)
        return describe_models(models), describe_models(rotate_models(models))

    results = run_each(runs, compute, nothing="no spectrum")
    images = {}
    eigenvalues = {}
    spectra = {}  # by name of the row in the table
    for index, (label, (learned, control)) in enumerate(results.by_label.items(), start=1):
        images[f"magnitudes_{index}"] = chart_image(
            plot_magnitudes(learned, control),
            caption=f"{label}: magnitudes of eigenvalues. Gray: rotated matrices.",
        )
        eigenvalues[label] = learned.eigenvalues
        spectra[label] = learned
        spectra[f"{label}, rotated"] = control
    return results.draw(
        "spectrum",
        "Spectrum of the linear models",
        _EXPLANATION,
        images,
        _tabulate(spectra),
        eigenvalues=eigenvalues,
        rows={name: spectrum.summary for name, spectrum in spectra.items()},
    )


@themed
def plot_magnitudes(learned: Spectrum, control: Spectrum) -> Chart:
    """Draws the magnitudes of eigenvalues, with one panel per scale.

    If there are two scales, a third panel compares them.
    """
    num_scales = len(learned.offsets)
    num_panels = 3 if num_scales == 2 else num_scales
    figure = start_figure(height=3.4, width=4 * num_panels)
    for index, (scale, eigenvalues) in enumerate(learned.eigenvalues.items(), start=1):
        axes = figure.add_subplot(1, num_panels, index)
        for name, values in control.eigenvalues[scale].items():
            # The control has one entry in the legend for all four matrices.
            label = "rotated" if name == NAMES[0] else "_nolegend_"
            axes.plot(values.abs(), color=_CONTROL_COLOR, lw=0.9, label=label)
        for name, color in zip(NAMES, LINE_COLORS, strict=False):
            axes.plot(eigenvalues[name].abs(), color=color, label=name)
        # Before training, all eigenvalues are zero, which a logarithmic axis cannot show.
        if any(values.any() for values in eigenvalues.values()):
            axes.set_yscale("log")
        axes.set_title(f"{scale}, Δx = {learned.offsets[scale]:g} W")
        axes.set_xlabel("eigenvalue, by magnitude")
        axes.set_ylabel("|eigenvalue| of A, B")
        axes.legend(loc="lower left")
    if num_scales == 2:
        axes = figure.add_subplot(1, num_panels, num_panels)
        _plot_across_scales(axes, control, [_CONTROL_COLOR] * len(NAMES), marker_size=1.5)
        _plot_across_scales(axes, learned, LINE_COLORS, marker_size=2.5)
        first, second = learned.offsets
        axes.set_title("one scale against the other")
        axes.set_xlabel(f"{first}: share of its energy")
        axes.set_ylabel(f"{second}: share of its energy")
    return figure


def _plot_across_scales(
    axes: Axes, spectrum: Spectrum, colors: Sequence[str], *, marker_size: float
) -> None:
    """Plots the magnitudes at the second scale over those at the first, as in Fig. 7.

    The magnitudes of a matrix are divided by their sum, its energy.
    """
    first, second = spectrum.eigenvalues.values()
    for name, color in zip(NAMES, colors, strict=False):
        x = first[name].abs()
        y = second[name].abs()
        if not (x.any() and y.any()):
            continue
        # Rasterized, because thousands of points would make the file large.
        axes.plot(x / x.sum(), y / y.sum(), ".", ms=marker_size, rasterized=True, color=color)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.axline((1e-3, 1e-3), (1e-2, 1e-2), color=AXIS_COLOR, lw=0.8)  # the diagonal


def _tabulate(spectra: Mapping[str, Spectrum]) -> Table:
    """Returns a table with a row per spectrum and a column per number of the summaries."""
    offsets: dict[str, float] = {}
    for spectrum in spectra.values():
        offsets |= spectrum.offsets
    columns = {}  # from the key in a summary to (header, number format)
    ascending = sorted(offsets.items(), key=lambda item: item[1])  # as in Table 3
    for scale, offset in ascending:
        columns[f"energy_ratio_{scale}"] = (f"E(A)/E(B) at Δx = {offset:g} W", ".4f")
    columns |= _COLUMNS
    rows = []
    for label, spectrum in spectra.items():
        cells = []
        for key, (_, number_format) in columns.items():
            cells.append(format(spectrum.summary.get(key, math.nan), number_format))
        rows.append([label, *cells])
    return Table(["matrices", *(title for title, _ in columns.values())], rows)
