# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The set loss and its losses of class against sums in Python loops: values and gradients."""

import math

import pytest
import torch
from torch.testing import assert_close

from qbheat_det.modeling.detr import SetCriterion
from qbheat_det.modeling.detr.criterion import FocalClassification, SoftmaxClassification, Targets

from ..reference_set_criterion import CLASS_WEIGHT, GIOU_WEIGHT, L1_WEIGHT, set_criterion

NO_OBJECT_WEIGHT = 0.1
COUNTS = {
    "every image has boxes": [3, 1, 4],
    "an image without boxes": [2, 0, 3],
    "no image with boxes": [0, 0],
    "more boxes than queries": [9, 1],
    "one image": [5],
}


def criterion(classes):
    return SetCriterion(
        class_weight=CLASS_WEIGHT,
        l1_weight=L1_WEIGHT,
        giou_weight=GIOU_WEIGHT,
        num_classes=classes,
        classification=SoftmaxClassification(no_object_weight=NO_OBJECT_WEIGHT),
    )


def losses(loss, outputs, targets):
    """By the divisors of this batch alone."""
    totals = loss.normalizers(targets.counts, outputs["pred_logits"].shape[2])
    return loss(outputs, targets, loss.mean_normalizers(torch.tensor(totals), 1))


def both(counts, *, queries=6, blocks=3):
    """Losses by the package and by the reference, and the gradients of their sums."""
    logits, boxes = predictions(blocks, len(counts), queries, classes=4)
    labels, true_boxes = ground_truth(counts, classes=4)
    ours = [tensor.clone().requires_grad_() for tensor in (logits, boxes)]
    theirs = [tensor.double().requires_grad_() for tensor in (logits, boxes)]
    outputs = dict(zip(("pred_logits", "pred_boxes"), ours, strict=True))
    found = losses(criterion(4), outputs, Targets.stack(labels, true_boxes))
    expected = set_criterion(
        [
            {"pred_logits": theirs[0][block], "pred_boxes": theirs[1][block]}
            for block in range(blocks)
        ],
        [(label, box.double()) for label, box in zip(labels, true_boxes, strict=True)],
        NO_OBJECT_WEIGHT,
    )
    sum(found.values()).backward()
    sum(expected.values()).backward()
    gradients = []
    for own, reference in zip(ours, theirs, strict=True):
        gradients.append((own.grad, reference.grad.float()))
    return found, expected, gradients


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_losses_and_gradients_equal_the_naive_ones(counts):
    found, expected, gradients = both(counts)
    assert set(found) == set(expected)
    for name, loss in found.items():
        assert_close(loss, expected[name].float(), rtol=1e-5, atol=1e-6, msg=name)
    for own, reference in gradients:
        assert_close(own, reference, rtol=1e-4, atol=1e-6)


def test_a_perfect_prediction_costs_nothing_and_has_finite_gradients():
    labels, true_boxes = ground_truth([3, 0], classes=4)
    logits = torch.full((1, 2, 5, 5), -30.0)
    logits[0, :, :, 4] = 30.0
    boxes = predictions(1, 2, 5, classes=4)[1]
    for query, (label, box) in enumerate(zip(labels[0], true_boxes[0], strict=True)):
        logits[0, 0, query] = -30.0
        logits[0, 0, query, label] = 30.0
        boxes[0, 0, query] = box
    logits.requires_grad_(), boxes.requires_grad_()
    outputs = {"pred_logits": logits, "pred_boxes": boxes}
    found = losses(criterion(4), outputs, Targets.stack(labels, true_boxes))
    for name, loss in found.items():
        assert_close(loss, torch.zeros(()), rtol=0, atol=1e-5, msg=name)
    sum(found.values()).backward()
    assert torch.isfinite(logits.grad).all()
    assert torch.isfinite(boxes.grad).all()


def test_the_loss_of_class_reads_the_overlap_and_does_not_move_the_boxes():
    boxes = torch.tensor([[[[0.5, 0.5, 0.4, 0.4], [0.1, 0.1, 0.2, 0.2]]]], requires_grad=True)
    logits = torch.zeros(1, 1, 2, 2)  # every score is 1/2
    targets = Targets.stack([torch.tensor([0])], [torch.tensor([[0.5, 0.5, 0.4, 0.2]])])
    loss = SetCriterion(num_classes=1, classification=FocalClassification(alpha=0.25))
    found = losses(loss, {"pred_logits": logits, "pred_boxes": boxes}, targets)["loss_ce"]
    # The IoU of the matched box is its score, 1/2, which costs nothing.
    assert float(found) == pytest.approx(0.75 * 0.5**2 * math.log(2))
    assert not found.requires_grad


def random_boxes(*shape, generator):
    """Boxes inside the image, neither thin nor aligned with it."""
    corners = torch.rand(*shape, 2, 2, generator=generator)
    size = 0.05 + 0.5 * corners[..., 1, :]
    return torch.cat([size / 2 + corners[..., 0, :] * (1 - size), size], dim=-1)


def predictions(blocks, images, queries, classes):
    generator = torch.Generator().manual_seed(blocks + 10 * images + 100 * queries)
    logits = 3 * torch.randn(blocks, images, queries, classes + 1, generator=generator)
    return logits, random_boxes(blocks, images, queries, generator=generator)


def ground_truth(counts, classes):
    generator = torch.Generator().manual_seed(sum(counts))
    labels = [torch.randint(classes, (count,), generator=generator) for count in counts]
    return labels, [random_boxes(count, generator=generator) for count in counts]


def test_a_diverged_model_does_not_crash_the_solver():
    logits, boxes = predictions(1, 1, queries=5, classes=4)
    targets = Targets.stack(*ground_truth([3], 4))
    assert len(criterion(4).match(logits * float("nan"), boxes, targets).query) == 3


LOSSES = {
    "softmax": SoftmaxClassification(no_object_weight=NO_OBJECT_WEIGHT),
    "focal": FocalClassification(),
    "focal, plain targets": FocalClassification(iou_target=0.0),
    "focal, between": FocalClassification(gamma=1.5, alpha=0.4, iou_target=0.3),
    "focal, no modulation": FocalClassification(gamma=0.0, alpha=0.5),
}


def binary_entropy(target, p):
    return -(target * p.log() + (1 - target) * (1 - p).log())


def naive_loss(loss, logits, wanted, quality):
    """Of one query's logits (K + 1,), class by class."""
    num_classes = len(logits) - 1
    powers = [value.exp() for value in logits]
    if not isinstance(loss, FocalClassification):
        weight = 1 if wanted < num_classes else NO_OBJECT_WEIGHT
        return -weight * (powers[wanted] / sum(powers)).log()
    total = logits.new_zeros(())
    for label in range(num_classes):
        p = powers[label] / (1 + powers[label])
        if label == wanted:
            target = (1 - loss.iou_target) + loss.iou_target * quality
            weight = loss.alpha * abs(target - p) ** loss.gamma
            total = total + weight * binary_entropy(target, p)
        else:
            total = total + (1 - loss.alpha) * p**loss.gamma * binary_entropy(0.0, p)
    return total


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_losses_of_class_and_their_gradients_equal_the_naive_ones(loss):
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(2, 3, 4, 6, generator=generator)  # (L, N, Q, K + 1)
    wanted = torch.randint(6, (2, 3, 4), generator=generator)  # 5 is no-object
    quality = torch.rand(2, 3, 4, generator=generator)
    ours, theirs = logits.clone().requires_grad_(), logits.double().requires_grad_()
    found = loss.loss(ours, wanted, quality)
    expected = torch.stack(
        [
            naive_loss(loss, row, int(label), float(iou))
            for row, label, iou in zip(
                theirs.flatten(0, 2), wanted.flatten(), quality.flatten(), strict=True
            )
        ]
    ).view(2, 3, 4)
    assert_close(found, expected.float(), rtol=1e-5, atol=1e-6)
    gradients = [
        torch.autograd.grad(value.sum(), x)[0] for value, x in ((found, ours), (expected, theirs))
    ]
    assert_close(gradients[0], gradients[1].float(), rtol=1e-4, atol=1e-6)


def test_costs_and_scores_equal_the_naive_ones():
    logits = 3 * torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(5))
    labels = torch.tensor([0, 2, 2, 1]).expand(2, 5, 4)
    rows = logits.double()
    p = rows.sigmoid()
    assert_close(LOSSES["focal"].scores(logits), p[..., :-1].float())
    focal = -0.4 * (1 - p) ** 1.5 * p.log() + 0.6 * p**1.5 * (1 - p).log()
    for name, naive in {"focal, between": focal, "softmax": -rows.softmax(-1)}.items():
        found = LOSSES[name].matching_cost(logits, labels)
        assert_close(found, naive[..., [0, 2, 2, 1]].float())


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_gradients_are_finite_at_the_extremes(loss):
    values = torch.tensor([-1e4, -50.0, 0.0, 50.0, 1e4])
    logits = torch.cartesian_prod(values, values, values)[:, None].requires_grad_()
    for wanted in range(3):
        for quality in (0.0, 0.5, 1.0):
            shape = logits.shape[:2]
            found = loss.loss(logits, torch.full(shape, wanted), torch.full(shape, quality))
            assert torch.isfinite(found).all()
            assert (found >= 0).all()
            assert torch.isfinite(torch.autograd.grad(found.sum(), logits)[0]).all()
