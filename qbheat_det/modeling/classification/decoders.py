# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The two classifiers of the QB-Heat paper: linear ("lin") and transformer ("tran-1", "tran-4").

Self-Supervised Learning based on Heat Equation, arXiv:2211.13228, Sec. 5 and B.1. As in its Table
8, the pooled map is joined with the first token if the backbone has tokens. Its parameter counts
(Tables 6 and 15) show that the transformer has no position embedding; heads of width 64 are chosen
here.
"""

from collections.abc import Mapping

from detectron2.layers import ShapeSpec
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional as F

from qbheat_det.layers import Linear, PooledFeatures, replace_linear_layers


class LinearDecoder(nn.Module):
    """Global average pooling, joined with the first token, and one linear layer."""

    def __init__(
        self,
        *,
        input_shape: Mapping[str, ShapeSpec],
        num_classes: int,
        normalize: bool = False,
        in_feature: str = "s16_expanded",
    ) -> None:
        """Args:
        input_shape: the backbone's ``output_shape()``, with ``in_feature`` and optionally
        "tokens".
        num_classes: K.
        normalize: BatchNorm without scale and offset before the linear layer, as in linear
        probing.
        in_feature: name of the map to pool.
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
        """From the map (N, C, H, W) and "tokens" (N, M, D), if any, to logits (N, K)."""
        logits: Tensor = self.classifier(self.norm(self.pool(features)))
        return logits


class TransformerDecoder(nn.Module):
    """Projection of every position to ``dim``, ViT blocks, pooling, one linear layer."""

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
        """As ``LinearDecoder``, with width (a multiple of 64), number and dropout of the blocks.

        The paper has widths of 192, 384 and 768 for MF-285M, MF-1.0G and MF-3.7G.
        """
        super().__init__()
        if dim <= 0 or dim % 64:
            raise ValueError(f"MODEL.CLASSIFIER.WIDTH must be a multiple of 64, not {dim}")
        if depth < 1 or not 0 <= dropout < 1:
            raise ValueError(
                "MODEL.CLASSIFIER.DEPTH is at least 1 and MODEL.CLASSIFIER.DROPOUT in [0, 1), not "
                f"{depth} and {dropout}"
            )
        check_map(input_shape, in_feature)
        self.pool = PooledFeatures(input_shape=input_shape, in_feature=in_feature)
        self.projection = Linear(self.pool.channels, dim)
        self.blocks = nn.Sequential(
            *(Block(dim, dim // 64, qkv_bias=True, proj_drop=dropout) for _ in range(depth))
        )
        replace_linear_layers(self.blocks)
        self.norm = nn.LayerNorm(dim)
        self.classifier = nn.Linear(dim + self.pool.token_dim, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """As in ``LinearDecoder``."""
        positions = features[self.pool.in_feature].flatten(2).transpose(1, 2)  # (N, HW, C)
        positions = self.norm(self.blocks(self.projection(positions)))
        pooled = F.adaptive_avg_pool1d(positions.transpose(1, 2), 1).flatten(1)
        logits: Tensor = self.classifier(self.pool.join_token(pooled, features))
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
