# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The preprocessing inside an exported file, beside Detectron2's and Pillow's."""

import numpy as np
import pytest
import torch
from detectron2.data.transforms import ResizeShortestEdge
from PIL import Image
from torch import nn
from torch.export import Dim

from qbheat_det.export.files import write_onnx
from qbheat_det.export.graph import CenterCrop, Preprocessing, ShortestEdge, trace, trace_images


def noise(number, height, width):
    return np.random.default_rng(0).integers(0, 256, (number, height, width, 3), dtype=np.uint8)


def _as_planes(image):
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
def test_the_shortest_edge_is_detectron2s_to_the_bit(height, width, min_size, max_size):
    image = noise(1, height, width)[0]
    resize = ResizeShortestEdge([min_size, min_size], max_size).get_transform(image)
    expected = resize.apply_image(image)
    planes, sizes = ShortestEdge(min_size, max_size)(torch.from_numpy(image)[None])
    torch.testing.assert_close(planes, _as_planes(expected), rtol=0, atol=0)
    assert sizes.tolist() == [height, width, *expected.shape[:2]]


def test_a_graph_for_any_size_resizes_as_the_code_for_one():
    resize = Preprocessing(ShortestEdge(64, 96), mean=[0.0] * 3, std=[1.0] * 3)
    program = trace_images(resize).module()
    # Larger, smaller, as it is, and held by the longer side; blocks of rows that are full or not.
    for number, height, width in ((1, 33, 47), (2, 150, 131), (1, 64, 64), (1, 20, 300)):
        images = torch.from_numpy(noise(number, height, width))
        for found, expected in zip(program(images), resize(images), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def _sides_with_halves(min_size, max_size):
    """Image sizes (n, 2) up to 1,300 pixels where a scaled side is k + 0.5 pixels."""
    height, width = np.mgrid[1:1301, 1:1301].reshape(2, -1)
    shorter, longer = np.minimum(height, width), np.maximum(height, width)
    is_half = (2 * min_size * longer) % (2 * shorter) == shorter
    is_half |= (2 * max_size * shorter) % (2 * longer) == longer
    return np.stack([height, width], axis=1)[is_half]


class _Shape(nn.Module):
    def __init__(self, resize):
        super().__init__()
        self.resize = resize

    def forward(self, sizes):
        return self.resize.output_shape(sizes)


@pytest.mark.parametrize(("min_size", "max_size"), [(288, 448), (800, 1333)])
def test_sides_are_rounded_as_by_detectron2_in_pytorch_and_in_onnx(min_size, max_size, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    halves = _sides_with_halves(min_size, max_size)
    assert len(halves) > 2000
    sizes = np.concatenate([halves, np.random.default_rng(0).integers(1, 5000, (100_000, 2))])
    expected = [
        ResizeShortestEdge.get_output_shape(height, width, min_size, max_size)
        for height, width in sizes.tolist()
    ]
    expected = np.maximum(expected, 1)  # Detectron2 fails on an image of 0 pixels
    shape = _Shape(ShortestEdge(min_size, max_size))
    np.testing.assert_array_equal(shape(torch.from_numpy(sizes)).numpy(), expected)
    program = trace(shape, (torch.from_numpy(sizes[:7]),), ({0: Dim("number")},))
    write_onnx(program, tmp_path / "x.onnx", ["sizes"], ["shapes"], {})
    session = onnxruntime.InferenceSession(str(tmp_path / "x.onnx"))
    np.testing.assert_array_equal(session.run(None, {"sizes": sizes})[0], expected)


def test_onnxruntime_resizes_as_detectron2_where_a_side_is_a_half(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    resize = Preprocessing(ShortestEdge(288, 448), mean=[0.0] * 3, std=[1.0] * 3)
    write_onnx(trace_images(resize), tmp_path / "x.onnx", ["images"], ["planes", "sizes"], {})
    session = onnxruntime.InferenceSession(str(tmp_path / "x.onnx"))
    halves = _sides_with_halves(288, 448)[::2000].tolist()
    for height, width in [(405, 640), (520, 1024), (1024, 520), (300, 300), *halves]:
        image = noise(1, height, width)
        transform = ResizeShortestEdge([288, 288], 448).get_transform(image[0])
        expected = _as_planes(transform.apply_image(image[0])).numpy()
        planes, sizes = session.run(None, {"images": image})
        assert sizes.tolist() == [height, width, *expected.shape[2:]]
        np.testing.assert_array_equal(planes, expected)
        fixed, sizes = resize(torch.from_numpy(image))  # the graph for one size
        assert sizes.tolist() == [height, width, *expected.shape[2:]]
        np.testing.assert_array_equal(fixed.numpy(), expected)


def test_openvino_resizes_to_the_same_sizes(tmp_path):
    openvino = pytest.importorskip("openvino")
    pytest.importorskip("onnxscript")
    resize = Preprocessing(ShortestEdge(64, 112), mean=[0.0] * 3, std=[1.0] * 3)
    write_onnx(trace_images(resize), tmp_path / "x.onnx", ["images"], ["planes", "sizes"], {})
    single = {"INFERENCE_PRECISION_HINT": "f32"}
    model = openvino.Core().compile_model(str(tmp_path / "x.onnx"), "CPU", single)
    for height, width in [(100, 90), (90, 100), (64, 64), (480, 640), (300, 70), (333, 500)]:
        images = noise(2, height, width)
        expected, expected_sizes = resize(torch.from_numpy(images))
        found = model({"images": images})
        assert found["sizes"].tolist() == expected_sizes.tolist()
        # OpenVINO computes float64 in float32, so some values are rounded to the neighbour.
        np.testing.assert_allclose(found["planes"], expected.numpy(), rtol=0, atol=1)


@pytest.mark.parametrize(
    ("height", "width", "share"),
    [(40, 61, 1.0), (75, 36, 0.875), (75, 44, 0.875)],  # halves are rounded up and down
)
def test_the_center_crop_is_pillows_to_the_bit(height, width, share):
    image = noise(1, height, width)[0]
    side = round(share * min(height, width))
    top, left = (height - side) // 2, (width - side) // 2
    square = Image.fromarray(image[top : top + side, left : left + side])
    expected = np.asarray(square.resize((32, 32), Image.Resampling.BILINEAR))
    planes, _ = CenterCrop(32, share)(torch.from_numpy(image)[None])
    torch.testing.assert_close(planes, _as_planes(expected), rtol=0, atol=0)


def test_images_are_normalised_and_then_padded_with_zeros():
    preprocessing = Preprocessing(
        ShortestEdge(0, 0), mean=[1.0, 2.0, 3.0], std=[2.0, 4.0, 8.0], size_divisibility=4
    )
    # A length of 0 does not resize.
    padded, sizes = preprocessing(torch.full((1, 5, 8, 3), 11, dtype=torch.uint8))
    expected = torch.zeros(1, 3, 8, 8)
    expected[0, 0, :5], expected[0, 1, :5], expected[0, 2, :5] = 5.0, 2.25, 1.0
    torch.testing.assert_close(padded, expected)
    assert sizes.tolist() == [5, 8, 5, 8]
