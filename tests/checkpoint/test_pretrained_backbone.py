# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Files of pre-training in detectors: only the backbone is loaded."""

from pathlib import Path

import pytest
import torch
from torch import nn

from qbheat_det.checkpoint import SafeCheckpointer, WeightsInfo, save_weights
from qbheat_det.core.errors import UserError
from tests.checkpoint.tiny_models import CLASSES, TinyDetector

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
