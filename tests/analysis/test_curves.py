# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Curves of runs: positions by hand, what shares a chart, what a line joins, odd logs."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from qbheat_det.analysis.curves import (
    draw_curves,
    draw_training_curves,
    find_quantities,
    read_series,
    select_curve,
)
from qbheat_det.analysis.figure import FigureOptions
from qbheat_det.analysis.run import Run, open_runs
from qbheat_det.config import get_cfg
from qbheat_det.core.figures import NotApplicable

# Logged every 10 steps. Killed after iteration 29, and resumed from a checkpoint after 19.
RESUMED = [
    {"iteration": 9, "epoch": 0.5, "total_loss": 4.0},
    {"iteration": 19, "epoch": 1.0, "total_loss": 3.0},
    {"iteration": 29, "epoch": 1.5, "total_loss": 9.0},
    {"iteration": 29, "epoch": 1.5, "total_loss": 2.0},
    {"iteration": 34, "epoch": 1.75, "bbox/AP": 12.0},
    {"iteration": 39, "epoch": 2.0, "total_loss": math.inf},
]


def write_run(
    folder: Path, *opts: Any, records: list[dict[str, Any]] | None = None, epochs: int = 2
) -> Run:
    folder.mkdir()
    cfg = get_cfg()
    cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.EPOCHS = 8, float(epochs)
    cfg.OUTPUT_DIR = str(folder)
    cfg.merge_from_list(list(opts))
    (folder / "config.yaml").write_text(cfg.dump())
    records = records or [
        {"iteration": 9, "epoch": 1, "total_loss": 40.0, "lr": 0.1, "bbox/AP": 1.0},
        {"iteration": 10 * epochs - 1, "epoch": epochs, "total_loss": 2.0, "bbox/AP": 5.276},
    ]
    (folder / "metrics.json").write_text("".join(f"{json.dumps(one)}\n" for one in records))
    return Run.open(folder, device="cpu")


@pytest.fixture
def resumed(tmp_path: Path) -> Run:
    return write_run(tmp_path / "resumed", records=RESUMED)


def test_positions_and_values_of_a_resumed_run_are_those_by_hand(resumed: Run) -> None:
    steps = [10, 20, 30, 35, 40]
    assert select_curve(resumed, "iteration", "steps")[0] == steps
    assert select_curve(resumed, "iteration", "images")[0] == [8 * n for n in steps]
    assert select_curve(resumed, "iteration", "epochs")[0] == [0.5, 1.0, 1.5, 1.75, 2.0]

    positions, values = select_curve(resumed, "total_loss", "epochs")
    assert positions == [0.5, 1.0, 1.5, 2.0]
    assert values[:3] == [4.0, 3.0, 2.0]
    assert math.isnan(values[3])
    assert select_curve(resumed, "bbox/AP", "images") == ([280.0], [12.0])
    assert select_curve(resumed, "bbox/AP50", "images") == ([], [])
    odd = [{"iteration": step, "a": 1.0} for step in ("none", math.nan, math.inf, None, 4)]
    assert read_series([*odd, {"a": 3.0}], "a") == ([4.0], [1.0])
    assert read_series([{"iteration": 1, "a": math.nan}], "a") == ([], [])


def test_quantities_leave_out_single_classes_and_inner_blocks() -> None:
    keys = ["lr", "bbox/AP-cat", "bbox/APs", "bbox/AP50", "loss_ce_0", "loss_ce", "knn/top1",
            "total_loss", "data_time", "reconstruction/loss_corner"]  # fmt: skip
    found = find_quantities([{"iteration": 0, "never": math.nan, **dict.fromkeys(keys, 1.0)}])
    assert list(found) == [
        "total_loss", "loss_ce", "reconstruction/loss_corner", "bbox/AP50", "knn/top1", "lr"
    ]  # fmt: skip


def test_each_model_has_its_losses_and_all_share_scores(tmp_path: Path) -> None:
    models = {"a": "QBHeat", "b": "MFDETR", "c": "QBHeat"}
    for name, model in models.items():
        write_run(tmp_path / name, "MODEL.META_ARCHITECTURE", model)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "config.yaml").touch()
    runs = open_runs([str(tmp_path / name) for name in (*models, "none")], device="cpu")
    figure = draw_curves(runs, FigureOptions())
    titles = "Total loss, QBHeat, Total loss, MFDETR, bbox/AP on the test set."
    assert figure.images["all"].caption == titles
    assert figure.data["runs"]["b"]["bbox/AP"] == {"epochs": [1.0, 2.0], "values": [1.0, 5.276]}
    assert [text[:6] for text in figure.data["left_out"]] == ["'none'"]
    row = dict(zip(figure.table.header, figure.table.rows[0], strict=True))
    assert (row["bbox/AP"], row["total_loss"]) == ("5.276", "2")
    with pytest.raises(NotApplicable):
        draw_curves(runs[-1:], FigureOptions())
    assert draw_curves(runs[:1], FigureOptions(), axis="images").data["axis"] == "images"


def test_the_image_of_one_run_is_written_if_it_logged_something(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for content in ("", '{"iteration": 1, "tot', '{"iteration": 1, "lr": "x"}\n'):
        (tmp_path / "metrics.json").write_text(content)
        assert not draw_training_curves(tmp_path / "metrics.json", tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()
    assert draw_training_curves(run.path / "metrics.json", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000
