# Copyright (c) qbheat_det contributors. Apache-2.0.
"""MF-DETR: an end-to-end detector with a head of Mobile-Former blocks.

Papers: QB-Heat, arXiv:2211.13228, Sec. 5 and B.2; "End-to-End Object Detection with Transformers"
(DETR), arXiv:2005.12872. Deviation: there are logits for K + 1 contiguous classes, while DETR has
92 logits for the category ids of COCO. ``decoder_block.py`` lists what the paper does not state.
"""

import inspect
import logging
from collections.abc import Sequence
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import META_ARCH_REGISTRY, Backbone, build_backbone, detector_postprocess
from detectron2.structures import Boxes, ImageList, Instances
from detectron2.utils import comm
from torch import Tensor, nn
from torchvision.ops import box_convert

from qbheat_det.config import configurable
from qbheat_det.layers import halve, padding_mask
from qbheat_det.modeling.annotated_classes import find_annotated
from qbheat_det.modeling.cached_images import find_cached_images
from qbheat_det.modeling.checks import check_value
from qbheat_det.modeling.contracts import get_encoder, pick_outputs

from .criterion import FocalClassification, SetCriterion, SoftmaxClassification, Targets
from .decoder_block import DecoderWidths
from .mf_decoder import MFDecoder
from .old_labels import (
    KeptClasses,
    OldLabels,
    add_old_labels,
    select_labels,
    sum_feature_losses,
)
from .query_selection import QuerySelection

logger = logging.getLogger(__name__)
_NEVER = -1e4  # logit of a class that is never predicted, also in half precision


@META_ARCH_REGISTRY.register()
class MFDETR(nn.Module):
    """A backbone, a decoder with object queries, and a set loss.

    Any Detectron2 backbone with outputs at strides 8 and 16 can be used. If its ``forward`` takes
    ``image_sizes``, as in ``MobileFormer``, padding does not change the results of an image.
    Otherwise a warning is logged. In training, BatchNorm's statistics always include the padding.
    """

    learns_partial_labels = True
    """Whether the model reads ``ANNOTATED_CLASSES``."""

    @configurable
    def __init__(
        self,
        *,
        backbone: Backbone,
        decoder: MFDecoder,
        criterion: SetCriterion,
        in_features: Sequence[str],
        pixel_mean: Sequence[float],
        pixel_std: Sequence[float],
        kept_classes: KeptClasses | None = None,
    ) -> None:
        """
        Args:
            backbone: has the outputs ``in_features``.
            decoder: computes predictions from the backbone's outputs.
            criterion: computes losses from predictions and ground truth.
            in_features: names of the backbone's outputs at strides 8, 16 and optionally 32.
            pixel_mean: mean of each channel, in the mapper's pixel format.
            pixel_std: standard deviation of each channel.
            kept_classes: how old classes are kept, by default none.
        """
        super().__init__()
        self.backbone = backbone
        self.decoder = decoder
        self.criterion = criterion
        self.in_features = list(in_features)
        self.kept_classes = kept_classes or KeptClasses()
        encoder = get_encoder(backbone)
        is_trained = any(parameter.requires_grad for parameter in encoder.parameters())
        self.keeps_features = is_trained and bool(
            self.kept_classes.num_classes and self.kept_classes.feature_weight
        )
        # The module whose class predictions the others refine.
        classifier: MFDecoder | QuerySelection = decoder
        if decoder.selection is not None:
            classifier = decoder.selection
        nn.init.constant_(classifier.class_embed.bias, criterion.classification.initial_bias)
        self.register_buffer("pixel_mean", torch.tensor(pixel_mean).view(-1, 1, 1), False)
        self.register_buffer("pixel_std", torch.tensor(pixel_std).view(-1, 1, 1), False)
        self.pixel_mean: Tensor
        self.pixel_std: Tensor
        self.masks_padding = "image_sizes" in inspect.signature(backbone.forward).parameters
        if not self.masks_padding:
            logger.warning(
                "%s takes no image_sizes: in a padded batch, the features of an image depend on "
                "the padding",
                type(backbone).__name__,
            )

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        node = cfg.MODEL.MF_DETR
        backbone = build_backbone(cfg)
        shapes = pick_outputs(backbone, node.IN_FEATURES, "MODEL.MF_DETR.IN_FEATURES")
        return {
            "backbone": backbone,
            "criterion": build_criterion(node),
            "decoder": build_decoder(node, shapes),
            "in_features": node.IN_FEATURES,
            "pixel_mean": cfg.MODEL.PIXEL_MEAN,
            "pixel_std": cfg.MODEL.PIXEL_STD,
            "kept_classes": KeptClasses.from_config(cfg),
        }

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return self.criterion.num_classes

    @property
    def device(self) -> torch.device:
        return self.pixel_mean.device

    def forward(
        self, batched_inputs: list[dict[str, Any]], normalizers: Tensor | None = None
    ) -> Any:
        """
        Args:
            batched_inputs: dicts of a dataset mapper with "image" (3, H, W). In training, also
                "instances" with ``gt_boxes`` (absolute XYXY) and ``gt_classes``. In inference,
                optionally "height" and "width" of the output (default: the size of the image).
            normalizers: in training, the result of ``loss_normalizers`` for the effective batch.
                By default, it is computed over the batches of all processes.

        Returns:
            In training, a dict of losses. In inference, one ``{"instances": Instances}`` per image
            with Q detections: ``pred_boxes`` (absolute XYXY), ``scores`` and ``pred_classes``.
        """
        images = self.preprocess_image(batched_inputs)
        features, padding = self.extract_features(images)
        if not self.training:
            outputs = self.decoder(features, padding)
            detections = self.inference(outputs, images.image_sizes)
            return self.resize_detections(detections, batched_inputs)
        targets = self.prepare_targets(self.add_old_labels(batched_inputs))
        if normalizers is None:
            normalizers = self.compute_normalizers(batched_inputs)
        outputs = self.decoder(features, padding)
        losses = self.criterion(outputs, targets, normalizers)
        if self.decoder.selection is not None:
            losses |= self.decoder.selection.losses(
                outputs["proposals"], targets, self.criterion, normalizers
            )
        if self.keeps_features:
            total = sum_feature_losses(features, batched_inputs)
            weight = self.kept_classes.feature_weight
            losses["loss_kept_features"] = weight * total / normalizers[1]
        return losses

    @torch.no_grad()
    def predict_old(self, batched_inputs: list[dict[str, Any]]) -> list[OldLabels]:
        """Returns the ``OLD_PREDICTIONS`` of each image. Called on the old detector.

        Its rows of new classes are random, and are set so that these classes are never predicted.
        """
        new_rows = slice(self.kept_classes.num_classes, self.criterion.num_classes)
        for module in (self.decoder, self.decoder.selection):
            if module is not None:
                module.class_embed.weight[new_rows] = 0
                module.class_embed.bias[new_rows] = _NEVER
        images = self.preprocess_image(batched_inputs)
        features, padding = self.extract_features(images)
        detections = self.inference(self.decoder(features, padding), images.image_sizes)
        old = []
        for index, found in enumerate(detections):
            kept_features: list[Tensor] = []
            if self.keeps_features:
                kept_features = [level[index].float() for level in features]
            old.append(OldLabels(select_labels(found, self.kept_classes), kept_features))
        return old

    def add_old_labels(self, batched_inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the inputs with labels of the old detector, if classes are kept."""
        num_kept = self.kept_classes.num_classes
        if not num_kept:
            return batched_inputs
        return [add_old_labels(entry, num_kept, self.device) for entry in batched_inputs]

    def compute_normalizers(self, batched_inputs: list[dict[str, Any]]) -> Tensor:
        """Returns the divisors (2,) of the losses for the batches of all processes together."""
        counts = self.loss_counts(batched_inputs).to(self.device, non_blocking=True)
        num_processes = comm.get_world_size()
        if num_processes > 1:
            torch.distributed.all_reduce(counts)
        return self.loss_normalizers(counts, num_processes)

    def loss_counts(self, batched_inputs: list[dict[str, Any]]) -> Tensor:
        """Returns the divisors (2,) of the class and box losses for a batch."""
        labelled = self.add_old_labels(batched_inputs)
        counts = [len(entry["instances"]) for entry in labelled]
        return torch.tensor(self.criterion.normalizers(counts, self.decoder.num_queries))

    def loss_normalizers(self, counts: Tensor, parts: int) -> Tensor:
        """Returns the divisors (2,) of the class and box losses of each micro-batch.

        ``counts`` (2,) are the sums of ``loss_counts`` over all ``parts`` micro-batches of a step.
        """
        return self.criterion.mean_normalizers(counts, parts)

    def preprocess_image(self, batched_inputs: list[dict[str, Any]]) -> ImageList:
        """Normalizes the images and stacks them, zero-padded on the right and bottom."""
        divisibility = self.backbone.size_divisibility
        cached = find_cached_images(batched_inputs, divisibility, self.device)
        if cached is not None:
            return cached
        images = []
        for entry in batched_inputs:
            pixels = entry["image"].to(self.device, non_blocking=True)  # (3, H, W)
            images.append((pixels - self.pixel_mean) / self.pixel_std)
        return ImageList.from_tensors(images, divisibility)

    def extract_features(self, images: ImageList) -> tuple[list[Tensor], Tensor | None]:
        """Returns the backbone's outputs ``in_features``, and the padding mask at stride 8.

        The mask is (N, 1, H / 8, W / 8), or None if no image is padded.
        """
        padded_size = tuple(images.tensor.shape[-2:])
        inputs = [images.tensor]
        padding = None
        is_padded = any(tuple(size) != padded_size for size in images.image_sizes)
        if is_padded:
            image_sizes = torch.tensor(images.image_sizes).to(self.device, non_blocking=True)
            padding = padding_mask(image_sizes, padded_size)  # (N, 1, H, W)
            if self.masks_padding:
                inputs.append(image_sizes)
        outputs = self.backbone(*inputs)
        features = [outputs[name] for name in self.in_features]
        return features, halve(halve(halve(padding)))

    def prepare_targets(self, batched_inputs: list[dict[str, Any]]) -> Targets:
        """Converts ground truth from absolute XYXY to cxcywh in [0, 1] of each unpadded image."""
        labels = []
        boxes = []
        for entry in batched_inputs:
            instances: Instances = entry["instances"].to(self.device)
            height, width = instances.image_size
            scale = torch.tensor([width, height] * 2).to(self.device, non_blocking=True)
            labels.append(instances.gt_classes)
            boxes.append(box_convert(instances.gt_boxes.tensor / scale, "xyxy", "cxcywh"))
        num_classes = self.criterion.num_classes
        return Targets.stack(
            labels, boxes, find_annotated(batched_inputs, num_classes, self.device)
        )

    def inference(
        self, outputs: dict[str, Tensor], image_sizes: Sequence[tuple[int, int]]
    ) -> list[Instances]:
        """Converts the last block's predictions to ``Instances`` of the unpadded input images.

        ``image_sizes`` are the (height, width) of the unpadded images in pixels.
        """
        logits = outputs["pred_logits"][-1].float()  # (N, Q, K + 1)
        probabilities = self.criterion.classification.scores(logits)  # (N, Q, K)
        scores, classes = probabilities.max(dim=-1)  # (N, Q) each
        corners = box_convert(outputs["pred_boxes"][-1], "cxcywh", "xyxy")  # (N, Q, 4) in [0, 1]
        results = []
        for index, (height, width) in enumerate(image_sizes):
            scale = torch.tensor([width, height] * 2).to(corners.device, non_blocking=True)
            boxes = Boxes(corners[index] * scale)
            boxes.clip((height, width))
            results.append(
                Instances(
                    (height, width),
                    pred_boxes=boxes,
                    scores=scores[index],
                    pred_classes=classes[index],
                )
            )
        return results

    @staticmethod
    def resize_detections(
        detections: list[Instances], batched_inputs: list[dict[str, Any]]
    ) -> list[dict[str, Instances]]:
        """Scales the boxes of each image to its "height" and "width", if the input has them."""
        results = []
        for entry, instances in zip(batched_inputs, detections, strict=True):
            height = entry.get("height", instances.image_size[0])
            width = entry.get("width", instances.image_size[1])
            results.append({"instances": detector_postprocess(instances, height, width)})
        return results


def build_decoder(node: CfgNode, input_shape: Sequence[ShapeSpec]) -> MFDecoder:
    """Builds the decoder that ``MODEL.MF_DETR`` describes."""
    selection = None
    if node.QUERY_SELECTION.ENABLED:
        if node.CLASSIFICATION != "focal":
            raise ValueError(
                "MODEL.MF_DETR.QUERY_SELECTION needs MODEL.MF_DETR.CLASSIFICATION 'focal'"
            )
        selection = QuerySelection(
            num_classes=node.NUM_CLASSES,
            num_queries=node.NUM_OBJECT_QUERIES,
            dim=node.HIDDEN_DIM,
        )
    return MFDecoder(
        input_shape=input_shape,
        num_classes=node.NUM_CLASSES,
        num_queries=node.NUM_OBJECT_QUERIES,
        num_blocks=node.NUM_BLOCKS,
        widths=DecoderWidths(
            dim=node.HIDDEN_DIM,
            num_heads=node.NHEADS,
            hidden=node.DIM_FEEDFORWARD,
            expansion=node.EXPANSION,
            dropout=node.DROPOUT,
        ),
        norm=node.NORM,
        selection=selection,
    )


def build_criterion(node: CfgNode) -> SetCriterion:
    """Builds the matching and the losses that ``MODEL.MF_DETR`` describes."""
    classifications: dict[str, SoftmaxClassification | FocalClassification] = {
        "softmax": SoftmaxClassification(no_object_weight=node.NO_OBJECT_WEIGHT),
        "focal": FocalClassification(
            gamma=node.FOCAL.GAMMA,
            alpha=node.FOCAL.ALPHA,
            iou_target=node.FOCAL.IOU_TARGET,
            prior=node.FOCAL.PRIOR,
        ),
    }
    name = node.CLASSIFICATION
    known = tuple(classifications)
    check_value(name in known, "MF_DETR.CLASSIFICATION", name, f"one of {known}")
    return SetCriterion(
        num_classes=node.NUM_CLASSES,
        classification=classifications[name],
        class_weight=node.CLASS_WEIGHT,
        l1_weight=node.L1_WEIGHT,
        giou_weight=node.GIOU_WEIGHT,
    )
