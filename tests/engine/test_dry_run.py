# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The dry run: what it predicts against a real run, what it finds, and that it leaves nothing."""

import dataclasses
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog

from qbheat_det.core.errors import UserError
from qbheat_det.data import ToySpec, prepare_toy_set, register_coco_json
from qbheat_det.engine import Trainer
from qbheat_det.engine.dry_run import dry_run
from qbheat_det.engine.dry_run_report import DryRunReport, format_duration
from qbheat_det.engine.setup import use_classes_of
from tests.engine.tiny_detectors import make_retinanet_config

from .conftest import forget_runs

NUM_IMAGES = 16


@pytest.fixture
def cfg(tmp_path: Path) -> Iterator[CfgNode]:
    folder = prepare_toy_set(ToySpec(name="tiny", num_images=NUM_IMAGES, image_size=64), tmp_path)
    register_coco_json("dry", str(Path(folder) / "annotations.json"), str(Path(folder) / "images"))
    cfg = make_retinanet_config()
    cfg.DATASETS.TRAIN = cfg.DATASETS.TEST = ("dry",)
    cfg.DATALOADER.NUM_WORKERS = 0
    cfg.INPUT.MIN_SIZE_TRAIN = (64,)
    cfg.SOLVER.IMS_PER_BATCH = 2
    cfg.SOLVER.BASE_LR = 1e-5
    cfg.SOLVER.MAX_ITER = 16
    cfg.SOLVER.CHECKPOINT_PERIOD = 8
    cfg.TEST.EVAL_PERIOD = 8
    cfg.OUTPUT_DIR = str(tmp_path / "runs" / "first")
    use_classes_of(cfg, "dry")
    yield cfg
    forget_runs("dry")


def test_it_predicts_the_time_of_a_real_run_and_leaves_nothing(cfg: CfgNode) -> None:
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
    assert (report.iterations, report.num_evaluations, report.num_checkpoints) == (16, 2, 2)
    files = [path.stat().st_size for path in Path(cfg.OUTPUT_DIR).glob("model_*")]
    assert report.disk_bytes == pytest.approx(sum(files), rel=0.05)
    assert report.num_test_images == NUM_IMAGES
    assert report.num_tensors_compared > 50
    assert report.loader_images_per_second > report.wanted_images_per_second > 1
    assert report.waiting == "" or "NUM_WORKERS" in report.waiting
    assert 100 * 2**20 < report.memory_bytes < report.memory_total_bytes


def test_a_tensor_that_a_checkpoint_changes_is_found(
    cfg: CfgNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = torch.save

    def damage(content: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(content, dict) and "model" in content:
            model = dict(content["model"])
            name = next(name for name, tensor in model.items() if tensor.is_floating_point())
            model[name] = model[name] + 1
            content = {**content, "model": model}
        original(content, *args, **kwargs)

    monkeypatch.setattr(torch, "save", damage)
    with pytest.raises(RuntimeError, match="does not come back from a checkpoint"):
        dry_run(cfg, Trainer, num_steps=1)


def test_a_folder_that_cannot_be_written_to_ends_with_a_sentence(
    cfg: CfgNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> str:
        raise PermissionError

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(UserError, match="cannot be written to"):
        dry_run(cfg, Trainer)


REPORT = DryRunReport(
    iterations=1000,
    images_per_step=16,
    num_evaluations=2,
    num_checkpoints=5,
    num_checkpoints_kept=5,
    num_test_images=5000,
    num_parameters=12_000_000,
    num_trainable=9_000_000,
    num_tensors_compared=400,
    setup_seconds=10.0,
    step_seconds=(1.0, 3.0),
    evaluation_seconds=100.0,
    checkpoint_seconds=2.0,
    checkpoint_bytes=100 * 2**20,
    weights_bytes=80 * 2**20,
    free_bytes=2**30,
    memory_bytes=3 * 2**30,
    memory_total_bytes=8 * 2**30,
)


def test_the_whole_run_is_the_sum_of_its_parts() -> None:
    assert REPORT.total_seconds == 10 + 1000 * 2 + 2 * 100 + 5 * 2
    table = str(REPORT)
    for row in (
        [
            "Step",
            "of",
            "16",
            "images",
            "1.0",
            "s",
            "to",
            "3.0",
            "s",
            "1,000",
            "33",
            "min",
            "20",
            "s",
        ],
        ["Whole", "run", "37", "min", "00", "s"],
    ):
        assert row in [line.split() for line in table.splitlines()]
    assert "Disk:       580.0 MiB; free are 1.0 GiB (5 checkpoints of 100.0 MiB, weights" in table
    assert "too small" not in table


def test_a_disk_that_is_too_small_is_told() -> None:
    report = dataclasses.replace(REPORT, free_bytes=400 * 2**20)
    assert not report.fits_disk
    assert "The disk is too small: lower SOLVER.CHECKPOINTS_KEPT" in str(report)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.1204, "120 ms"),
        (4.25, "4.2 s"),
        (190, "3 min 10 s"),
        (3900, "1 h 05 min"),
        (7199.9, "2 h 00 min"),
        (200_000, "2 d 8 h"),
    ],
)
def test_durations_are_as_people_say_them(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_a_mistake_that_the_first_step_finds_is_a_sentence_without_a_traceback(
    cfg: CfgNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(trainer: Trainer) -> None:
        raise UserError("an even number of images")

    logged: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: logged.append(record.getMessage()))
    monkeypatch.setattr(Trainer, "run_step", refuse)
    loop = logging.getLogger("detectron2.engine.train_loop")
    loop.addHandler(handler)
    try:
        with pytest.raises(UserError, match="an even number of images"):
            dry_run(cfg, Trainer, num_steps=1)
    finally:
        loop.removeHandler(handler)
    assert not any("Exception during training" in line for line in logged)


def test_the_report_sets_the_loader_beside_the_steps_and_says_what_to_do() -> None:
    report = dataclasses.replace(
        REPORT,
        loader_images_per_second=123.4,
        wanted_images_per_second=8.0,
        waiting="Steps wait",
    )
    lines = str(report).splitlines()
    assert "Images:     the loader alone gives 123 a second, steps would take 8" in lines
    assert "Steps wait." in lines
    assert "loader" not in str(REPORT)
