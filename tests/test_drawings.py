# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The measurements that docs/ draws are those of docs/results.md."""

import re
import runpy
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def read_rows():
    """Returns the cells of all table rows of docs/results.md."""
    text = (DOCS / "results.md").read_text("utf-8")
    rows = re.findall(r"^\| (.+) \|$", text, flags=re.MULTILINE)
    return [[cell.strip("* ") for cell in row.split("|")] for row in rows]


def test_the_first_figure_shows_the_numbers_of_the_results():
    drawing = runpy.run_path(str(DOCS / "draw_minutes.py"))
    measured = drawing["read"]()
    rows = read_rows()
    for run in measured["ours"] + measured["peers"]:
        mean = f"{sum(run['ap50']) / len(run['ap50']):.1f}"
        found = [row for row in rows if mean in row and str(run["minutes"]) in row]
        assert found, run
    for peer in measured["peers"]:
        assert [row for row in rows if row[0] == peer["name"]], peer
    figure = drawing["draw"](measured)
    drawn = {(line.get_xdata()[0], line.get_ydata()[0]) for line in figure.axes[0].lines}
    assert {(peer["minutes"], peer["ap50"][0]) for peer in measured["peers"]} <= drawn
