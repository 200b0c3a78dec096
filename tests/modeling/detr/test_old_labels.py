# Copyright (c) qbheat_det contributors. Apache-2.0.
"""MF-DETR that keeps classes: what its old detector finds, and what is learned from that."""

import copy

import pytest
import torch
from detectron2.modeling import build_model
from detectron2.structures import Boxes, Instances
from detectron2.utils.events import EventStorage
from torch.testing import assert_close

from qbheat_det.checkpoint.matching import fit_weights
from qbheat_det.modeling.contracts import ANNOTATED_CLASSES, OLD_PREDICTIONS
from tests.engine.gradient_cases import MF_DETR, SELECTED_QUERIES, Case, make_case_config

from ..tiny_dense import make_images

NUM_OLD = 2
SOFTMAX = ("MODEL.MF_DETR.CLASSIFICATION", "softmax")
KINDS = {"softmax": SOFTMAX, "selected queries": SELECTED_QUERIES}
KEPT = ("MODEL.KEEP_CLASSES.NUM", NUM_OLD, "MODEL.KEEP_CLASSES.MIN_SCORE", 0.0)


def build(kind, *opts, seed=0):
    torch.manual_seed(seed)
    model = build_model(make_case_config(Case(MF_DETR, opts=(*KINDS[kind], *opts)), "cpu"))
    torch.nn.init.normal_(model.decoder.class_embed.weight)
    torch.nn.init.normal_(model.decoder.bbox_embed.last.weight, std=0.3)
    if model.decoder.selection is not None:
        torch.nn.init.normal_(model.decoder.selection.class_embed.weight)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_the_old_detector_finds_what_it_did_before_it_had_new_classes(kind):
    before = build(kind, "MODEL.MF_DETR.NUM_CLASSES", NUM_OLD).eval()
    grown = build(kind, *KEPT, seed=1).eval()
    tensors, _ = fit_weights(
        before.state_dict(),
        grown.state_dict(),
        file="",
        old_classes=("a", "b"),
        classes=("a", "b", "c"),
    )
    grown.load_state_dict(tensors, strict=False)
    batch = make_images(2, 3)
    for old, result in zip(grown.predict_old(batch), before(batch), strict=True):
        expected = result["instances"]
        assert_close(old.instances.gt_boxes.tensor, expected.pred_boxes.tensor)
        assert torch.equal(old.instances.gt_classes, expected.pred_classes)


def take_losses(model, batch):
    model.train()
    with EventStorage():
        return copy.deepcopy(model)(copy.deepcopy(batch))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_found_of_classes_without_labels_is_learned_as_if_labelled(kind):
    model = build(kind, *KEPT, "MODEL.KEEP_CLASSES.FEATURE_WEIGHT", 0.0)
    images = make_images(2, 3)
    boxes = Boxes(torch.tensor([[4.0, 4.0, 20.0, 24.0], [30.0, 8.0, 60.0, 40.0]]))
    found = Instances((64, 64), gt_boxes=boxes, gt_classes=torch.tensor([0, 1]))
    (prediction,) = build(kind, *KEPT, seed=1).eval().predict_old(images[:1])
    old = type(prediction)(found, [])
    partly = [{**image, ANNOTATED_CLASSES: [1, 2], OLD_PREDICTIONS: old} for image in images]
    by_hand = []
    for image in images:
        own = image["instances"]
        labels = Instances(
            (64, 64),
            gt_boxes=Boxes.cat([own.gt_boxes, boxes[:1]]),
            gt_classes=torch.cat([own.gt_classes, torch.tensor([0])]),
        )
        by_hand.append({**image, "instances": labels, OLD_PREDICTIONS: old})
    found_losses = take_losses(model, partly)
    expected = take_losses(model, by_hand)
    assert all(torch.equal(found_losses[name], value) for name, value in expected.items())
    assert torch.equal(model.loss_counts(partly), model.loss_counts(by_hand))


def test_features_of_a_trained_backbone_are_kept():
    model = build("softmax", *KEPT, "MODEL.KEEP_CLASSES.FEATURE_WEIGHT", 0.5).eval()
    images = [{**image, ANNOTATED_CLASSES: [2]} for image in make_images(2, 3)]
    predictions = model.predict_old(images)
    same = [{**e, OLD_PREDICTIONS: old} for e, old in zip(images, predictions, strict=True)]
    model.training = True  # BatchNorm keeps its statistics
    with EventStorage():
        normalizers = torch.tensor([1.0, 4.0])
        assert model(same, normalizers)["loss_kept_features"] == 0
        for old in predictions:
            for level in old.features:
                level += 2
        loss = model(same, normalizers)["loss_kept_features"]
    num_positions = sum(level[0].numel() for old in predictions for level in old.features)
    assert_close(loss.item(), 0.5 * 4 * num_positions / 4, rtol=1e-4, atol=0)
