# Copyright (c) qbheat_det contributors. Apache-2.0.
"""ATSS beside a naive implementation, and RetinaNet with it."""

import statistics

import pytest
import torch
from detectron2.modeling import build_model
from detectron2.structures import Boxes, Instances
from detectron2.utils.events import EventStorage
from torch.testing import assert_close
from torchvision.ops import box_iou, generalized_box_iou, sigmoid_focal_loss

from qbheat_det.modeling.atss import AtssAssigner
from qbheat_det.modeling.loss_normalizer import COUNT
from qbheat_det.modeling.losses import quality_focal_loss

from .tiny_dense import make_dense_config

STRIDES = (8, 16, 32)


def make_anchors(side=96):
    """Returns a square anchor of four strides per position of a square image, level by level."""
    levels = []
    for stride in STRIDES:
        places = torch.arange(0, side, stride, dtype=torch.float)
        centers = torch.cartesian_prod(places, places)
        levels.append(Boxes(torch.cat([centers - 2 * stride, centers + 2 * stride], dim=1)))
    return levels


def first(pair):
    return pair[0]


def assign_naively(anchors, boxes, top_k):
    every = Boxes.cat(anchors).tensor
    best = [(-1.0, -1)] * len(every)
    for number, box in enumerate(boxes):
        center, candidates, start = (box[:2] + box[2:]) / 2, [], 0
        for level in anchors:
            distance = (level.get_centers() - center).square().sum(1)
            candidates += (distance.argsort(stable=True)[:top_k] + start).tolist()
            start += len(level)
        overlaps = box_iou(box[None].double(), every[candidates].double())[0].tolist()
        mean = statistics.mean(overlaps)
        spread = statistics.stdev(overlaps)
        taken = []
        for row, overlap in zip(candidates, overlaps, strict=True):
            x, y = ((every[row, :2] + every[row, 2:]) / 2).tolist()
            distance = min(x - box[0], y - box[1], box[2] - x, box[3] - y)
            if overlap >= mean + spread and distance > 0.01:
                taken.append((overlap, row))
        for overlap, row in taken or [max(zip(overlaps, candidates, strict=True), key=first)]:
            best[row] = max(best[row], (overlap, number))
    return [number for _, number in best]


@pytest.mark.parametrize("seed", range(8))
def test_atss_is_the_naive_assignment(seed):
    torch.manual_seed(seed)
    corners, sides = torch.rand(5, 2) * 70, torch.rand(5, 2) * 40 + 2  # some are below a stride
    boxes, anchors = torch.cat([corners, corners + sides], dim=1), make_anchors()
    found = AtssAssigner(top_k=4)(anchors, Boxes(boxes))
    assert found.tolist() == assign_naively(anchors, boxes, 4)
    assert set(found.tolist()) == {-1, 0, 1, 2, 3, 4}  # each box has an anchor, however small


FAR = [[100.0 + i, 100.0, 110.0 + i, 110.0] for i in range(7)]


def test_the_best_anchor_beside_a_box_is_not_its_own_if_another_is():
    beside, inside = [0.0, 0.0, 22.0, 10.0], [3.0, 3.0, 9.0, 9.0]
    anchors = [Boxes(torch.tensor([beside, inside, *FAR]))]
    found = AtssAssigner()(anchors, Boxes(torch.tensor([[0.0, 0.0, 10.0, 10.0]])))
    assert found.tolist() == [-1, 0] + [-1] * 7


@pytest.mark.parametrize(("distance", "number"), [(0.005, -1), (0.02, 0)])
def test_a_center_is_in_a_box_from_a_hundredth_of_a_pixel(distance, number):
    # IoUs are 0.5, 0.49 and seven times 0, so the threshold is 0.33. The center of the first anchor
    # is as far from the left side of the box.
    first, second = [distance - 10, 0.0, distance + 10, 10.0], [1.0, 1.0, 8.0, 8.0]
    anchors = [Boxes(torch.tensor([first, second, *FAR]))]
    found = AtssAssigner()(anchors, Boxes(torch.tensor([[0.0, 0.0, 10.0, 10.0]])))
    assert found.tolist() == [number, 0] + [-1] * 7


@pytest.mark.parametrize(("overlap", "number"), [(0.51, -1), (0.53, 0)])
def test_the_deviation_of_the_overlaps_is_unbiased(overlap, number):
    # With IoUs of 1, x and seven times 0, the threshold is x at x = 0.5 with divisor 9, and at
    # x = 0.5272 with divisor 8.
    anchors = [Boxes(torch.tensor([[0.0, 0.0, 10.0, 10 * overlap], [0.0, 0.0, 10.0, 10.0], *FAR]))]
    found = AtssAssigner()(anchors, Boxes(torch.tensor([[0.0, 0.0, 10.0, 10.0]])))
    assert found.tolist() == [number, 0] + [-1] * 7


def test_a_box_with_one_candidate_gets_it():
    anchor = Boxes(torch.tensor([[0.0, 0.0, 8.0, 8.0]]))
    for box in ([0.0, 0.0, 8.0, 8.0], [1.0, 2.0, 9.0, 7.0], [50.0, 50.0, 60.0, 60.0]):
        assert AtssAssigner()([anchor], Boxes(torch.tensor([box]))).tolist() == [0]


def test_without_boxes_all_anchors_are_background():
    assert (AtssAssigner()(make_anchors(), Boxes(torch.zeros(0, 4))) == -1).all()


def test_quality_focal_loss_with_hard_targets_is_the_focal_loss():
    torch.manual_seed(0)
    logits, targets = torch.randn(50), torch.randint(2, (50,)).float()
    theirs = sigmoid_focal_loss(logits, targets, alpha=-1, gamma=2.0)
    assert_close(quality_focal_loss(logits, targets, 2.0), theirs)
    scores = torch.rand(50)  # no loss at the target itself
    assert_close(quality_focal_loss(scores.logit(), scores, 2.0), torch.zeros(50))


def test_scores_learn_the_overlap_of_the_predicted_boxes():
    cfg = make_dense_config("SyncRetinaNet")
    cfg.MODEL.RETINANET.ATSS.ENABLED = True
    model = build_model(cfg)
    anchors = make_anchors()
    every = Boxes.cat(anchors).tensor
    truth = Instances((96, 96), gt_classes=torch.tensor([2, 0]))
    truth.gt_boxes = Boxes(torch.tensor([[10.0, 10.0, 40.0, 44.0], [50.0, 30.0, 90.0, 88.0]]))
    labels, boxes = model.label_anchors(anchors, [truth])
    torch.manual_seed(0)
    deltas, logits = 0.1 * torch.randn(1, len(every), 4), torch.randn(1, len(every), 3)
    with EventStorage():
        losses = model.losses(anchors, [logits], labels, [deltas], boxes)
    cls = box = 0.0
    for row, label in enumerate(labels[0].tolist()):
        targets = torch.zeros(3)
        if label < 3:
            found = model.box2box_transform.apply_deltas(deltas[0, row][None], every[row][None])
            wanted = truth.gt_boxes.tensor[truth.gt_classes.tolist().index(label)][None]
            targets[label] = box_iou(found, wanted).item()
            box += 2.0 * (1 - generalized_box_iou(found, wanted).item())
        cls += quality_focal_loss(logits[0, row], targets, 2.0).sum().item()
    assert losses["loss_cls"].item() == pytest.approx(cls, rel=1e-5)
    assert losses["loss_box_reg"].item() == pytest.approx(box, rel=1e-5)
    assert losses[COUNT].item() == sum(label < 3 for label in labels[0].tolist()) > 2
