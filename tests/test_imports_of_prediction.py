# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What a prediction does not import, so that it starts fast."""

import subprocess
import sys

import pytest

from .data.pictures import draw, save


@pytest.mark.slow
def test_a_prediction_imports_no_training_and_no_drawing(tmp_path):
    image = save(tmp_path / "image.jpg", draw(120, 90))
    large = ("scipy", "matplotlib", "pandas", "onnx", "fsspec", "jinja2", "qbheat_det.engine")
    large += ("qbheat_det.analysis", "qbheat_det.export", "qbheat_det.feature_cache")
    program = f"""if True:
        import sys, qbheat_det
        qbheat_det.load("retinanet/285M_bccd", device="cpu").predict({image!r})
        print(*{{*sys.modules}} & {{*{large}}})
    """
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert run.stdout.split() == []
