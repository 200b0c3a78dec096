# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The spectrum of the linear models of QB-Heat as one chart, after Fig. 7 of arXiv:2211.13228."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .charts import INK, LINE, Format, Theme, encode, list_colors, style_axes
from .spectrum import NAMES, Spectrum

_WIDTH, _HEIGHT = 3.6, 3.4  # inches of a panel


def plot_spectrum(
    spectrum: Spectrum,
    control: Spectrum | None = None,
    *,
    theme: Theme = "light",
    format: Format = "svg",
) -> bytes:
    """Draws the magnitudes of all eigenvalues at each scale, and those of one scale by the other.

    Args:
        spectrum: of the learned matrices.
        control: of untrained ones; drawn in grey.
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
        _draw_magnitudes(axes, spectrum, control, scale, theme)
    if len(spectrum.scales) == 2:
        _draw_across_scales(figure.add_subplot(1, panels, panels), spectrum, control, theme)
    return encode(figure, theme, format)


def _draw_magnitudes(
    axes: Axes, spectrum: Spectrum, control: Spectrum | None, scale: str, theme: Theme
) -> None:
    style_axes(axes, theme)
    figures = spectrum.scales[scale]
    if control is not None:
        for index, matrix in enumerate(control.scales[scale].matrices.values()):
            label = "" if index else "rotated at random"
            axes.plot(matrix.magnitudes.tolist(), color=list_colors(theme)[-1], lw=0.9, label=label)
    for name, color in zip(NAMES, list_colors(theme), strict=False):
        magnitudes = figures.matrices[name].magnitudes.tolist()
        axes.plot(magnitudes, color=color, lw=1.6, label=name)
    axes.set_title(f"{scale}, Δx = {figures.offset:g} W", fontsize=10, loc="left")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("eigenvalue, by magnitude")
    axes.set_ylabel("|eigenvalue| of A, B")
    axes.grid(color=LINE[theme])
    axes.legend(frameon=False, labelcolor=INK[theme], fontsize=8, loc="upper right")


def _draw_across_scales(
    axes: Axes, spectrum: Spectrum, control: Spectrum | None, theme: Theme
) -> None:
    style_axes(axes, theme)
    first, second = spectrum.scales
    colors = list_colors(theme)
    lines = [(spectrum, name, color) for name, color in zip(NAMES, colors, strict=False)]
    if control is not None:
        lines = [(control, name, colors[-1]) for name in NAMES] + lines
    drawn = False
    for source, name, color in lines:
        x, y = (scale.matrices[name].magnitudes for scale in source.scales.values())
        if float(x.sum()) and float(y.sum()):
            axes.plot((x / x.sum()).tolist(), (y / y.sum()).tolist(), ".", color=color, ms=2.5)
            drawn = True
    if drawn:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.tick_params(which="minor", length=0)
        axes.axline((1e-3, 1e-3), (1e-2, 1e-2), color=INK[theme], lw=0.8)  # where they agree
    axes.set_title("the scales against each other", fontsize=10, loc="left")
    axes.set_xlabel(f"{first}: share of its energy")
    axes.set_ylabel(f"{second}: share of its energy")
    axes.grid(color=LINE[theme])
