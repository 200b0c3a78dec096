# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The transformer classifier of the QB-Heat paper ("tran-1", "tran-4").

Self-Supervised Learning based on Heat Equation, Section 5. What the paper leaves open is read off
the parameter counts of its Tables 6 and 15: no position embedding, and the first token beside the
pooled map as in Table 8, where the backbone gives tokens. Heads of width 64 are a choice that no
count shows.
"""

from collections.abc import Mapping

from detectron2.layers import ShapeSpec
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional as F

from qbheat_det.layers import Linear, PooledFeatures, replace_linear_layers

from .linear_decoder import check_map


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
        """
        Args:
            input_shape: the backbone's ``output_shape()``, with ``in_feature``, and ``"tokens"``
                where the first is to be read.
            num_classes: K.
            dim: width of the blocks, a multiple of 64; the paper has 192, 384 and 768 for
                MF-285M, MF-1.0G and MF-3.7G.
            depth: number of blocks.
            dropout: rate inside the blocks.
            in_feature: name of the map whose positions the blocks attend over.

        Raises:
            ValueError: ``dim`` is not a multiple of 64, there is no block, or the backbone does
                not give the map.
        """
        super().__init__()
        if dim <= 0 or dim % 64:
            raise ValueError(
                "MODEL.CLASSIFIER.WIDTH must be a multiple of 64, the width of an attention head, "
                f"not {dim}"
            )
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
        """
        Args:
            features: the map (N, C, H, W) under ``in_feature``, and ``"tokens"`` (N, M, D) where
                the backbone gives them.

        Returns:
            Logits, (N, K).
        """
        positions = features[self.pool.in_feature].flatten(2).transpose(1, 2)  # (N, HW, C)
        positions = self.norm(self.blocks(self.projection(positions)))
        pooled = F.adaptive_avg_pool1d(positions.transpose(1, 2), 1).flatten(1)
        logits: Tensor = self.classifier(self.pool.join_token(pooled, features))
        return logits
