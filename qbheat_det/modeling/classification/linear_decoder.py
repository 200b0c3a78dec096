# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The linear classifier of the QB-Heat paper ("lin").

Self-Supervised Learning based on Heat Equation, Section B.1. As in its Table 8, the pooled map is
joined with the first token before the classifier, where the backbone gives tokens; of a backbone
that gives none, the map alone is read.
"""

from collections.abc import Mapping

from detectron2.layers import ShapeSpec
from torch import Tensor, nn

from qbheat_det.layers import PooledFeatures


class LinearDecoder(nn.Module):
    """Global average pooling, the first token beside it if there are any, one linear layer."""

    def __init__(
        self,
        *,
        input_shape: Mapping[str, ShapeSpec],
        num_classes: int,
        normalize: bool = False,
        in_feature: str = "s16_expanded",
    ) -> None:
        """
        Args:
            input_shape: the backbone's ``output_shape()``, with ``in_feature``, and ``"tokens"``
                where they are to be read.
            num_classes: K.
            normalize: BatchNorm without scale and offset before the linear layer, as linear
                probing has it; fine-tuning does without.
            in_feature: name of the map to pool.

        Raises:
            ValueError: the backbone does not give the map.
        """
        super().__init__()
        check_map(input_shape, in_feature)
        self.pool = PooledFeatures(input_shape=input_shape, in_feature=in_feature)
        width = self.pool.width
        self.norm = nn.BatchNorm1d(width, affine=False) if normalize else nn.Identity()
        self.classifier = nn.Linear(width, num_classes)
        nn.init.normal_(self.classifier.weight, std=0.01)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """
        Args:
            features: the map (N, C, H, W) under ``in_feature``, and ``"tokens"`` (N, M, D) where
                the backbone gives them.

        Returns:
            Logits, (N, K).
        """
        logits: Tensor = self.classifier(self.norm(self.pool(features)))
        return logits


def check_map(input_shape: Mapping[str, ShapeSpec], in_feature: str) -> None:
    """
    Raises:
        ValueError: the map is not among the backbone's outputs.
    """
    shape = input_shape.get(in_feature)
    if shape is None or not shape.channels or in_feature == "tokens":
        maps = [name for name in input_shape if name != "tokens"]
        raise ValueError(
            f"the classifier reads the map '{in_feature}', but the backbone's maps are "
            f"{', '.join(maps) or 'none'}: set MODEL.CLASSIFIER.IN_FEATURE to one of them, or add "
            "it to MODEL.MOBILE_FORMER.OUT_FEATURES or MODEL.TIMM.OUT_FEATURES"
        )
