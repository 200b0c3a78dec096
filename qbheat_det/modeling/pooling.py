# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The vector of an image: its pooled feature map, and the first token of a Mobile-Former.

The feature map is averaged over positions, and concatenated with the first token if there are
tokens (QB-Heat, arXiv:2211.13228, Table 8).
"""

from collections.abc import Mapping

import torch
from detectron2.layers import ShapeSpec
from torch import Tensor, nn
from torch.nn import functional as F

from .checks import check_value


class PooledFeatures(nn.Module):
    """Pools a backbone's outputs to one vector per image, without parameters.

    Attributes:
        in_feature: name of the feature map.
        in_features: names of all outputs of the backbone that are read.
        channels: C, the channels of the feature map.
        token_dim: D, the width of the tokens, or 0 without tokens.
        width: C + D, the length of the vector.
    """

    def __init__(self, *, input_shape: Mapping[str, ShapeSpec], in_feature: str) -> None:
        """Takes the backbone's ``output_shape()`` and the name of the feature map.

        Raises a ``ValueError`` if the backbone has no such feature map.
        """
        super().__init__()
        maps = [name for name in input_shape if name != "tokens"]
        check_value(in_feature in maps, "CLASSIFIER.IN_FEATURE", in_feature, f"one of {maps}")
        self.in_feature = in_feature
        self.in_features = [in_feature]
        self.channels = int(input_shape[in_feature].channels or 0)
        self.token_dim = 0
        if "tokens" in input_shape:
            self.in_features.append("tokens")
            self.token_dim = int(input_shape["tokens"].channels or 0)
        self.width = self.channels + self.token_dim

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """Takes a feature map (N, C, H, W) and optional "tokens" (N, M, D). Returns (N, C + D)."""
        pooled = F.adaptive_avg_pool2d(features[self.in_feature], 1).flatten(1)
        return self.join_token(pooled, features)

    def join_token(self, pooled: Tensor, features: Mapping[str, Tensor]) -> Tensor:
        """Concatenates pooled features (N, E) with the first token (N, D), if there are tokens."""
        if "tokens" not in self.in_features:
            return pooled
        return torch.cat([pooled, features["tokens"][:, 0]], dim=1)
