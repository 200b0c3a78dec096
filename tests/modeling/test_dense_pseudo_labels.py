# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The losses on unlabelled images (Dense Teacher) beside a naive implementation."""

import math

import pytest
import torch
from detectron2.modeling import build_model
from detectron2.utils.events import EventStorage
from torch.testing import assert_close

from qbheat_det.modeling.contracts import PSEUDO_LABELS, STRONG, UNLABELLED
from qbheat_det.modeling.dense_predictions import DensePredictions
from qbheat_det.modeling.dense_pseudo_labels import (
    DensePseudoLabelLoss,
    DensePseudoLabels,
)
from tests.engine.gradient_cases import NUM_BOXES, make_image

from .tiny_dense import make_dense_config


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def cross_entropy(target, p):
    return -target * math.log(p) - (1 - target) * math.log(1 - p)


def generalized_iou(a, b):
    def area(x):
        return max(0.0, x[2] - x[0]) * max(0.0, x[3] - x[1])

    inner = area([*map(max, a[:2], b[:2]), *map(min, a[2:], b[2:])])
    outer = area([*map(min, a[:2], b[:2]), *map(max, a[2:], b[2:])])
    union = area(a) + area(b) - inner
    return inner / union - (outer - union) / outer


def naive_losses(student, teacher, share):
    """Sums over lists, location by location."""
    places = [(n, r) for n in range(len(student.logits)) for r in range(student.logits.shape[1])]
    best = {(n, r): max(map(sigmoid, teacher.logits[n, r].tolist())) for n, r in places}
    top = sorted(places, key=lambda place: -best[place])[: max(1, int(share * len(places)))]
    total = sum(best[place] for place in top)
    cls = box = quality = 0.0
    for n, r in places:
        pairs = zip(student.logits[n, r].tolist(), teacher.logits[n, r].tolist(), strict=True)
        for mine, theirs in pairs:
            target, p = sigmoid(theirs) if (n, r) in top else 0.0, sigmoid(mine)
            cls += abs(target - p) ** 2 * cross_entropy(target, p) / total
    for n, r in top:
        weight = best[n, r] / total
        overlap = generalized_iou(student.boxes[n, r].tolist(), teacher.boxes[n, r].tolist())
        box += weight * (1 - overlap)
        if student.quality is not None and teacher.quality is not None:
            mine, theirs = float(student.quality[n, r]), float(teacher.quality[n, r])
            quality += weight * cross_entropy(sigmoid(theirs), sigmoid(mine))
    losses = {"loss_pseudo_cls": cls, "loss_pseudo_box": box}
    return losses if student.quality is None else {**losses, "loss_pseudo_ctr": quality}


def draw_predictions(has_quality):
    corners = torch.rand(2, 30, 2, dtype=torch.float64) * 40
    boxes = torch.cat([corners, corners + 5 + 20 * torch.rand(2, 30, 2)], dim=2)
    quality = torch.randn(2, 30) if has_quality else None
    return DensePredictions(torch.randn(2, 30, 3), boxes, quality)


@pytest.mark.parametrize("has_quality", [False, True])
@pytest.mark.parametrize("share", [0.001, 0.1, 1.0])
def test_the_losses_are_those_of_a_naive_implementation(has_quality, share):
    torch.manual_seed(0)
    student, teacher = draw_predictions(has_quality), draw_predictions(has_quality)
    loss = DensePseudoLabelLoss(top_ratio=3.0, weight=2.0)
    found = loss(student, DensePseudoLabels.join(loss.select([teacher], share * 60 / 3)))
    expected = {name: 2 * value for name, value in naive_losses(student, teacher, share).items()}
    assert_close({name: float(v) for name, v in found.items()}, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["SyncRetinaNet", "SyncFCOS"])
def test_a_student_equal_to_its_mean_teacher_has_only_the_loss_of_other_places(name):
    cfg = make_dense_config(name)
    model = build_model(cfg)
    labelled, other = (make_image(NUM_BOXES.index(count)) for count in (2, 3))
    entry = {"image": other["image"], STRONG: other["image"]}
    model.head.bbox_pred.bias.data.fill_(0.5)  # no boxes without area
    model.eval()  # BatchNorm's own statistics in both
    entry[PSEUDO_LABELS] = model.pseudo_labels([[entry]])[0]
    with torch.no_grad():
        teacher = model.predict_densely([entry])
    share = 2 * float(model.loss_normalizer) / teacher.logits[..., 0].numel()
    for module in (model, model.head):
        module.training = True
    with EventStorage():
        losses = model([{**labelled, UNLABELLED: [entry]}])
        alone = model([labelled])
    assert {name for name in losses if "pseudo" not in name} == set(alone)
    assert_close(losses["loss_pseudo_box"], torch.zeros(()), rtol=0, atol=1e-4)
    expected = naive_losses(teacher, teacher, share)["loss_pseudo_cls"]
    assert_close(float(losses["loss_pseudo_cls"].detach()), expected, rtol=1e-3, atol=1e-5)
    sum(losses.values()).backward()
    assert all(float(p.grad.abs().sum()) > 0 for p in model.head.parameters())
