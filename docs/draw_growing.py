# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Draws docs/growing_ap50.svg: AP50 of old and new classes before and after classes are added.

usage: python -m docs.draw_growing output/growing/cells/cells.json [MORE.json …]

The files are those that ``python -m benchmarks.growing`` writes. There is a panel for each of them.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.growing import CASES, mean_of
from qbheat_det.analysis import plotting
from qbheat_det.core.files import write_atomically

ROOT = Path(__file__).resolve().parents[1]
TITLES = {
    "cells": "blood cells: WBC added to RBC, Platelets",
    "aquarium": "aquarium: 3 classes added to 4",
}
LABELS = {
    "old": "before",
    "plain": "new images,\nnothing is kept",
    "joined": "new images,\na second head",
    "kept": "new images,\n--keep-classes",
    "both": "new and old images,\n--keep-classes",
    "joint": "all images,\nall labels",
}
"""The text below the bars of a cell."""
_WIDTH = 0.38  # of a bar


def main(argv: Sequence[str] | None = None) -> None:
    """Draws the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    args = parser.parse_args(argv)
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in args.files]
    target = ROOT / "docs" / "growing_ap50.svg"
    write_atomically(target, plotting.chart_image(draw(contents)).content)
    print(target)


@plotting.themed
def draw(contents: Sequence[dict[str, Any]]) -> Figure:
    """Draws the mean of AP50 over seeds as bars, with their range."""
    figure = plotting.start_figure(height=3.0 * len(contents), width=8.0)
    panels = figure.subplots(len(contents), 1, squeeze=False)[:, 0]
    for axes, content in zip(panels, contents, strict=True):
        case = CASES[content["case"]]
        names = [name for name in LABELS if any(e["cell"] == name for e in content["cells"])]
        groups = {"old classes": case.old, "new classes": case.new}
        for number, (label, classes) in enumerate(groups.items()):
            means = []
            below = []
            above = []
            for name in names:
                values = [mean_of(e, classes) for e in content["cells"] if e["cell"] == name]
                means.append(statistics.fmean(values))
                below.append(means[-1] - min(values))
                above.append(max(values) - means[-1])
            bars = axes.bar(
                [position + (number - 0.5) * _WIDTH for position in range(len(names))],
                means,
                _WIDTH,
                yerr=[below, above],
                label=label,
                color=plotting.LINE_COLORS[number],
            )
            axes.bar_label(bars, fmt="%.1f", fontsize=8, padding=2)
        axes.set_xticks(range(len(names)), [LABELS[name] for name in names], fontsize=8)
        axes.set_ylim(0, 110)
        axes.set_ylabel("AP50")
        axes.set_title(TITLES[content["case"]], loc="left", fontsize=9)
        axes.grid(visible=False, axis="x")
    plotting.add_legend(figure, *panels)
    return figure


if __name__ == "__main__":
    main()
