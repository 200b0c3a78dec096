# Copyright (c) qbheat_det contributors. Apache-2.0.
"""One vector for an image: its map averaged over positions, with the first token beside it.

As classifiers read a backbone: QB-Heat, arXiv:2211.13228, Table 8.
"""

from collections.abc import Mapping

import torch
from detectron2.layers import ShapeSpec
from torch import Tensor


def pool_features(features: Mapping[str, Tensor], in_feature: str) -> Tensor:
    """Returns (N, C + D), or (N, C) where the backbone gives no tokens.

    Args:
        features: the backbone's outputs, the map (N, C, H, W) under ``in_feature``, and "tokens"
            (N, M, D), if it gives them.
        in_feature: name of the map.
    """
    pooled = features[in_feature].mean(dim=(2, 3))
    if "tokens" not in features:
        return pooled
    return torch.cat([pooled, features["tokens"][:, 0]], dim=1)


def pooled_width(shapes: Mapping[str, ShapeSpec], in_feature: str) -> int:
    """Returns how many features ``pool_features`` gives.

    Args:
        shapes: the backbone's ``output_shape()``.
        in_feature: name of one of its maps.
    """
    names = [in_feature, "tokens"] if "tokens" in shapes else [in_feature]
    return sum(int(shapes[name].channels or 0) for name in names)
