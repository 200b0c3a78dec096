# Copyright (c) qbheat_det contributors. Apache-2.0.
"""FCOS with the losses of the effective batch, beside Detectron2's own."""

import copy
import inspect
from typing import Any

import pytest
import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from detectron2.modeling.meta_arch.fcos import FCOS
from detectron2.utils.events import EventStorage
from torch.testing import assert_close

from qbheat_det.modeling.dense import SyncFCOS
from tests.engine.gradient_cases import NUM_BOXES, make_image
from tests.modeling.tiny_pretraining import make_tiny_config


@pytest.fixture
def cfg() -> CfgNode:
    cfg = make_tiny_config("SyncFCOS")
    # Of a map of one place, 32 groups of 32 channels have no statistics.
    cfg.MODEL.FCOS.update({"NUM_CLASSES": 3, "NUM_CONVS": 1, "NORM": ""})
    cfg.MODEL.FPN.update({"IN_FEATURES": ["s8", "s16"], "OUT_CHANNELS": 32})
    cfg.MODEL.BACKBONE.NAME = "build_fpn_backbone"
    return cfg


def _images(*num_boxes: int) -> list[dict[str, Any]]:
    return [make_image(NUM_BOXES.index(count)) for count in num_boxes]


def _as_detectron2(model: SyncFCOS) -> FCOS:
    """Returns Detectron2's own class around copies of the same parts."""
    names = inspect.signature(FCOS.__init__).parameters.keys()
    parts = {name: copy.deepcopy(vars(model)[name]) for name in names if name in vars(model)}
    other = FCOS(
        backbone=copy.deepcopy(model.backbone),
        head=copy.deepcopy(model.head),
        pixel_mean=model.pixel_mean.flatten().tolist(),
        pixel_std=model.pixel_std.flatten().tolist(),
        **parts,
    )
    return other.train(model.training)


def test_in_one_process_its_losses_are_detectron2s_step_after_step(cfg: CfgNode) -> None:
    model = build_model(cfg)
    theirs = _as_detectron2(model)
    batches = [_images(2, 3), _images(1, 4), _images(1, 1)]
    with EventStorage():
        for batch in batches:
            assert_close(model(copy.deepcopy(batch)), theirs(copy.deepcopy(batch)))
    assert float(model.loss_normalizer) != model.first_normalizer
    assert_close(float(model.loss_normalizer), theirs.loss_normalizer)


def test_an_image_without_boxes_is_background(cfg: CfgNode) -> None:
    model = build_model(cfg)
    batch = _images(0, 2)
    features = [torch.zeros(1, 1, side, side) for side in (8, 4, 2, 1, 1)]
    anchors = model.anchor_generator(features)
    labels, _ = model.label_anchors(anchors, [entry["instances"] for entry in batch])
    assert set(labels[0].tolist()) == {3}
    assert set(labels[1].tolist()) > {3}
    with EventStorage():
        losses = model(_images(0, 0))
    assert all(torch.isfinite(loss) for loss in losses.values())
    assert losses["loss_fcos_loc"] == losses["loss_fcos_ctr"] == 0


def test_parts_of_a_batch_have_the_losses_of_the_batch(cfg: CfgNode) -> None:
    model = build_model(cfg).eval()  # BatchNorm would see another batch
    model.training = True
    batch = _images(2, 0, 3, 1)
    parts = [batch[:1], batch[1:]]
    with EventStorage():
        whole = copy.deepcopy(model)(copy.deepcopy(batch))
        counts = sum((model.loss_counts(part) for part in parts), torch.zeros(1))
        normalizers = model.loss_normalizers(counts, parts=len(parts))
        losses = [model(part, normalizers) for part in parts]
    for name, value in whole.items():
        assert_close(sum(part[name] for part in losses) / len(parts), value)
