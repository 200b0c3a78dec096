# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Resizing of padded batches against each image alone; position encodings."""

import pytest
import torch
from torch.testing import assert_close

from qbheat_det.layers import SinePositionEncoding, padding_mask, resize_bilinear

from ..modeling.reference_mf_decoder import bilinear, pixels, sine_code


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
