# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Whole runs of scattered masking: held-out loss, pictures, and what the weights say."""

import json
import math
from pathlib import Path

import cv2
import pytest

from qbheat_det.checkpoint import info_of
from qbheat_det.engine.data_flags import CUSTOM_IMAGES, CUSTOM_VAL_IMAGES
from qbheat_det.engine.looking import Look

from .conftest import forget_runs
from .held_out_cases import make_folder, train


@pytest.mark.parametrize("arch", ["InterpolatedMasking", "MaskTokenMasking"])
def test_a_run_is_evaluated_and_looked_at_once_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    monkeypatch.setattr(Look, "_run_seconds", lambda _: 1e9)
    forget_runs(CUSTOM_IMAGES, CUSTOM_VAL_IMAGES)
    opts = {
        "MODEL.META_ARCHITECTURE": arch,
        "VIS.ENABLED": "True",
        "VIS.PERIOD": "2",
        "VIS.NUM_IMAGES": "2",
    }
    seen, unseen = make_folder(tmp_path / "seen", 6), make_folder(tmp_path / "unseen", 3, first=6)
    flags = ["--image-folder", str(seen), "--val-image-folder", str(unseen)]
    found = train(tmp_path / "run", opts, *flags)["reconstruction"]
    assert found.keys() == {"loss", "loss_standard_error"}
    assert 0.5 < found["loss"] < 3
    assert math.isfinite(found["loss_standard_error"])
    info = info_of(str(tmp_path / "run" / "model_final.safetensors"))
    assert info is not None
    assert info.pretrain_only_modules == ("projection", "predictor", "decoder")
    looks = tmp_path / "run" / "looks"
    assert {path.name for path in looks.iterdir()} == {
        f"{kind}_000000{steps}.{ending}"
        for steps in (0, 2)
        for kind, ending in (
            ("correlation", "json"),
            ("reconstructions", "json"),
            ("reconstructions", "png"),
        )
    }
    sheet = cv2.imread(str(looks / "reconstructions_0000002.png"))
    assert sheet.shape[1] == 3 * 192 + 2 * 6  # 64 pixels, three times enlarged
    content = json.loads((looks / "reconstructions_0000002.json").read_text())
    assert [set(row) for row in content["patches"]] == [{"loss"}] * 2
