# Copyright (c) qbheat_det contributors. Apache-2.0.
"""One test for every difference between Detectron2 v0.6 and its main branch that can reach us.

Each difference is imitated in both directions, so that the tests say the same on either. The
whole suite passes on both too; these say why. What importing needs, ``test_wheel.py`` tests.
"""

import importlib.util

import pytest
import torch
from detectron2.config import CfgNode
from detectron2.modeling import Backbone, build_model

from qbheat_det.config import get_config_path, load_config


def small(name: str) -> CfgNode:
    """Returns a shipped config on the CPU with the smallest decoder."""
    cfg = load_config(get_config_path(name), ["MODEL.DEVICE", "cpu"])
    cfg.MODEL.MF_DETR.NUM_BLOCKS = [1, 1, 1]
    return cfg


@pytest.mark.parametrize(
    "name", ["coco/mf_detr_211_285M_probe.yaml", "coco/retinanet_285M_probe.yaml"]
)
def test_detectors_work_with_and_without_padding_constraints(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # main's detectors read this property of the backbone, v0.6 has none.
    batch = [{"image": torch.rand(3, 70, 96) * 255}, {"image": torch.rand(3, 64, 50) * 255}]
    model = build_model(small(name)).eval()
    monkeypatch.delattr(Backbone, "padding_constraints", raising=False)
    with torch.no_grad():
        without = model.preprocess_image(batch).tensor
        outputs = model(batch)
    monkeypatch.setattr(Backbone, "padding_constraints", property(lambda _: {}), raising=False)
    with torch.no_grad():
        torch.testing.assert_close(model.preprocess_image(batch).tensor, without)
        for one, other in zip(model(batch), outputs, strict=True):
            boxes, expected = one["instances"].pred_boxes, other["instances"].pred_boxes
            torch.testing.assert_close(boxes.tensor, expected.tensor)


def test_without_detectron2_the_error_names_the_two_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    from qbheat_det.core.environment import require_detectron2

    require_detectron2()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"tools/install_detectron2\.py.*pip install.*git\+"):
        require_detectron2()
