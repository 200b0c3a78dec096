# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Draws the SVG files of docs/minutes, epochs, latency and speed, from docs/results.json.

usage: python -m docs.draw_results

The measurements and their conditions are in docs/results.md and docs/performance.md.
"""

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from qbheat_det.analysis.plotting import AXIS_COLOR, LINE_COLORS, chart_image, start_chart, themed

DOCS = Path(__file__).parent
MEASURED = DOCS / "results.json"


def read() -> dict[str, Any]:
    """Returns the measurements of each drawing, by its name."""
    content: dict[str, Any] = json.loads(MEASURED.read_text("utf-8"))
    return content


@themed
def draw_minutes(measured: dict[str, Any]) -> Figure:
    """Draws AP50 over CPU minutes: a line of our runs, and a point for each peer.

    "ours" and "peers" have "name", "minutes" and the "ap50" of each seed. Seeds have a range.
    """
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
        (-150, 8),
        textcoords="offset points",
        color=AXIS_COLOR,
    )
    axes.set_xlim(0, 50)
    axes.set_ylim(-3, 80)
    axes.set_xlabel("minutes of one CPU core")
    axes.set_ylabel("AP50 (%)")
    return figure


@themed
def draw_epochs(measured: dict[str, Any]) -> Figure:
    """Draws AP50 over epochs."""
    figure, axes = start_chart(height=2.6)
    axes.plot(measured["epochs"], measured["ap50"], color=LINE_COLORS[0], marker="o")
    for epoch, ap50 in zip(measured["epochs"], measured["ap50"], strict=True):
        axes.annotate(f"{ap50:g}", (epoch, ap50), (0, -14), textcoords="offset points")
    axes.set_xlim(0, 20)
    axes.set_ylim(0, 80)
    axes.set_xlabel("epochs")
    axes.set_ylabel("AP50 (%)")
    return figure


@themed
def draw_latency(measured: dict[str, Any]) -> Figure:
    """Draws a bar of the seconds for an image, for each model and its form."""
    names = [name for name, _ in measured["seconds"]]
    seconds = [value for _, value in measured["seconds"]]
    colors = [LINE_COLORS[0] if name.startswith("MF-DETR") else AXIS_COLOR for name in names]
    figure, axes = start_chart(height=3.2)
    bars = axes.barh(names, seconds, color=colors)
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("seconds for an image")
    return figure


@themed
def draw_speed(measured: dict[str, Any]) -> Figure:
    """Draws AP50 over the milliseconds for an image at each size, and the times of peers."""
    figure, axes = start_chart(height=2.8)
    axes.plot(measured["ms"], measured["ap50"], color=LINE_COLORS[0], marker="o")
    for side, x, y in zip(measured["sides"], measured["ms"], measured["ap50"], strict=True):
        axes.annotate(
            f"{y:g} at {side} pixels",
            (x, y),
            (0, 10),
            textcoords="offset points",
            color=LINE_COLORS[0],
            ha="right" if side == min(measured["sides"]) else "left",
        )
    for row, (name, x) in enumerate(measured["peers"]):
        axes.axvline(x, color=AXIS_COLOR, linestyle=":")
        axes.annotate(f" {name}", (x, 57 - 5 * row), color=AXIS_COLOR)
    axes.set_xlim(0, 60)
    axes.set_ylim(50, 85)
    axes.set_xlabel("milliseconds for an image")
    axes.set_ylabel("AP50 (%)")
    return figure


DRAWINGS = {
    "minutes": draw_minutes,
    "epochs": draw_epochs,
    "latency": draw_latency,
    "speed": draw_speed,
}


def main() -> None:
    measured = read()
    for name, draw in DRAWINGS.items():
        image = chart_image(draw(measured[name]), caption=name)
        (DOCS / f"{name}.svg").write_bytes(image.content)


if __name__ == "__main__":
    main()
