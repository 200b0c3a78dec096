# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Convolutions against Detectron2's; padded batches against each image alone."""

from unittest.mock import Mock

import pytest
import torch
from detectron2.layers import Conv2d, FrozenBatchNorm2d
from torch.testing import assert_close

from qbheat_det.layers import (
    DynamicReLU,
    NormedConv2d,
    SinePositionEncoding,
    padding_mask,
    resize_bilinear,
)

from ..modeling.reference_mf_decoder import bilinear, pixels, sine_code
from ..modeling.reference_mobile_former import randomise_


def randomised(norm):
    for value in norm.state_dict().values():
        value.uniform_(0.1, 3)
    return norm


@pytest.mark.parametrize("bias", [False, True], ids=["bare", "bias"])
@pytest.mark.parametrize(
    ("groups", "channels"),
    [(1, 6), (4, 12)],
    ids=["dense", "depthwise"],
)
def test_a_frozen_norm_is_folded_into_the_weights(groups, channels, bias, monkeypatch):
    torch.manual_seed(0)
    shared = {"padding": 1, "groups": groups, "bias": bias}
    ours, theirs = (
        each(4, channels, 3, **shared, norm=FrozenBatchNorm2d(channels, eps=0.01)).double()
        for each in (NormedConv2d, Conv2d)
    )
    randomised(ours.norm)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 4, 7, 9, dtype=torch.float64)
    found = []
    for layer in (ours, theirs):
        given = x.clone().requires_grad_()
        y = layer(given)
        gradients = torch.autograd.grad(y.square().sum(), [given, *layer.parameters()])
        found.append([y, *gradients])
    assert_close(*found)
    with torch.no_grad():
        assert_close(ours(x), theirs(x))
    monkeypatch.setattr(FrozenBatchNorm2d, "forward", Mock(side_effect=AssertionError))
    ours(x)  # does not run the norm


def test_exported_norms_and_activations_are_detectron2s():
    torch.manual_seed(0)
    norm = randomised(FrozenBatchNorm2d(3))
    ours = NormedConv2d(2, 3, 1, bias=False, norm=norm).eval()
    x = torch.randn(1, 2, 4, 4)
    with torch.no_grad():
        traced = torch.jit.trace(ours, x)
    assert "batch_norm" in str(traced.inlined_graph)
    acting = NormedConv2d(2, 3, 1, bias=False, norm=norm, activation=torch.relu)
    acting.load_state_dict(ours.state_dict())
    assert_close(acting(x), ours(x).relu())


def test_gradients_of_the_dynamic_relu_are_correct():
    activation = DynamicReLU(token_dim=16, channels=12).double()
    randomise_(activation)
    torch.nn.init.normal_(activation.slopes.bias, std=3)  # saturates the slopes at both ends
    x = torch.randn(2, 12, 2, 2, dtype=torch.float64, requires_grad=True)
    tokens = torch.randn(2, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(activation, (x, tokens))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ([(3, 4), (2, 2), (1, 5), (3, 5)], [(6, 7), (3, 4), (1, 9), (5, 10)]),
        ([(4, 4), (7, 2), (3, 7), (1, 1)], [(2, 4), (3, 3), (5, 2), (1, 1)]),
    ],
)
@pytest.mark.parametrize("garbage", [0.0, float("nan")])
def test_every_image_of_a_padded_batch_is_resized_as_alone(old, new, garbage):
    x = torch.randn(4, 3, 8, 9).double()
    mask_in = padding_mask(torch.tensor(old), (8, 9))
    mask_out = padding_mask(torch.tensor(new), (7, 12))
    x = x.masked_fill(mask_in, garbage)
    resized = resize_bilinear(x, (7, 12), mask_in, mask_out)
    for image, result, (h, w), (new_h, new_w) in zip(x, resized, old, new, strict=True):
        assert_close(result[:, :new_h, :new_w], bilinear(image[:, :h, :w], (new_h, new_w)))


@pytest.mark.parametrize("size", [(1, 1), (3, 5)])
@pytest.mark.parametrize("channels", [8, 256])
def test_the_position_encoding_equals_the_naive_loop(size, channels):
    code = SinePositionEncoding(channels=channels)(size)
    assert_close(code[0], pixels(sine_code(*size, channels)).float(), rtol=0, atol=1e-5)
