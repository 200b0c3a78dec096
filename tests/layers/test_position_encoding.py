# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Sine codes: by hand, against the naive loop, and inside a padded batch."""

import pytest
import torch
from torch.testing import assert_close

from qbheat_det.layers import SinePositionEncoding, padding_mask

from ..modeling.reference_mf_decoder import pixels, sine_code


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (7, 2), (1, 9)])
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
