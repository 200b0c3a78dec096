# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A pre-trained backbone in every detector: what is taken, what is left behind, by which rule."""

import logging
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_backbone, build_model
from torch import nn

from qbheat_det.checkpoint import (
    ExactCheckpointer,
    SafeCheckpointer,
    WeightsInfo,
    bare_backbone,
    save_weights,
)
from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError
from tests.checkpoint.tiny_models import CLASSES, TinyDetector

LEFT_BEHIND = ("projection", "predictor", "decoder")


class TinyPretraining(nn.Module):
    """QB-Heat's children; its decoder has a tensor of the name and shape of a detector's."""

    pretrain_only_modules = LEFT_BEHIND

    def __init__(self, backbone: nn.Module, seed: int = 5) -> None:
        super().__init__()
        self.backbone = backbone
        self.projection = nn.Conv2d(4, 8, 1)
        self.predictor = nn.Linear(8, 8)
        self.decoder = nn.Module()
        self.decoder.bbox_embed = nn.Linear(4, 4)
        self.decoder.head = nn.Linear(8, 8)
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)


def _info(model: nn.Module) -> WeightsInfo:
    return WeightsInfo(pretrain_only_modules=tuple(getattr(model, "pretrain_only_modules", ())))


def _save(model: nn.Module, folder: Path, kind: str) -> str:
    """Writes the model as a trainer does; as a moving average, with other weights beside it."""
    if kind == "safetensors":
        path = folder / "model_final.safetensors"
        save_weights(str(path), model.state_dict(), _info(model))
        return str(path)
    content = {"model": model.state_dict()}
    if kind == "ema":
        others = {key: 2 * value for key, value in model.state_dict().items()}
        content = {"model": others, "ema": model.state_dict()}
    path = folder / "model_0000009.pth"
    torch.save({**content, "iteration": 9, "info": _info(model).to_dict()}, path)
    return str(path)


@pytest.mark.parametrize("kind", ["checkpoint", "ema", "safetensors"])
@pytest.mark.parametrize("pyramid", [False, True])
def test_a_detector_takes_the_backbone_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, pyramid: bool
) -> None:
    caplog.set_level(logging.INFO)
    pretraining = TinyPretraining(TinyDetector(seed=3).backbone)
    path = _save(pretraining, tmp_path, kind)
    model = TinyDetector(pyramid=pyramid, seed=9)
    fresh = {key: value.clone() for key, value in model.state_dict().items()}
    checkpointer = SafeCheckpointer(model, class_names=CLASSES)
    checkpointer.load(path)
    inside = model.backbone.bottom_up if pyramid else model.backbone
    torch.testing.assert_close(
        dict(inside.state_dict()), dict(pretraining.backbone.state_dict()), rtol=0, atol=0
    )
    for key, value in model.state_dict().items():
        if key.startswith("decoder.") or "lateral" in key:
            torch.testing.assert_close(value, fresh[key], rtol=0, atol=0)
    report = checkpointer.report
    assert report is not None
    assert report.groups["backbone"].is_full
    assert report.groups["decoder"].is_new
    assert report.unexpected == report.unused == ()
    assert "9/9 backbone tensors; " in caplog.text
    assert "skipped: projection, predictor, decoder" in caplog.text


def test_without_the_rule_names_that_collide_are_an_error_and_not_taken(tmp_path: Path) -> None:
    state = TinyPretraining(TinyDetector(seed=3).backbone).state_dict()
    save_weights(str(tmp_path / "w.safetensors"), state, WeightsInfo())
    with pytest.raises(UserError, match="unexpected"):
        SafeCheckpointer(TinyDetector()).load(str(tmp_path / "w.safetensors"))


@pytest.mark.parametrize("kind", [SafeCheckpointer, ExactCheckpointer])
def test_the_pre_training_itself_takes_all(tmp_path: Path, kind: type[SafeCheckpointer]) -> None:
    first = TinyPretraining(TinyDetector(seed=3).backbone)
    second = TinyPretraining(TinyDetector(seed=4).backbone, seed=6)
    checkpointer = kind(second)
    checkpointer.load(_save(first, tmp_path, "safetensors"))
    torch.testing.assert_close(dict(second.state_dict()), dict(first.state_dict()))
    assert "left behind" not in str(checkpointer.report)


def test_a_resumed_pre_training_takes_all(tmp_path: Path) -> None:
    first = TinyPretraining(TinyDetector(seed=3).backbone)
    SafeCheckpointer(first, str(tmp_path)).save(
        "model_0000001", iteration=1, info=_info(first).to_dict()
    )
    second = TinyPretraining(TinyDetector(seed=4).backbone, seed=6)
    SafeCheckpointer(second, str(tmp_path)).resume_or_load("", resume=True)
    torch.testing.assert_close(dict(second.state_dict()), dict(first.state_dict()))


def test_a_rule_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    info = WeightsInfo(pretrain_only_modules=("backbone", "decoder"))
    save_weights(str(tmp_path / "w.safetensors"), TinyDetector().state_dict(), info)
    with pytest.raises(UserError, match="another architecture"):
        SafeCheckpointer(TinyDetector()).load(str(tmp_path / "w.safetensors"))


def test_a_child_is_left_behind_by_its_whole_name(tmp_path: Path) -> None:
    model = TinyDetector(seed=1)
    info = WeightsInfo(pretrain_only_modules=("deco", "back"))
    save_weights(str(tmp_path / "w.safetensors"), model.state_dict(), info)
    checkpointer = SafeCheckpointer(TinyDetector())
    checkpointer.load(str(tmp_path / "w.safetensors"))
    assert str(checkpointer.report) == "9/9 backbone tensors; 4/4 decoder tensors"


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
def test_the_bare_backbone_is_found_below_wrappers_and_pyramids(prefix: str) -> None:
    expected = set(TinyDetector().backbone.state_dict())
    for pyramid in (False, True):
        state = TinyDetector(pyramid=pyramid).state_dict()
        names = bare_backbone([f"{prefix}{key}" for key in state])
        assert set(names.values()) == expected
        assert all(name.startswith(f"{prefix}backbone.") for name in names)
    assert bare_backbone(["stem.weight", "fc.weight"]) == {}


def _detector_config(name: str, backbone: str) -> CfgNode:
    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.META_ARCHITECTURE = name
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    cfg.MODEL.MOBILE_FORMER.OUT_FEATURES = ["s8", "s16"]
    in_features = ["s8", "s16"]
    if name == "MFDETR":
        cfg.MODEL.BACKBONE.NAME = backbone
        cfg.MODEL.MF_DETR.IN_FEATURES = in_features
        cfg.MODEL.MF_DETR.NUM_BLOCKS = [1, 1, 1]
    else:
        cfg.MODEL.BACKBONE.NAME = "build_fpn_backbone"
        cfg.MODEL.FPN.BOTTOM_UP = backbone
        cfg.MODEL.FPN.IN_FEATURES = in_features
        cfg.MODEL.FPN.OUT_CHANNELS = 16
        cfg.MODEL.RPN.IN_FEATURES = cfg.MODEL.ROI_HEADS.IN_FEATURES = ["p3", "p4"]
        cfg.MODEL.ANCHOR_GENERATOR.SIZES = [[32]]
        cfg.MODEL.ROI_BOX_HEAD.NAME = "FastRCNNConvFCHead"
        cfg.MODEL.ROI_BOX_HEAD.NUM_FC = 1
        cfg.MODEL.ROI_BOX_HEAD.FC_DIM = 16
        cfg.MODEL.ROI_HEADS.NAME = "StandardROIHeads"
    return cfg


@pytest.mark.parametrize("backbone", ["MobileFormer", "timm:mobilenetv4_conv_small"])
@pytest.mark.parametrize("name", ["MFDETR", "SyncRetinaNet", "GeneralizedRCNN"])
@pytest.mark.parametrize("freeze_at", [0, 5])
def test_real_detectors_report_the_whole_backbone(
    tmp_path: Path, name: str, backbone: str, freeze_at: int
) -> None:
    cfg = _detector_config(name, backbone)
    pretrained = build_backbone(_detector_config("MFDETR", backbone))
    path = _save(TinyPretraining(pretrained), tmp_path, "safetensors")
    cfg.MODEL.BACKBONE.FREEZE_AT = freeze_at
    model = build_model(cfg)
    checkpointer = SafeCheckpointer(model)
    checkpointer.load(path)
    report = checkpointer.report
    assert report is not None
    assert report.groups["backbone"].is_full
    assert report.skipped == LEFT_BEHIND
    assert report.unexpected == ()
    inside = model.backbone if name == "MFDETR" else model.backbone.bottom_up
    _assert_same_weights(inside, pretrained)


def _assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    expected = other.state_dict()
    for key, value in one.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=0)


def test_timms_own_files_fit_and_what_the_backbone_leaves_out_is_no_fault(tmp_path: Path) -> None:
    whole: Any = timm.create_model("convnext_atto")
    torch.save(whole.state_dict(), tmp_path / "convnext_atto.pth")
    cfg = _detector_config("SyncRetinaNet", "timm:convnext_atto")
    checkpointer = SafeCheckpointer(build_model(cfg))
    checkpointer.load(str(tmp_path / "convnext_atto.pth"))
    report = checkpointer.report
    assert report is not None
    assert report.groups["backbone"].is_full
    assert report.unexpected == ()
    assert any("head.fc" in key for key in report.unused)
