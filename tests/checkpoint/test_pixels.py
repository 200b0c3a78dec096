# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Weights of the zoo in a config with other pixels: a warning with both, whoever loads them."""

import dataclasses
import logging

import pytest
import torch
from detectron2 import model_zoo
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import LazyCall, instantiate
from detectron2.modeling import build_model
from detectron2.utils.file_io import PathManager

from qbheat_det import get_cfg
from qbheat_det.checkpoint import SafeCheckpointer
from qbheat_det.config import Pixels
from qbheat_det.feature_cache.cached_backbone import CachedBackbone
from qbheat_det.modeling.backbone import MobileFormer, MobileFormerFPN
from qbheat_det.modeling.contracts import get_pixel_format

WEIGHTS = "qbheat://distill/285M"  # trained on RGB, with ImageNet's statistics
TRAINED = Pixels("RGB", (123.675, 116.28, 103.53), (58.395, 57.12, 57.375))
OTHERS = {
    "the same": TRAINED,
    "detectron2's": Pixels("BGR", (103.53, 116.28, 123.675), (1.0, 1.0, 1.0)),
    "other order": Pixels("BGR", TRAINED.mean, TRAINED.std),
    "other deviation": Pixels("RGB", TRAINED.mean, (1.0, 1.0, 1.0)),
}


def load_by_our_checkpointer(model):
    SafeCheckpointer(model, allow_partial=True).load(WEIGHTS)


def load_by_detectron2(model):
    DetectionCheckpointer(model).load(WEIGHTS)


@pytest.mark.parametrize("load", [load_by_our_checkpointer, load_by_detectron2])
@pytest.mark.parametrize("pixels", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize(
    "keys",
    [
        "META_ARCHITECTURE MFDETR BACKBONE.NAME MobileFormer MF_DETR.NUM_BLOCKS [1,1,1]",
        # A detector of Detectron2.
        "META_ARCHITECTURE RetinaNet BACKBONE.NAME build_mobile_former_fpn_backbone "
        "FPN.IN_FEATURES ['s8','s16'] RETINANET.NUM_CLASSES 3",
    ],
    ids=["mf_detr", "retinanet"],
)
def test_other_pixels_are_warned_of(load, pixels, keys, caplog):
    cfg = get_cfg()
    for key, value in zip(keys.split()[::2], keys.split()[1::2], strict=True):
        cfg.merge_from_list([f"MODEL.{key}", value])
    cfg.MODEL.DEVICE = "cpu"
    cfg.INPUT.FORMAT = pixels.format
    cfg.MODEL.PIXEL_MEAN = list(pixels.mean)
    cfg.MODEL.PIXEL_STD = list(pixels.std)
    model = build_model(cfg)
    with caplog.at_level(logging.WARNING):
        load(model)
    warnings = [text for text in caplog.messages if "trained with the pixels" in text]
    if pixels == TRAINED:
        assert warnings == []
        return
    (warning,) = warnings
    assert f"pixels {TRAINED}, but" in warning
    assert f"has {pixels}: check INPUT.FORMAT, MODEL.PIXEL_MEAN and" in warning


def test_a_bare_encoder_has_no_pixels_and_loads_the_file_without_a_warning(caplog):
    state = torch.load(PathManager.get_local_path(WEIGHTS), weights_only=True)["model"]
    encoder = MobileFormer(arch="285M", out_features=["s16_expanded"])
    encoder_state = {
        name: value
        for name, value in state.items()
        if name in encoder.state_dict() or "trained_pixels" in name
    }
    assert len(encoder_state) == len(encoder.state_dict()) + 2
    encoder.load_state_dict(encoder_state, strict=True)
    assert "pixels" not in caplog.text
    assert torch.equal(encoder.tokens, state["tokens"])
    assert Pixels.pop_from(dict(state)) == TRAINED


@pytest.mark.parametrize(
    ("pixels", "words"),
    [(None, "set the model's input_format"), (TRAINED, ""), (Pixels("BGR"), "but the model has")],
)
def test_a_lazy_config_is_told_the_pixels_unless_it_passes_the_same(pixels, words, caplog):
    model = model_zoo.get_config("common/models/retinanet.py").model
    model.backbone = LazyCall(MobileFormerFPN)(arch="285M", in_features=["s8", "s16"])
    if pixels:
        model.backbone.pixels = LazyCall(Pixels)(**dataclasses.asdict(pixels))
    with caplog.at_level(logging.WARNING):
        load_by_detectron2(instantiate(model))
    warnings = [text for text in caplog.messages if "trained with the pixels" in text]
    assert len(warnings) == bool(words)
    assert all(words in text and str(TRAINED) in text for text in warnings)


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        (Pixels(), TRAINED, True),
        (TRAINED, Pixels("RGB"), True),
        (TRAINED, Pixels("", (123.676, 116.28, 103.53)), True),
        (TRAINED, Pixels("", (123.775, 116.28, 103.53)), False),
        (TRAINED, Pixels("", (), (58.395,)), False),
        (Pixels("BGR"), Pixels("RGB"), False),
    ],
)
def test_only_what_both_know_is_compared(own, other, expected):
    assert own.equals(other) == other.equals(own) == expected


def test_a_cached_backbone_has_the_channel_order_of_its_encoder():
    encoder = MobileFormer(arch="285M", out_features=["s8"], pixels=Pixels("RGB"))
    cached = CachedBackbone(encoder=encoder, outputs=["s8"])
    assert get_pixel_format(cached) == get_pixel_format(encoder) == "RGB"
