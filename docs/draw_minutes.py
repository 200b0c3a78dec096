# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Draws docs/minutes.svg: AP50 on aquarium over CPU minutes, from docs/minutes.json.

usage: python -m docs.draw_minutes

The measurements and their conditions are in docs/results.md.
"""

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from qbheat_det.analysis.plotting import AXIS_COLOR, LINE_COLORS, chart_image, start_chart, themed

DOCS = Path(__file__).parent
MEASURED = DOCS / "minutes.json"
DRAWING = DOCS / "minutes.svg"


def read() -> dict[str, Any]:
    """Returns the measurements: "ours" and "peers", each with "name", "minutes" and "ap50"."""
    content: dict[str, Any] = json.loads(MEASURED.read_text("utf-8"))
    return content


@themed
def draw(measured: dict[str, Any]) -> Figure:
    """Draws a line of our runs and a point for each peer. Several seeds have a range."""
    figure, axes = start_chart(height=3.4)
    minutes = [run["minutes"] for run in measured["ours"]]
    means = [sum(run["ap50"]) / len(run["ap50"]) for run in measured["ours"]]
    below = [mean - min(run["ap50"]) for mean, run in zip(means, measured["ours"], strict=True)]
    above = [max(run["ap50"]) - mean for mean, run in zip(means, measured["ours"], strict=True)]
    axes.errorbar(minutes, means, (below, above), color=LINE_COLORS[0], marker="o", capsize=3)
    for run, x, y in zip(measured["ours"], minutes, means, strict=True):
        text = f"{y:.0f}  {run['name']}"
        axes.annotate(
            text, (x, y), (0, -16), textcoords="offset points", color=LINE_COLORS[0], ha="left"
        )
    for peer in measured["peers"]:
        (y,) = peer["ap50"]
        axes.plot(peer["minutes"], y, marker="s", color=AXIS_COLOR, linestyle="")
        if y > 10:
            axes.annotate(
                f"{y:.0f}  {peer['name']}",
                (peer["minutes"], y),
                (0, -16),
                textcoords="offset points",
                color=AXIS_COLOR,
            )
    low = [peer for peer in measured["peers"] if peer["ap50"][0] <= 10]
    first = min(low, key=lambda peer: peer["minutes"])
    axes.annotate(
        "torchvision's and Detectron2's detectors, YOLO26-n from random weights",
        (first["minutes"], 4),
        (-90, 8),
        textcoords="offset points",
        color=AXIS_COLOR,
    )
    axes.set_xlim(0, 70)
    axes.set_ylim(-3, 80)
    axes.set_xlabel("minutes of one CPU core")
    axes.set_ylabel("AP50 (%)")
    return figure


def main() -> None:
    image = chart_image(draw(read()), caption="AP50 on aquarium over CPU minutes")
    DRAWING.write_bytes(image.content)


if __name__ == "__main__":
    main()
