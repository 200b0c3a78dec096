# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Losses of class against loops over queries and classes, hand arithmetic and exact identities."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close
from torchvision.ops import sigmoid_focal_loss

from qbheat_det.modeling.detr import (
    ClassificationLoss,
    FocalSettings,
    build_classification,
)

NO_OBJECT_WEIGHT = 0.1
NAMES = ("softmax", "softmax_focal", "focal", "varifocal")
SETTINGS = {
    "as published": FocalSettings(),
    "plain targets": FocalSettings(iou_target=0.0),
    "between": FocalSettings(gamma=1.5, alpha=0.4, iou_target=0.3),
    "no modulation": FocalSettings(gamma=0.0, alpha=0.5),
}


def build(name: str, settings: FocalSettings | None = None) -> ClassificationLoss:
    return build_classification(
        name, no_object_weight=NO_OBJECT_WEIGHT, settings=settings or FocalSettings()
    )


def binary_entropy(target: float, p: Tensor) -> Tensor:
    return -(target * p.log() + (1 - target) * (1 - p).log())


def naive_loss(
    name: str, logits: Tensor, wanted: int, quality: float, settings: FocalSettings
) -> Tensor:
    """Of one query's logits (K + 1,), class by class."""
    num_classes, gamma, alpha = len(logits) - 1, settings.gamma, settings.alpha
    matched = wanted < num_classes
    target = (1 - settings.iou_target) + settings.iou_target * quality if matched else 0.0
    powers = [value.exp() for value in logits]
    total = logits.new_zeros(())
    if name.startswith("softmax"):
        shares = [power / sum(powers) for power in powers]
        if name == "softmax":
            target = float(matched)
        targets = [0.0] * num_classes + [1 - target]
        if matched:
            targets[wanted] = target
        for t, p in zip(targets, shares, strict=True):
            modulation = 1 if name == "softmax" else abs(t - p) ** gamma
            total = total - modulation * t * p.log()
        return total * (1 if matched else NO_OBJECT_WEIGHT)
    for label in range(num_classes):
        p = powers[label] / (1 + powers[label])
        if label == wanted:
            weight = target if name == "varifocal" else alpha * abs(target - p) ** gamma
            total = total + weight * binary_entropy(target, p)
        else:
            total = total + (1 - alpha) * p**gamma * binary_entropy(0.0, p)
    return total


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("name", NAMES)
def test_losses_and_gradients_equal_the_naive_ones(name: str, settings: FocalSettings) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(2, 3, 4, 6, generator=generator)  # (L, N, Q, K + 1)
    wanted = torch.randint(6, (2, 3, 4), generator=generator)  # 5 is no-object
    quality = torch.rand(2, 3, 4, generator=generator)
    ours, theirs = logits.clone().requires_grad_(), logits.double().requires_grad_()
    found = build(name, settings).loss(ours, wanted, quality)
    expected = torch.stack(
        [
            naive_loss(name, theirs[index], int(wanted[index]), float(quality[index]), settings)
            for index in map(tuple, torch.cartesian_prod(*map(torch.arange, (2, 3, 4))).tolist())
        ]
    ).view(2, 3, 4)
    assert_close(found, expected.float(), rtol=1e-5, atol=1e-6)
    gradients = [
        torch.autograd.grad(loss.sum(), x)[0] for loss, x in ((found, ours), (expected, theirs))
    ]
    assert_close(gradients[0], gradients[1].float(), rtol=1e-4, atol=1e-6)


def test_plain_targets_give_the_focal_loss_of_retinanet() -> None:
    generator = torch.Generator().manual_seed(2)
    logits, quality = torch.randn(5, 7, 4, generator=generator), torch.rand(5, 7)
    wanted = torch.randint(4, (5, 7), generator=generator)
    labels = F.one_hot(wanted, 4)[..., :-1].float()
    expected = sigmoid_focal_loss(logits[..., :-1], labels, alpha=0.3, gamma=1.7).sum(dim=-1)
    settings = FocalSettings(alpha=0.3, gamma=1.7, iou_target=0.0)
    assert_close(build("focal", settings).loss(logits, wanted, quality), expected)


@pytest.mark.parametrize("gamma", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_finite_at_the_extremes(name: str, gamma: float) -> None:
    values = torch.tensor([-1e4, -50.0, 0.0, 50.0, 1e4])
    logits = torch.cartesian_prod(values, values, values)[:, None].requires_grad_()
    for wanted in range(3):
        for quality in (0.0, 0.5, 1.0):
            shape = logits.shape[:2]
            part = build(name, FocalSettings(gamma=gamma))
            loss = part.loss(logits, torch.full(shape, wanted), torch.full(shape, quality))
            assert torch.isfinite(loss).all()
            assert (loss >= 0).all()
            assert torch.isfinite(torch.autograd.grad(loss.sum(), logits)[0]).all()


def test_matching_costs_equal_the_naive_ones() -> None:
    logits = 3 * torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(5))
    labels = torch.tensor([0, 2, 2, 1]).expand(2, 5, 4)
    settings = FocalSettings(gamma=1.5, alpha=0.4)
    for image in range(2):
        for query in range(5):
            for column, label in enumerate([0, 2, 2, 1]):
                row = logits[image, query].double()
                p = row[label].sigmoid()
                there = -0.4 * (1 - p) ** 1.5 * p.log()
                focal = there + 0.6 * p**1.5 * (1 - p).log()
                expected = {"focal": focal, "varifocal": focal}
                expected |= dict.fromkeys(("softmax", "softmax_focal"), -row.softmax(0)[label])
                for name, cost in expected.items():
                    found = build(name, settings).matching_cost(logits, labels)
                    assert_close(found[image, query, column], cost.float())
