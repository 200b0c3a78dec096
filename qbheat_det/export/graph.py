# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Builds one module of preprocessing, backbone and head from a trained model, and traces it.

Detectron2 resizes with Pillow, whose bilinear filter is antialiased and uses fixed-point numbers.
No ONNX operator gives the same pixels, so the graph multiplies the image by matrices of Pillow's
weights. Most entries of these matrices are zero. Therefore each block of output rows is computed
only from its window of the image. Variable sizes are tensors, so they stay symbolic in the graph.
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
_HALF = 2.0**11  # Pillow's weights are integers divided by the square of this number
_BLOCK = 32  # rows of a resized image that are computed together


@dataclass(frozen=True)
class ShortestEdge:
    """The resize of Detectron2's ``DefaultPredictor``, ``ResizeShortestEdge`` with one length.

    The shorter side becomes ``min_size`` pixels (0 does not resize). The image is made smaller if
    the longer side would exceed ``max_size``.
    """

    min_size: int
    max_size: int

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Takes images (N, H, W, 3), uint8. Returns resized images and the sizes.

        The images are (N, 3, H', W') with integer values. The sizes are int64 (4,): H, W, H', W'.
        """
        size = _size_of(images)
        if not self.min_size:
            return images.permute(0, 3, 1, 2).float(), torch.cat([size, size])
        lengths = images.shape[1:3]
        if all(type(length) is int for length in lengths):  # the graph is for one size
            shape = ResizeShortestEdge.get_output_shape(*lengths, self.min_size, self.max_size)
            height, width = (max(1, length) for length in shape)
            resized = torch.tensor([height, width])
        else:
            resized = self.output_shape(size)
            height, width = (_as_int(length) for length in resized.unbind())
        return resize_as_pillow(images, height, width), torch.cat([size, resized])

    def output_shape(self, size: Tensor) -> Tensor:
        """Returns H' and W' of images of ``size`` (…, 2), H and W. Both are int64 and at least 1.

        Equals Detectron2's ``ResizeShortestEdge.get_output_shape``, whose branches cannot be in a
        graph. The operations are the same, in float64 and in the same order. Therefore, sides of
        k + 0.5 pixels, where a different rounding error would change the result, are equal too.
        """
        height, width = size[..., 0], size[..., 1]
        # As in Detectron2, the shorter side of a square is its width.
        is_shorter = torch.stack([height < width, width <= height], dim=-1)
        # A number in place of these tensors would be multiplied by the reciprocal of the divisor.
        min_size, max_size = (
            torch.scalar_tensor(length, dtype=torch.float64)
            for length in (self.min_size, self.max_size)
        )
        sides = size.double()
        sides = torch.where(is_shorter, min_size, min_size / sides.amin(-1, keepdim=True) * sides)
        longer = sides.amax(-1, keepdim=True)
        sides = torch.where(longer > max_size, sides * (max_size / longer), sides)
        return (sides + 0.5).long().clamp(min=1)


@dataclass(frozen=True)
class CenterCrop:
    """The center crop of classifiers in inference.

    Crops a square whose side is ``share`` times the shorter side, and resizes it to ``size``.
    """

    size: int
    share: float

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Like ``ShortestEdge.__call__``, but returns images (N, 3, size, size)."""
        size = _size_of(images)
        # Halves are rounded to even numbers, as in Python.
        side = (size.min().double() * self.share).round().long().clamp(min=1)
        start = torch.div(size - side, 2, rounding_mode="floor")
        # The exporter does not support slices whose ends are computed.
        steps = torch.arange(_as_int(side), device=images.device)
        planes = images.index_select(1, start[0] + steps).index_select(2, start[1] + steps)
        resized = resize_as_pillow(planes, self.size, self.size)
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
        """Height and width are padded to multiples of ``size_divisibility``; 0 does not pad."""
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
        planes, sizes = self.resize(images)
        x = (planes - self.mean) / self.std
        if not self.size_divisibility:
            return x, sizes
        multiple = self.size_divisibility
        steps = torch.div(sizes[2:] + (multiple - 1), multiple, rounding_mode="floor")
        height, width = (multiple * _as_int(length) for length in steps.unbind())
        return F.pad(x, (0, width - x.shape[3], 0, height - x.shape[2])), sizes


def resize_as_pillow(images: Tensor, height: int, width: int) -> Tensor:
    """Resizes as Pillow does: bilinear, antialiased, rounded after each direction.

    Takes images (N, H, W, 3), uint8. Returns (N, 3, height, width), float32 with integer values in
    [0, 255].
    """
    columns = images.transpose(1, 2)  # (N, W, H, 3)
    columns = _resize_rows(columns.flatten(2), width).unflatten(2, (-1, 3))
    rows = _resize_rows(columns.transpose(1, 2).flatten(2), height).unflatten(2, (-1, 3))
    return rows.permute(0, 3, 1, 2).float()


def _resize_rows(x: Tensor, length: int) -> Tensor:
    """Resizes (N, L, M), with integer values in [0, 255] of any dtype, to (N, length, M)."""
    if type(length) is type(x.shape[1]) is int and length == x.shape[1]:
        return x
    old, new = (torch.scalar_tensor(n, dtype=torch.float64) for n in (x.shape[1], length))
    scale = old / new
    support = scale.clamp(min=1)
    blocks = (length + _BLOCK - 1) // _BLOCK
    row = (_BLOCK * torch.arange(blocks)[:, None] + torch.arange(_BLOCK)).double()
    center = (torch.minimum(row, new - 1) + 0.5) * scale  # (blocks, _BLOCK)
    window = _as_int(((_BLOCK - 1) * scale + 2 * support).ceil().long() + 2)
    pixel = (center[:, :1] - support).floor() + torch.arange(window)  # (blocks, window)
    distance = (pixel[:, None] + 0.5 - center[:, :, None]).abs() / support
    inside = (pixel >= 0) & (pixel < old)
    weights = (1 - distance).clamp(min=0) * inside[:, None].double()
    weights = weights / weights.sum(dim=2, keepdim=True)
    weights = (weights * _HALF**2 + 0.5).floor()  # 22 bits: the upper 11 and the lower 11
    high = (weights / _HALF).floor()
    pair = torch.cat([high / _HALF, weights / _HALF - high], dim=1).float()
    index = torch.minimum(pixel.clamp(min=0), old - 1).long().flatten()
    windows = x.index_select(1, index).unflatten(1, (blocks, window)).float()
    upper, lower = (pair @ windows).unflatten(2, (2, _BLOCK)).unbind(2)
    # (2048 upper + lower) / 2048 to the nearest integer, exactly, in float32.
    resized = (upper + lower.floor() / _HALF + 0.5).floor().flatten(1, 2)
    return resized.index_select(1, torch.arange(length))


def _size_of(images: Tensor) -> Tensor:
    """Returns H and W of images (N, H, W, C) as a tensor (2,), int64."""
    return torch.stack([torch.scalar_tensor(n, dtype=torch.int64) for n in images.shape[1:3]])


def _as_int(length: Tensor) -> int:
    """Converts a 0-d tensor, at least 1, to an integer that stays symbolic in the graph."""
    number = length.item()
    torch._check(number >= 1)
    return cast(int, number)


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
        """Takes images (N, H, W, 3), uint8; returns outputs in the order of ``info.outputs``."""
        x, sizes = self.preprocessing(images)
        return cast(tuple[Tensor, ...], self.head(self.backbone(x), sizes))


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
    assert backbone is not None  # else ``build_head`` raises an error
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
    # Paths of the exporting machine may be private.
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
    """Traces a module in eval mode."""
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
    # The default lengths are unlikely to equal any other length in a network.
    shape = number, height, width, 3
    return (torch.arange(math.prod(shape)) * 37 % 256).to(torch.uint8).view(shape)
