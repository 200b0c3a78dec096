# Copyright (c) qbheat_det contributors. Apache-2.0.
"""One vector for an image: its map averaged over positions, joined with the first token.

QB-Heat, arXiv:2211.13228, Table 8. For a backbone without tokens it is the map alone.
"""

from collections.abc import Mapping

import torch
from detectron2.layers import ShapeSpec
from torch import Tensor, nn
from torch.nn import functional as F


class PooledFeatures(nn.Module):
    """From a backbone's outputs to one vector for each image, without parameters.

    Attributes:
        in_feature: name of the map.
        in_features: names of all outputs that it reads.
        channels: C of the map.
        token_dim: D of the tokens, 0 without tokens.
        width: of the vector, C + D.
    """

    def __init__(self, *, input_shape: Mapping[str, ShapeSpec], in_feature: str) -> None:
        """Takes the backbone's ``output_shape()``, optionally with "tokens", and the map's name."""
        super().__init__()
        tokens = input_shape.get("tokens")
        self.in_feature = in_feature
        self.in_features = [in_feature] if tokens is None else [in_feature, "tokens"]
        self.channels = int(input_shape[in_feature].channels or 0)
        self.token_dim = 0 if tokens is None else int(tokens.channels or 0)
        self.width = self.channels + self.token_dim

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """From the map (N, C, H, W) and "tokens" (N, M, D), if any, to (N, C + D)."""
        pooled = F.adaptive_avg_pool2d(features[self.in_feature], 1).flatten(1)
        return self.join_token(pooled, features)

    def join_token(self, pooled: Tensor, features: Mapping[str, Tensor]) -> Tensor:
        """Joins another pooling of the map, (N, E), with the first token if there are tokens."""
        if "tokens" not in self.in_features:
            return pooled
        return torch.cat([pooled, features["tokens"][:, 0]], dim=1)
