# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The picture at the end of a run: what is drawn, and that odd runs do not break it."""

import json
import math
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from matplotlib.axes import Axes

from qbheat_det.analysis.charts import read_metrics
from qbheat_det.analysis.training_curves import collect_series, draw_training_curves


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def make_records(count: int) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = [
        {
            "iteration": 20 * index + 19,
            "total_loss": 3 / (index + 1),
            "loss_ce": 1 / (index + 1),
            "loss_ce_0": 1.0,
            "lr": 1e-4,
            "gradient_norm": 5.0,
        }
        for index in range(count)
    ]
    records[-1] |= {"bbox/AP": 12.0, "bbox/AP50": 30.0, "bbox/AP-cat": 9.0}
    return records


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Names of the lines by title of their panel."""
    panels: dict[str, set[str]] = {}
    original = Axes.set_title

    def note(axes: Axes, title: str, **keywords: Any) -> Any:
        panels[title] = {str(line.get_label()) for line in axes.get_lines()}
        return original(axes, title, **keywords)

    monkeypatch.setattr(Axes, "set_title", note)
    return panels


def test_each_kind_of_figure_has_its_panel(tmp_path: Path, drawn: dict[str, set[str]]) -> None:
    picture = tmp_path / "curves.png"
    assert draw_training_curves(write(tmp_path / "metrics.json", make_records(30)), picture)
    assert drawn == {
        "Loss": {"total_loss", "loss_ce"},
        "AP (%)": {"bbox/AP", "bbox/AP50"},
        "Learning rate": {"lr"},
        "Norm of the gradients": {"gradient_norm"},
    }
    pixels = cv2.imread(str(picture))
    assert min(pixels.shape[:2]) > 400
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50
    assert sorted(file.name for file in tmp_path.iterdir()) == ["curves.png", "metrics.json"]


def test_of_an_iteration_written_twice_the_later_line_counts(tmp_path: Path) -> None:
    path = write(
        tmp_path / "metrics.json",
        [
            {"iteration": 1, "lr": 1.0},
            {"iteration": 3, "lr": 3.0},
            {"iteration": 5, "lr": 5.0},
            {"iteration": 3, "lr": 30.0},
        ],
    )
    assert collect_series(read_metrics(path), ["lr"]) == {"lr": ([1, 3, 5], [1, 30, 5])}


def test_values_that_are_not_finite_are_gaps_and_never_seen_ones_no_line(tmp_path: Path) -> None:
    records = [
        {"iteration": 1, "loss_a": math.inf, "loss_b": math.nan},
        {"iteration": 3, "loss_a": 2.0, "loss_b": math.inf},
    ]
    series = collect_series(records, ["loss_a", "loss_b", "loss_c"])
    assert list(series) == ["loss_a"]
    assert math.isnan(series["loss_a"][1][0])
    assert draw_training_curves(write(tmp_path / "m.json", records), tmp_path / "curves.png")


@pytest.mark.parametrize(
    "content", ["", '{"iteration": 1, "tot', '{"iteration": 1}\n', '{"iteration": 1, "lr": "x"}\n']
)
def test_where_nothing_was_recorded_no_picture_is_written(tmp_path: Path, content: str) -> None:
    (tmp_path / "metrics.json").write_text(content)
    assert not draw_training_curves(tmp_path / "metrics.json", tmp_path / "curves.png")
    assert not draw_training_curves(tmp_path / "missing.json", tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


def test_a_run_of_a_single_line_is_drawn(tmp_path: Path, drawn: dict[str, set[str]]) -> None:
    path = write(tmp_path / "metrics.json", [{"iteration": 0, "total_loss": 1.0}])
    assert draw_training_curves(path, tmp_path / "curves.png")
    assert drawn == {"Loss": {"total_loss"}}
