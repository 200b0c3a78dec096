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
    SupportsKeptClasses,
    get_backbone,
    get_encoder,
    get_in_features,
    get_num_classes,
    get_pixel_statistics,
    masks_padding,
    prepare_backbone_inputs,
)

_LIMIT = "TEST.DETECTIONS_PER_IMAGE"
# Keys that are the same for all detectors.
_FOR_ALL = (
    "MODEL.CACHE_FEATURES.",
    "MODEL.CATEGORY_IDS",
    "MODEL.CLASS_NAMES",
    "MODEL.DEVICE",
    "MODEL.JOINED.",
    "MODEL.KEEP_CLASSES.",
    "MODEL.LOAD_PROPOSALS",
    "MODEL.PIXEL_",
    "MODEL.WEIGHTS",
)


class JoinedEncoder(Backbone):
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
            name: x.batch(name, shape.stride, torch.contiguous_format)
            for name, shape in self._shapes.items()
            if name in x.features[0]  # others are read by no detector
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
            detectors: complete detectors of the same encoder. The first encoder with all outputs
                that they read is kept.
            class_indices: for each detector, the class index in the joined detector of each of its
                classes; -1 for a class that another detector finds.
            max_detections: number of detections per image that are kept, with the highest scores.
        """
        super().__init__()
        for detector, indices in zip(detectors, class_indices, strict=True):
            if get_num_classes(detector) != len(indices):
                raise UserError(
                    f"MODEL.JOINED.CLASS_INDICES has {len(indices)} indices for a detector of "
                    f"{get_num_classes(detector)} classes"
                )
        names: dict[str, None] = {}  # ordered
        for detector in detectors:
            names |= dict.fromkeys(_list_inputs(detector))
        in_features = list(names)
        size_divisibility = _check_padding(detectors)
        encoders = [take_encoder(detector) for detector in detectors]
        self.backbone = JoinedEncoder(
            bottom_up=_find_fullest(encoders, in_features),
            in_features=in_features,
            size_divisibility=size_divisibility,
        )
        self.detectors = nn.ModuleList(detectors)
        self.class_indices = [list(indices) for indices in class_indices]
        self.max_detections = max_detections
        self.masks_padding = masks_padding(detectors[0])

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        check_parts(cfg)
        limit = cfg.TEST.DETECTIONS_PER_IMAGE
        limits = [values[_LIMIT] for values in cfg.MODEL.JOINED.PARTS]
        detectors = []
        for values in cfg.MODEL.JOINED.PARTS:
            part_cfg = with_values(cfg, values)
            if limit > sum(limits):  # the user has raised it
                part_cfg.TEST.DETECTIONS_PER_IMAGE = limit
            detectors.append(META_ARCH_REGISTRY.get(part_cfg.MODEL.META_ARCHITECTURE)(part_cfg))
        return {
            "detectors": detectors,
            "class_indices": cfg.MODEL.JOINED.CLASS_INDICES,
            "max_detections": limit,
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


def check_parts(cfg: CfgNode) -> None:
    """Checks ``MODEL.JOINED``, which may come from a stranger's file.

    Raises:
        UserError: a key or value is not one that ``qbheat join`` writes.
    """
    parts = cfg.MODEL.JOINED.PARTS
    class_indices = cfg.MODEL.JOINED.CLASS_INDICES
    if not _is_list_of(parts, dict) or not parts:
        raise UserError("MODEL.JOINED.PARTS must be a list of the keys of each detector")
    if not _is_list_of(class_indices, list) or len(class_indices) != len(parts):
        raise UserError("MODEL.JOINED.CLASS_INDICES must have a list for each detector")
    for values, indices in zip(parts, class_indices, strict=True):
        for key, value in values.items():
            _check_value(cfg, key, value)
        _check_part(values, indices)
    used = [index for indices in class_indices for index in indices if index >= 0]
    if sorted(used) != list(range(len(cfg.MODEL.CLASS_NAMES))):
        raise UserError(
            "MODEL.JOINED.CLASS_INDICES must have the index of each of the "
            f"{len(cfg.MODEL.CLASS_NAMES)} classes once"
        )


def _check_value(cfg: CfgNode, key: object, value: object) -> None:
    """Checks a key of a part, and the type of its value. Raises a ``UserError``."""
    is_allowed = key == _LIMIT or (
        isinstance(key, str)
        and key.startswith("MODEL.")
        and not key.startswith(_FOR_ALL)
        and not key.endswith("_TEST")
    )
    try:
        present = get_value(cfg, str(key))
    except (KeyError, TypeError):
        is_allowed = False
    if not is_allowed or isinstance(present, CfgNode):
        raise UserError(f"MODEL.JOINED.PARTS has the key {key!r}, which is none of a detector")
    is_sequence = isinstance(present, list | tuple) and isinstance(value, list | tuple)
    if present is not None and type(value) is not type(present) and not is_sequence:
        raise UserError(
            f"MODEL.JOINED.PARTS: {key} is {value!r}, expected a value like {present!r}"
        )


def _check_part(values: Mapping[str, Any], indices: Sequence[object]) -> None:
    """Checks the architecture and the number of classes of a part. Raises a ``UserError``."""
    architecture = values.get("MODEL.META_ARCHITECTURE")
    is_known = isinstance(architecture, str) and architecture in META_ARCH_REGISTRY
    if not is_known or not issubclass(META_ARCH_REGISTRY.get(architecture), SupportsKeptClasses):
        raise UserError(
            f"MODEL.JOINED.PARTS: {architecture!r} cannot be joined; RetinaNet, FCOS, MF-DETR can"
        )
    if values.get(_LIMIT, 0) < 1:
        raise UserError(f"MODEL.JOINED.PARTS: {_LIMIT} must be at least 1 in each part")
    if any(type(index) is not int for index in indices):
        raise UserError("MODEL.JOINED.CLASS_INDICES must have integers")
    for key, value in values.items():
        if key.endswith(".NUM_CLASSES") and value < 1:
            raise UserError(f"MODEL.JOINED.PARTS: {key} is {value}, expected at least 1")


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, kind) for item in value)


def _find_fullest(encoders: Sequence[Backbone], names: Sequence[str]) -> Backbone:
    """Returns the first encoder that has all outputs ``names``.

    Raises:
        UserError: none has.
    """
    for encoder in encoders:
        if set(names) <= set(encoder.output_shape()):
            return encoder
    raise UserError(
        f"no encoder of the detectors has all outputs that they read, {', '.join(names)}: build "
        "one of them with all of these outputs"
    )


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
