# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The losses towards an old detector beside a loop over its predictions, and what they leave be."""

import copy
import math

import pytest
import torch
from detectron2.modeling import build_model
from detectron2.utils.events import EventStorage
from torch.testing import assert_close

from qbheat_det.modeling.contracts import ANNOTATED_CLASSES, OLD_PREDICTIONS
from qbheat_det.modeling.dense_predictions import DensePredictions
from qbheat_det.modeling.kept_classes import KeptClassLoss, OldPredictions

from .test_dense_pseudo_labels import cross_entropy, generalized_iou, sigmoid
from .tiny_dense import make_dense_config, make_images

NUM_OLD = 2
NUM_CLASSES = 3
NUM_PLACES = 20
MODELS = ("SyncRetinaNet", "SyncFCOS")


def draw_boxes():
    corners = torch.rand(2, NUM_PLACES, 2) * 40
    return torch.cat([corners, corners + 5 + 20 * torch.rand(2, NUM_PLACES, 2)], dim=2)


@pytest.mark.parametrize("has_quality", [False, True])
def test_the_losses_are_those_of_a_naive_implementation(has_quality):
    torch.manual_seed(0)
    student = DensePredictions(
        logits=torch.randn(2, NUM_PLACES, NUM_CLASSES),
        boxes=draw_boxes(),
        quality=torch.randn(2, NUM_PLACES) if has_quality else None,
    )
    old = OldPredictions(
        scores=torch.rand(2, NUM_PLACES, NUM_OLD),
        boxes=draw_boxes(),
        quality=torch.rand(2, NUM_PLACES) if has_quality else None,
        features=[torch.randn(2, 4, 3, 3)],
    )
    features = [torch.randn(2, 4, 3, 3)]
    is_taught = torch.tensor([[True, False], [True, True]])
    is_positive = torch.rand(2, NUM_PLACES) < 0.2
    loss = KeptClassLoss(NUM_OLD, weight=2.0, min_score=0.6, feature_weight=0.5)
    weights = loss.weigh(old, is_taught, is_positive)
    found = loss(student, features, old, is_taught, weights)
    expected = dict.fromkeys(("cls", "box", "ctr"), 0.0)
    num_weighted = 0
    for image in range(2):
        for place in range(NUM_PLACES):
            best = 0.0
            for index in range(NUM_OLD):
                if not is_taught[image, index]:
                    continue
                target = float(old.scores[image, place, index])
                p = sigmoid(float(student.logits[image, place, index]))
                expected["cls"] += abs(target - p) * cross_entropy(target, p)
                best = max(best, target)
            is_weighted = best >= 0.6 and not is_positive[image, place]
            num_weighted += is_weighted
            assert_close(weights[image, place].item(), best * is_weighted)
            if not is_weighted:
                continue
            pair = student.boxes[image, place].tolist(), old.boxes[image, place].tolist()
            expected["box"] += best * (1 - generalized_iou(*pair))
            if has_quality:
                p = sigmoid(float(student.quality[image, place]))
                expected["ctr"] += best * cross_entropy(float(old.quality[image, place]), p)
    assert 0 < num_weighted < 2 * NUM_PLACES
    squares = (features[0] - old.features[0]).square()
    expected = {f"loss_kept_{name}": 2 * value for name, value in expected.items()}
    expected["loss_kept_features"] = 0.5 * float(squares.sum()) / 4
    if not has_quality:
        del expected["loss_kept_ctr"]
    found = {name: value.item() for name, value in found.items()}
    assert_close(found, expected, rtol=1e-5, atol=1e-6)


def build(name):
    cfg = make_dense_config(name)
    cfg.MODEL.KEEP_CLASSES.NUM = NUM_OLD
    cfg.MODEL.KEEP_CLASSES.MIN_SCORE = 0.5
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    torch.manual_seed(0)
    model = build_model(cfg).eval()  # BatchNorm's running statistics
    torch.nn.init.normal_(model.head.cls_score.bias)
    torch.nn.init.constant_(model.head.bbox_pred.bias, 0.5)  # no boxes without area
    return model


def predict_old(model, batch):
    """Returns the batch with the predictions of a copy of the model."""
    predictions = copy.deepcopy(model).predict_old(batch)
    pairs = zip(batch, predictions, strict=True)
    return [{**image, OLD_PREDICTIONS: prediction} for image, prediction in pairs]


def take_losses(model, batch, *normalizers):
    model.training = True
    with EventStorage():
        return model(copy.deepcopy(batch), *normalizers)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_equal_to_its_old_detector_loses_nothing(name):
    model = build(name)
    batch = [{**image, ANNOTATED_CLASSES: [2]} for image in make_images(2, 3)]
    losses = take_losses(model, predict_old(model, batch))
    kept = {key: loss for key, loss in losses.items() if "kept" in key}
    assert len(kept) == 3 + (name == "SyncFCOS")
    total = sum(kept.values())
    if name == "SyncFCOS":  # its binary cross-entropy has the entropy of the target
        total = total - kept["loss_kept_ctr"]
    assert_close(total.item(), 0.0, rtol=0, atol=1e-4)
    sum(kept.values()).backward()
    for parameter_name, parameter in model.named_parameters():
        if parameter.grad is not None and "bbox_pred" not in parameter_name:
            assert float(parameter.grad.abs().max()) < 1e-3
    assert losses["loss_kept_features"] == 0


@pytest.mark.parametrize("name", MODELS)
def test_annotated_classes_learn_from_labels_alone_and_new_ones_not_from_the_old_detector(name):
    old = build(name)
    model = build(name)
    torch.nn.init.normal_(model.head.cls_score.bias, std=3.0)
    batch = make_images(2, 3)
    everything = predict_old(old, batch)
    losses = take_losses(model, everything)
    kept = [losses[key] for key in losses if "kept" in key and key != "loss_kept_features"]
    assert not any(kept)
    gradients = {}
    for annotated in ([2], [0, 2]):
        model.zero_grad()
        partly = [{**image, ANNOTATED_CLASSES: annotated} for image in everything]
        take_losses(model, partly)["loss_kept_cls"].backward()
        bias = model.head.cls_score.bias.grad.view(-1, NUM_CLASSES)
        gradients[tuple(annotated)] = bias.abs().amin(dim=0) > 0
    assert gradients[(2,)].tolist() == [True, True, False]
    assert gradients[(0, 2)].tolist() == [False, True, False]


@pytest.mark.parametrize("name", MODELS)
def test_what_the_old_detector_finds_counts_as_positive(name):
    model = build(name)
    batch = make_images(2, 3)
    num_labelled = float(model.loss_counts(predict_old(model, batch)))
    partly = predict_old(model, [{**image, ANNOTATED_CLASSES: [2]} for image in batch])
    predictions = OldPredictions.stack([image[OLD_PREDICTIONS] for image in partly])
    levels = model.predict_levels(batch)
    labels, _ = model.label_anchors(levels.anchors, [image["instances"] for image in batch])
    expected = num_labelled
    for image, place in torch.cartesian_prod(torch.arange(2), torch.arange(len(labels[0]))):
        best = float(predictions.scores[image, place].max())
        if best >= 0.5 and not 0 <= int(labels[image][place]) < NUM_CLASSES:
            expected += best
    assert expected > num_labelled
    assert math.isclose(float(model.loss_counts(partly)), expected, rel_tol=1e-5)
    losses = take_losses(model, partly, torch.tensor([8.0]))
    again = take_losses(model, partly)
    mean = 0.9 * model.first_normalizer + 0.1 * expected
    for key, loss in losses.items():
        assert_close(again[key].item(), loss.item() * 8 / mean, rtol=1e-4, atol=1e-6)
