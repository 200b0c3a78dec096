# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Builds one module of preprocessing, network and head from a trained model, and traces its graph.

Detectron2 resizes with Pillow, whose bilinear filter is antialiased and computes in fixed point. No
ONNX operator gives the same pixels, so the graph multiplies the image by matrices of Pillow's
weights. Most entries of such a matrix are zero: each block of output rows is a product with its
window of the image. Sizes that vary are tensors, so that they stay symbolic in the graph.
"""

import copy
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from detectron2.config import CfgNode
from detectron2.modeling import Backbone
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional as F

from qbheat_det.config import dump_config, get_cfg, with_values
from qbheat_det.core.environment import VERSION
from qbheat_det.deployment.fused_blocks import fold_batch_norms, fuse_blocks
from qbheat_det.inference.exported import ExportInfo
from qbheat_det.layers.cpu_kernels import recorded_as
from qbheat_det.modeling.classification import ImageClassifier
from qbheat_det.modeling.contracts import get_backbone

from .heads import Head, build_head

logger = logging.getLogger(__name__)
_HALF = 2.0**11  # Pillow's weights are integers over the square of this
_BLOCK = 32  # rows of a resized image that are computed together


@dataclass(frozen=True)
class ShortestEdge:
    """Detectron2's ``ResizeShortestEdge`` with one length, as its ``DefaultPredictor`` applies it.

    The shorter side becomes ``min_size`` pixels (0: unchanged), the longer ``max_size`` at most.
    """

    min_size: int
    max_size: int

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """From (N, H, W, 3), uint8, to (N, 3, H', W'), integral, and int64 (4,): H, W, H', W'."""
        size = _size_of(images)
        if not self.min_size:
            return images.permute(0, 3, 1, 2).float(), torch.cat([size, size])
        lengths = images.shape[1:3]
        if all(type(length) is int for length in lengths):  # the graph is for one size
            shorter, longer = min(lengths), max(lengths)
            height, width = (
                max(1, min(_divide(n * self.min_size, shorter), _divide(n * self.max_size, longer)))
                for n in lengths
            )
            resized = torch.tensor([height, width])
        else:
            resized = torch.minimum(
                _divide(size * self.min_size, size.min()), _divide(size * self.max_size, size.max())
            ).clamp(min=1)
            height, width = (_as_int(length) for length in resized.unbind())
        return resize_as_pillow(images, height, width), torch.cat([size, resized])


@dataclass(frozen=True)
class CenterCrop:
    """The test-time crop of classifiers: a square of ``share`` of the shorter side, to ``size``."""

    size: int
    share: float

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Like ``ShortestEdge``, to (N, 3, size, size)."""
        size = _size_of(images)
        # Halves are rounded to even, as in Python.
        side = (size.min().double() * self.share).round().long().clamp(min=1)
        start = torch.div(size - side, 2, rounding_mode="floor")
        # The exporter does not support slices whose ends are computed.
        steps = torch.arange(_as_int(side), device=images.device)
        planes = images.index_select(1, start[0] + steps).index_select(2, start[1] + steps)
        resized = resize_as_pillow(planes, self.size, self.size)
        return resized, torch.cat([size, torch.full_like(size, self.size)])


class Preprocessing(nn.Module):
    """Resizes, normalises, and pads with zeros on the right and at the bottom."""

    def __init__(
        self,
        resize: ShortestEdge | CenterCrop,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        size_divisibility: int = 0,
    ) -> None:
        """Pads height and width to multiples of ``size_divisibility``; 0 for no padding."""
        super().__init__()
        self.resize = resize
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))
        self.mean: Tensor
        self.std: Tensor
        self.size_divisibility = size_divisibility if size_divisibility > 1 else 0

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """From (N, H, W, 3), uint8, to (N, 3, H'', W''), padded, and (4,): H, W, H', W'."""
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

    From (N, H, W, 3), uint8, to (N, 3, height, width), integers in [0, 255] as float32.
    """
    columns = images.transpose(1, 2)  # (N, W, H, 3)
    columns = _resize_rows(columns.flatten(2), width).unflatten(2, (-1, 3))
    rows = _resize_rows(columns.transpose(1, 2).flatten(2), height).unflatten(2, (-1, 3))
    return rows.permute(0, 3, 1, 2).float()


def _resize_rows(x: Tensor, length: int) -> Tensor:
    """Resizes (N, L, M), integers in [0, 255] of any type, to (N, length, M)."""
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
    """Returns (2,), int64: H and W of (N, H, W, C)."""
    return torch.stack([torch.scalar_tensor(n, dtype=torch.int64) for n in images.shape[1:3]])


def _as_int(length: Tensor) -> int:
    """Returns a computed length, 0-d and at least 1, as an integer that stays symbolic."""
    number = length.item()
    torch._check(number >= 1)
    return cast(int, number)


def _divide(dividend: Any, divisor: Any) -> Any:
    """Divides integers, or tensors of them, and rounds to the nearest; halves go up."""
    return (2 * dividend + divisor) // (2 * divisor)


class ExportableModel(nn.Module):
    """Preprocessing, backbone and head: from uint8 images to the outputs that ``info`` names."""

    def __init__(
        self, preprocessing: Preprocessing, backbone: Backbone, head: Head, info: ExportInfo
    ) -> None:
        super().__init__()
        self.preprocessing = preprocessing
        self.backbone = backbone
        self.head = head
        self.info = info

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """From (N, H, W, 3), uint8, to the outputs in the order of ``info.outputs``."""
        x, sizes = self.preprocessing(images)
        return cast(tuple[Tensor, ...], self.head(self.backbone(x), sizes))


def build_exportable(
    model: nn.Module, cfg: CfgNode, *, image_size: tuple[int, ...] = ()
) -> ExportableModel:
    """Builds the module that is exported, in evaluation mode; ``model`` does not change.

    ``image_size`` (H, W) goes into the description. Raises a ``UserError`` if the model cannot be
    exported.
    """
    model = copy.deepcopy(model).eval().requires_grad_(False)
    fold_batch_norms(model)
    fuse_blocks(model)
    head = build_head(model)
    backbone = get_backbone(model)
    assert backbone is not None  # ``build_head`` refuses other models
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
    own = {"MODEL.WEIGHTS": defaults.MODEL.WEIGHTS, "OUTPUT_DIR": defaults.OUTPUT_DIR}
    info = ExportInfo(
        task=head.task,
        outputs=head.outputs,
        pixel_format=cfg.INPUT.FORMAT,
        class_names=tuple(str(name) for name in cfg.MODEL.CLASS_NAMES),
        category_ids=tuple(int(number) for number in cfg.MODEL.CATEGORY_IDS),
        image_size=image_size,
        score_threshold=head.score_threshold,
        model=str(cfg.MODEL.META_ARCHITECTURE),
        config=dump_config(with_values(cfg, own)),
        version=VERSION,
    )
    return ExportableModel(preprocessing, backbone, head, info).eval()


def trace(
    module: nn.Module,
    inputs: tuple[Any, ...],
    dynamic_shapes: Sequence[Any],
    *,
    int8: bool = False,
) -> ExportedProgram:
    """Traces a module in evaluation mode; ``int8`` keeps weights constant, to be quantised."""
    with recorded_as("int8" if int8 else "float"), torch.no_grad():
        return torch.export.export(
            module, inputs, dynamic_shapes=tuple(dynamic_shapes), strict=False
        )


def trace_images(
    module: nn.Module, image_size: tuple[int, ...] = (), *, int8: bool = False
) -> ExportedProgram:
    """Traces a module of (N, H, W, 3), uint8, for any N, H and W.

    With ``image_size`` (H, W) in pixels, the graph takes one image of this size at a time.
    """
    if image_size:
        logger.info("Tracing the model, for one image of %d x %d …", *image_size)
        return trace(module, (example_images(1, *image_size),), (None,), int8=int8)
    logger.info("Tracing the model, for images of any size …")
    shape = {0: Dim("batch", min=1), 1: Dim("height"), 2: Dim("width")}
    return trace(module, (example_images(),), (shape,), int8=int8)


def example_images(number: int = 2, height: int = 253, width: int = 311) -> Tensor:
    """Returns images to trace a module with: (number, height, width, 3), uint8."""
    # No other length in a network is likely to equal the default ones.
    shape = number, height, width, 3
    return (torch.arange(math.prod(shape)) * 37 % 256).to(torch.uint8).view(shape)
