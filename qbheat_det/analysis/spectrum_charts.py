# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The spectrum of the linear models of QB-Heat as charts, after Fig. 7 of arXiv:2211.13228."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .charts import (
    INK,
    LINE,
    Format,
    Theme,
    encode,
    list_colors,
    list_styles,
    start_figure,
    style_axes,
    to_text,
)
from .spectrum import NAMES, Spectrum

_WIDTH, _HEIGHT = 3.6, 3.4  # inches of a panel


def plot_spectrum(
    spectrum: Spectrum,
    control: Spectrum | None = None,
    *,
    untrained: Spectrum | None = None,
    theme: Theme = "light",
    format: Format = "svg",
) -> bytes:
    """Draws the magnitudes of all eigenvalues at each scale, and those of one scale by the other.

    Args:
        spectrum: of the learned matrices.
        control: of rotated ones; drawn in grey.
        untrained: of random ones of the same size; dotted.
        theme: of the page.
        format: of the file.
    """
    panels = len(spectrum.scales) + (len(spectrum.scales) == 2)
    figure = Figure(figsize=(_WIDTH * panels, _HEIGHT))
    # By hand: looking for a layout would take longer than all of the drawing.
    width = _WIDTH * panels
    figure.subplots_adjust(
        left=0.55 / width, right=1 - 0.12 / width, bottom=0.16, top=0.91, wspace=0.24
    )
    for index, scale in enumerate(spectrum.scales):
        axes = figure.add_subplot(1, panels, index + 1)
        _draw_magnitudes(axes, spectrum, _list_controls(control, untrained, theme), scale, theme)
    if len(spectrum.scales) == 2:
        controls = _list_controls(control, untrained, theme)
        _draw_across_scales(figure.add_subplot(1, panels, panels), spectrum, controls, theme)
    return encode(figure, theme, format)


def plot_eigenvalues(
    spectrum: Spectrum, *, theme: Theme = "light", format: Format = "svg"
) -> bytes:
    """Draws all eigenvalues of A and B in the complex plane, a panel for each scale.

    Right of the upright line at 0 a direction grows as it is carried on; above and below the level
    line it turns.

    Args:
        spectrum: of the learned matrices.
        theme: of the page.
        format: of the file.
    """
    width = _WIDTH * len(spectrum.scales)
    figure = Figure(figsize=(width, _HEIGHT + 0.3))
    figure.subplots_adjust(
        left=0.65 / width, right=1 - 0.12 / width, bottom=0.15, top=0.92, wspace=0.28
    )
    for index, (scale, figures) in enumerate(spectrum.scales.items()):
        axes = figure.add_subplot(1, len(spectrum.scales), index + 1)
        style_axes(axes, theme)
        for name, color in zip(NAMES, list_colors(theme), strict=False):
            values = figures.matrices[name].eigenvalues
            axes.plot(values.real, values.imag, ".", color=color, ms=3, label=name, rasterized=True)
        axes.axvline(0, color=INK[theme], lw=0.8)
        axes.axhline(0, color=INK[theme], lw=0.8)
        axes.set_aspect("equal", adjustable="datalim")
        axes.set_title(
            f"{scale}, Δx = {figures.offset:g} W", fontsize=10, loc="left", color=INK[theme]
        )
        axes.set_xlabel("real part, per side of the image")
        axes.set_ylabel("imaginary part")
        axes.grid(color=LINE[theme])
        axes.legend(frameon=False, labelcolor=INK[theme], fontsize=8, markerscale=2)
    return encode(figure, theme, format)


def plot_energy_ratios(
    ratios: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    x_label: str,
    theme: Theme = "light",
    format: Format = "svg",
) -> bytes:
    """Draws E(A)/E(B) over the course of training, the columns of Table 3 as lines.

    Args:
        ratios: for each line how far training was, and the ratio; nan is a gap.
        x_label: what says how far training was.
        theme: of the page.
        format: of the file.
    """
    figure, axes = start_figure(theme, height=3.4)
    for (name, (x, y)), style in zip(ratios.items(), list_styles(theme, len(ratios)), strict=True):
        axes.plot(x, y, label=to_text(name), lw=1.6, ms=4.5, **style)
    axes.axhline(1, color=INK[theme], lw=0.8)
    axes.set_title("Energy of A over that of B", fontsize=10, loc="left", color=INK[theme])
    axes.set_xlabel(x_label)
    axes.set_ylabel("E(A) / E(B)")
    axes.grid(color=LINE[theme])
    axes.legend(frameon=False, labelcolor=INK[theme], fontsize=8)
    return encode(figure, theme, format)


@dataclass(frozen=True)
class _Control:
    """A spectrum to compare with, and how its lines are drawn."""

    spectrum: Spectrum
    label: str
    color: str
    dash: str


def _list_controls(
    rotated: Spectrum | None, untrained: Spectrum | None, theme: Theme
) -> list[_Control]:
    found = []
    if untrained is not None:
        found.append(_Control(untrained, "untrained", INK[theme], ":"))
    if rotated is not None:
        found.append(_Control(rotated, "rotated at random", list_colors(theme)[-1], "-"))
    return found


def _draw_magnitudes(
    axes: Axes, spectrum: Spectrum, controls: Sequence[_Control], scale: str, theme: Theme
) -> None:
    style_axes(axes, theme)
    figures = spectrum.scales[scale]
    for control in controls:
        for index, matrix in enumerate(control.spectrum.scales[scale].matrices.values()):
            label = "" if index else control.label
            axes.plot(
                matrix.magnitudes.tolist(), control.dash, label=label, color=control.color, lw=0.9
            )
    for name, color in zip(NAMES, list_colors(theme), strict=False):
        magnitudes = figures.matrices[name].magnitudes.tolist()
        axes.plot(magnitudes, color=color, lw=1.6, label=name)
    axes.set_title(f"{scale}, Δx = {figures.offset:g} W", fontsize=10, loc="left", color=INK[theme])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("eigenvalue, by magnitude")
    axes.set_ylabel("|eigenvalue| of A, B")
    axes.grid(color=LINE[theme])
    axes.legend(frameon=False, labelcolor=INK[theme], fontsize=8, loc="upper right")


def _draw_across_scales(
    axes: Axes, spectrum: Spectrum, controls: Sequence[_Control], theme: Theme
) -> None:
    style_axes(axes, theme)
    first, second = spectrum.scales
    points = [
        (control.spectrum, name, control.color, 1.5) for control in controls for name in NAMES
    ]
    colors = zip(NAMES, list_colors(theme), strict=False)
    points += [(spectrum, name, color, 2.5) for name, color in colors]
    drawn = False
    for source, name, color, size in points:
        x, y = (scale.matrices[name].magnitudes for scale in source.scales.values())
        if float(x.sum()) and float(y.sum()):
            # As pixels: thousands of points would be most of the file.
            axes.plot(x / x.sum(), y / y.sum(), ".", ms=size, rasterized=True, color=color)
            drawn = True
    if drawn:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.tick_params(which="minor", length=0)
        axes.axline((1e-3, 1e-3), (1e-2, 1e-2), color=INK[theme], lw=0.8)  # where they agree
    axes.set_title("the scales against each other", fontsize=10, loc="left", color=INK[theme])
    axes.set_xlabel(f"{first}: share of its energy")
    axes.set_ylabel(f"{second}: share of its energy")
    axes.grid(color=LINE[theme])
