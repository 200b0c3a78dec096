# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The linear classifier of the QB-Heat paper ("lin").

Self-Supervised Learning based on Heat Equation, Section B.1. As in its Table 8, the pooled map is
joined with the first token before the classifier.
"""

from collections.abc import Mapping

import torch
from detectron2.layers import ShapeSpec
from torch import Tensor, nn


class LinearDecoder(nn.Module):
    """Global average pooling, the first token beside it, one linear layer."""

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
            input_shape: the backbone's ``output_shape()``, with ``in_feature`` and ``"tokens"``.
            num_classes: K.
            normalize: BatchNorm without scale and offset before the linear layer, as linear
                probing has it; fine-tuning does without.
            in_feature: name of the map to pool.

        Raises:
            ValueError: the backbone does not give the map or the tokens.
        """
        super().__init__()
        channels, token_dim = decoder_widths(input_shape, in_feature)
        self.in_feature = in_feature
        self.pool = nn.AdaptiveAvgPool2d(1)
        width = channels + token_dim
        self.norm = nn.BatchNorm1d(width, affine=False) if normalize else nn.Identity()
        self.classifier = nn.Linear(width, num_classes)
        nn.init.normal_(self.classifier.weight, std=0.01)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """
        Args:
            features: the map (N, C, H, W) under ``in_feature`` and ``"tokens"`` (N, M, D).

        Returns:
            Logits, (N, K).
        """
        pooled = self.pool(features[self.in_feature]).flatten(1)
        token = features["tokens"][:, 0]
        logits: Tensor = self.classifier(self.norm(torch.cat([pooled, token], dim=1)))
        return logits


def decoder_widths(input_shape: Mapping[str, ShapeSpec], in_feature: str) -> tuple[int, int]:
    """Returns C of the map and D of the tokens.

    Raises:
        ValueError: one of them is not among the backbone's outputs.
    """
    widths = []
    for name in (in_feature, "tokens"):
        channels = input_shape[name].channels if name in input_shape else None
        if channels is None:
            given = ", ".join(sorted(input_shape))
            raise ValueError(
                f"the classifier reads '{name}', but the backbone's outputs are {given}; "
                f"add it to MODEL.MOBILE_FORMER.OUT_FEATURES"
            )
        widths.append(channels)
    return widths[0], widths[1]
