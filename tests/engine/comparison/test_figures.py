# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Figures are read from what runs leave, and what is not finished has none."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qbheat_det.checkpoint import WeightsInfo, save_weights
from qbheat_det.core.errors import UserError
from qbheat_det.engine.comparison.figures import (
    fingerprint,
    read_backbone,
    read_detection,
    read_pretraining,
    read_probes,
)


def write_run(folder: Path, lines: list[dict[str, Any]], *, iteration: int) -> None:
    folder.mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.json").write_text(text)
    (folder / "config.yaml").write_text("SOLVER:\n  IMS_PER_BATCH: 4\n")
    state = {"backbone.weight": torch.ones(2)}
    save_weights(str(folder / "model_final.safetensors"), state, WeightsInfo(iteration=iteration))


def test_images_and_seconds_of_a_run_are_those_of_its_log(tmp_path: Path) -> None:
    lines = [
        {"iteration": 19, "time": 2.0, "total_loss": 3.0},
        {"iteration": 39, "time": 1.0, "total_loss": 2.0},
        {"iteration": 40, "reconstruction/loss": 0.5},  # an evaluation
        {"iteration": 44, "time": 4.0, "total_loss": 1.0, "loss_pixel": 1.0, "lr": 0.1},
    ]
    write_run(tmp_path / "run", lines, iteration=44)
    figures = read_pretraining(tmp_path / "run")
    assert figures["iterations"] == 45
    assert figures["images_seen"] == 45 * 4
    assert figures["seconds"] == 20 * 2.0 + 20 * 1.0 + 5 * 4.0
    assert figures["seconds_per_image"] == 2.0 / 4
    assert figures["last_losses"] == {"total_loss": 1.0, "loss_pixel": 1.0}


def test_a_run_that_was_stopped_has_no_figures(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for read in (read_pretraining, read_detection):
        with pytest.raises(UserError, match=r"no model_final\.safetensors.* to its end"):
            read(tmp_path / "run")


def test_the_last_ap_of_a_detector_counts(tmp_path: Path) -> None:
    lines = [
        {"iteration": 10, "bbox/AP": 9.0, "bbox/AP50": 20.0, "bbox/AP75": 8.0},
        {"iteration": 19, "time": 2.0},
        {"iteration": 20, "bbox/AP": 1.0, "bbox/AP50": 3.0, "bbox/AP75": 0.5},
    ]
    write_run(tmp_path / "run", lines, iteration=19)
    assert read_detection(tmp_path / "run") == {
        "AP": 1.0, "AP50": 3.0, "AP75": 0.5, "iterations": 20, "seconds_per_step": 2.0,
    }  # fmt: skip


def test_a_detector_that_was_never_evaluated_has_no_figures(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [{"iteration": 19, "time": 2.0}], iteration=19)
    with pytest.raises(UserError, match="never evaluated"):
        read_detection(tmp_path / "run")


def test_a_detector_that_predicts_nothing_has_ap_0_and_not_that_of_before(tmp_path: Path) -> None:
    lines = [{"iteration": 10, "bbox/AP": 9.0}, {"iteration": 19, "time": 2.0}]
    write_run(tmp_path / "run", lines, iteration=19)
    (tmp_path / "run" / "inference").mkdir()
    figures = read_detection(tmp_path / "run")
    assert figures["AP"] == figures["AP50"] == 0


def test_probes_are_those_of_the_weights_asked_for(tmp_path: Path) -> None:
    rows = [
        {"backbone": "a", "probe": "knn", "top1": 1.0},
        {"backbone": "b", "probe": "knn", "top1": 2.0},
        {"backbone": "b", "probe": "linear", "top1": 3.0},
    ]
    (tmp_path / "rows.json").write_text(json.dumps({"setting": {"k": 20}, "rows": rows}))
    figures = read_probes(tmp_path / "rows.json", Path("b"), ["linear"])
    assert {name: figures[name]["top1"] for name in ("knn", "linear")} == {
        "knn": 2.0,
        "linear": 3.0,
    }
    with pytest.raises(UserError, match="lacks the probes tran-1"):
        read_probes(tmp_path / "rows.json", Path("b"), ["knn", "tran-1"])
    with pytest.raises(UserError, match="cannot be read"):
        read_probes(tmp_path / "none.json", Path("b"), ["knn"])


def test_a_backbone_is_known_by_the_file_that_others_take(tmp_path: Path) -> None:
    (tmp_path / "figures.json").write_text('{"batch_norms": 3}')
    (tmp_path / "recalibrated.safetensors").write_bytes(b"weights")
    expected = hashlib.sha256(b"weights").hexdigest()
    assert read_backbone(tmp_path) == {"batch_norms": 3, "fingerprint": expected}
    assert fingerprint(tmp_path / "recalibrated.safetensors") == expected
