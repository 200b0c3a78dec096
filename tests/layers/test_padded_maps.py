# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Masks of padded batches, and what they promise to convolutions and resizing."""

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from qbheat_det.layers import SinePositionEncoding, padding_mask, resize_bilinear, zero_padding

from ..modeling.reference_mf_decoder import bilinear, pixels, sine_code

SIZES = [(5, 3), (2, 7), (5, 7), (1, 1), (4, 6)]


@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_of_a_zeroed_map_equals_the_image_alone(stride: int) -> None:
    x, kernel = torch.randn(5, 2, 6, 9).double(), torch.randn(3, 2, 3, 3).double()
    mask = padding_mask(torch.tensor(SIZES), (6, 9))
    batch = F.conv2d(zero_padding(x, mask), kernel, None, stride, 1)
    for image, result, (height, width) in zip(x, batch, SIZES, strict=True):
        alone = F.conv2d(image[None, :, :height, :width], kernel, None, stride, 1)[0]
        assert_close(result[:, : alone.shape[1], : alone.shape[2]], alone)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ([(3, 4), (2, 2), (1, 5), (3, 5)], [(6, 7), (3, 4), (1, 9), (5, 10)]),
        ([(4, 4), (7, 2), (3, 7), (1, 1)], [(2, 4), (3, 3), (5, 2), (1, 1)]),
    ],
)
@pytest.mark.parametrize("garbage", [0.0, float("nan")])
def test_every_image_is_resized_from_its_own_size_to_its_own_size(
    old: list[tuple[int, int]], new: list[tuple[int, int]], garbage: float
) -> None:
    x = torch.randn(4, 3, 8, 9).double()
    mask_in = padding_mask(torch.tensor(old), (8, 9))
    mask_out = padding_mask(torch.tensor(new), (7, 12))
    x = x.masked_fill(mask_in, garbage)
    resized = resize_bilinear(x, (7, 12), mask_in, mask_out)
    for image, result, (h, w), (new_h, new_w) in zip(x, resized, old, new, strict=True):
        assert_close(result[:, :new_h, :new_w], bilinear(image[:, :h, :w], (new_h, new_w)))


@pytest.mark.parametrize("size", [(1, 1), (3, 5)])
@pytest.mark.parametrize("channels", [8, 256])
def test_it_equals_the_naive_loop(size: tuple[int, int], channels: int) -> None:
    code = SinePositionEncoding(channels=channels)(size)
    assert_close(code[0], pixels(sine_code(*size, channels)).float(), rtol=0, atol=1e-5)


def test_an_image_of_a_padded_batch_has_the_code_that_it_has_alone() -> None:
    encoding = SinePositionEncoding(channels=16)
    sizes = [(5, 3), (2, 7), (5, 7), (1, 1)]
    code = encoding((5, 7), padding_mask(torch.tensor(sizes), (5, 7)))
    for image, (height, width) in zip(code.unflatten(1, (5, 7)), sizes, strict=True):
        alone = encoding((height, width))[0].unflatten(0, (height, width))
        assert_close(image[:height, :width], alone, rtol=0, atol=0)
