# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Whole MF-DETR: a batch of differently sized images gives what the images give one by one."""

import pytest
import torch
from detectron2.structures import Boxes, Instances
from torch import nn
from torch.testing import assert_close

from qbheat_det.modeling.backbone import MOBILE_FORMER_ARCHS, MobileFormer
from qbheat_det.modeling.detr import MFDETR, MFDecoder, SetCriterion
from qbheat_det.modeling.detr.query_selection import QuerySelection

from .reference_mobile_former import randomise_

SIZES = [(1, 1), (40, 56), (2, 97), (31, 3)]


def build(blocks=(2, 1, 1), selection=None):
    features = ["s8", "s16_expanded"]
    backbone = MobileFormer(arch=MOBILE_FORMER_ARCHS["285M"], out_features=features)
    shapes = backbone.output_shape()
    return MFDETR(
        backbone=backbone,
        decoder=MFDecoder(
            input_shape=[shapes[name] for name in features],
            num_classes=6,
            num_blocks=blocks,
            selection=selection,
        ),
        criterion=SetCriterion(num_classes=6),
        in_features=features,
        pixel_mean=[123.675, 116.28, 103.53],
        pixel_std=[58.395, 57.12, 57.375],
    )


def random_model(*args):
    """Random everywhere, with moderate weights and the BatchNorm statistics of its activations.

    As in a trained model, activations then neither grow nor fade with depth. Otherwise attention
    saturates and amplifies float32's rounding to 1e-2, for one image alone as well.
    """
    model = build(*args)
    randomise_(model, gain=0.5)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    model.eval()
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    with torch.no_grad():
        model(entries([(96, 128)] * 2))
    return model.eval()


def image(size, seed):
    noise = torch.rand(3, *size, generator=torch.Generator().manual_seed(seed))
    return 255 * noise


def entries(sizes):
    return [{"image": image(size, seed)} for seed, size in enumerate(sizes)]


@pytest.mark.parametrize("num_selected", [0, 5])
def test_in_double_precision_nothing_leaks_at_all(num_selected):
    sizes = {"num_classes": 6, "num_queries": num_selected, "dim": 256}
    selection = QuerySelection(**sizes) if num_selected else None
    model = random_model((2, 1, 1), selection).double()
    inputs = [
        {"image": entry["image"].double()} for entry in entries([(50, 77), (33, 120), *SIZES])
    ]
    inputs[0].update(height=300, width=451)  # the size of the picture before resizing
    with torch.no_grad():
        for together, entry in zip(model(inputs), inputs, strict=True):
            found, alone = together["instances"], model([entry])[0]["instances"]
            assert found.image_size == alone.image_size
            assert len(found) > 0
            assert torch.equal(found.pred_classes, alone.pred_classes)
            assert_close(found.scores, alone.scores, rtol=0, atol=1e-9)
            assert_close(found.pred_boxes.tensor, alone.pred_boxes.tensor, rtol=1e-6, atol=1e-3)
        model.decoder.training = True  # returns all blocks; its parts stay in evaluation
        outputs = model.decoder(*model.extract_features(model.preprocess_image(inputs)))
        for n, entry in enumerate(inputs):
            alone = model.decoder(*model.extract_features(model.preprocess_image([entry])))
            for key in ("pred_logits", "pred_boxes"):
                wide = {"rtol": 0, "atol": 1e-6 if key == "pred_boxes" else 1e-9}  # float32 boxes
                assert_close(outputs[key][:, n], alone[key][:, 0], **wide, msg=f"image {n}")


def test_every_parameter_gets_a_gradient_in_training():
    model = random_model((2, 2, 2)).train()
    inputs = entries([(64, 96), (50, 77), (40, 40)])
    for count, entry in zip((3, 0, 1), inputs, strict=True):
        height, width = entry["image"].shape[1:]
        corners = torch.tensor([[0.1, 0.2, 0.5, 0.9], [0.3, 0.3, 0.4, 0.6], [0.5, 0.0, 1.0, 0.7]])
        boxes = corners[:count] * torch.tensor([width, height, width, height])
        labels = torch.arange(count)
        entry["instances"] = Instances((height, width), gt_boxes=Boxes(boxes), gt_classes=labels)
    losses = model(inputs)
    assert len(losses) == 18
    sum(losses.values()).backward()
    # The first block adapts its positions from queries that are all zero.
    silent = "decoder.levels.0.0.query_layer.adapt_position.0.weight"
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        if name != silent:
            assert float(parameter.grad.abs().max()) > 0, f"the gradient of {name} is zero"


def test_losses_of_a_padded_batch_follow_from_the_images_alone():
    # Stored statistics and no dropout: each image is on its own. One box an image gives all the
    # same share of the normalisers, so that the batch's losses are the mean.
    model = random_model()
    for module in (model, model.decoder):
        module.training = True
    inputs = entries([(50, 77), (33, 120), (97, 31)])
    for n, entry in enumerate(inputs):
        size = tuple(entry["image"].shape[1:])
        box = torch.tensor([[0.2, 0.1 * (n + 1), 0.7, 0.9]]) * torch.tensor([size[1], size[0]] * 2)
        entry["instances"] = Instances(size, gt_boxes=Boxes(box), gt_classes=torch.tensor([n]))
    together, alone = model(inputs), [model([entry]) for entry in inputs]
    for name, loss in together.items():
        mean = torch.stack([each[name] for each in alone]).mean()
        assert_close(loss, mean, rtol=1e-4, atol=1e-4, msg=name)
