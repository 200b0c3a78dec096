# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Preprocessing inside the graph: Detectron2's resize to the bit, crop, normalisation, padding."""

import numpy as np
import pytest
import torch
from detectron2.data.transforms import ResizeShortestEdge
from PIL import Image

from qbheat_det.export.graph import CenterCrop, Preprocessing, ShortestEdge


def _noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def _as_planes(image: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(image.copy()).permute(2, 0, 1)[None].float()


@pytest.mark.parametrize(
    ("height", "width", "min_size", "max_size"),
    [
        (97, 405, 256, 400),  # smaller along both sides, held by the longer one
        (60, 80, 100, 133),  # larger; the longer side is a half before it is rounded
        (64, 64, 128, 200),  # weights of quarters: many values at a half
        (1, 30, 16, 64),
        (33, 47, 33, 1333),  # as it is
    ],
)
def test_the_shortest_edge_is_detectron2s_to_the_bit(
    height: int, width: int, min_size: int, max_size: int
) -> None:
    image = _noise(height, width)
    resize = ResizeShortestEdge([min_size, min_size], max_size).get_transform(image)
    expected = resize.apply_image(image)
    planes, sizes = ShortestEdge(min_size, max_size)(torch.from_numpy(image)[None])
    torch.testing.assert_close(planes, _as_planes(expected), rtol=0, atol=0)
    assert sizes.tolist() == [height, width, *expected.shape[:2]]


@pytest.mark.parametrize(("height", "width", "share"), [(40, 61, 1.0), (75, 36, 0.875)])
def test_the_center_crop_is_pillows(height: int, width: int, share: float) -> None:
    image = _noise(height, width)
    side = round(share * min(height, width))
    top, left = (height - side) // 2, (width - side) // 2
    square = Image.fromarray(image[top : top + side, left : left + side])
    expected = np.asarray(square.resize((32, 32), Image.Resampling.BILINEAR))
    planes, _ = CenterCrop(32, share)(torch.from_numpy(image)[None])
    torch.testing.assert_close(planes, _as_planes(expected), rtol=0, atol=0)


def test_images_are_normalised_and_then_padded_with_zeros() -> None:
    preprocessing = Preprocessing(
        ShortestEdge(0, 0), mean=[1.0, 2.0, 3.0], std=[2.0, 4.0, 8.0], size_divisibility=4
    )
    # A length of 0 does not resize.
    padded, sizes = preprocessing(torch.full((1, 5, 8, 3), 11, dtype=torch.uint8))
    expected = torch.zeros(1, 3, 8, 8)
    expected[0, 0, :5], expected[0, 1, :5], expected[0, 2, :5] = 5.0, 2.25, 1.0
    torch.testing.assert_close(padded, expected)
    assert sizes.tolist() == [5, 8, 5, 8]
