# Copyright (c) qbheat_det contributors. Apache-2.0.
"""FCOS beside Detectron2's own, and the divisor of the losses of dense detectors."""

import copy
import inspect

import pytest
import torch
from detectron2.modeling import build_model
from detectron2.modeling.meta_arch.fcos import FCOS
from detectron2.utils.events import EventStorage
from torch.testing import assert_close

from .tiny_dense import make_dense_config, make_images


@pytest.fixture
def cfg():
    return make_dense_config("SyncFCOS")


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
    batches = [make_images(2, 3), make_images(1, 4), make_images(1, 1)]
    with EventStorage():
        for batch in batches:
            assert_close(model(copy.deepcopy(batch)), theirs(copy.deepcopy(batch)))
    assert float(model.loss_normalizer) != model.first_normalizer
    assert_close(float(model.loss_normalizer), theirs.loss_normalizer)


def test_an_image_without_boxes_is_background(cfg):
    model = build_model(cfg)
    batch = make_images(0, 2)
    features = [torch.zeros(1, 1, side, side) for side in (8, 4, 2, 1, 1)]
    anchors = model.anchor_generator(features)
    labels, _ = model.label_anchors(anchors, [entry["instances"] for entry in batch])
    assert set(labels[0].tolist()) == {3}
    assert set(labels[1].tolist()) > {3}
    with EventStorage():
        losses = model(make_images(0, 0))
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
    batch = make_images(2, 0, 3, 1)
    parts = [batch[:1], batch[1:]]
    with EventStorage():
        whole = copy.deepcopy(model)(copy.deepcopy(batch))
        counts = sum((model.loss_counts(part) for part in parts), torch.zeros(1))
        normalizers = model.loss_normalizers(counts, parts=len(parts))
        losses = [model(part, normalizers) for part in parts]
    for name, value in whole.items():
        assert_close(sum(part[name] for part in losses) / len(parts), value)


@pytest.mark.parametrize("name", ["SyncRetinaNet", "SyncFCOS"])
def test_losses_under_autocast_are_near_those_in_float32(name):
    model, batch = build_model(make_dense_config(name)), make_images(2, 3)
    with EventStorage():
        expected = model(batch)
        with torch.autocast("cpu", torch.bfloat16):
            found = model(batch)
    sum(found.values()).backward()
    for key, loss in expected.items():
        assert_close(found[key].float(), loss, rtol=0.1, atol=0.05)
