# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Several detectors on one frozen encoder, as one detector with the classes of all.

The encoder runs once per image. Each detector keeps its own feature pyramid and head, so it finds
exactly what it finds alone. ``qbheat join`` writes the weights of such a model.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import FPN, META_ARCH_REGISTRY, Backbone
from detectron2.structures import ImageList, Instances
from torch import Tensor, nn

from qbheat_det.config import configurable, get_value, with_values
from qbheat_det.core.errors import UserError

from .cached_images import CachedImages
from .contracts import (
    PreparesImages,
    get_backbone,
    get_encoder,
    get_in_features,
    get_pixel_statistics,
    masks_padding,
    prepare_backbone_inputs,
)


class SharedEncoder(Backbone):
    """The encoder of joined detectors."""

    def __init__(
        self, *, bottom_up: Backbone, in_features: Sequence[str], size_divisibility: int
    ) -> None:
        """
        Args:
            bottom_up: the encoder.
            in_features: names of the outputs that at least one detector reads.
            size_divisibility: images are padded to multiples of this number of pixels, as each of
                the detectors does.
        """
        super().__init__()
        self.bottom_up = bottom_up
        self.in_features = list(in_features)
        self._size_divisibility = size_divisibility

    @property
    def size_divisibility(self) -> int:
        return self._size_divisibility

    def output_shape(self) -> dict[str, ShapeSpec]:
        shapes: dict[str, ShapeSpec] = self.bottom_up.output_shape()
        return {name: shapes[name] for name in self.in_features}

    def forward(self, x: Tensor, *image_sizes: Tensor) -> dict[str, Tensor]:
        """Takes images (N, 3, H, W), and the sizes of padded ones. Returns the outputs by name."""
        outputs = self.bottom_up(x, *image_sizes)
        return {name: outputs[name] for name in self.in_features}


class EncodedImages(Backbone):
    """Takes the place of a detector's encoder, and returns outputs that are already computed."""

    def __init__(self, encoder: Backbone) -> None:
        """``encoder`` is replaced. Only the shapes of its outputs are used."""
        super().__init__()
        self._shapes: dict[str, ShapeSpec] = encoder.output_shape()
        self._size_divisibility = int(encoder.size_divisibility)

    @property
    def size_divisibility(self) -> int:
        return self._size_divisibility

    def output_shape(self) -> dict[str, ShapeSpec]:
        return dict(self._shapes)

    def forward(self, x: CachedImages, image_sizes: Tensor | None = None) -> dict[str, Tensor]:
        """Returns the outputs of a batch by name: maps (N, C, h, w) and tokens (N, M, D)."""
        return {
            name: x.batch(name, self._shapes[name].stride, torch.contiguous_format)
            for name in x.features[0]
        }


@META_ARCH_REGISTRY.register()
class JoinedDetectors(nn.Module):
    """Detectors that read the outputs of one encoder. It predicts, and cannot be trained."""

    is_trainable = False
    """Training would change the encoder's outputs for the other detectors, or forget classes."""
    learns_partial_labels = True
    """Evaluation may leave out classes that are not annotated."""

    @configurable
    def __init__(
        self,
        *,
        detectors: Sequence[nn.Module],
        class_indices: Sequence[Sequence[int]],
        max_detections: int,
    ) -> None:
        """
        Args:
            detectors: complete detectors of the same encoder. That of the first is kept.
            class_indices: for each detector, the class index in the joined detector of each of its
                classes; -1 for a class that another detector finds.
            max_detections: number of detections per image that are kept, with the highest scores.
        """
        super().__init__()
        encoder = take_encoder(detectors[0])
        in_features: dict[str, None] = {}  # ordered
        for detector in detectors:
            in_features |= dict.fromkeys(_list_inputs(detector))
        self.backbone = SharedEncoder(
            bottom_up=encoder,
            in_features=list(in_features),
            size_divisibility=_check_padding(detectors),
        )
        for detector in detectors[1:]:
            take_encoder(detector)
        self.detectors = nn.ModuleList(detectors)
        self.class_indices = [list(indices) for indices in class_indices]
        self.max_detections = max_detections
        self.masks_padding = masks_padding(detectors[0])

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        return {
            "detectors": [_build_part(cfg, values) for values in cfg.MODEL.JOINED.PARTS],
            "class_indices": cfg.MODEL.JOINED.CLASS_INDICES,
            "max_detections": cfg.TEST.DETECTIONS_PER_IMAGE,
        }

    @property
    def device(self) -> torch.device:
        return self.pixel_mean.device

    @property
    def pixel_mean(self) -> Tensor:
        """Mean of each channel (3, 1, 1), in the mapper's pixel format."""
        return get_pixel_statistics(self.detectors[0])["pixel_mean"]

    @property
    def pixel_std(self) -> Tensor:
        """Standard deviation of each channel (3, 1, 1)."""
        return get_pixel_statistics(self.detectors[0])["pixel_std"]

    @torch.no_grad()
    def forward(self, batched_inputs: list[dict[str, Any]]) -> list[dict[str, Instances]]:
        """Returns the detections of all detectors.

        Args:
            batched_inputs: dicts of a dataset mapper with "image" (3, H, W), and optionally
                "height" and "width" of the output.

        Returns:
            One ``{"instances": Instances}`` per image, sorted by score: ``pred_boxes`` (absolute
            XYXY), ``scores`` and ``pred_classes``.

        Raises:
            UserError: the model is in training mode.
        """
        if self.training:
            raise UserError(
                "joined detectors cannot be trained: train another detector on the same frozen "
                "encoder, and join it with qbheat join"
            )
        encoded = self.encode(batched_inputs)
        outputs = [detector(encoded) for detector in self.detectors]
        results = []
        for of_image in zip(*outputs, strict=True):
            found = [output["instances"] for output in of_image]
            results.append({"instances": self.merge(found)})
        return results

    def preprocess_image(self, batched_inputs: list[dict[str, Any]]) -> ImageList:
        """Returns normalized and padded images, which are the same for all detectors."""
        first = self.detectors[0]
        assert isinstance(first, PreparesImages)
        images = first.preprocess_image(batched_inputs)
        assert isinstance(images, ImageList)
        return images

    def encode(self, batched_inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the images' dicts with the encoder's outputs, "features", instead of pixels."""
        outputs = self.backbone(*prepare_backbone_inputs(self, batched_inputs))
        encoded = []
        for index, entry in enumerate(batched_inputs):
            others = {key: value for key, value in entry.items() if key != "image"}
            encoded.append(
                {
                    **others,
                    "features": {name: output[index] for name, output in outputs.items()},
                    "image_size": tuple(entry["image"].shape[-2:]),
                }
            )
        return encoded

    def merge(self, found: Sequence[Instances]) -> Instances:
        """Returns the best detections of all detectors in one image.

        ``found`` has the detections of each detector, in the order of the detectors.
        """
        parts = []
        for instances, indices in zip(found, self.class_indices, strict=True):
            table = torch.tensor(indices, device=instances.pred_classes.device)
            classes = table[instances.pred_classes]
            is_used = classes >= 0
            part = instances[is_used]
            part.pred_classes = classes[is_used]
            parts.append(part)
        merged: Instances = Instances.cat(parts)
        order = merged.scores.sort(descending=True, stable=True).indices
        return merged[order[: self.max_detections]]


def _build_part(cfg: CfgNode, values: Mapping[str, Any]) -> nn.Module:
    """Builds a detector of ``MODEL.JOINED.PARTS``.

    Raises:
        UserError: a key is unknown, or the part is a joined detector itself.
    """
    for key in values:
        try:
            get_value(cfg, key)
        except (KeyError, TypeError) as error:
            raise UserError(f"MODEL.JOINED.PARTS has the unknown key '{key}'") from error
    part_cfg = with_values(cfg, values)
    architecture = part_cfg.MODEL.META_ARCHITECTURE
    if architecture == JoinedDetectors.__name__:
        raise UserError(f"MODEL.JOINED.PARTS: a part cannot be {architecture} itself")
    detector: nn.Module = META_ARCH_REGISTRY.get(architecture)(part_cfg)
    return detector


def take_encoder(detector: nn.Module) -> Backbone:
    """Returns the encoder of a detector, which then reads outputs that are already computed."""
    backbone = _get_backbone(detector)
    encoder = get_encoder(backbone)
    if isinstance(backbone, FPN):
        backbone.bottom_up = EncodedImages(encoder)
    else:
        detector.backbone = EncodedImages(encoder)
    return encoder


def _get_backbone(detector: nn.Module) -> Backbone:
    backbone = get_backbone(detector)
    if backbone is None or not isinstance(detector, PreparesImages):
        raise UserError(
            f"{type(detector).__name__} cannot be joined: RetinaNet, FCOS and MF-DETR can"
        )
    return backbone


def _list_inputs(detector: nn.Module) -> list[str]:
    """Returns the names of the encoder's outputs that a detector reads."""
    backbone = _get_backbone(detector)
    reader = backbone if isinstance(backbone, FPN) else detector
    return get_in_features(reader) or list(backbone.output_shape())


def _check_padding(detectors: Sequence[nn.Module]) -> int:
    """Returns the number of pixels to whose multiples all detectors pad images.

    Raises:
        UserError: they differ. The encoder's outputs would not be those of each detector alone.
    """
    multiples = [int(_get_backbone(detector).size_divisibility) for detector in detectors]
    if len(set(multiples)) > 1:
        raise UserError(
            f"detectors that pad images to multiples of {sorted(set(multiples))} pixels cannot be "
            "joined: join detectors of one architecture"
        )
    return multiples[0]
