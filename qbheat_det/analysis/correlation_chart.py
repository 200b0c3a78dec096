# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Histograms of spatial correlation over images, after Fig. 12 of arXiv:2211.13228.

The paper counts images; here, shares of them stand along y, so that sets of different sizes
compare. Untrained encoders are grey and dashed.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from matplotlib.markers import CARETUPBASE

from .charts import INK, LINE, Format, Theme, encode, list_colors, start_figure, to_text

_BINS = 24
_STYLES = ("-", "--", "-.", ":")


def plot_correlations(
    values: Mapping[str, Sequence[float]],
    map_name: str = "",
    *,
    controls: Collection[str] = (),
    theme: Theme = "light",
    format: Format = "svg",
) -> bytes:
    """Draws a histogram for each subject over common bins, and a mark at its mean.

    Args:
        values: spatial correlation of each image, in [0, 1], by subject; one subject or more.
        map_name: of the map, for the title.
        controls: those subjects that are not trained.
        theme: of the page.
        format: of the file.
    """
    figure, axes = start_figure(theme, height=3.4 + 0.2 * len(values))
    everything = np.concatenate([np.asarray(found) for found in values.values()])
    edges = np.histogram_bin_edges(everything, bins=_BINS)
    *colors, grey = list_colors(theme)
    trained = itertools.cycle(itertools.product(_STYLES, colors))  # dashed once colours are taken
    controlled = itertools.cycle(_STYLES[1:])
    for name, found in values.items():
        style, color = (next(controlled), grey) if name in controls else next(trained)
        counts, _ = np.histogram(found, bins=edges)
        shares = 100 * counts / max(1, len(found))
        mean = float(np.mean(found))
        label = f"{to_text(name)}: mean {mean:.3f}, {len(found):,} images"
        axes.stairs(shares, edges, color=color, ls=style, lw=1.8, label=label)
        # Its base on the axis: centred there, it would cover the numbers below.
        axes.plot([mean], [0], marker=CARETUPBASE, ms=8, color=color, ls="none", zorder=3)
    # Below the axes, since a histogram fills them wherever it likes.
    figure.legend(loc="outside lower center", frameon=False, labelcolor=INK[theme], fontsize=8)
    axes.set_ylim(bottom=0)
    title = f"Spatial correlation of the map {map_name}" if map_name else "Spatial correlation"
    axes.set_title(title, fontsize=10, loc="left", color=INK[theme])
    axes.set_xlabel("mean |correlation| between two positions (0: unrelated, 1: the same)")
    axes.set_ylabel("images (%)")
    axes.grid(color=LINE[theme])
    return encode(figure, theme, format)
