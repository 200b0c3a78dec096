# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``qbheat_det.load``: names, files, folders and addresses, and what is said of others."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import qbheat_det
from qbheat_det.api import Detector, Encoder
from qbheat_det.core.errors import UserError


def test_a_zoo_name_is_a_detector_or_an_encoder_and_says_what_it_is() -> None:
    detector = qbheat_det.load("retinanet/285M_bccd", device="cpu")
    assert isinstance(detector, Detector)
    assert detector.weights == "qbheat://retinanet/285M_bccd"
    for word in ("SyncRetinaNet", "RBC, WBC, Platelets", "5.2 M", "cpu", detector.weights):
        assert word in repr(detector)
    encoder = qbheat_det.load("qbheat://qb_heat/285M_caltech101", device="cpu")
    assert isinstance(encoder, Encoder)
    assert "MobileFormer" in repr(encoder)


def test_of_a_run_the_best_weights_are_taken_or_else_the_final_ones(
    weights: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=str(tmp_path)):
        qbheat_det.load(tmp_path)
    for name in ("model_final", "model_best"):
        shutil.copy(weights, tmp_path / f"{name}.safetensors")
        detector = qbheat_det.load(tmp_path, device="cpu")
        assert Path(detector.weights) == tmp_path / f"{name}.safetensors"


def test_timms_networks_are_encoders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[Any] = []
    create = timm.create_model

    def fetch(name: str, *, pretrained: bool = False, **kwargs: Any) -> Any:
        model = create(name, pretrained=False, **kwargs)
        made.extend([model] if pretrained else [])
        return model

    monkeypatch.setattr(timm, "create_model", fetch)
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path))
    encoder = qbheat_det.load("timm://resnet18", device="cpu")
    assert isinstance(encoder, Encoder)
    image = torch.randint(256, (3, 64, 96), dtype=torch.uint8)
    outputs = encoder(image)
    assert [*outputs] == ["s2", "s4", "s8", "s16", "s32"]
    mean, std = (torch.tensor(made[0].pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        expected = made[0].eval().forward_features(((image / 255 - mean) / std)[None])
    torch.testing.assert_close(outputs["s32"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("retinanet/285M_bccc", "retinanet/285M_bccd"),  # suggested
        ("nowhere.safetensors", "nowhere"),
        ("nowhere.onnx", "nowhere"),
        ("timm://resnet18x", "resnet18x"),
        ("qbheat://nothing/here", "nothing/here"),
    ],
)
def test_what_is_not_there_is_named(name: str, named: str) -> None:
    with pytest.raises(UserError, match=named):
        qbheat_det.load(name)


@pytest.mark.parametrize("device", ["cuda", "cuda:7", "gpu", "meta"])
def test_a_device_that_is_not_there_is_named(
    device: str, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=device):
        qbheat_det.load(weights, device=device)
