# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Base classes of classifiers and pre-training objectives, and parts that models share.

The pooled vector of an image is its feature map averaged over positions, concatenated with the
first token if there are tokens (QB-Heat, arXiv:2211.13228, Table 8).

A pre-training objective is a ``PretrainingModel`` with its own layers and a ``forward`` that
returns losses in training. The dataset mapper decodes and crops images. The model draws the
objective's random choices, such as masks. ``forward`` also takes these choices as an optional
argument, for tests and figures. ``ProjectionHead`` is the two-layer MLP without BatchNorm of
"Improved Baselines with Momentum Contrastive Learning" (MoCo-v2), arXiv:2003.04297.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import Backbone, build_backbone
from detectron2.structures import ImageList
from detectron2.utils import comm
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F

from qbheat_det.core.errors import UserError

logger = logging.getLogger(__name__)


def check_value(is_allowed: bool, key: str, value: object, allowed: str) -> None:
    """Raises a ``ValueError`` about ``MODEL.{key}`` and its value, unless ``is_allowed``."""
    if not is_allowed:
        raise ValueError(f"MODEL.{key} is {value}, but must be {allowed}")


@dataclass(frozen=True)
class CachedImages:
    """Cached outputs for a batch, which a model passes to a ``CachedBackbone`` as its images."""

    features: Sequence[Mapping[str, Tensor]]  # per image, outputs (C, h, w) or (M, D) by name
    shape: torch.Size  # shape of the padded pixels
    device: torch.device

    def batch(self, name: str, stride: int | None, layout: torch.memory_format) -> Tensor:
        """Returns the output ``name`` of all images, in float32 on ``device``.

        Tokens (stride None) are (N, M, D). Feature maps are (N, C, ceil(H / stride), ceil(W /
        stride)), zero-padded on the right and bottom. Raises a ``UserError`` if a cached map is
        larger than this.
        """
        maps = [outputs[name] for outputs in self.features]
        if stride is None:
            return torch.stack(maps).to(self.device, non_blocking=True).float()
        size = [-(-side // stride) for side in self.shape[2:]]
        stays = maps[0].device == self.device
        batch = torch.empty(
            (len(maps), maps[0].shape[0], *size),
            dtype=torch.float32 if stays else maps[0].dtype,  # fewer bytes to transfer
            memory_format=layout,
            device=maps[0].device,
            pin_memory=self.device.type == "cuda" and not stays,
        )
        for out, stored in zip(batch, maps, strict=True):
            height, width = stored.shape[1:]
            if height > size[0] or width > size[1]:
                raise UserError(
                    f"cached features '{name}' are {height} x {width}, but the image is "
                    f"{size[0]} x {size[1]} at stride {stride}: they belong to another image"
                )
            if stored.shape == out.shape:  # the usual case, which skips the slow slicing below
                out.copy_(stored)
                continue
            out[:, :height, :width] = stored
            out[:, height:] = 0
            out[:, :height, width:] = 0
        return batch.to(self.device, non_blocking=True).float()


def find_cached_images(
    batched_inputs: Sequence[Mapping[str, Any]], size_divisibility: int, device: torch.device
) -> ImageList | None:
    """Returns an ``ImageList`` with the cached "features" of a batch in place of pixels.

    Returns None if an input has no "features". The "image_size" (height, width) of each input is
    padded to multiples of ``size_divisibility``.
    """
    if not batched_inputs or not all("features" in entry for entry in batched_inputs):
        return None
    sizes = [torch.empty(3, *entry["image_size"], device="meta") for entry in batched_inputs]
    padded = ImageList.from_tensors(sizes, size_divisibility)
    features = [entry["features"] for entry in batched_inputs]
    images: Any = CachedImages(features, padded.tensor.shape, device)
    return ImageList(images, padded.image_sizes)


class ImageModel(nn.Module):
    """Base class of classifiers and pre-training objectives, for images of one size.

    A subclass adds a head and a ``forward`` that returns losses in training. The attributes are
    documented in ``FixedSizeModel`` in ``modeling/contracts.py``.
    """

    mapper_name: str
    """The value of ``INPUT.DATASET_MAPPER_NAME`` that the model needs."""

    def __init__(
        self,
        *,
        backbone: Backbone,
        in_feature: str,
        head_in_features: Sequence[str],
        image_size: int,
        pixel_mean: Sequence[float],
        pixel_std: Sequence[float],
    ) -> None:
        """
        Args:
            backbone: has the outputs ``head_in_features``.
            in_feature: name of the feature map that k-NN and figures use.
            head_in_features: names of all outputs of the backbone that the model reads.
            image_size: S, the height and width of the images.
            pixel_mean: mean of each channel, in the mapper's pixel format.
            pixel_std: standard deviation of each channel.
        """
        super().__init__()
        self.backbone = backbone
        self.in_feature = in_feature
        self.head_in_features = list(head_in_features)
        self.image_size = image_size
        self.register_buffer("pixel_mean", torch.tensor(pixel_mean).view(-1, 1, 1), False)
        self.register_buffer("pixel_std", torch.tensor(pixel_std).view(-1, 1, 1), False)
        self.pixel_mean: Tensor
        self.pixel_std: Tensor

    @property
    def device(self) -> torch.device:
        return self.pixel_mean.device

    def preprocess_image(
        self, batched_inputs: Sequence[Mapping[str, Any]], key: str = "image"
    ) -> Tensor:
        """Normalizes and stacks the images (3, S, S) under ``key``. Returns (N, 3, S, S).

        Raises a ``UserError`` if an image is missing or is not S x S.
        """
        expected = (len(self.pixel_mean), self.image_size, self.image_size)
        for entry in batched_inputs:
            shape = tuple(entry[key].shape) if key in entry else None
            if shape != expected:
                raise UserError(
                    f"'{key}' of '{entry.get('file_name', '')}' is {shape}, but "
                    f"{type(self).__name__} reads {expected}: INPUT.DATASET_MAPPER_NAME "
                    f"'{self.mapper_name}' crops to INPUT.PRETRAIN.SIZE"
                )
        if (cached := find_cached_images(batched_inputs, 0, self.device)) is not None:
            return cached.tensor
        # Stacked on the CPU, so that one transfer of 8-bit pixels is enough.
        images = torch.stack([entry[key] for entry in batched_inputs])
        images = images.to(self.device, non_blocking=True)
        return (images - self.pixel_mean) / self.pixel_std


class PooledFeatures(nn.Module):
    """Pools a backbone's outputs to one vector per image, without parameters.

    ``channels`` C is the width of the feature map ``in_feature``. ``token_dim`` D is the width of
    the tokens (0 without tokens). The vector has ``width`` C + D.
    """

    def __init__(self, *, input_shape: Mapping[str, ShapeSpec], in_feature: str) -> None:
        """Takes the backbone's ``output_shape()`` and the name of the feature map."""
        super().__init__()
        tokens = input_shape.get("tokens")
        maps = [name for name in input_shape if name != "tokens"]
        check_value(in_feature in maps, "CLASSIFIER.IN_FEATURE", in_feature, f"one of {maps}")
        self.in_feature = in_feature
        self.in_features = [in_feature] if tokens is None else [in_feature, "tokens"]
        self.channels = int(input_shape[in_feature].channels or 0)
        self.token_dim = 0 if tokens is None else int(tokens.channels or 0)
        self.width = self.channels + self.token_dim

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """Takes a feature map (N, C, H, W) and optional "tokens" (N, M, D). Returns (N, C + D)."""
        pooled = F.adaptive_avg_pool2d(features[self.in_feature], 1).flatten(1)
        return self.join_token(pooled, features)

    def join_token(self, pooled: Tensor, features: Mapping[str, Tensor]) -> Tensor:
        """Concatenates pooled features (N, E) with the first token, if there are tokens."""
        if "tokens" not in self.in_features:
            return pooled
        return torch.cat([pooled, features["tokens"][:, 0]], dim=1)


class PretrainingModel(ImageModel):
    """Base class of pre-training objectives, which learn from one feature map of a backbone."""

    pretrain_only_modules: tuple[str, ...] = ()
    mapper_name = "pretrain"
    held_out_loss = True

    def __init__(
        self, *, backbone: Backbone, in_feature: str, image_size: int, **others: Any
    ) -> None:
        """See ``ImageModel``. Raises a ``ValueError`` if the backbone has no such feature map."""
        shape = find_map(backbone.output_shape(), in_feature, image_size)
        for name, other in backbone.output_shape().items():
            if (other.stride or 0) > shape.stride:
                logger.warning(
                    f"The objective learns from '{in_feature}': the layers after it, up to "
                    f"'{name}', keep their random weights"
                )
        super().__init__(backbone=backbone, in_feature=in_feature, image_size=image_size, **others)


class ProjectionHead(nn.Module):
    """Pools a backbone's outputs and projects them to one unit-norm vector per image."""

    def __init__(
        self, *, input_shape: Mapping[str, ShapeSpec], in_feature: str, hidden_dim: int, dim: int
    ) -> None:
        """Takes the backbone's ``output_shape()``, the feature map's name, and the layer widths."""
        super().__init__()
        if min(hidden_dim, dim) < 1:
            raise ValueError(f"HIDDEN_DIM and DIM are at least 1, not {hidden_dim} and {dim}")
        self.pool = PooledFeatures(input_shape=input_shape, in_feature=in_feature)
        self.in_features = self.pool.in_features  # the backbone's outputs that the head reads
        self.hidden = nn.Linear(self.pool.width, hidden_dim)
        self.out = nn.Linear(hidden_dim, dim)

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """Takes a feature map (N, C, H, W) and optional "tokens". Returns unit-norm rows (N, D)."""
        projected = self.out(F.relu(self.hidden(self.pool(features))))
        # Float32 even under autocast, because half precision is too coarse near a similarity of 1.
        return F.normalize(projected.float(), dim=1)


def embedding_from_config(
    cfg: CfgNode, node: CfgNode, *, multiple: int | None = None
) -> dict[str, Any]:
    """Returns the arguments of ``PretrainingModel``, and a ``ProjectionHead`` as "head".

    ``node`` is the objective's config node with the keys ``IN_FEATURE``, ``HIDDEN_DIM`` and
    ``DIM``. For ``multiple``, see ``find_map``.
    """
    backbone, size = build_backbone(cfg), cfg.INPUT.PRETRAIN.SIZE
    shapes = backbone.output_shape()
    find_map(shapes, node.IN_FEATURE, size, multiple=multiple)  # raises before the head is built
    return {
        "backbone": backbone,
        "head": ProjectionHead(
            input_shape=shapes, in_feature=node.IN_FEATURE, hidden_dim=node.HIDDEN_DIM, dim=node.DIM
        ),
        "in_feature": node.IN_FEATURE,
        "image_size": size,
        "pixel_mean": cfg.MODEL.PIXEL_MEAN,
        "pixel_std": cfg.MODEL.PIXEL_STD,
    }


def check_equal_shares(batch_size: int, processes: int) -> None:
    """Raises a ``UserError`` if the batch cannot be split equally among the processes."""
    if batch_size % processes:
        raise UserError(
            f"SOLVER.IMS_PER_BATCH {batch_size} is not a multiple of the {processes} processes: "
            "this objective compares images of all processes, so each needs equally many"
        )


def gather_over_processes(values: Tensor) -> Tensor:
    """Concatenates (N, …) of P processes to (P * N, …), with gradients. N is equal on all."""
    single = comm.get_world_size() == 1
    return values if single else torch.cat(all_gather(values.contiguous()))


def find_map(
    shapes: Mapping[str, ShapeSpec], name: str, image_size: int, *, multiple: int | None = None
) -> ShapeSpec:
    """Returns the shape of a backbone's feature map. Raises a ``ValueError`` if it does not exist.

    If ``multiple`` is given, also raises a ``ValueError`` unless the image's side is a multiple of
    the stride, and the feature map's side is a multiple of ``multiple``.
    """
    strides = {key: shape.stride for key, shape in shapes.items() if shape.stride}
    if name not in strides:
        raise ValueError(
            f"IN_FEATURE '{name}' is no map of the backbone, which has the strides {strides}: add "
            "it to MODEL.MOBILE_FORMER.OUT_FEATURES or MODEL.TIMM.OUT_FEATURES"
        )
    side = (multiple or 1) * strides[name]
    if image_size < 1 or (multiple and image_size % side):
        nearest = max(1, round(image_size / side)) * side
        raise ValueError(
            f"'{name}' has stride {strides[name]}, so the image's side must be a multiple of "
            f"{side}, not {image_size}: set INPUT.PRETRAIN.SIZE to {nearest}"
        )
    return shapes[name]
