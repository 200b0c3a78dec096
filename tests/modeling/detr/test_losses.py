# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Losses of class against loops over queries and classes, hand arithmetic and exact identities."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close
from torchvision.ops import sigmoid_focal_loss

from qbheat_det.modeling.detr.losses import (
    ClassificationLoss,
    FocalClassification,
    SoftmaxClassification,
)

NO_OBJECT_WEIGHT = 0.1
LOSSES: dict[str, ClassificationLoss] = {
    "softmax": SoftmaxClassification(no_object_weight=NO_OBJECT_WEIGHT),
    "focal": FocalClassification(),
    "focal, plain targets": FocalClassification(iou_target=0.0),
    "focal, between": FocalClassification(gamma=1.5, alpha=0.4, iou_target=0.3),
    "focal, no modulation": FocalClassification(gamma=0.0, alpha=0.5),
}


def binary_entropy(target: float, p: Tensor) -> Tensor:
    return -(target * p.log() + (1 - target) * (1 - p).log())


def naive_loss(loss: ClassificationLoss, logits: Tensor, wanted: int, quality: float) -> Tensor:
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
def test_losses_and_gradients_equal_the_naive_ones(loss: ClassificationLoss) -> None:
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


def test_plain_targets_give_the_focal_loss_of_retinanet() -> None:
    generator = torch.Generator().manual_seed(2)
    logits, quality = torch.randn(5, 7, 4, generator=generator), torch.rand(5, 7)
    wanted = torch.randint(4, (5, 7), generator=generator)
    labels = F.one_hot(wanted, 4)[..., :-1].float()
    expected = sigmoid_focal_loss(logits[..., :-1], labels, alpha=0.3, gamma=1.7).sum(dim=-1)
    loss = FocalClassification(alpha=0.3, gamma=1.7, iou_target=0.0)
    assert_close(loss.loss(logits, wanted, quality), expected)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_gradients_are_finite_at_the_extremes(loss: ClassificationLoss) -> None:
    values = torch.tensor([-1e4, -50.0, 0.0, 50.0, 1e4])
    logits = torch.cartesian_prod(values, values, values)[:, None].requires_grad_()
    for wanted in range(3):
        for quality in (0.0, 0.5, 1.0):
            shape = logits.shape[:2]
            found = loss.loss(logits, torch.full(shape, wanted), torch.full(shape, quality))
            assert torch.isfinite(found).all()
            assert (found >= 0).all()
            assert torch.isfinite(torch.autograd.grad(found.sum(), logits)[0]).all()


def test_matching_costs_equal_the_naive_ones() -> None:
    logits = 3 * torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(5))
    labels = torch.tensor([0, 2, 2, 1]).expand(2, 5, 4)
    rows = logits.double()
    p = rows.sigmoid()
    focal = -0.4 * (1 - p) ** 1.5 * p.log() + 0.6 * p**1.5 * (1 - p).log()
    for name, naive in {"focal, between": focal, "softmax": -rows.softmax(-1)}.items():
        found = LOSSES[name].matching_cost(logits, labels)
        assert_close(found, naive[..., [0, 2, 2, 1]].float())
