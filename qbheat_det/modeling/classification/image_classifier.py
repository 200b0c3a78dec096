# Copyright (c) qbheat_det contributors. Apache-2.0.
"""An image classifier: linear probing, decoder probing and fine-tuning of any encoder.

Self-Supervised Learning based on Heat Equation, arXiv:2211.13228, Sec. 5, B.1 and Tables 10-12.
"""

from typing import Any

import torch
from detectron2.config import CfgNode, configurable
from detectron2.modeling import META_ARCH_REGISTRY, Backbone, build_backbone
from torch import Tensor
from torch.nn import functional as F

from qbheat_det.core.errors import UserError
from qbheat_det.modeling.image_model import ImageModel

from .decoders import LinearDecoder, TransformerDecoder
from .mixing import BatchMixing

_DECODERS = ("linear", "transformer")


@META_ARCH_REGISTRY.register()
class ImageClassifier(ImageModel):
    """An encoder, a decoder to class scores, and cross-entropy.

    Any Detectron2 backbone serves as encoder. Without trainable parameters it is frozen: it stays
    in evaluation mode, without changes of statistics or dropped paths, and without gradients.

    The loss is a mean over images; gradients of several processes are those of one with the joined
    batch, except for random mixing and dropout, and for BatchNorm's statistics of each process.
    """

    pretrain_only_modules = ("decoder",)
    mapper_name = "classify"

    @configurable
    def __init__(
        self,
        *,
        backbone: Backbone,
        decoder: LinearDecoder | TransformerDecoder,
        mixing: BatchMixing,
        **others: Any,
    ) -> None:
        """As ``ImageModel``, and:

        Args:
            backbone: has the outputs that ``decoder`` reads.
            decoder: from the backbone's outputs to logits of K classes.
            mixing: from labels to targets, and optionally mixes images.
        """
        pool = decoder.pool
        super().__init__(
            backbone=backbone,
            in_feature=pool.in_feature,
            head_in_features=pool.in_features,
            **others,
        )
        self.decoder = decoder
        self.mixing = mixing
        self.backbone_is_frozen = not any(p.requires_grad for p in backbone.parameters())
        # "accuracy" in per cent; of the class with the larger share where images are mixed.
        self.metrics: dict[str, Tensor] = {}

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        node = cfg.MODEL.CLASSIFIER
        backbone = build_backbone(cfg)
        shared = {
            "input_shape": backbone.output_shape(),
            "num_classes": node.NUM_CLASSES,
            "in_feature": node.IN_FEATURE,
        }
        if node.DECODER not in _DECODERS:
            raise ValueError(f"MODEL.CLASSIFIER.DECODER is one of {_DECODERS}, not {node.DECODER}")
        return {
            "backbone": backbone,
            "decoder": (
                LinearDecoder(**shared, normalize=node.NORMALIZE)
                if node.DECODER == "linear"
                else TransformerDecoder(
                    **shared, dim=node.WIDTH, depth=node.DEPTH, dropout=node.DROPOUT
                )
            ),
            "mixing": BatchMixing(
                num_classes=node.NUM_CLASSES,
                label_smoothing=node.LABEL_SMOOTHING,
                mixup=node.MIXUP,
                cutmix=node.CUTMIX,
            ),
            "image_size": cfg.INPUT.PRETRAIN.SIZE,
            "pixel_mean": cfg.MODEL.PIXEL_MEAN,
            "pixel_std": cfg.MODEL.PIXEL_STD,
        }

    @property
    def num_classes(self) -> int:
        """K."""
        return self.mixing.num_classes

    def train(self, mode: bool = True) -> "ImageClassifier":
        """Sets the mode, except of a frozen encoder, which stays in evaluation mode."""
        super().train(mode)
        if self.backbone_is_frozen:
            self.backbone.eval()
        return self

    def forward(self, batched_inputs: list[dict[str, Any]]) -> Any:
        """
        Args:
            batched_inputs: dicts of a dataset mapper: "image" (3, S, S), in training with "label"
                from 0 on.

        Returns:
            {"loss_cls"}, (), in training; else a list with a dict for each image: "scores" (K,),
            which sum to one.

        Raises:
            UserError: an image has another size, or a label is missing or out of range.
        """
        images = self.preprocess_image(batched_inputs)
        if not self.training:
            scores = self.classify(images).softmax(dim=1)
            return [{"scores": row} for row in scores]
        images, targets = self.mixing(images, self.prepare_labels(batched_inputs))
        logits = self.classify(images)
        correct = logits.detach().argmax(dim=1) == targets.argmax(dim=1)
        self.metrics = {"accuracy": 100 * correct.float().mean()}
        return {"loss_cls": F.cross_entropy(logits, targets)}

    def classify(self, images: Tensor) -> Tensor:
        """From normalised images (N, 3, S, S) to logits (N, K), in float32."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.backbone_is_frozen):
            features = self.backbone(images)
        logits: Tensor = self.decoder(features)
        return logits.float()

    def prepare_labels(self, batched_inputs: list[dict[str, Any]]) -> Tensor:
        """Returns the labels (N,), checked on the CPU, so that nothing waits for the device.

        Raises:
            UserError: one is missing or out of range.
        """
        labels = [entry.get("label", -1) for entry in batched_inputs]
        for entry, label in zip(batched_inputs, labels, strict=True):
            if not 0 <= label < self.num_classes:
                raise UserError(
                    f"image '{entry.get('file_name', '')}' has "
                    f"{f'label {label}' if 'label' in entry else 'no label'}, but labels are 0 to "
                    f"{self.num_classes - 1} (MODEL.CLASSIFIER.NUM_CLASSES): train on class "
                    "folders (--train-folder and --val-folder) or on imagenet_train"
                )
        return torch.tensor(labels).to(self.device, non_blocking=True)
