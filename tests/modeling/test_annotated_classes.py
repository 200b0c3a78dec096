# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Losses of images in which only some classes are labelled, beside loops over their classes."""

import copy
import math

import pytest
import torch
from detectron2.modeling import build_model
from detectron2.utils.events import EventStorage
from torch.testing import assert_close

from qbheat_det.modeling.contracts import ANNOTATED_CLASSES, learns_partial_labels
from qbheat_det.modeling.detr.criterion import (
    FocalClassification,
    Matches,
    SetCriterion,
    SoftmaxClassification,
    Targets,
)
from tests.engine.gradient_cases import MF_DETR, SELECTED_QUERIES, Case, make_case_config

from .tiny_dense import make_dense_config, make_images

NUM_CLASSES = 3
ANNOTATED = ((0, 1), (2,), (), (0, 1, 2))  # of each image
DENSE = {
    "RetinaNet": ("SyncRetinaNet", False, "loss_cls"),
    "RetinaNet with ATSS": ("SyncRetinaNet", True, "loss_cls"),
    "FCOS": ("SyncFCOS", False, "loss_fcos_cls"),
}
SOFTMAX = ()


def build_dense(name, has_atss):
    cfg = make_dense_config(name)
    cfg.MODEL.RETINANET.ATSS.ENABLED = has_atss
    torch.manual_seed(0)
    model = build_model(cfg).eval()  # BatchNorm's running statistics
    model.training = True
    torch.nn.init.normal_(model.head.cls_score.bias)
    return model


def build_mf_detr(opts):
    torch.manual_seed(0)
    return build_model(make_case_config(Case(MF_DETR, opts=opts), "cpu"))


MODELS = {
    **{name: (build_dense, case[:2]) for name, case in DENSE.items()},
    "MF-DETR": (build_mf_detr, [SOFTMAX]),
    "MF-DETR with selected queries": (build_mf_detr, [SELECTED_QUERIES]),
}


def annotate(images, annotated=ANNOTATED):
    pairs = zip(images, annotated, strict=True)
    return [{**image, ANNOTATED_CLASSES: classes} for image, classes in pairs]


def take_losses(model, batch, *normalizers):
    with EventStorage():
        return model(copy.deepcopy(batch), *normalizers)


@pytest.mark.parametrize("name", MODELS)
def test_a_list_of_all_classes_changes_nothing_and_a_shorter_one_the_class_losses(name):
    build, arguments = MODELS[name]
    batch = make_images(2, 3, 0, 1)
    plain = take_losses(build(*arguments), batch)
    everything = take_losses(build(*arguments), annotate(batch, [range(NUM_CLASSES)] * 4))
    assert all(torch.equal(everything[key], value) for key, value in plain.items())
    some = take_losses(build(*arguments), annotate(batch))
    changed = {key for key, value in some.items() if not torch.equal(value, plain[key])}
    is_of_class = [key for key in plain if "cls" in key or "_ce" in key]
    assert changed == set(is_of_class)


def focal(logit, target, gamma, alpha):
    p = 1 / (1 + math.exp(-logit))
    if target:
        return -alpha * (1 - p) ** gamma * math.log(p)
    return -(1 - alpha) * p**gamma * math.log(1 - p)


@pytest.mark.parametrize("name", DENSE)
def test_the_class_loss_of_a_dense_detector_is_the_sum_over_classes_that_teach(name):
    arch, has_atss, loss_name = DENSE[name]
    model = build_dense(arch, has_atss)
    batch = annotate(make_images(2, 3, 0, 1))
    levels = model.predict_levels(batch)
    logits = torch.cat(levels.logits, dim=1).detach().double()
    labels, boxes = model.label_anchors(levels.anchors, [e["instances"] for e in batch])
    predicted = levels.decode(model.box2box_transform).boxes.detach()
    total = 0.0
    num_odd = 0  # labelled objects of a class that is not annotated in their image
    for image, classes in enumerate(ANNOTATED):
        for place, label in enumerate(labels[image].tolist()):
            if label == -1:
                continue
            for index in range(NUM_CLASSES):
                is_labelled = index == label
                if index not in classes and not is_labelled:
                    continue
                num_odd += index not in classes
                logit = float(logits[image, place, index])
                if not has_atss:
                    total += focal(logit, is_labelled, 2.0, 0.25)
                    continue
                target = 0.0
                if is_labelled:
                    first, second = predicted[image, place], boxes[image][place]
                    inner = torch.minimum(first, second)[2:] - torch.maximum(first, second)[:2]
                    shared = float(inner.clamp(min=0).prod())
                    areas = [float((box[2:] - box[:2]).prod()) for box in (first, second)]
                    target = shared / (sum(areas) - shared)
                p = 1 / (1 + math.exp(-logit))
                entropy = -target * math.log(p) - (1 - target) * math.log(1 - p)
                total += abs(target - p) ** 2 * entropy
    assert num_odd
    losses = take_losses(model, batch, torch.tensor([7.0]))
    assert_close(losses[loss_name].item(), total / 7, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", DENSE)
def test_masked_logits_of_a_dense_detector_get_no_gradient(name):
    arch, has_atss, _ = DENSE[name]
    model = build_dense(arch, has_atss)
    seen = []
    predict = model.predict_levels

    def watch(batch):
        levels = predict(batch)
        for logits in levels.logits:
            logits.retain_grad()
        seen.append(levels)
        return levels

    model.predict_levels = watch
    batch = annotate(make_images(2, 3, 0, 1))
    losses = take_losses(model, batch)
    sum(losses.values()).backward()
    gradient = torch.cat([logits.grad for logits in seen[0].logits], dim=1)
    labels, _ = model.label_anchors(seen[0].anchors, [e["instances"] for e in batch])
    for image, classes in enumerate(ANNOTATED):
        for index in range(NUM_CLASSES):
            is_labelled = labels[image] == index
            values = gradient[image, :, index]
            assert bool(values[is_labelled].all())
            if index in classes:
                assert float(values[labels[image] >= 0].abs().min()) > 0
            else:
                assert float(values[~is_labelled].abs().max()) == 0


@pytest.mark.parametrize("classification", [FocalClassification(), SoftmaxClassification()])
def test_the_class_loss_of_mf_detr_is_the_sum_over_classes_that_teach(classification):
    torch.manual_seed(0)
    num_queries = 4
    logits = torch.randn(1, 2, num_queries, NUM_CLASSES + 1, requires_grad=True)
    boxes = torch.rand(1, 2, num_queries, 4) / 4 + 0.2
    labels = [torch.tensor([1, 2]), torch.tensor([0])]
    annotated = torch.tensor([[True, True, False], [False, False, False]])
    true_boxes = [boxes[0, 0, [3, 0]], boxes[0, 1, [2]]]  # an IoU of 1
    targets = Targets.stack(labels, true_boxes, annotated)
    matches = Matches(*torch.tensor([[0, 0, 0], [0, 0, 1], [3, 0, 2], [0, 1, 0]]))
    class_of = {(0, 3): 1, (0, 0): 2, (1, 2): 0}
    criterion = SetCriterion(num_classes=NUM_CLASSES, classification=classification)
    losses = criterion.block_losses(logits, boxes, targets, torch.tensor([5.0, 1.0]), matches)
    losses["loss_ce"].sum().backward()
    total = 0.0
    for image in range(2):
        for query in range(num_queries):
            label = class_of.get((image, query), NUM_CLASSES)
            teaching = [k for k in range(NUM_CLASSES) if annotated[image, k] or k == label]
            values = logits[0, image, query].tolist()
            if isinstance(classification, SoftmaxClassification):
                weight = 0.1 if label == NUM_CLASSES else 1.0
                others = [values[k] for k in (*teaching, NUM_CLASSES)]
                total += weight * (math.log(sum(map(math.exp, others))) - values[label])
            else:
                total += sum(focal(values[k], k == label, 2.0, 0.25) for k in teaching)
            masked = [k for k in range(NUM_CLASSES) if k not in teaching]
            assert float(logits.grad[0, image, query, masked].abs().sum()) == 0
            assert logits.grad[0, image, query, teaching].all()
    assert_close(losses["loss_ce"].item(), total / 5, rtol=1e-5, atol=1e-6)


def test_models_say_whether_they_learn_from_such_images():
    for build, arguments in MODELS.values():
        assert learns_partial_labels(build(*arguments))
    assert not learns_partial_labels(torch.nn.Linear(1, 1))
