# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Weights that fit, but were trained on other pixels or for other scores, load with a warning."""

from pathlib import Path

import pytest
import torch

from qbheat_det.checkpoint import SafeCheckpointer, WeightsInfo, save_weights
from tests.checkpoint.tiny_models import TinyDetector


@pytest.mark.parametrize(
    ("architecture", "trained", "told"),
    [
        ("TinyDetector", "sigmoid", True),
        ("TinyDetector", "soft", False),
        ("AnotherModel", "sigmoid", False),
    ],
)
def test_scores_of_another_kind_than_the_weights_were_trained_for_are_told(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    architecture: str,
    trained: str,
    told: bool,
) -> None:
    model = TinyDetector()
    model.equivalent_configs = {"MODEL.READING": ("soft", "softer")}
    config = f"MODEL:\n  META_ARCHITECTURE: {architecture}\n  READING: {trained}\n"
    save_weights(tmp_path / "w.safetensors", model.state_dict(), WeightsInfo(config=config))
    SafeCheckpointer(model).load(str(tmp_path / "w.safetensors"))
    assert ("trained with MODEL.READING sigmoid" in caplog.text) == told


def test_other_pixels_than_the_weights_were_trained_on_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = TinyDetector()
    model.register_buffer("pixel_mean", torch.tensor([103.53, 116.28, 123.675]).view(-1, 1, 1), 0)
    info = WeightsInfo(pixel_format="BGR", pixel_mean=(103.53, 116.28, 123.675))
    save_weights(str(tmp_path / "bgr.safetensors"), model.state_dict(), info)
    SafeCheckpointer(model).load(str(tmp_path / "bgr.safetensors"))
    assert "INPUT.FORMAT" not in caplog.text
    info = WeightsInfo(pixel_format="RGB", pixel_mean=(123.675, 116.28, 103.53))
    save_weights(str(tmp_path / "rgb.safetensors"), model.state_dict(), info)
    SafeCheckpointer(model).load(str(tmp_path / "rgb.safetensors"))
    assert "pixel_mean [123.675, 116.28, 103.53] in format RGB" in caplog.text
