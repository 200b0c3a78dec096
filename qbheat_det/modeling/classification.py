# Copyright (c) qbheat_det contributors. Apache-2.0.
"""An image classifier: linear probing, decoder probing and fine-tuning of any encoder.

The linear ("lin") and transformer decoders ("tran-1", "tran-4") follow QB-Heat, arXiv:2211.13228,
Sec. 5, B.1 and Tables 10-12. Parameter counts (Tables 6 and 15) imply that "tran" has no position
embedding. The paper does not state the width of attention heads (here 64). Mixup (arXiv:1710.09412)
and CutMix (arXiv:1905.04899) are timm's. Label smoothing: arXiv:1512.00567.
"""

from collections.abc import Mapping
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import META_ARCH_REGISTRY, Backbone, build_backbone
from timm.data import Mixup
from timm.data.mixup import mixup_target
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional as F

from qbheat_det.config import configurable
from qbheat_det.core.errors import UserError

from .checks import check_value
from .image_model import ImageModel
from .pooling import PooledFeatures


class LinearDecoder(nn.Module):
    """Global average pooling, concatenation with the first token, and one linear layer."""

    def __init__(
        self,
        *,
        input_shape: Mapping[str, ShapeSpec],
        num_classes: int,
        normalize: bool = False,
        in_feature: str = "s16_expanded",
    ) -> None:
        """Takes the backbone's ``output_shape()``, the number of classes K, and the map to pool.

        ``normalize`` adds a BatchNorm without scale and offset before the linear layer, as is
        common in linear probing.
        """
        super().__init__()
        self.pool = PooledFeatures(input_shape=input_shape, in_feature=in_feature)
        self.norm: nn.Module = nn.Identity()
        if normalize:
            self.norm = nn.BatchNorm1d(self.pool.width, affine=False)
        self.classifier = nn.Linear(self.pool.width, num_classes)
        nn.init.normal_(self.classifier.weight, std=0.01)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """Takes a map (N, C, H, W) and optional "tokens" (N, M, D). Returns logits (N, K)."""
        return self.classifier(self.norm(self.pool(features)))


class TransformerDecoder(nn.Module):
    """Projects every position to ``dim``, then applies ViT blocks, pooling and a linear layer."""

    def __init__(
        self,
        *,
        input_shape: Mapping[str, ShapeSpec],
        num_classes: int,
        dim: int,
        depth: int = 1,
        dropout: float = 0.0,
        in_feature: str = "s16_expanded",
    ) -> None:
        """
        Args:
            input_shape: the backbone's ``output_shape()``.
            num_classes: number of classes K.
            dim: width of the blocks, a multiple of 64. The paper uses 192, 384 and 768 for MF-285M,
                MF-1.0G and MF-3.7G.
            depth: number of blocks.
            dropout: dropout rate of the blocks.
            in_feature: name of the feature map to read.

        Raises:
            ValueError: a number is out of range.
        """
        super().__init__()
        is_multiple = dim > 0 and dim % 64 == 0
        check_value(is_multiple, "CLASSIFIER.WIDTH", dim, "a multiple of 64")
        check_value(depth >= 1, "CLASSIFIER.DEPTH", depth, "at least 1")
        check_value(0 <= dropout < 1, "CLASSIFIER.DROPOUT", dropout, "in [0, 1)")
        self.pool = PooledFeatures(input_shape=input_shape, in_feature=in_feature)
        self.projection = nn.Linear(self.pool.channels, dim)
        self.blocks = nn.Sequential(
            *(Block(dim, dim // 64, qkv_bias=True, proj_drop=dropout) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(dim)
        self.classifier = nn.Linear(dim + self.pool.token_dim, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """Takes a map (N, C, H, W) and optional "tokens" (N, M, D). Returns logits (N, K)."""
        positions = features[self.pool.in_feature].flatten(2).transpose(1, 2)  # (N, HW, C)
        positions = self.norm(self.blocks(self.projection(positions)))  # (N, HW, dim)
        pooled = F.adaptive_avg_pool1d(positions.transpose(1, 2), 1).flatten(1)  # (N, dim)
        return self.classifier(self.pool.join_token(pooled, features))


class BatchMixing:
    """Mixes image i of N with image N - 1 - i, and mixes their labels in the same way.

    Each process draws one mixing ratio per batch from NumPy's global generator. The trainer seeds
    this generator by run, step and process, so that a resumed run draws the same ratios.
    """

    def __init__(
        self,
        *,
        num_classes: int,
        label_smoothing: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
    ) -> None:
        """Takes the number of classes K, the label smoothing, and the alphas of Mixup and CutMix.

        An alpha of 0 disables Mixup or CutMix. If both are enabled, each batch uses one at random.
        """
        is_fraction = 0 <= label_smoothing < 1
        check_value(num_classes >= 1, "CLASSIFIER.NUM_CLASSES", num_classes, "at least 1")
        check_value(is_fraction, "CLASSIFIER.LABEL_SMOOTHING", label_smoothing, "in [0, 1)")
        check_value(mixup >= 0, "CLASSIFIER.MIXUP", mixup, "at least 0")
        check_value(cutmix >= 0, "CLASSIFIER.CUTMIX", cutmix, "at least 0")
        self.num_classes = num_classes
        self.label_smoothing = label_smoothing
        self._mix: Mixup | None = None
        if mixup or cutmix:
            self._mix = Mixup(
                mixup, cutmix, label_smoothing=label_smoothing, num_classes=num_classes
            )

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mixes images (N, 3, H, W) in place. Returns the images and the targets (N, K).

        ``labels`` (N,) are class indices. The targets of an image sum to 1 over classes. Raises a
        ``UserError`` if mixing is enabled and the number of images is odd.
        """
        if self._mix is None:
            return images, mixup_target(labels, self.num_classes, smoothing=self.label_smoothing)
        if len(images) % 2:
            raise UserError(
                f"Mixup and CutMix pair the images of a batch, and a process has {len(images)}: "
                "choose SOLVER.IMS_PER_BATCH so that the share of each process, and each of its "
                "SOLVER.ACCUMULATE parts, is even"
            )
        mixed, targets = self._mix(images, labels)
        return mixed, targets


@META_ARCH_REGISTRY.register()
class ImageClassifier(ImageModel):
    """An encoder, and a decoder that returns class scores, trained by the mean cross-entropy.

    An encoder without trainable parameters stays in evaluation mode. Gradients do not depend on the
    number of processes, except through random mixing, dropout, and BatchNorm's statistics.
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
        """Takes the arguments of ``ImageModel``, a decoder that returns logits, and the mixing."""
        pool = decoder.pool
        super().__init__(
            backbone=backbone,
            in_feature=pool.in_feature,
            head_in_features=pool.in_features,
            **others,
        )
        self.decoder = decoder
        self.mixing = mixing
        self.num_classes = mixing.num_classes
        self.backbone_is_frozen = not any(p.requires_grad for p in backbone.parameters())
        # "accuracy" in percent. For mixed images, the class with the larger target is the true one.
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
        known = ("linear", "transformer")
        check_value(node.DECODER in known, "CLASSIFIER.DECODER", node.DECODER, f"one of {known}")
        decoder: LinearDecoder | TransformerDecoder
        if node.DECODER == "linear":
            decoder = LinearDecoder(**shared, normalize=node.NORMALIZE)
        else:
            decoder = TransformerDecoder(
                **shared, dim=node.WIDTH, depth=node.DEPTH, dropout=node.DROPOUT
            )
        return {
            "backbone": backbone,
            "decoder": decoder,
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

    def train(self, mode: bool = True) -> "ImageClassifier":
        """Sets the mode. A frozen encoder stays in evaluation mode."""
        super().train(mode)
        if self.backbone_is_frozen:
            self.backbone.eval()
        return self

    def forward(self, batched_inputs: list[dict[str, Any]]) -> Any:
        """Takes dicts of a dataset mapper with "image" (3, S, S), and "label" in training.

        Returns ``{"loss_cls": scalar}`` in training. In evaluation, returns one
        ``{"scores": (K,)}`` per image, which sum to 1. Raises a ``UserError`` if an image is not
        S x S, or if a label is missing or not in [0, K).
        """
        images = self.preprocess_image(batched_inputs)
        if not self.training:
            scores = self.classify(images).softmax(dim=1)
            return [{"scores": row} for row in scores]
        labels = self.prepare_labels(batched_inputs)
        images, targets = self.mixing(images, labels)
        logits = self.classify(images)
        correct = logits.detach().argmax(dim=1) == targets.argmax(dim=1)
        self.metrics = {"accuracy": 100 * correct.float().mean()}
        return {"loss_cls": F.cross_entropy(logits, targets)}

    def classify(self, images: Tensor) -> Tensor:
        """Takes normalized images (N, 3, S, S) and returns logits (N, K) in float32."""
        needs_gradients = torch.is_grad_enabled() and not self.backbone_is_frozen
        with torch.set_grad_enabled(needs_gradients):
            features = self.backbone(images)
        logits: Tensor = self.decoder(features)
        return logits.float()

    def prepare_labels(self, batched_inputs: list[dict[str, Any]]) -> Tensor:
        """Returns the labels (N,). Raises a ``UserError`` if one is missing or out of range."""
        labels = [entry.get("label", -1) for entry in batched_inputs]
        for entry, label in zip(batched_inputs, labels, strict=True):
            is_known = 0 <= label < self.num_classes
            if not is_known:
                given = f"label {label}" if "label" in entry else "no label"
                raise UserError(
                    f"image '{entry.get('file_name', '')}' has {given}, but labels are 0 to "
                    f"{self.num_classes - 1} (MODEL.CLASSIFIER.NUM_CLASSES): train on class "
                    "folders (--data and --val) or on imagenet_train"
                )
        return torch.tensor(labels).to(self.device, non_blocking=True)
