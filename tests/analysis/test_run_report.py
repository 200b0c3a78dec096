# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What a run's report says, from figures known in advance."""

import json
import math
from pathlib import Path

import pytest

from qbheat_det.analysis.run_report import Run, describe_run, format_duration
from qbheat_det.config import get_cfg


def _run(output: Path, metrics: dict[str, float]) -> Run:
    cfg = get_cfg()
    cfg.OUTPUT_DIR = str(output)
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("some_train",), ("some_val",)
    cfg.SOLVER.MAX_ITER, cfg.SOLVER.IMS_PER_BATCH = 1500, 16
    return Run(
        cfg=cfg,
        config_file="configs/some.yaml",
        metrics=metrics,
        seconds=372,
        num_parameters=1_234_567,
        num_train=2400,
        num_val=400,
        score_threshold=0.4,
    )


def test_the_figures_are_those_of_the_run(tmp_path: Path) -> None:
    report = describe_run(_run(tmp_path, {"AP": 41.26, "AP50": 70.0, "AP75": math.nan}), [])
    figures = {figure.label: figure.value for figure in report.figures}
    assert figures == {
        "AP": "41.3",
        "AP50": "70.0",
        "AP75": "n/a",
        "Parameters": "1.23 M",
        "Steps": "1,500",
        "Wall time": "6.2 min",
    }
    assert "2,400 images of some_train" in report.lead
    assert "400 images that it has not seen" in report.lead


def test_sections_appear_only_with_something_in_them(tmp_path: Path) -> None:
    titles = [section.title for section in describe_run(_run(tmp_path, {}), []).sections]
    assert titles == ["Predictions on unseen images", "The same by hand", "Environment"]
    lines = [{"iteration": i, "total_loss": 1.0, "bbox/AP": 2.0, "bbox/AP50": 3.0} for i in (1, 2)]
    (tmp_path / "metrics.json").write_text("\n".join(map(json.dumps, lines)))
    sections = describe_run(_run(tmp_path, {"AP-disc": 3.0, "APs": 1.0}), []).sections
    by_title = {section.title: section for section in sections}
    assert len(by_title["Training"].pictures) == 2
    table = by_title["AP by class and size"].table
    assert table is not None
    assert [row[1] for row in table.rows] == ["1.0", "n/a", "n/a"]


def test_commands_name_the_files_of_the_run(tmp_path: Path) -> None:
    report = describe_run(_run(tmp_path, {}), [])
    (commands,) = [s.commands for s in report.sections if s.commands]
    assert commands[0].endswith("--config-file configs/some.yaml")
    assert f"--weights {tmp_path}/model_final.pth" in commands[1]


@pytest.mark.parametrize(
    ("seconds", "text"), [(12.4, "12 s"), (60, "1 min 0 s"), (372, "6 min 12 s")]
)
def test_durations_read_as_people_say_them(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
