# Copyright (c) qbheat_det contributors. Apache-2.0.
"""RetinaNet's separable head and pyramid: shapes, parameters and levels by hand, and gradients."""

import pytest
import torch
from detectron2.layers import ShapeSpec
from detectron2.modeling import build_model
from detectron2.utils.events import EventStorage
from torch.nn import functional as F
from torch.testing import assert_close

from qbheat_det.layers import separable_conv
from qbheat_det.modeling.separable_head import SeparableHead

from .tiny_dense import make_dense_config, make_images

CHANNELS, CLASSES, ANCHORS = 8, 3, 2
SIZES = ((6, 10), (3, 5))


def make_head(**changes):
    arguments = {
        "input_shape": [ShapeSpec(channels=CHANNELS)] * len(SIZES),
        "num_classes": CLASSES,
        "num_anchors": ANCHORS,
        "conv_dims": [CHANNELS] * 2,
        "norm": "BN",
        "kernel_size": 5,
    }
    torch.manual_seed(0)
    return SeparableHead(**{**arguments, **changes})


def make_maps():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, CHANNELS, *size, generator=generator) for size in SIZES]


def make_config(**head):
    cfg = make_dense_config("SyncRetinaNet")
    cfg.MODEL.FPN.SEPARABLE = True
    cfg.MODEL.RETINANET.SEPARABLE_HEAD.update({"ENABLED": True, **head})
    return cfg


@pytest.mark.parametrize("stride", [1, 2])
def test_a_separable_convolution_is_the_dense_one_with_the_product_of_its_weights(stride):
    conv = separable_conv(4, 6, 5, stride)
    x = torch.randn(2, 4, 9, 7)
    depthwise, pointwise = conv
    weight = pointwise.weight * depthwise.weight.transpose(0, 1)  # (6, 4, 5, 5)
    assert_close(conv(x), F.conv2d(x, weight, pointwise.bias, stride, padding=2))


def test_the_head_computes_its_towers_level_by_level():
    head = make_head().eval()
    for number, norm in enumerate((head.cls_subnet[1], head.cls_subnet[4])):
        norm[1].running_mean.fill_(number + 0.5)  # the second level has its own statistics
    maps = make_maps()
    logits, deltas = head(maps)
    for level, x in enumerate(maps):
        results = []
        for tower in (head.cls_subnet, head.bbox_subnet):
            y = x
            for index in (0, 3):
                norm = tower[index + 1]
                y = norm[level](tower[index](y)) * norm.weight.view(-1, 1, 1)
                y = F.relu(y + norm.bias.view(-1, 1, 1))
            results.append(y)
        assert_close(logits[level], head.cls_score(results[0]))
        assert_close(deltas[level], head.bbox_pred(results[1]))
        assert logits[level].shape == (2, ANCHORS * CLASSES, *SIZES[level])


def test_the_number_of_parameters_is_what_the_docstring_counts():
    layer = CHANNELS * 25 + CHANNELS * CHANNELS + CHANNELS + 2 * CHANNELS  # with bias and norm
    predictors = (CHANNELS + 1) * ANCHORS * (CLASSES + 4)
    assert sum(p.numel() for p in make_head().parameters()) == 4 * layer + predictors


def test_scores_start_at_the_prior():
    head = make_head(prior_prob=0.25)
    assert_close(head.cls_score.bias.sigmoid(), torch.full((ANCHORS * CLASSES,), 0.25))
    assert head.cls_score.weight.std() < 0.02


@pytest.mark.parametrize("kernel_size", [0, 4, -1])
def test_an_even_kernel_is_refused_by_its_key(kernel_size):
    with pytest.raises(ValueError, match=r"RETINANET\.SEPARABLE_HEAD\.KERNEL_SIZE"):
        make_head(kernel_size=kernel_size)


def test_each_parameter_of_a_model_from_a_config_has_a_gradient():
    model = build_model(make_config()).train()
    assert isinstance(model.head, SeparableHead)
    names = ("fpn_output3", "fpn_output4", "top_block.convs.0")
    for name in names:
        depthwise, _ = model.backbone.get_submodule(name)
        assert depthwise.groups == depthwise.in_channels
    with EventStorage(0):
        losses = model(make_images(1, 3))
    sum(loss for name, loss in losses.items() if name.startswith("loss")).backward()
    parts = (*model.head.named_parameters(), *model.backbone.named_parameters())
    without = [name for name, p in parts if p.requires_grad and p.grad is None]
    assert not without


def test_weights_of_a_pyramid_are_saved_and_loaded_by_the_names_of_its_levels():
    model = build_model(make_config()).eval()
    other = build_model(make_config()).eval()
    other.load_state_dict(model.state_dict())
    x = torch.randn(1, 3, 64, 96)
    for name, level in model.backbone(x).items():
        assert_close(other.backbone(x)[name], level)
