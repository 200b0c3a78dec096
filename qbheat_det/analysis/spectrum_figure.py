# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Figure "spectrum": eigenvalues of the linear models of QB-Heat beside two controls.

Paper: QB-Heat, arXiv:2211.13228, Table 3 and Fig. 7.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from detectron2.config import CfgNode
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Chart
from torch import nn
from tqdm import tqdm

from qbheat_det.checkpoint import info_of
from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import (
    Figure,
    Image,
    NotApplicable,
    Table,
    register_figure,
)
from qbheat_det.modeling.contracts import get_linear_models

from .figure import FigureOptions, run_each
from .linear_models import (
    NAMES,
    draw_random_models,
    list_checkpoints,
    list_linear_models,
    read_linear_models,
    rotate_models,
)
from .plotting import (
    COLORS,
    INK,
    QUIET,
    chart_image,
    list_styles,
    start_chart,
    start_figure,
    themed,
    to_text,
)
from .run import Run
from .spectrum import Spectrum, describe_models

logger = logging.getLogger(__name__)

_EXPLANATION = (
    "Eigenvalues of A and B, which propagate features by z(x + Δx) = (I + Δx A) z(x), at both "
    "scales; each scale's magnitudes, divided by their sum, against the other's, where the paper "
    "(Fig. 7) finds the diagonal.",
    "Random matrices of the same size also lie on the diagonal and have E(A)/E(B) near 1 (Table "
    "3): only what differs from them was learned. What rotated matrices, with the learned singular "
    "values, share with the learned ones is due to size and rank.",
    "The commutator ‖AB - BA‖ / (‖A‖‖B‖) is 0 where the order of right and down makes no "
    "difference (Eq. 3), the inverse error 0 where left undoes right. Of several matrices the "
    "table has the smallest rank, the largest condition number, and the mean of everything else.",
)


@dataclass(frozen=True)
class RunSpectra:
    """Of one run: learned, controls, spectra by steps (rising), steps an epoch (nan if unknown)."""

    learned: Spectrum
    controls: Mapping[str, Spectrum]
    course: Sequence[tuple[int, Spectrum]]
    epoch: float
    left_out: Sequence[str]

    def rows(self, label: str) -> dict[str, Spectrum]:
        """Returns the rows of the table."""
        unit, size = ("step", 1.0) if math.isnan(self.epoch) else ("epoch", self.epoch)
        earlier = {
            f"{label}, {unit} {steps / size:,.4g}": spectrum
            for steps, spectrum in self.course
            if spectrum is not self.learned
        }
        controls = {f"{label}, {name}": spectrum for name, spectrum in self.controls.items()}
        return {**earlier, label: self.learned, **controls}


@register_figure("spectrum")
def draw_spectrum(runs: Sequence[Run], options: FigureOptions, *, checkpoints: int = 5) -> Figure:
    """Draws the spectra of each run, with so many of its ``checkpoints`` as rows of Table 3."""
    results = run_each(
        runs, lambda run: _compute(run, options.seed, checkpoints), nothing="no spectrum"
    )
    images: dict[str, Image] = {}
    courses = {label: one for label, one in results.found.items() if len(one.course) > 1}
    if courses:
        images["energy_ratios"] = _draw_courses(courses)
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
    left_out = list(results.left_out)
    rows: dict[str, Spectrum] = {}
    for label, one in results.found.items():
        left_out += one.left_out
        rows |= one.rows(label)
    return Figure(
        name="spectrum",
        title="Spectrum of the linear models",
        explanation=[*_EXPLANATION, *(f"Left out: {reason}." for reason in left_out)],
        images=images,
        data={
            "runs": {label: _list_numbers(one) for label, one in results.found.items()},
            "left_out": left_out,
        },
        table=_tabulate(rows),
    )


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
    return Figure(
        "spectrum",
        "Spectrum of the linear models",
        images={"magnitudes": chart_image(chart, alt="Magnitudes of eigenvalues", format="png")},
        data={"learned": asdict(learned), "rotated": control.summarize()},
        scalars={
            **_list_scalars(learned, "spectrum"),
            **_list_scalars(control, "spectrum_control"),
        },
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
                axes.plot(matrix.magnitudes, dash, color=color, lw=0.9)
            axes.plot([], [], dash, color=color, lw=0.9, label=control)
        for key, color in zip(NAMES, COLORS, strict=False):
            axes.plot(scale.matrices[key].magnitudes, color=color, label=key)
        axes.set_yscale("log")
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
        x, y = (scale.matrices[name].magnitudes for scale in spectrum.scales.values())
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


def _compute(run: Run, seed: int, number: int) -> RunSpectra:
    models = read_linear_models(run.weights, run.label)
    learned = describe_models(models)
    course: list[tuple[int, Spectrum]] = []
    left_out: list[str] = []
    epoch = math.nan
    if run.folder is not None and number:
        found = list_checkpoints(run.folder, number)
        for steps, path in tqdm(found.items(), desc=f"spectra of {run.label}", leave=False):
            if path.resolve() == run.weights.resolve():
                continue
            try:
                course.append((steps, describe_models(read_linear_models(path, run.label))))
            except (NotApplicable, UserError) as reason:  # such as one that is being written
                left_out.append(f"step {steps:,} of '{run.label}': {reason}")
        try:
            solver = run.cfg.SOLVER
            epoch = solver.MAX_ITER / solver.EPOCHS if solver.EPOCHS else math.nan
        except UserError as error:
            left_out.append(f"epochs of '{run.label}': {error}")
    info = info_of(str(run.weights))
    if info is not None and info.iteration:
        course.append((info.iteration + 1, learned))
    for text in left_out:
        logger.warning("left out: %s", text)
    controls = {
        "rotated": describe_models(rotate_models(models, seed)),
        "random": describe_models(draw_random_models(models, seed)),
    }
    return RunSpectra(learned, controls, course, epoch, left_out)


@themed
def _draw_courses(courses: Mapping[str, RunSpectra]) -> Image:
    """Draws E(A)/E(B) over training, the columns of Table 3."""
    in_epochs = not any(math.isnan(one.epoch) for one in courses.values())
    figure, axes = start_chart(height=3.4)
    lines = [(label, one, scale) for label, one in courses.items() for scale in one.learned.scales]
    for (label, one, scale), style in zip(lines, list_styles(len(lines)), strict=True):
        x = [steps / one.epoch if in_epochs else steps for steps, _ in one.course]
        y = [spectrum.scales[scale].energy_ratio for _, spectrum in one.course]
        axes.plot(x, y, label=to_text(f"{label}, {scale}"), **style)
    axes.axhline(1, color=INK, lw=0.8)
    axes.set_title("Energy of A over that of B")
    axes.set_xlabel("epochs" if in_epochs else "steps")
    axes.set_ylabel("E(A) / E(B)")
    axes.legend()
    return chart_image(figure, caption="E(A)/E(B) over training, the columns of Table 3.")


def _list_numbers(one: RunSpectra) -> dict[str, Any]:
    spectra = {"learned": one.learned, **one.controls}
    return {
        **asdict(one.learned),
        "summary": {name: spectrum.summarize() for name, spectrum in spectra.items()},
        "course": [{"steps": steps, **spectrum.summarize()} for steps, spectrum in one.course],
    }


def _list_scalars(spectrum: Spectrum, prefix: str) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in spectrum.summarize().items()}


def _tabulate(spectra: Mapping[str, Spectrum]) -> Table:
    offsets = {name: scale.offset for one in spectra.values() for name, scale in one.scales.items()}
    ratios = {  # the smaller offset first, as in Table 3
        f"energy_ratio_{name}": (f"E(A)/E(B) at Δx = {offsets[name]:g} W", ".4f")
        for name in sorted(offsets, key=offsets.__getitem__)
    }
    columns = ratios | {
        "correlation": ("correlation of the scales' spectra", ".4f"),
        "cosine": ("cosine of the scales' matrices", ".3f"),
        "rank": ("rank", ".0f"),
        "effective_rank": ("effective rank", ".1f"),
        "condition": ("condition of I + M", ".3g"),
        "commutator": ("commutator", ".3f"),
        "inverse_error": ("inverse error", ".3f"),
    }
    rows = []
    for label, spectrum in spectra.items():
        values = spectrum.summarize()
        cells = (format(values.get(key, math.nan), form) for key, (_, form) in columns.items())
        rows.append([label, *cells])
    return Table(["matrices", *(title for title, _ in columns.values())], rows)
