# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Builds one module of preprocessing, backbone and head from a trained model, and traces it.

Detectron2 resizes with Pillow, whose bilinear filter is antialiased and uses fixed-point numbers.
No ONNX operator gives the same pixels, so the graph multiplies the image by matrices of Pillow's
weights. Most entries of these matrices are zero. Therefore each block of output rows is computed
only from the input rows that have a weight. Image sizes are computed as tensors. A Python number
would be written to the graph as a constant, and the file would accept only images of one size.
"""

import copy
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from detectron2.config import CfgNode
from detectron2.data.transforms import ResizeShortestEdge
from detectron2.modeling import Backbone
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional as F

from qbheat_det.config import dump_config, get_cfg, with_values
from qbheat_det.core.environment import VERSION
from qbheat_det.fast import fold_batch_norms
from qbheat_det.inference.exported import ExportInfo
from qbheat_det.modeling.classification import ImageClassifier
from qbheat_det.modeling.contracts import get_backbone

from .heads import Head, build_head

logger = logging.getLogger(__name__)
_HALF = 2.0**11  # Pillow's weights are 22-bit fractions, integers divided by _HALF**2
_BLOCK = 32  # rows of a resized image that are computed together


@dataclass(frozen=True)
class ShortestEdge:
    """The resize of Detectron2's ``DefaultPredictor``, ``ResizeShortestEdge`` with one length.

    The shorter side becomes ``min_size`` pixels. If the longer side would then exceed ``max_size``
    pixels, the longer side becomes ``max_size`` instead. If ``min_size`` is 0, images keep their
    size.
    """

    min_size: int
    max_size: int

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Takes images (N, H, W, 3), uint8. Returns resized images and the sizes.

        The images are (N, 3, H', W'), float32 with integer values. The sizes are int64 (4,): H, W,
        H', W'.
        """
        size = _size_of(images)
        if not self.min_size:
            return images.permute(0, 3, 1, 2).float(), torch.cat([size, size])
        old_height, old_width = images.shape[1:3]
        if _is_fixed(old_height) and _is_fixed(old_width):
            height, width = ResizeShortestEdge.get_output_shape(
                old_height, old_width, self.min_size, self.max_size
            )
            height = max(1, height)
            width = max(1, width)
            new_size = torch.tensor([height, width])
        else:
            new_size = self.output_shape(size)
            height = _as_int(new_size[0])
            width = _as_int(new_size[1])
        return resize_as_pillow(images, height, width), torch.cat([size, new_size])

    def output_shape(self, size: Tensor) -> Tensor:
        """Takes sizes (…, 2), H and W. Returns the sizes (…, 2) after the resize, int64.

        Equals Detectron2's ``ResizeShortestEdge.get_output_shape``, whose branches cannot be in a
        graph. Sides are at least 1. The operations are the same, in float64 and in the same order.
        With other rounding errors, sides of k + 0.5 pixels could be rounded to another integer.
        """
        # Height and width are separate tensors. OpenVINO 2025.2 to 2026.4 returns wrong sizes, such
        # as 1 x 112 instead of 64 x 85, if both are in one tensor that is divided by its maximum.
        height, width = size.double().unbind(-1)
        # Tensors, because a Python number would be divided by multiplying with the reciprocal.
        min_size = torch.scalar_tensor(self.min_size, dtype=torch.float64)
        max_size = torch.scalar_tensor(self.max_size, dtype=torch.float64)
        scale = min_size / torch.minimum(height, width)
        # As in Detectron2, the shorter side of a square is its width.
        new_height = torch.where(height < width, min_size, scale * height)
        new_width = torch.where(width <= height, min_size, scale * width)
        shrink = (max_size / torch.maximum(new_height, new_width)).clamp(max=1)
        sides = torch.stack([new_height * shrink, new_width * shrink], dim=-1)
        return (sides + 0.5).long().clamp(min=1)


@dataclass(frozen=True)
class CenterCrop:
    """The center crop of classifiers in inference.

    Crops a square whose side is ``share`` times the shorter side, and resizes it to ``size``.
    """

    size: int
    share: float

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Takes images (N, H, W, 3), uint8. Returns the resized crops and the sizes.

        The crops are (N, 3, size, size), float32 with integer values. The sizes are int64 (4,): H,
        W, size, size.
        """
        size = _size_of(images)
        # Halves are rounded to even numbers, as by Python's round.
        side = (size.min().double() * self.share).round().long().clamp(min=1)
        first_row, first_column = torch.div(size - side, 2, rounding_mode="floor").unbind()
        # The exporter does not support slices whose ends are computed.
        offsets = torch.arange(_as_int(side), device=images.device)
        crops = images.index_select(1, first_row + offsets)
        crops = crops.index_select(2, first_column + offsets)  # (N, side, side, 3)
        resized = resize_as_pillow(crops, self.size, self.size)
        return resized, torch.cat([size, torch.full_like(size, self.size)])


class Preprocessing(nn.Module):
    """Resizes and normalizes images, and pads them with zeros on the right and at the bottom."""

    def __init__(
        self,
        resize: ShortestEdge | CenterCrop,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        size_divisibility: int = 0,
    ) -> None:
        """
        Args:
            resize: resizes or crops the images.
            mean: mean of each channel.
            std: standard deviation of each channel.
            size_divisibility: heights and widths are padded to multiples of this number. 0 does not
                pad.
        """
        super().__init__()
        self.resize = resize
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))
        self.mean: Tensor
        self.std: Tensor
        self.size_divisibility = size_divisibility if size_divisibility > 1 else 0

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Takes images (N, H, W, 3), uint8. Returns padded images (N, 3, H'', W'') and sizes.

        The sizes are int64 (4,): H, W, and H', W' after the resize.
        """
        resized, sizes = self.resize(images)
        x = (resized - self.mean) / self.std
        if not self.size_divisibility:
            return x, sizes
        multiple = self.size_divisibility
        # H' / multiple and W' / multiple, rounded up
        quotients = torch.div(sizes[2:] + (multiple - 1), multiple, rounding_mode="floor")
        height = multiple * _as_int(quotients[0])
        width = multiple * _as_int(quotients[1])
        padded = F.pad(x, (0, width - x.shape[3], 0, height - x.shape[2]))
        return padded, sizes


def resize_as_pillow(images: Tensor, height: int, width: int) -> Tensor:
    """Resizes as Pillow does: bilinear, antialiased, rounded after each direction.

    Takes images (N, H, W, 3), uint8. Returns (N, 3, height, width), float32 with integer values in
    [0, 255].
    """
    columns = images.transpose(1, 2).flatten(2)  # (N, W, H * 3)
    columns = _resize_rows(columns, width).unflatten(2, (-1, 3))  # (N, width, H, 3)
    rows = columns.transpose(1, 2).flatten(2)  # (N, H, width * 3)
    rows = _resize_rows(rows, height).unflatten(2, (-1, 3))  # (N, height, width, 3)
    return rows.permute(0, 3, 1, 2).float()


def _resize_rows(x: Tensor, length: int) -> Tensor:
    """Resizes (N, L, M), with integer values in [0, 255] of any dtype, to (N, length, M).

    The output rows are computed in blocks of ``_BLOCK`` rows. A window is the range of input rows
    that a block needs. All windows have the same number of rows.
    """
    if _is_fixed(length) and _is_fixed(x.shape[1]) and length == x.shape[1]:
        return x
    old_length = torch.scalar_tensor(x.shape[1], dtype=torch.float64)
    new_length = torch.scalar_tensor(length, dtype=torch.float64)
    scale = old_length / new_length
    support = scale.clamp(min=1)  # half the width of the triangle filter, in input rows
    num_blocks = (length + _BLOCK - 1) // _BLOCK
    block_starts = _BLOCK * torch.arange(num_blocks)[:, None]
    output_rows = (block_starts + torch.arange(_BLOCK)).double()  # (num_blocks, _BLOCK)
    # Rows of the last block beyond the end repeat the last row. They are removed at the end.
    output_rows = torch.minimum(output_rows, new_length - 1)
    centers = (output_rows + 0.5) * scale  # in input rows
    window_length = _as_int(((_BLOCK - 1) * scale + 2 * support).ceil().long() + 2)
    window_starts = (centers[:, :1] - support).floor()
    input_rows = window_starts + torch.arange(window_length)  # (num_blocks, window_length)

    # The weight of each input row for each output row, (num_blocks, _BLOCK, window_length).
    distances = (input_rows[:, None] + 0.5 - centers[:, :, None]).abs() / support
    is_inside = (input_rows >= 0) & (input_rows < old_length)
    weights = (1 - distances).clamp(min=0) * is_inside[:, None].double()
    weights = weights / weights.sum(dim=2, keepdim=True)
    weights = (weights * _HALF**2 + 0.5).floor()  # 22-bit integers, as in Pillow
    # The upper and the lower 11 bits, because products of 22 bits are not exact in float32.
    upper_bits = (weights / _HALF).floor()
    lower_bits = weights / _HALF - upper_bits
    both = torch.cat([upper_bits / _HALF, lower_bits], dim=1).float()

    index = torch.minimum(input_rows.clamp(min=0), old_length - 1).long().flatten()
    windows = x.index_select(1, index)  # (N, num_blocks * window_length, M)
    windows = windows.unflatten(1, (num_blocks, window_length)).float()
    sums = (both @ windows).unflatten(2, (2, _BLOCK))  # (N, num_blocks, 2, _BLOCK, M)
    upper, lower = sums.unbind(2)
    # (2048 upper + lower) / 2048, rounded to the nearest integer. This is exact in float32.
    resized = (upper + lower.floor() / _HALF + 0.5).floor().flatten(1, 2)
    return resized.index_select(1, torch.arange(length))


def _size_of(images: Tensor) -> Tensor:
    """Returns H and W of images (N, H, W, C) as a tensor (2,), int64."""
    return torch.stack([torch.scalar_tensor(n, dtype=torch.int64) for n in images.shape[1:3]])


def _as_int(length: Tensor) -> int:
    """Converts a 0-d tensor, at least 1, to an integer that stays symbolic in the graph."""
    number = length.item()
    torch._check(number >= 1)  # tells the exporter the range of the number
    return cast(int, number)


def _is_fixed(length: object) -> bool:
    """Returns whether a length is a Python number, the same for all images of the file.

    Other lengths are symbolic while the model is traced.
    """
    return type(length) is int


class ExportableModel(nn.Module):
    """Preprocessing, backbone and head of a model. ``info`` is the exported file's metadata."""

    def __init__(
        self, preprocessing: Preprocessing, backbone: Backbone, head: Head, info: ExportInfo
    ) -> None:
        super().__init__()
        self.preprocessing = preprocessing
        self.backbone = backbone
        self.head = head
        self.info = info

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Takes images (N, H, W, 3), uint8. Returns the outputs that ``info.outputs`` names."""
        x, sizes = self.preprocessing(images)
        features = self.backbone(x)
        return cast(tuple[Tensor, ...], self.head(features, sizes))


def build_exportable(
    model: nn.Module, cfg: CfgNode, *, image_size: tuple[int, ...] = ()
) -> ExportableModel:
    """Builds the module to export, in eval mode, from a copy of ``model``.

    ``image_size`` (H, W) is only written to the metadata of the exported file. Raises a
    ``UserError`` if the model cannot be exported.
    """
    model = copy.deepcopy(model).eval().requires_grad_(False)
    fold_batch_norms(model)
    head = build_head(model)
    backbone = get_backbone(model)
    assert backbone is not None  # ``build_head`` raises an error for models without backbone
    resize: ShortestEdge | CenterCrop
    if isinstance(model, ImageClassifier):
        resize = CenterCrop(model.image_size, share=cfg.INPUT.CLASSIFY.TEST_CROP)
    else:
        resize = ShortestEdge(cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST)
    preprocessing = Preprocessing(
        resize,
        mean=cfg.MODEL.PIXEL_MEAN,
        std=cfg.MODEL.PIXEL_STD,
        size_divisibility=0 if head.task == "classification" else backbone.size_divisibility,
    )
    # The file's metadata contains the config, but no paths of this machine, which may be private.
    defaults = get_cfg()
    paths = {"MODEL.WEIGHTS": defaults.MODEL.WEIGHTS, "OUTPUT_DIR": defaults.OUTPUT_DIR}
    info = ExportInfo(
        task=head.task,
        outputs=head.outputs,
        pixel_format=cfg.INPUT.FORMAT,
        class_names=tuple(str(name) for name in cfg.MODEL.CLASS_NAMES),
        category_ids=tuple(int(number) for number in cfg.MODEL.CATEGORY_IDS),
        image_size=image_size,
        score_threshold=head.score_threshold,
        model=str(cfg.MODEL.META_ARCHITECTURE),
        config=dump_config(with_values(cfg, paths)),
        version=VERSION,
    )
    return ExportableModel(preprocessing, backbone, head, info).eval()


@torch.no_grad()
def trace(
    module: nn.Module, inputs: tuple[Any, ...], dynamic_shapes: Sequence[Any]
) -> ExportedProgram:
    """Traces a module in evaluation mode with example inputs.

    ``dynamic_shapes`` are the variable dimensions of each input, as for ``torch.export``.
    """
    return torch.export.export(module, inputs, dynamic_shapes=tuple(dynamic_shapes), strict=False)


def trace_images(module: nn.Module, image_size: tuple[int, ...] = ()) -> ExportedProgram:
    """Traces a module whose input is images (N, H, W, 3), uint8, for any N, H and W.

    With ``image_size`` (H, W) in pixels, the graph accepts only single images of this size.
    """
    if image_size:
        logger.info("Tracing the model, for one image of %d x %d …", *image_size)
        return trace(module, (example_images(1, *image_size),), (None,))
    logger.info("Tracing the model, for images of any size …")
    shape = {0: Dim("batch", min=1), 1: Dim("height"), 2: Dim("width")}
    return trace(module, (example_images(),), (shape,))


def example_images(number: int = 2, height: int = 253, width: int = 311) -> Tensor:
    """Returns example images for tracing, (number, height, width, 3), uint8."""
    # The exporter treats equal lengths as one. The default height and width are unlikely to equal
    # any other length in a network.
    shape = (number, height, width, 3)
    values = torch.arange(math.prod(shape)) * 37 % 256
    return values.to(torch.uint8).view(shape)
