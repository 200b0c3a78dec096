# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The measurements that docs/ draws are those of the tables in its pages."""

import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.fixture(scope="module")
def drawing():
    return runpy.run_path(str(DOCS / "draw_results.py"))


def read_rows(page):
    """Returns the cells of all table rows of a page."""
    text = (DOCS / page).read_text("utf-8")
    rows = re.findall(r"^\| (.+) \|$", text, flags=re.MULTILINE)
    return [[cell.replace("`", "").strip("* ") for cell in row.split("|")] for row in rows]


def test_minutes_and_epochs_are_those_of_the_results(drawing):
    measured = drawing["read"]()
    rows = read_rows("results.md")
    minutes = measured["minutes"]
    for run in minutes["ours"] + minutes["peers"]:
        mean = f"{sum(run['ap50']) / len(run['ap50']):.1f}"
        assert [row for row in rows if mean in row and str(run["minutes"]) in row], run
    for peer in minutes["peers"]:
        assert [row for row in rows if row[0] == peer["name"]], peer
    figure = drawing["draw_minutes"](minutes)
    drawn = {(line.get_xdata()[0], line.get_ydata()[0]) for line in figure.axes[0].lines}
    assert {(peer["minutes"], peer["ap50"][0]) for peer in minutes["peers"]} <= drawn
    epochs = measured["epochs"]
    assert ["AP50", *(f"{value:.1f}" for value in epochs["ap50"])] in rows
    assert [*map(str, epochs["epochs"])] in [row[1:] for row in rows]


def test_latencies_are_those_of_the_page(drawing):
    rows = read_rows("performance.md")
    seconds = drawing["read"]()["latency"]["seconds"]
    for name, value in seconds:
        assert [name, f"{value:g}"] in [row[:2] for row in rows]
    bars = drawing["draw_latency"]({"seconds": seconds}).axes[0].patches
    assert [bar.get_width() for bar in bars] == [value for _, value in seconds]


def test_speeds_are_those_of_the_page(drawing):
    rows = {row[0]: row for row in read_rows("performance.md")}
    speed = drawing["read"]()["speed"]
    for side, ms, ap50 in zip(speed["sides"], speed["ms"], speed["ap50"], strict=True):
        assert rows[str(side)][2:4] == [f"{ap50:g}", f"{ms} ms"]
    for name, ms in speed["peers"]:
        assert rows[name][3] == f"{ms} ms"
    line, *peers = drawing["draw_speed"](speed).axes[0].lines
    assert [*line.get_ydata()] == speed["ap50"]
    assert [peer.get_xdata()[0] for peer in peers] == [ms for _, ms in speed["peers"]]


def test_each_drawing_is_committed(drawing):
    assert drawing["DRAWINGS"].keys() == drawing["read"]().keys()
    for name in drawing["DRAWINGS"]:
        assert (DOCS / f"{name}.svg").read_text("utf-8").rstrip().endswith("</svg>")
