# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A whole small pre-training run by the trainer, and detectors that start from its files."""

from pathlib import Path

import pytest
import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.modeling import build_model
from PIL import Image

from qbheat_det.checkpoint import SafeCheckpointer, info_of
from qbheat_det.config import get_cfg
from qbheat_det.data import register_image_folders
from qbheat_det.engine import Trainer
from qbheat_det.modeling.pretrain import QBHeat

# Each backbone with the key of its outputs, and its maps at strides 8 and 16.
BACKBONES = {
    "MobileFormer": ("MOBILE_FORMER", ["s8", "s16"]),
    "build_resnet_backbone": ("RESNETS", ["res3", "res4"]),
    "timm:mobilenetv4_conv_small": ("TIMM", ["s8", "s16"]),
}


def _config(backbone: str) -> CfgNode:
    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    cfg.MODEL.RESNETS.NORM = "BN"
    cfg.MODEL.RESNETS.DEPTH = 18
    cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 64
    return cfg


def _pretraining_config(backbone: str, folder: Path) -> CfgNode:
    cfg = _config(backbone)
    key, in_features = BACKBONES[backbone]
    cfg.MODEL.META_ARCHITECTURE = "QBHeat"
    cfg.MODEL.BACKBONE.NAME = backbone
    cfg.MODEL[key].OUT_FEATURES = in_features[-1:]
    cfg.MODEL.QB_HEAT.IN_FEATURE = in_features[-1]
    cfg.MODEL.QB_HEAT.FEATURE_DIM = cfg.MODEL.QB_HEAT.DECODER_DIM = 16
    cfg.MODEL.QB_HEAT.DECODER_DEPTH = 1
    cfg.MODEL.QB_HEAT.DECODER_HEADS = 2
    cfg.INPUT.DATASET_MAPPER_NAME = "pretrain"
    cfg.INPUT.PRETRAIN.SIZE = 64
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("photos",), ()
    cfg.DATALOADER.NUM_WORKERS = 0
    cfg.DATALOADER.ASPECT_RATIO_GROUPING = False
    cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.MAX_ITER, cfg.SOLVER.STEPS = 4, 2, ()
    cfg.SOLVER.EMA.ENABLED = True
    cfg.SEED = 1
    cfg.OUTPUT_DIR = str(folder / "run")
    (folder / "run").mkdir()
    return cfg


def _detector_config(backbone: str, name: str) -> CfgNode:
    cfg = _config(backbone)
    key, in_features = BACKBONES[backbone]
    cfg.MODEL.META_ARCHITECTURE = name
    cfg.MODEL[key].OUT_FEATURES = in_features
    cfg.MODEL.MF_DETR.IN_FEATURES = cfg.MODEL.FPN.IN_FEATURES = in_features
    cfg.MODEL.MF_DETR.NUM_BLOCKS = [1, 1, 1]
    cfg.MODEL.MF_DETR.HIDDEN_DIM = cfg.MODEL.MF_DETR.DIM_FEEDFORWARD = 32
    cfg.MODEL.FPN.OUT_CHANNELS = 32
    pyramid = name != "MFDETR"
    cfg.MODEL.BACKBONE.NAME = "build_fpn_backbone" if pyramid else backbone
    cfg.MODEL.FPN.BOTTOM_UP = backbone
    return cfg


@pytest.mark.parametrize(
    "backbone",
    [
        name if name == "MobileFormer" else pytest.param(name, marks=pytest.mark.slow)
        for name in BACKBONES
    ],
)
def test_every_detector_starts_from_what_a_pre_training_run_writes(
    tmp_path: Path, backbone: str
) -> None:
    (tmp_path / "photos").mkdir()
    for index in range(4):
        pixels = torch.randint(0, 256, (160, 160, 3), dtype=torch.uint8).numpy()
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{index}.png")
    register_image_folders("photos", [tmp_path / "photos"])
    try:
        trainer = Trainer(_pretraining_config(backbone, tmp_path))
        trainer.train()
    finally:
        DatasetCatalog.remove("photos")
        MetadataCatalog.remove("photos")
    averaged = trainer.evaluated_model.backbone.state_dict()
    for file in ("model_final.pth", "model_final.safetensors"):
        path = str(tmp_path / "run" / file)
        info = info_of(path)
        assert info is not None
        assert info.pretrain_only_modules == QBHeat.pretrain_only_modules
        for name in ("MFDETR", "SyncRetinaNet"):
            model = build_model(_detector_config(backbone, name))
            checkpointer = SafeCheckpointer(model)
            checkpointer.load(path)
            report = checkpointer.report
            assert report is not None
            assert report.groups["backbone"].is_full
            assert (report.unexpected, report.skipped) == ((), QBHeat.pretrain_only_modules)
            inside = getattr(model.backbone, "bottom_up", model.backbone)
            torch.testing.assert_close(dict(inside.state_dict()), dict(averaged), rtol=0, atol=0)
