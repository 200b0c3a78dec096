# Copyright (c) qbheat_det contributors. Apache-2.0.
"""FCOS beside Detectron2's own; Dense Teacher and ATSS beside naive implementations."""

import copy
import inspect
import math
import statistics

import pytest
import torch
from detectron2.modeling import build_model
from detectron2.modeling.meta_arch.fcos import FCOS
from detectron2.structures import Boxes, Instances
from detectron2.utils.events import EventStorage
from torch.testing import assert_close
from torchvision.ops import box_iou, generalized_box_iou, sigmoid_focal_loss

from qbheat_det.modeling.atss import AtssAssigner
from qbheat_det.modeling.contracts import PSEUDO_LABELS, STRONG, UNLABELLED
from qbheat_det.modeling.dense import (
    COUNT,
    DensePredictions,
    DenseTargets,
    DenseTeacherLoss,
    quality_focal_loss,
)
from tests.engine.gradient_cases import NUM_BOXES, make_image
from tests.modeling.tiny_pretraining import make_tiny_config


def make_config(name):
    cfg = make_tiny_config(name)
    for node in (cfg.MODEL.FCOS, cfg.MODEL.RETINANET):
        # Of a map of one place, 32 groups of 32 channels have no statistics.
        node.update({"NUM_CLASSES": 3, "NUM_CONVS": 1, "NORM": ""})
    cfg.MODEL.FPN.update({"IN_FEATURES": ["s8", "s16"], "OUT_CHANNELS": 32})
    cfg.MODEL.BACKBONE.NAME = "build_fpn_backbone"
    return cfg


@pytest.fixture
def cfg():
    return make_config("SyncFCOS")


def _images(*num_boxes):
    return [make_image(NUM_BOXES.index(count)) for count in num_boxes]


def _as_detectron2(model):
    """Returns Detectron2's own class around copies of the same parts."""
    names = inspect.signature(FCOS.__init__).parameters.keys()
    parts = {name: copy.deepcopy(vars(model)[name]) for name in names if name in vars(model)}
    other = FCOS(
        backbone=copy.deepcopy(model.backbone),
        head=copy.deepcopy(model.head),
        pixel_mean=model.pixel_mean.flatten().tolist(),
        pixel_std=model.pixel_std.flatten().tolist(),
        **parts,
    )
    return other.train(model.training)


def test_in_one_process_its_losses_are_detectron2s_step_after_step(cfg):
    model = build_model(cfg)
    theirs = _as_detectron2(model)
    batches = [_images(2, 3), _images(1, 4), _images(1, 1)]
    with EventStorage():
        for batch in batches:
            assert_close(model(copy.deepcopy(batch)), theirs(copy.deepcopy(batch)))
    assert float(model.loss_normalizer) != model.first_normalizer
    assert_close(float(model.loss_normalizer), theirs.loss_normalizer)


def test_an_image_without_boxes_is_background(cfg):
    model = build_model(cfg)
    batch = _images(0, 2)
    features = [torch.zeros(1, 1, side, side) for side in (8, 4, 2, 1, 1)]
    anchors = model.anchor_generator(features)
    labels, _ = model.label_anchors(anchors, [entry["instances"] for entry in batch])
    assert set(labels[0].tolist()) == {3}
    assert set(labels[1].tolist()) > {3}
    with EventStorage():
        losses = model(_images(0, 0))
    assert all(torch.isfinite(loss) for loss in losses.values())
    assert losses["loss_fcos_loc"] == losses["loss_fcos_ctr"] == 0


def test_a_batch_without_positives_counts_as_one_in_the_running_mean(cfg):
    model = build_model(cfg)
    expected = model.first_normalizer
    for count in (0, 50, 0):
        expected = 0.9 * expected + 0.1 * max(count, 1)
        found = model.loss_normalizers(torch.tensor([float(count)]), parts=2)
        assert_close(found, torch.tensor([expected / 2]))


def test_parts_of_a_batch_have_the_losses_of_the_batch(cfg):
    model = build_model(cfg).eval()  # BatchNorm would see another batch
    model.training = True
    batch = _images(2, 0, 3, 1)
    parts = [batch[:1], batch[1:]]
    with EventStorage():
        whole = copy.deepcopy(model)(copy.deepcopy(batch))
        counts = sum((model.loss_counts(part) for part in parts), torch.zeros(1))
        normalizers = model.loss_normalizers(counts, parts=len(parts))
        losses = [model(part, normalizers) for part in parts]
    for name, value in whole.items():
        assert_close(sum(part[name] for part in losses) / len(parts), value)


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
    losses = {"loss_teacher_cls": cls, "loss_teacher_box": box}
    return losses if student.quality is None else {**losses, "loss_teacher_ctr": quality}


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
    loss = DenseTeacherLoss(top_ratio=3.0, weight=2.0)
    found = loss(student, DenseTargets.join(loss.select([teacher], share * 60 / 3)))
    expected = {name: 2 * value for name, value in naive_losses(student, teacher, share).items()}
    assert_close({name: float(v) for name, v in found.items()}, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["SyncRetinaNet", "SyncFCOS"])
def test_a_student_equal_to_its_teacher_has_only_the_loss_of_other_places(name):
    cfg = make_config(name)
    model = build_model(cfg)
    labelled, other = (make_image(NUM_BOXES.index(count)) for count in (2, 3))
    entry = {"image": other["image"], STRONG: other["image"]}
    model.head.bbox_pred.bias.data.fill_(0.5)  # no boxes without area
    model.eval()  # BatchNorm's own statistics in both
    entry[PSEUDO_LABELS] = model.pseudo_labels([[entry]])[0]
    with torch.no_grad():
        teacher = model._predict_densely([entry])
    share = 2 * float(model.loss_normalizer) / teacher.logits[..., 0].numel()
    for module in (model, model.head):
        module.training = True
    with EventStorage():
        losses = model([{**labelled, UNLABELLED: [entry]}])
        alone = model([labelled])
    assert {name for name in losses if "teacher" not in name} == set(alone)
    assert_close(losses["loss_teacher_box"], torch.zeros(()), rtol=0, atol=1e-4)
    expected = naive_losses(teacher, teacher, share)["loss_teacher_cls"]
    assert_close(float(losses["loss_teacher_cls"].detach()), expected, rtol=1e-3, atol=1e-5)
    sum(losses.values()).backward()
    assert all(float(p.grad.abs().sum()) > 0 for p in model.head.parameters())


@pytest.mark.parametrize("name", ["SyncRetinaNet", "SyncFCOS"])
def test_losses_under_autocast_are_near_those_in_float32(name):
    model, batch = build_model(make_config(name)), _images(2, 3)
    with EventStorage():
        expected = model(batch)
        with torch.autocast("cpu", torch.bfloat16):
            found = model(batch)
    sum(found.values()).backward()
    for key, loss in expected.items():
        assert_close(found[key].float(), loss, rtol=0.1, atol=0.05)


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
    cfg = make_config("SyncRetinaNet")
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
