# Copyright (c) qbheat_det contributors. Apache-2.0.
"""OpenVINO runs the exported ONNX files, and gives what onnxruntime gives."""

from pathlib import Path

import numpy as np
import pytest

from qbheat_det.engine.predict import build_predictor, find_inputs, read_bgr
from qbheat_det.export import ExportedModel
from qbheat_det.export.api import write_model
from tests.export.tiny_models import make_config, save_model, save_photos

pytestmark = pytest.mark.slow
openvino = pytest.importorskip("openvino")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")


@pytest.mark.parametrize("kind", ["two_maps", "mf_detr", "classifier", "qb_heat"])
def test_openvino_agrees_with_onnxruntime(kind: str, tmp_path: Path) -> None:
    cfg = make_config(kind)
    cfg.MODEL.WEIGHTS = save_model(tmp_path / "run", cfg)
    write_model(build_predictor(cfg).model, cfg, tmp_path / "m.onnx")
    exported = ExportedModel.open(tmp_path / "m.onnx", device="cpu")
    compiled = openvino.Core().compile_model(str(tmp_path / "m.onnx"), "CPU")
    for file in find_inputs([save_photos(tmp_path / "photos")]):
        image = read_bgr(file.path)
        images = np.stack([image, image[::-1]])
        expected = exported.run(images)
        found = compiled({"images": images})
        count = expected["counts"] if "counts" in expected else None
        for name, value in expected.items():
            other = found[name]
            assert other.shape == value.shape, name
            for row in range(2):
                end = None if count is None or name == "counts" else count[row]
                np.testing.assert_allclose(
                    other[row][:end], value[row][:end], rtol=1e-3, atol=1e-3, err_msg=name
                )
