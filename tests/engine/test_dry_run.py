# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The dry run: what it predicts against a real run, what it finds, and that it leaves nothing."""

import dataclasses
import os
import time
from pathlib import Path

import pytest
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog

from qbheat_det.core.errors import UserError
from qbheat_det.engine import Trainer, build_config
from qbheat_det.engine import dry_run as dry_run_module
from qbheat_det.engine.dry_run import dry_run

from .tiny_training import parse


@pytest.fixture
def cfg(tmp_path: Path, tiny_data: Path) -> CfgNode:
    opts = {"SOLVER.MAX_ITER": "16", "SOLVER.CHECKPOINT_PERIOD": "8", "TEST.EVAL_PERIOD": "8"}
    return build_config(parse(tmp_path / "runs" / "first", tiny_data, opts))


def test_the_forecast_is_that_of_a_real_run_and_nothing_is_left_behind(cfg: CfgNode) -> None:
    before, folder = set(DatasetCatalog), Path(cfg.OUTPUT_DIR).parents[1]
    there = set(folder.iterdir())
    report = dry_run(cfg, Trainer, num_steps=5)
    assert set(DatasetCatalog) == before
    assert set(folder.iterdir()) == there

    Path(cfg.OUTPUT_DIR).mkdir(parents=True)
    start = time.perf_counter()
    Trainer(cfg).train()
    seconds = time.perf_counter() - start
    # Other programs on the machine can slow down either of the two.
    assert report.total_seconds == pytest.approx(seconds, rel=0.67, abs=3.0)
    written = (Path(cfg.OUTPUT_DIR) / "model_final.pth").stat().st_size
    assert report.checkpoint_bytes == pytest.approx(written, rel=0.05)
    assert {name: times for name, (_, times) in report.costs.items()} == {
        "Set-up": 1,
        "Step of 2 images": 16,
        "Evaluation of 12 images": 2,
        "Checkpoint": 2,
    }
    assert all(seconds > 0 for seconds, _ in report.costs.values())
    files = [path.stat().st_size for path in Path(cfg.OUTPUT_DIR).glob("model_*")]
    assert report.disk_bytes == pytest.approx(sum(files), rel=0.05)
    assert 100 * 2**20 < report.memory_bytes < report.memory_total_bytes
    assert "SOLVER.CHECKPOINTS_KEPT" not in str(report)
    assert "SOLVER.CHECKPOINTS_KEPT" in str(dataclasses.replace(report, free_bytes=1000))


def test_a_folder_that_cannot_be_written_to_ends_with_a_sentence(
    cfg: CfgNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> str:
        raise PermissionError

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(UserError, match="OUTPUT_DIR"):
        dry_run(cfg, Trainer)


def test_total_memory_is_that_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders, groups = tmp_path / "folders", tmp_path / "groups"
    monkeypatch.setattr(dry_run_module, "_GROUP", groups)
    monkeypatch.setattr(dry_run_module, "_GROUPS_ROOT", folders)
    pages = {"SC_PAGE_SIZE": 2**12, "SC_PHYS_PAGES": 2**38}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    assert dry_run_module.total_memory() == 2**50
    (folders / "a" / "b").mkdir(parents=True)
    (folders / "a" / "memory.max").write_text("2000\n")
    (folders / "a" / "b" / "memory.max").write_text("max\n")
    groups.write_text("0::/a/b\n")
    assert dry_run_module.total_memory() == 2000
    (folders / "memory.max").write_text("1000\n")
    groups.write_text("0::/\n")  # in a container with a name space
    assert dry_run_module.total_memory() == 1000
