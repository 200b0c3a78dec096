# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Detectron2's detectors on a Mobile-Former from QB-Heat: its file fits whole, and they train."""

from pathlib import Path

import pytest
import torch
from detectron2.engine import default_argument_parser
from detectron2.modeling import build_model
from torch import nn

from qbheat_det.checkpoint import WeightsInfo, save_weights
from qbheat_det.config import get_config_path
from qbheat_det.engine import Trainer, add_data_flags, build_config, setup
from tests.modeling.tiny_pretraining import make_tiny_config

from .conftest import forget_runs
from .tiny_pretraining import TINY_ENCODER

DETECTORS = ("retinanet_285M_finetune", "fcos_285M", "faster_rcnn_285M", "mask_rcnn_285M")
OPTS = {
    **TINY_ENCODER,
    "MODEL.DEVICE": "cpu",
    "MODEL.FPN.OUT_CHANNELS": "32",
    "MODEL.RPN.POST_NMS_TOPK_TRAIN": "16",
    "MODEL.ROI_BOX_HEAD.FC_DIM": "16",
    "MODEL.ROI_MASK_HEAD.CONV_DIM": "16",
    "DATALOADER.NUM_WORKERS": "0",
    "INPUT.MIN_SIZE_TRAIN": "(64,)",
    "SOLVER.IMS_PER_BATCH": "2",
    "SOLVER.WARMUP_ITERS": "0",
    "SOLVER.MAX_ITER": "2",
    "SOLVER.REFERENCE_BATCH_SIZE": "2",
}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, nn.Module]:
    """Weights of QB-Heat as its training exports them, and the model."""
    cfg = make_tiny_config()
    for key, value in TINY_ENCODER.items():
        cfg.merge_from_list([key, value])
    model = build_model(cfg)
    path = str(tmp_path_factory.mktemp("pretrained") / "model_final.safetensors")
    save_weights(
        path, model.state_dict(), WeightsInfo(left_behind=tuple(model.pretrain_only_modules))
    )
    return path, model


@pytest.mark.parametrize("name", DETECTORS)
def test_a_downstream_detector_takes_the_whole_backbone_and_trains(
    name: str, pretrained: tuple[str, nn.Module], tiny_data: Path, tmp_path: Path
) -> None:
    path, model = pretrained
    forget_runs()
    parser = default_argument_parser()
    add_data_flags(parser)
    pairs = {**OPTS, "MODEL.WEIGHTS": path, "OUTPUT_DIR": str(tmp_path)}
    json_file, images = str(tiny_data / "annotations.json"), str(tiny_data / "images")
    data = ["--train-json", json_file, "--train-images", images]
    data += ["--val-json", json_file, "--val-images", images]
    words = [word for pair in pairs.items() for word in pair]
    args = parser.parse_args(["--config-file", get_config_path(f"coco/{name}.yaml"), *data, *words])
    cfg = build_config(args)
    cfg.defrost()
    cfg.DATASETS.TEST = ()
    setup(cfg, args)
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=False)
    report = trainer.checkpointer.report
    assert report is not None
    assert report.groups["backbone"].is_full
    assert report.left_behind == tuple(model.pretrain_only_modules)
    assert {key for key in report.spare if "expand." not in key} == set()  # the pyramid ends before
    bottom_up = trainer.model.backbone.bottom_up
    expected = model.backbone.state_dict()
    before = {key: value.clone() for key, value in bottom_up.state_dict().items()}
    for key, value in before.items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=0)
    trainer.train()
    forget_runs()
    stem = bottom_up.stem.weight
    assert torch.isfinite(stem).all()
    assert not torch.equal(stem, before["stem.weight"])
