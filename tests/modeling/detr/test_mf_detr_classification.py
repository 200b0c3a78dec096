# Copyright (c) qbheat_det contributors. Apache-2.0.
"""MF-DETR under each loss of class: the same network, whose logits are read otherwise."""

from typing import Any

import pytest
import torch
from detectron2.modeling import build_model
from torch import Tensor
from torch.testing import assert_close

from qbheat_det.modeling.detr.mf_detr import MFDETR
from tests.engine.gradient_cases import MF_DETR, Case, make_case_config, make_image

KEY, PRIOR = "MODEL.MF_DETR.CLASSIFICATION", "MODEL.MF_DETR.FOCAL.PRIOR"


def build(*opts: Any) -> MFDETR:
    torch.manual_seed(0)
    model = build_model(make_case_config(Case(MF_DETR, opts=opts), "cpu"))
    assert isinstance(model, MFDETR)
    return model.eval()


def predictions(model: MFDETR) -> tuple[Tensor, list[Any]]:
    """Logits of the last block (N, Q, K + 1), and the instances of inference."""
    images = [make_image(index) for index in (0, 5)]
    with torch.no_grad():
        features, padding = model.extract_features(model.preprocess_image(images))
        logits = model.decoder(features, padding)["pred_logits"][-1]
        return logits, [result["instances"] for result in model(images)]


def test_inference_under_the_focal_softmax_is_that_of_the_softmax_to_the_bit() -> None:
    _, plain = predictions(build())
    _, focal = predictions(build(KEY, "softmax_focal"))
    for one, other in zip(plain, focal, strict=True):
        assert_close(other.scores, one.scores, rtol=0, atol=0)
        assert_close(other.pred_classes, one.pred_classes, rtol=0, atol=0)
        assert_close(other.pred_boxes.tensor, one.pred_boxes.tensor, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["focal", "varifocal"])
def test_inference_under_sigmoids_takes_the_highest_and_never_no_object(name: str) -> None:
    logits, found = predictions(build(KEY, name))
    for row, instances in zip(logits, found, strict=True):
        scores, classes = row[:, :-1].sigmoid().max(dim=-1)
        assert_close(instances.scores, scores)
        assert_close(instances.pred_classes, classes, rtol=0, atol=0)
