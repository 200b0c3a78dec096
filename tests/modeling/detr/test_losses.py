# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Losses of class against loops over queries and classes, hand arithmetic and exact identities."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close
from torchvision.ops import box_convert, box_iou, sigmoid_focal_loss

from qbheat_det.modeling.detr import (
    ClassificationLoss,
    FocalSettings,
    HungarianMatcher,
    SetCriterion,
    SoftmaxClassification,
    Targets,
    build_classification,
)

from .test_matcher import as_list, ground_truth, predictions

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


def test_one_query_by_hand() -> None:
    wanted, quality = torch.tensor([[1]]), torch.tensor([[0.5]])
    # Sigmoids 1/2 and 3/4; targets 0 and 1/2. The last logit has no part.
    logits = torch.tensor([[[0.0, math.log(3), 9.0]]])
    absent = 0.75 * 0.5**2 * math.log(2)
    entropy = -0.5 * math.log(0.75) - 0.5 * math.log(0.25)
    there = 0.25 * 0.25**2 * entropy
    assert_close(build("focal").loss(logits, wanted, quality), torch.tensor([[absent + there]]))
    there = 0.5 * entropy
    assert_close(build("varifocal").loss(logits, wanted, quality), torch.tensor([[absent + there]]))
    # A softmax of 1/5, 3/5 and 1/5 with targets 0, 1/2 and 1/2.
    logits = torch.tensor([[[0.0, math.log(3), 0.0]]])
    expected = 0.1**2 * 0.5 * math.log(5 / 3) + 0.3**2 * 0.5 * math.log(5)
    assert_close(build("softmax_focal").loss(logits, wanted, quality), torch.tensor([[expected]]))
    no_object = NO_OBJECT_WEIGHT * 0.8**2 * math.log(5)
    found = build("softmax_focal").loss(logits, torch.tensor([[2]]), quality)
    assert_close(found, torch.tensor([[no_object]]))


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


def test_scores_are_those_of_the_softmax_or_of_sigmoids() -> None:
    logits = 3 * torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(4))
    softmax = logits.softmax(dim=-1)[..., :3]
    assert_close(build("softmax").scores(logits), softmax, rtol=0, atol=0)
    assert_close(build("softmax_focal").scores(logits), softmax, rtol=0, atol=0)
    assert_close(build("focal").scores(logits), logits[..., :3].sigmoid(), rtol=0, atol=0)


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


class Recording(SoftmaxClassification):
    """Keeps what it is asked."""

    reads_quality = True

    def loss(self, logits: Tensor, wanted: Tensor, quality: Tensor) -> Tensor:
        self.wanted, self.quality = wanted, quality
        return super().loss(logits, wanted, quality)


@pytest.mark.parametrize("counts", [[3, 0, 4], [0, 0], [9, 1]], ids=str)
def test_quality_is_the_iou_of_a_match_and_holds_no_gradient(counts: list[int]) -> None:
    logits, boxes = predictions(2, len(counts), 6, classes=4)
    boxes.requires_grad_()
    labels, true_boxes = ground_truth(counts, classes=4)
    targets, part = Targets.stack(labels, true_boxes), Recording()
    matcher = HungarianMatcher(class_weight=1, l1_weight=5, giou_weight=2)
    criterion = SetCriterion(matcher=matcher, num_classes=4, classification=part)
    criterion({"pred_logits": logits, "pred_boxes": boxes}, targets)
    quality, wanted = torch.zeros(2, len(counts), 6), torch.full((2, len(counts), 6), 4)
    matches = as_list(matcher(logits, boxes, targets))
    for block, image, query, target in matches:
        pair = (boxes[block, image, query].detach(), true_boxes[image][target])
        corners = (box_convert(each[None], "cxcywh", "xyxy") for each in pair)
        quality[block, image, query] = box_iou(*corners)[0, 0]
        wanted[block, image, query] = labels[image][target]
    assert_close(part.quality, quality)
    assert_close(part.wanted, wanted)
    assert not part.quality.requires_grad


def test_a_batch_without_boxes_is_divided_by_one_in_any_number_of_parts() -> None:
    part = build("focal")
    matcher = HungarianMatcher(class_weight=1, l1_weight=5, giou_weight=2, classification=part)
    criterion = SetCriterion(matcher=matcher, num_classes=4, classification=part)
    counts = torch.tensor(criterion.normalizers([0, 0, 0], num_queries=5))
    # A mean over parts of sums divided by 1 / parts is the sum over parts.
    for parts in (1, 2, 7):
        assert_close(criterion.mean_normalizers(counts, parts)[0], torch.tensor(1 / parts))
    full = criterion.mean_normalizers(torch.tensor([6.0, 9.0]), 3)
    assert_close(full, torch.tensor([2.0, 3.0]), rtol=0, atol=0)


def test_an_unknown_name_is_told_the_choices() -> None:
    with pytest.raises(ValueError, match="hinge"):
        build("hinge")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"gamma": -1.0}, "GAMMA"),
        ({"gamma": 0.5}, "GAMMA"),
        ({"alpha": 1.5}, "ALPHA"),
        ({"iou_target": -0.1}, "IOU_TARGET"),
        ({"prior": 0.0}, "PRIOR"),
        ({"prior": 1.0}, "PRIOR"),
    ],
)
def test_settings_out_of_range_are_refused(values: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FocalSettings(**values)
