# Copyright (c) qbheat_det contributors. Apache-2.0.
"""One picture of a whole run: losses, learning rate, AP, norm of the gradients."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qbheat_det.core.files import write_atomically

from .charts import LINE, encode, has_step, list_colors, read_metrics, style_axes

Series = dict[str, tuple[list[float], list[float]]]

_MAX_LINES = 6
_POINTS_WITH_MARKERS = 25
# Spread of the values above which a loss that explodes would hide all the rest.
_LOG_SCALE_FROM = 100.0


@dataclass(frozen=True)
class _Panel:
    title: str
    series: Series
    may_be_log: bool = False


def draw_training_curves(
    metrics_json: str | os.PathLike[str], output_png: str | os.PathLike[str]
) -> bool:
    """Draws what a run's ``metrics.json`` holds, a panel for each kind of figure.

    Where a run was resumed and an iteration stands there twice, the later line counts. Values
    that are not finite are gaps.

    Args:
        metrics_json: one JSON line a log step, as Detectron2 writes it.
        output_png: picture to write; whole or not at all.

    Returns:
        Whether there was something to draw; else no picture is written.

    Raises:
        UserError: the picture cannot be written.
    """
    if not os.path.isfile(metrics_json):
        return False
    panels = [panel for panel in _list_panels(read_metrics(metrics_json)) if panel.series]
    if not panels:
        return False
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(5.6 * columns, 3.1 * rows))
    figure.set_layout_engine("constrained", w_pad=0.16, h_pad=0.16)
    end = max(its[-1] for panel in panels for its, _ in panel.series.values())
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, index + 1)
        _draw_panel(axes, panel)
        axes.set_xlim(0, 1.03 * max(end, 1.0))
    picture = encode(figure, "light", "png")
    write_atomically(output_png, lambda stream: stream.write(picture))
    return True


def collect_series(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Series:
    """Returns iterations, rising, and values of each name that was ever recorded.

    Args:
        records: lines of a ``metrics.json``, in order.
        names: keys to look for.
    """
    series: Series = {}
    for name in names:
        points = {
            int(record["iteration"]): float(record[name])
            for record in records
            if isinstance(record.get(name), int | float) and has_step(record)
        }
        if any(math.isfinite(value) for value in points.values()):
            iterations = sorted(points)
            values = [points[iteration] for iteration in iterations]
            series[name] = (
                [float(iteration) for iteration in iterations],
                [value if math.isfinite(value) else math.nan for value in values],
            )
    return series


def _list_panels(records: Sequence[Mapping[str, Any]]) -> list[_Panel]:
    names = list(dict.fromkeys(name for record in records for name in record))
    # Losses of inner decoder blocks, such as loss_ce_0, repeat those of the last.
    losses = [name for name in names if "loss" in name and not re.search(r"_\d+$", name)]
    losses.sort(key=lambda name: name != "total_loss")
    precision = [name for name in names if re.search(r"/AP(50|75)?$", name)]
    return [
        _Panel("Loss", collect_series(records, losses[:_MAX_LINES]), may_be_log=True),
        _Panel("AP (%)", collect_series(records, precision[:_MAX_LINES])),
        _Panel("Learning rate", collect_series(records, ["lr"])),
        _Panel(
            "Norm of the gradients",
            collect_series(records, ["gradient_norm"]),
            may_be_log=True,
        ),
    ]


def _draw_panel(axes: Axes, panel: _Panel) -> None:
    style_axes(axes, "light")
    colors = list_colors("light")
    for index, (name, (iterations, values)) in enumerate(panel.series.items()):
        few = len(iterations) < _POINTS_WITH_MARKERS
        axes.plot(
            iterations,
            values,
            label=name,
            color=colors[index % len(colors)],
            lw=1.6,
            marker="o" if few else "",
            ms=3.5,
        )
    if len(panel.series) > 1:
        axes.legend(frameon=False, fontsize=8)
    if panel.may_be_log and _is_wide(panel.series):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.set_xlabel("iteration")
    axes.grid(color=LINE["light"])


def _is_wide(series: Series) -> bool:
    """Whether the first line alone spans orders of magnitude and stays above zero."""
    _, values = next(iter(series.values()))
    finite = [value for value in values if math.isfinite(value)]
    return min(finite) > 0 and max(finite) > _LOG_SCALE_FROM * min(finite)
