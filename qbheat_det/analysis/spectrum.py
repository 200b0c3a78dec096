# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Figure "spectrum": eigenvalues of the linear models of QB-Heat beside two controls.

Paper: QB-Heat, arXiv:2211.13228, Eq. 6 to 8, Sec. 6.2, Table 3 and Fig. 7. M = Δx A is learned;
eigenvalues and energies are those of A. E(A) = E(A1) + E(A2). Undefined quantities are nan.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from statistics import fmean
from typing import Any

import torch
from detectron2.config import CfgNode
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Chart
from torch import Tensor, nn
from tqdm import tqdm

from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import Figure, Image, NotApplicable, Table, register_figure
from qbheat_det.modeling.contracts import get_linear_models

from .figure import FigureOptions, run_each
from .linear_models import (
    AXES,
    NAMES,
    Models,
    commutator,
    cosine,
    draw_random_models,
    effective_rank,
    inverse_error,
    list_checkpoints,
    list_linear_models,
    magnitude_correlation,
    read_linear_models,
    rotate_models,
    sort_eigenvalues,
)
from .plotting import COLORS, INK, QUIET, chart_image, start_figure, themed
from .run import Run

logger = logging.getLogger(__name__)

_COLUMNS = {
    "correlation": ("correlation of the scales' spectra", ".4f"),
    "cosine": ("cosine of the scales' matrices", ".3f"),
    "rank": ("rank", ".0f"),
    "effective_rank": ("effective rank", ".1f"),
    "condition": ("condition of I + M", ".3g"),
    "commutator": ("commutator", ".3f"),
    "inverse_error": ("inverse error", ".3f"),
}
_EXPLANATION = (
    "Eigenvalues of A and B, which propagate features by z(x + Δx) = (I + Δx A) z(x). Random "
    "matrices of the same size also lie on the diagonal of Fig. 7 and have E(A)/E(B) near 1 (Table "
    "3): only what differs from them was learned. What rotated matrices, with the learned singular "
    "values, share with the learned ones is due to size and rank.",
    "The commutator is 0 where the order of right and down makes no difference (Eq. 3), the "
    "inverse error 0 where left undoes right. The table has the smallest rank, largest condition.",
)


@dataclass(frozen=True)
class MatrixSpectrum:
    """Of one matrix: eigenvalues (C,) of A by falling magnitude, ranks of A, condition of I + M."""

    eigenvalues: Tensor
    rank: int
    effective_rank: float
    condition: float

    @property
    def energy(self) -> float:
        """E(A), the sum of the magnitudes of the eigenvalues, Eq. 7."""
        return float(self.eigenvalues.abs().sum())


@dataclass(frozen=True)
class ScaleSpectrum:
    """Of the matrices of one scale, by name: spectra, E(A)/E(B), commutators, inverse errors."""

    offset: float
    matrices: Mapping[str, MatrixSpectrum]
    energy_ratio: float
    commutators: Sequence[float]
    inverse_errors: Sequence[float]


@dataclass(frozen=True)
class Spectrum:
    """Of all scales; by matrix, cosine of two scales' M and correlation of their spectra."""

    scales: Mapping[str, ScaleSpectrum]
    cosines: Sequence[float]
    correlations: Sequence[float]

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
            "correlation": _mean(self.correlations),
            "cosine": _mean(self.cosines),
            "rank": min(matrix.rank for matrix in matrices),
            "effective_rank": _mean(matrix.effective_rank for matrix in matrices),
            "condition": max(matrix.condition for matrix in matrices),
            "commutator": _mean(value for scale in scales for value in scale.commutators),
            "inverse_error": _mean(value for scale in scales for value in scale.inverse_errors),
        }


def describe_models(models: Models) -> Spectrum:
    """Computes the spectra of the linear models of one or two scales."""
    scales = {scale: _describe_scale(found, offset) for scale, (offset, found) in models.items()}
    if len(models) != 2:
        return Spectrum(scales, [], [])
    (_, first), (_, second) = models.values()
    magnitudes = [
        [scale.matrices[name].eigenvalues.abs() for name in NAMES] for scale in scales.values()
    ]
    return Spectrum(
        scales,
        [cosine(first[name], second[name]) for name in NAMES],
        [magnitude_correlation(*pair) for pair in zip(*magnitudes, strict=True)],
    )


def _describe_scale(matrices: Mapping[str, Tensor], offset: float) -> ScaleSpectrum:
    described = {}
    for name in NAMES:
        matrix = matrices[name]
        whole = torch.eye(len(matrix), dtype=matrix.dtype) + matrix
        described[name] = MatrixSpectrum(
            eigenvalues=sort_eigenvalues(matrix) / offset,
            rank=int(torch.linalg.matrix_rank(matrix)),
            effective_rank=effective_rank(matrix),
            condition=float(torch.linalg.cond(whole, 2)),
        )
    energy = {axis: sum(described[name].energy for name in pair) for axis, pair in AXES.items()}
    return ScaleSpectrum(
        offset=offset,
        matrices=described,
        energy_ratio=energy["A"] / energy["B"] if energy["A"] and energy["B"] else math.nan,
        commutators=[
            commutator(matrices[a], matrices[b]) for a, b in product(AXES["A"], AXES["B"])
        ],
        inverse_errors=[inverse_error(matrices[a], matrices[b]) for a, b in AXES.values()],
    )


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return fmean(known) if known else math.nan


@dataclass(frozen=True)
class _RunSpectra:
    """Of one run: learned, controls, earlier ones by name of their row, and what was left out."""

    learned: Spectrum
    controls: Mapping[str, Spectrum]
    earlier: Mapping[str, Spectrum]
    left_out: Sequence[str]


@register_figure("spectrum")
def draw_spectrum(runs: Sequence[Run], options: FigureOptions, *, checkpoints: int = 5) -> Figure:
    """Draws the spectra of each run, with so many of its ``checkpoints`` as rows of Table 3."""
    results = run_each(
        runs, lambda run: _compute(run, options.seed, checkpoints), nothing="no spectrum"
    )
    images: dict[str, Image] = {}
    left_out = list(results.left_out)
    rows: dict[str, Spectrum] = {}
    for index, (label, one) in enumerate(results.found.items(), 1):
        images[f"{index}_magnitudes"] = chart_image(
            plot_magnitudes(one.learned, one.controls),
            caption=f"{label}: magnitudes of eigenvalues. Grey: rotated; dotted: random matrices.",
        )
        images[f"{index}_eigenvalues"] = chart_image(
            plot_eigenvalues(one.learned),
            caption=f"{label}: a direction grows where the real part is positive, and turns where "
            "the imaginary part is not 0.",
        )
        left_out += one.left_out
        rows |= {f"{label}, {name}": spectrum for name, spectrum in one.earlier.items()}
        rows[label] = one.learned
        rows |= {f"{label}, {name}": spectrum for name, spectrum in one.controls.items()}
    data = {
        "runs": {label: asdict(one.learned) for label, one in results.found.items()},
        "rows": {name: spectrum.summarize() for name, spectrum in rows.items()},
        "left_out": left_out,
    }
    explanation = [*_EXPLANATION, *(f"Left out: {reason}." for reason in left_out)]
    title = "Spectrum of the linear models"
    return Figure("spectrum", title, explanation, images, data, _tabulate(rows))


@register_figure("spectrum", training=True)
def draw_training_spectrum(
    model: nn.Module, load_images: Callable[[int], list[dict[str, Any]]], cfg: CfgNode
) -> Figure:
    """Draws the spectra of the linear models beside those of rotated ones."""
    scales = get_linear_models(model)
    if not scales:
        raise NotApplicable(f"{type(model).__name__} has no linear models")
    models = list_linear_models(scales)
    learned, control = describe_models(models), describe_models(rotate_models(models))
    chart = plot_magnitudes(learned, {"rotated": control})
    named = {"spectrum": learned.summarize(), "spectrum_control": control.summarize()}
    return Figure(
        "spectrum",
        "Spectrum of the linear models",
        images={"magnitudes": chart_image(chart, alt="Magnitudes of eigenvalues", format="png")},
        data={"learned": asdict(learned), "rotated": control.summarize()},
        scalars={f"{name}/{key}": v for name, row in named.items() for key, v in row.items()},
    )


@themed
def plot_magnitudes(learned: Spectrum, controls: Mapping[str, Spectrum]) -> Chart:
    """Draws magnitudes of eigenvalues at each scale, and those of one scale against the other's."""
    styles = {"random": (INK, ":"), "rotated": (COLORS[-1], "-")}
    panels = len(learned.scales) + (len(learned.scales) == 2)
    figure = start_figure(height=3.4, width=4 * panels, constrained=False)
    figure.subplots_adjust(wspace=0.35)
    for index, (name, scale) in enumerate(learned.scales.items(), 1):
        axes = figure.add_subplot(1, panels, index)
        for control, spectrum in controls.items():
            color, dash = styles[control]
            for matrix in spectrum.scales[name].matrices.values():
                axes.plot(matrix.eigenvalues.abs(), dash, color=color, lw=0.9)
            axes.plot([], [], dash, color=color, lw=0.9, label=control)
        for key, color in zip(NAMES, COLORS, strict=False):
            axes.plot(scale.matrices[key].eigenvalues.abs(), color=color, label=key)
        if any(matrix.eigenvalues.any() for matrix in scale.matrices.values()):
            axes.set_yscale("log")  # as initialised, all are zero
        axes.set_title(f"{name}, Δx = {scale.offset:g} W")
        axes.set_xlabel("eigenvalue, by magnitude")
        axes.set_ylabel("|eigenvalue| of A, B")
        axes.legend(loc="lower left")
    if len(learned.scales) == 2:
        axes = figure.add_subplot(1, panels, panels)
        for control, spectrum in controls.items():
            _draw_across_scales(axes, spectrum, [styles[control][0]] * len(NAMES), 1.5)
        _draw_across_scales(axes, learned, COLORS, 2.5)
        first, second = learned.scales
        axes.set_title("one scale against the other")
        axes.set_xlabel(f"{first}: share of its energy")
        axes.set_ylabel(f"{second}: share of its energy")
    return figure


def _draw_across_scales(axes: Axes, spectrum: Spectrum, colors: Sequence[str], size: float) -> None:
    for name, color in zip(NAMES, colors, strict=False):
        x, y = (scale.matrices[name].eigenvalues.abs() for scale in spectrum.scales.values())
        if x.any() and y.any():
            # As pixels: thousands of points would be most of the file.
            axes.plot(x / x.sum(), y / y.sum(), ".", ms=size, rasterized=True, color=color)
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.axline((1e-3, 1e-3), (1e-2, 1e-2), color=QUIET, lw=0.8)


@themed
def plot_eigenvalues(spectrum: Spectrum) -> Chart:
    """Draws all eigenvalues of A and B in the complex plane, a panel for each scale."""
    figure = start_figure(height=3.7, width=4 * len(spectrum.scales), constrained=False)
    figure.subplots_adjust(wspace=0.35)
    for index, (name, scale) in enumerate(spectrum.scales.items(), 1):
        axes = figure.add_subplot(1, len(spectrum.scales), index)
        for key, color in zip(NAMES, COLORS, strict=False):
            values = scale.matrices[key].eigenvalues
            axes.plot(values.real, values.imag, ".", color=color, ms=3, label=key, rasterized=True)
        axes.axvline(0, color=QUIET, lw=0.8)
        axes.axhline(0, color=QUIET, lw=0.8)
        axes.set_aspect("equal", adjustable="datalim")
        axes.set_title(f"{name}, Δx = {scale.offset:g} W")
        axes.set_xlabel("real part, per side of the image")
        axes.set_ylabel("imaginary part")
        axes.legend(markerscale=2)
    return figure


def _compute(run: Run, seed: int, number: int) -> _RunSpectra:
    models = read_linear_models(run.weights, run.label)
    earlier: dict[str, Spectrum] = {}
    left_out: list[str] = []
    if run.folder is not None and number:
        unit, size = "step", 1.0
        try:
            if run.cfg.SOLVER.EPOCHS:
                unit, size = "epoch", run.cfg.SOLVER.MAX_ITER / run.cfg.SOLVER.EPOCHS
        except UserError as error:
            left_out.append(f"epochs of '{run.label}': {error}")
        found = list_checkpoints(run.folder, number)
        for steps, path in tqdm(found.items(), desc=f"spectra of {run.label}", leave=False):
            if path.resolve() == run.weights.resolve():
                continue
            try:
                spectrum = describe_models(read_linear_models(path, run.label))
                earlier[f"{unit} {steps / size:,.4g}"] = spectrum
            except (NotApplicable, UserError) as reason:  # such as one that is being written
                left_out.append(f"step {steps:,} of '{run.label}': {reason}")
    for text in left_out:
        logger.warning("left out: %s", text)
    controls = {
        "rotated": describe_models(rotate_models(models, seed)),
        "random": describe_models(draw_random_models(models, seed)),
    }
    return _RunSpectra(describe_models(models), controls, earlier, left_out)


def _tabulate(spectra: Mapping[str, Spectrum]) -> Table:
    offsets = {name: scale.offset for one in spectra.values() for name, scale in one.scales.items()}
    columns = {  # the smaller offset first, as in Table 3
        f"energy_ratio_{name}": (f"E(A)/E(B) at Δx = {offsets[name]:g} W", ".4f")
        for name in sorted(offsets, key=offsets.__getitem__)
    } | _COLUMNS
    rows = []
    for label, spectrum in spectra.items():
        values = spectrum.summarize()
        cells = (format(values.get(key, math.nan), form) for key, (_, form) in columns.items())
        rows.append([label, *cells])
    return Table(["matrices", *(title for title, _ in columns.values())], rows)
