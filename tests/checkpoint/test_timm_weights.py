# Copyright (c) qbheat_det contributors. Apache-2.0.
"""timm's weights by address, without a network: what is asked of timm, and what is said."""

import logging
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

from qbheat_det.checkpoint import SafeCheckpointer
from qbheat_det.core.errors import UserError
from qbheat_det.modeling.backbone import TimmBackbone


class _Detector(nn.Module):
    def __init__(self, mean: float = 0.485) -> None:
        super().__init__()
        self.backbone = TimmBackbone(name="resnet18", out_features=["s8", "s16"])
        self.head = nn.Linear(2, 2)
        mean_of_channels = [255 * mean, 255 * 0.456, 255 * 0.406]
        self.register_buffer("pixel_mean", torch.tensor(mean_of_channels).view(3, 1, 1), False)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """timm's hub with random weights; returns the names that were asked for."""
    asked: list[str] = []
    create = timm.create_model

    def fetch(name: str, *, pretrained: bool = False, **kwargs: Any) -> nn.Module:
        asked.extend([name] if pretrained else [])
        return create(name, pretrained=False, **kwargs)

    monkeypatch.setattr(timm, "create_model", fetch)
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path))
    return asked


def test_weights_are_fetched_once_and_other_pixels_are_warned_of(
    hub: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = SafeCheckpointer(_Detector())
    checkpointer.load("timm://resnet18")
    assert checkpointer.report is not None
    assert checkpointer.report.groups["backbone"].is_full
    assert set(checkpointer.report.unused) >= {"fc.weight", "fc.bias"}
    assert "pixel_mean" not in caplog.text
    tag = timm.models.get_pretrained_cfg("resnet18").tag
    with caplog.at_level(logging.WARNING):
        SafeCheckpointer(_Detector(mean=0.5)).load(f"timm://resnet18.{tag}")
    assert "pixel_mean [123.67" in caplog.text
    assert hub == [f"resnet18.{tag}"]


def test_without_a_network_one_sentence_says_where_the_file_belongs_or_what_is_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*args: Any, **kwargs: Any) -> nn.Module:
        raise OSError("We couldn't connect\nto the hub")

    model = _Detector()
    monkeypatch.setattr(timm, "create_model", fail)
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path))
    for name, named in (
        ("resnet18.a1_in1k", rf"resnet18\.a1_in1k.*{tmp_path}"),
        ("resnt18", "'resnt18'"),  # which timm does not know
        ("resnet18.a9_in9k", "'resnet18.a9_in9k'"),
    ):
        with pytest.raises(UserError, match=named):
            SafeCheckpointer(model).load(f"timm://{name}")
