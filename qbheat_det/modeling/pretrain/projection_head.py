# Copyright (c) qbheat_det contributors. Apache-2.0.
"""From a backbone's outputs to one vector an image that is compared with others.

"Improved Baselines with Momentum Contrastive Learning" (MoCo-v2), arXiv:2003.04297, which takes the
perceptron of two layers from SimCLR, without BatchNorm.
"""

from collections.abc import Mapping

from detectron2.layers import ShapeSpec
from torch import Tensor, nn
from torch.nn import functional as F

from .pooled_features import pool_features, pooled_width


class ProjectionHead(nn.Module):
    """Pooled features, two layers, and vectors brought to length 1."""

    def __init__(
        self, *, input_shape: Mapping[str, ShapeSpec], in_feature: str, hidden_dim: int, dim: int
    ) -> None:
        """
        Args:
            input_shape: the backbone's ``output_shape()``, with ``in_feature``.
            in_feature: name of the map to pool; the first token joins it where there are tokens.
            hidden_dim: width between the two layers.
            dim: D of the result.

        Raises:
            ValueError: a width is not positive.
        """
        super().__init__()
        if min(hidden_dim, dim) < 1:
            raise ValueError(f"widths of the head must be at least 1, not {hidden_dim} and {dim}")
        self.in_feature = in_feature
        self.in_features = [in_feature, *(["tokens"] if "tokens" in input_shape else [])]
        width = pooled_width(input_shape, in_feature)
        self.hidden = nn.Linear(width, hidden_dim)
        self.out = nn.Linear(hidden_dim, dim)

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """
        Args:
            features: the map (N, C, H, W) and, where the backbone gives them, "tokens" (N, M, E).

        Returns:
            (N, D), float32, each row of length 1.
        """
        pooled = pool_features(features, self.in_feature)
        projected = self.out(F.relu(self.hidden(pooled)))
        # In float32 under autocast too: half precision would blur similarities near one.
        return F.normalize(projected.float(), dim=1)
