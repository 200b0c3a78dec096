# Copyright (c) qbheat_det contributors. Apache-2.0.
"""One vector for an image: its map averaged over positions, with the first token beside it.

As classifiers read a backbone: QB-Heat, arXiv:2211.13228, Table 8. Of a backbone that gives no
tokens the map alone is read.
"""

from collections.abc import Mapping

import torch
from detectron2.layers import ShapeSpec
from torch import Tensor, nn
from torch.nn import functional as F


class PooledFeatures(nn.Module):
    """From a backbone's outputs to one vector an image; has no parameters.

    Attributes:
        in_feature: name of the map.
        in_features: names of all outputs that are read.
        channels: C of the map.
        token_dim: D of the tokens, 0 where the backbone gives none.
        width: of the vector, C + D.
    """

    def __init__(self, *, input_shape: Mapping[str, ShapeSpec], in_feature: str) -> None:
        """
        Args:
            input_shape: the backbone's ``output_shape()``, with ``in_feature``, and ``"tokens"``
                where the first is to be read.
            in_feature: name of the map.
        """
        super().__init__()
        tokens = input_shape.get("tokens")
        self.in_feature = in_feature
        self.in_features = [in_feature] if tokens is None else [in_feature, "tokens"]
        self.channels = int(input_shape[in_feature].channels or 0)
        self.token_dim = 0 if tokens is None else int(tokens.channels or 0)
        self.width = self.channels + self.token_dim

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """
        Args:
            features: the map (N, C, H, W) under ``in_feature``, and ``"tokens"`` (N, M, D) where
                the backbone gives them.

        Returns:
            (N, C + D).
        """
        pooled = F.adaptive_avg_pool2d(features[self.in_feature], 1).flatten(1)
        return self.join_token(pooled, features)

    def join_token(self, pooled: Tensor, features: Mapping[str, Tensor]) -> Tensor:
        """Joins what was made of the map by other means, (N, E), with the first token if any."""
        if "tokens" not in self.in_features:
            return pooled
        return torch.cat([pooled, features["tokens"][:, 0]], dim=1)
