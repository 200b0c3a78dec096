# Copyright (c) qbheat_det contributors. Apache-2.0.
"""OpenVINO runs the exported ONNX files, and gives what onnxruntime gives."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qbheat_det.engine.predict import build_predictor, find_inputs, read_bgr
from qbheat_det.export import ExportedModel
from qbheat_det.export.api import write_model
from tests.export.tiny_models import make_config, save_model, save_photos

pytestmark = pytest.mark.slow
FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32"}  # by default some CPUs compute in bfloat16
openvino = pytest.importorskip("openvino")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")


@pytest.mark.parametrize("kind", ["two_maps"])
def test_openvino_agrees_with_onnxruntime(kind: str, tmp_path: Path) -> None:
    cfg = make_config(kind)
    cfg.MODEL.WEIGHTS = save_model(tmp_path / "run", cfg)
    write_model(build_predictor(cfg).model, cfg, tmp_path / "m.onnx")
    exported = ExportedModel.open(tmp_path / "m.onnx", device="cpu")
    compiled = openvino.Core().compile_model(str(tmp_path / "m.onnx"), "CPU", FLOAT32)
    for file in find_inputs([save_photos(tmp_path / "photos")]):
        image = read_bgr(file.path)
        images = np.stack([image, image[::-1]])
        expected = exported.run(images)
        found = compiled({"images": images})
        if "counts" in expected:
            for row in range(2):
                _assert_same_boxes(
                    *({k: out[k][row] for k in expected} for out in (found, expected))
                )
            continue
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-3, err_msg=name)


def _assert_same_boxes(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Boxes have partners of their own, in whatever order, as scores of random weights are close.

    One may differ, where suppression chose the other of two.
    """
    count = int(expected["counts"])
    assert int(found["counts"]) == count > 0
    rows = [
        np.column_stack([out["boxes"][:count], 1e3 * out["scores"][:count], out["labels"][:count]])
        for out in (found, expected)
    ]
    apart = np.abs(rows[0][:, None] - rows[1][None]).max(axis=2)
    is_same = apart.min(axis=1) < 0.05  # pixels, and thousandths of a score
    assert is_same.sum() >= count - 1
    partners = apart.argmin(axis=1)[is_same]
    assert len(set(partners.tolist())) == len(partners)
