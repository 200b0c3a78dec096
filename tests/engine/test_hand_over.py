# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Detectors start from the files of a pre-training run."""

from pathlib import Path

import pytest
import torch
from detectron2.modeling import build_model

from qbheat_det.checkpoint import SafeCheckpointer, WeightsInfo, info_of, save_weights
from qbheat_det.config import get_config_path, load_config
from qbheat_det.data import register_image_folders
from qbheat_det.engine.resume import warn_of_weights
from qbheat_det.modeling.contracts import get_backbone, get_encoder, pretrain_only_modules

from .conftest import forget_runs
from .tiny_pretraining import TINY_ENCODER, make_folder, train

DETECTORS = ("mf_detr_211_285M_toy", "retinanet_285M_toy", "mask_rcnn_285M_toy")


def test_every_detector_starts_from_what_a_pre_training_run_writes(tmp_path: Path) -> None:
    register_image_folders("photos", [make_folder(tmp_path / "photos", 4)])
    opts = {"DATASETS.TRAIN": "('photos',)", "SOLVER.MAX_ITER": "1", "SOLVER.IMS_PER_BATCH": "2"}
    try:
        trainer = train(tmp_path / "run", {**opts, "SOLVER.EMA.ENABLED": "True"})
    finally:
        forget_runs("photos")
    files = [tmp_path / "run" / f"model_final{ending}" for ending in (".pth", ".safetensors")]
    infos = [info_of(str(file)) for file in files]
    modules = pretrain_only_modules(trainer.bare_model)
    assert all(info is not None and info.pretrain_only_modules == modules for info in infos)
    averaged = dict(trainer.evaluated_model.backbone.state_dict())
    for name in DETECTORS:
        words = [word for pair in TINY_ENCODER.items() for word in pair]
        path = get_config_path(f"quick_schedules/{name}.yaml")
        model = build_model(load_config(path, [*words, "MODEL.DEVICE", "cpu"]))
        for file in files:
            checkpointer = SafeCheckpointer(model)
            checkpointer.load(str(file))
            report = checkpointer.report
            assert report is not None
            assert report.groups["backbone"].is_full
            assert report.skipped == modules
            encoder = get_encoder(get_backbone(model)).state_dict()
            expected = {key: averaged[key] for key in encoder}  # a pyramid reads no expanded map
            torch.testing.assert_close(dict(encoder), expected, rtol=0, atol=0)


def test_weights_for_other_pixels_and_a_frozen_random_encoder_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = get_config_path("quick_schedules/retinanet_285M_toy.yaml")
    words = [word for pair in TINY_ENCODER.items() for word in pair]
    cfg = load_config(path, [*words, "MODEL.DEVICE", "cpu", "MODEL.BACKBONE.FREEZE_AT", "5"])
    model, file = build_model(cfg), str(tmp_path / "weights.safetensors")
    warn_of_weights(model, cfg)
    assert "frozen with random weights" in caplog.text
    caplog.clear()
    save_weights(file, model.state_dict(), WeightsInfo.from_config(cfg, iteration=1, commit=""))
    cfg.MODEL.WEIGHTS = file
    warn_of_weights(model, cfg)
    assert not caplog.messages
    cfg.MODEL.PIXEL_STD = [128.0, 128.0, 128.0]
    warn_of_weights(model, cfg)
    assert "MODEL.PIXEL_STD" in caplog.text
