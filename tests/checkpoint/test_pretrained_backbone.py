# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Files of pre-training in detectors: only the backbone is loaded."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from detectron2.modeling import build_model
from torch import nn

from qbheat_det.checkpoint import ExactCheckpointer, SafeCheckpointer, WeightsInfo, save_weights
from qbheat_det.core.errors import UserError
from tests.checkpoint.tiny_models import CLASSES, TinyDetector
from tests.modeling.backbone.timm_models import make_retinanet_config

PRETRAIN_ONLY = ("projection", "predictor", "decoder")


class TinyPretraining(nn.Module):
    """QB-Heat's children; its decoder has a tensor of the name and shape of a detector's."""

    pretrain_only_modules = PRETRAIN_ONLY

    def __init__(self, backbone: nn.Module, seed: int = 5) -> None:
        super().__init__()
        self.backbone = backbone
        self.projection = nn.Conv2d(4, 8, 1)
        self.predictor = nn.Linear(8, 8)
        self.decoder = nn.Module()
        self.decoder.bbox_embed = nn.Linear(4, 4)
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)


def _save(model: nn.Module, folder: Path, kind: str = "safetensors") -> str:
    """Writes the model as the trainer does; "ema" as the average beside other weights."""
    info = WeightsInfo(pretrain_only_modules=PRETRAIN_ONLY)
    if kind == "safetensors":
        save_weights(str(folder / "w.safetensors"), model.state_dict(), info)
        return str(folder / "w.safetensors")
    others = {key: 2 * value for key, value in model.state_dict().items()}
    content = {"model": others, "ema": model.state_dict(), "iteration": 9, "info": info.to_dict()}
    torch.save(content, folder / "w.pth")
    return str(folder / "w.pth")


@pytest.mark.parametrize(("kind", "pyramid"), [("safetensors", False), ("ema", True)])
def test_a_detector_loads_the_backbone_and_nothing_else(
    tmp_path: Path, kind: str, pyramid: bool
) -> None:
    pretraining = TinyPretraining(TinyDetector(seed=3).backbone)
    model = TinyDetector(pyramid=pyramid, seed=9)
    fresh = {key: value.clone() for key, value in model.state_dict().items()}
    checkpointer = SafeCheckpointer(model, class_names=CLASSES)
    checkpointer.load(_save(pretraining, tmp_path, kind))
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
    assert (report.unexpected, report.unused, report.skipped) == ((), (), PRETRAIN_ONLY)


@pytest.mark.parametrize("kind", [SafeCheckpointer, ExactCheckpointer])
def test_pre_training_itself_loads_and_resumes_all(
    tmp_path: Path, kind: type[SafeCheckpointer]
) -> None:
    first = TinyPretraining(TinyDetector(seed=3).backbone)
    info = WeightsInfo(pretrain_only_modules=PRETRAIN_ONLY).to_dict()
    SafeCheckpointer(first, str(tmp_path)).save("model_0000001", iteration=1, info=info)
    path = _save(first, tmp_path)
    for load in (lambda c: c.load(path), lambda c: c.resume_or_load("", resume=True)):
        second = TinyPretraining(TinyDetector(seed=4).backbone, seed=6)
        load(kind(second, str(tmp_path)))
        torch.testing.assert_close(dict(second.state_dict()), dict(first.state_dict()))


def test_only_the_named_children_are_skipped(tmp_path: Path) -> None:
    state = TinyPretraining(TinyDetector(seed=3).backbone).state_dict()
    for modules, error in (
        ((), "unexpected"),  # names that collide by accident
        (("backbone", *PRETRAIN_ONLY), "another architecture"),  # nothing is left
        (("back", "pro", "deco"), "unexpected"),  # children are named in full
    ):
        info = WeightsInfo(pretrain_only_modules=modules)
        save_weights(str(tmp_path / "w.safetensors"), state, info)
        with pytest.raises(UserError, match=error):
            SafeCheckpointer(TinyDetector()).load(str(tmp_path / "w.safetensors"))


def test_timm_s_own_files_fit_and_what_the_backbone_leaves_out_is_unused(tmp_path: Path) -> None:
    whole: Any = timm.create_model("convnext_atto")
    torch.save(whole.state_dict(), tmp_path / "convnext_atto.pth")
    checkpointer = SafeCheckpointer(build_model(make_retinanet_config("convnext_atto")))
    checkpointer.load(str(tmp_path / "convnext_atto.pth"))
    report = checkpointer.report
    assert report is not None
    assert report.groups["backbone"].is_full
    assert report.unexpected == ()
    assert any("head.fc" in key for key in report.unused)
