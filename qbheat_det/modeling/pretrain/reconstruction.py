# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Base class of the objectives that reconstruct masked pixels: QB-Heat and random masking.

The objectives differ in the part of the image that the encoder sees, and in how they predict the
features of masked positions. Their config node is ``MODEL.QB_HEAT``.

Papers: QB-Heat, arXiv:2211.13228, Sec. 4; "Masked Autoencoders Are Scalable Vision Learners" (MAE),
arXiv:2111.06377. These parts follow MAE: the decoder's heads, MLP, position encoding and
initialization, the normalized patches, and the loss on masked positions.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from detectron2.config import CfgNode
from detectron2.modeling import Backbone, build_backbone
from timm.layers import build_sincos2d_pos_embed
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional as F

from qbheat_det.layers import DotProductAttention
from qbheat_det.modeling.checks import check_value
from qbheat_det.modeling.contracts import PATCHES, MaskedPatches

from .base import PretrainingModel, find_feature_map

_EPSILON = 1e-6  # added to the variance of a patch, as in MAE


class DecoderBlock(Block):
    """timm's pre-norm transformer block, which can compute only some positions.

    In training, the last block computes only masked patches, because visible patches are not part
    of the loss. Dropout and layer scale are not supported.
    """

    def __init__(self, dim: int, num_heads: int, **settings: Any) -> None:
        """Takes the arguments of timm's ``Block``."""
        super().__init__(dim, num_heads, **settings)
        self.attend = DotProductAttention()

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Takes features (N, L, D). Returns updated features (N, L, D).

        If indices ``positions`` (N, K) are given, returns only these positions, (N, K, D).
        """
        memory = self.norm1(x)
        queries = memory
        if positions is not None:
            x = take(x, positions)
            queries = take(memory, positions)
        x = x + self.attend_to(queries, memory)
        return x + self.mlp(self.norm2(x))

    def attend_to(self, queries: Tensor, memory: Tensor) -> Tensor:
        """Attends from queries (N, K, D) to ``memory`` (N, L, D), with timm's weights.

        Returns features (N, K, D).
        """
        attention = self.attn
        dim = queries.shape[-1]
        num_heads = attention.num_heads
        # timm stacks the weights of queries, keys and values, (3 D, D).
        query_weight, key_value_weight = attention.qkv.weight.split([dim, 2 * dim])
        query_bias, key_value_bias = attention.qkv.bias.split([dim, 2 * dim])
        query = F.linear(queries, query_weight, query_bias)  # (N, K, D)
        query = query.unflatten(2, (num_heads, -1)).transpose(1, 2)  # (N, heads, K, D / heads)
        key_value = F.linear(memory, key_value_weight, key_value_bias)  # (N, L, 2 D)
        key_value = key_value.unflatten(2, (2, num_heads, -1))  # (N, L, 2, heads, D / heads)
        key, value = key_value.permute(2, 0, 3, 1, 4).unbind(0)  # (N, heads, L, D / heads) each
        return attention.proj(self.attend(query, key, value))


class ReconstructionDecoder(nn.Module):
    """Pre-norm transformer blocks over visible and predicted positions, and a linear head."""

    def __init__(
        self,
        *,
        in_channels: int,
        grid_size: int,
        patch_size: int,
        dim: int = 512,
        depth: int = 6,
        num_heads: int = 16,
    ) -> None:
        """
        Args:
            in_channels: C, the channels of the features.
            grid_size: G, the height and width of the features.
            patch_size: height and width, in pixels, of the patch that a position reconstructs.
            dim: width of the blocks, divisible by 4 and by ``num_heads``.
            depth: number of blocks.
            num_heads: number of attention heads.

        Raises:
            ValueError: a number is out of range.
        """
        super().__init__()
        is_positive = dim >= 1 and num_heads >= 1
        is_divisible = is_positive and dim % num_heads == 0 and dim % 4 == 0
        allowed = f"divisible by 4 and DECODER_HEADS ({num_heads})"
        check_value(is_divisible, "QB_HEAT.DECODER_DIM", dim, allowed)
        check_value(depth >= 1, "QB_HEAT.DECODER_DEPTH", depth, "at least 1")
        self.grid_size = grid_size
        self.patch_size = patch_size
        self.image_size = grid_size * patch_size  # side in pixels
        self.embed: nn.Module = nn.Identity()
        if in_channels != dim:
            self.embed = nn.Linear(in_channels, dim)
        position = build_sincos2d_pos_embed([grid_size, grid_size], dim)
        self.register_buffer("position", position, persistent=False)
        self.position: Tensor  # (G * G, dim)
        norm = partial(nn.LayerNorm, eps=1e-6)
        blocks = [
            DecoderBlock(dim, num_heads, mlp_ratio=4.0, qkv_bias=True, norm_layer=norm)
            for _ in range(depth)
        ]
        self.blocks = nn.Sequential(*blocks)
        self.norm = norm(dim)
        self.head = nn.Linear(dim, 3 * patch_size**2)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, z: Tensor, positions: Tensor | None = None) -> Tensor:
        """Decodes features (N, G, G, C) to patches (N, G * G, 3 * patch_size ** 2).

        If indices ``positions`` (N, K) are given, returns only these patches, (N, K, …).
        """
        x = self.embed(z.flatten(1, 2)) + self.position
        *blocks, last = self.blocks
        for block in blocks:
            x = block(x)
        return self.head(self.norm(last(x, positions)))


def patchify(images: Tensor, patch_size: int, positions: Tensor | None = None) -> Tensor:
    """Splits images (N, 3, S, S) into patches (N, G * G, 3 * patch_size ** 2), row by row.

    If indices ``positions`` (N, K) are given, returns only these patches.
    """
    # (N, 3, G, patch_size, G, patch_size)
    blocks = images.unflatten(3, (-1, patch_size)).unflatten(2, (-1, patch_size))
    blocks = blocks.permute(0, 2, 4, 1, 3, 5)  # (N, G, G, 3, patch_size, patch_size)
    # The first flatten makes the only copy. After it, the values of a patch are contiguous.
    patches = blocks.flatten(3).flatten(1, 2)
    if positions is None:
        return patches
    return take(patches, positions)


def take(x: Tensor, positions: Tensor) -> Tensor:
    """Selects the rows of ``x`` (N, L, D) at indices (N, K). Returns rows (N, K, D)."""
    num_images, num_rows = x.shape[:2]
    # gather would be slow. index_select copies whole rows, of all images in one list.
    first_rows = torch.arange(0, num_images * num_rows, num_rows, device=x.device)  # (N,)
    rows = (positions + first_rows[:, None]).flatten()
    return x.flatten(0, 1).index_select(0, rows).unflatten(0, positions.shape)


def masked_positions(visible: Tensor, count: int) -> Tensor:
    """Returns the sorted indices (N, count) of masked positions, where ``visible`` (N, L) is False.

    Each image must have ``count`` masked positions. Because the number is known, no synchronization
    with the GPU is needed.
    """
    order = visible.byte().argsort(dim=1, stable=True)  # masked positions (0) come first
    return order[:, :count]


def enlarge_mask(mask: Tensor, patch_size: int) -> Tensor:
    """Takes a mask of patches (N, G, G). Returns the mask of their pixels (N, S, S)."""
    return mask.repeat_interleave(patch_size, dim=1).repeat_interleave(patch_size, dim=2)


class ReconstructionLoss(nn.Module):
    """Mean squared error over the P = 3 * patch_size ** 2 values of each masked patch."""

    def __init__(self, *, normalize_patches: bool = True) -> None:
        """If ``normalize_patches``, each target patch is scaled to mean 0 and variance 1."""
        super().__init__()
        self.normalize_patches = normalize_patches

    def forward(self, predicted: Tensor, patches: Tensor, visible: Tensor) -> Tensor:
        """Takes predicted and true patches (N, L, P). Returns the loss of each image, (N,).

        ``visible`` (N, L) is True at patches that the encoder sees.
        """
        error = (predicted.float() - self.find_target(patches)).square().mean(dim=-1)
        masked = ~visible
        return (error * masked).sum(dim=1) / masked.sum(dim=1)

    def find_target(self, patches: Tensor) -> Tensor:
        """Takes true patches (N, L, P) and returns the prediction targets (N, L, P)."""
        if not self.normalize_patches:
            return patches
        # MAE divides by the unbiased variance, and layer_norm by the biased variance. The factor
        # makes both equal. torch.var_mean would be slow on CPUs.
        biased_over_unbiased = 1 - 1 / patches.shape[-1]
        normalized = F.layer_norm(patches, patches.shape[-1:], eps=_EPSILON * biased_over_unbiased)
        return normalized * biased_over_unbiased**0.5

    def restore(self, predicted: Tensor, patches: Tensor) -> Tensor:
        """Rescales normalized predictions (N, L, P) by mean and variance of the true patches."""
        if not self.normalize_patches:
            return predicted.float()
        variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
        return predicted.float() * (variance + _EPSILON).sqrt() + mean


class FeaturePredictor(Protocol):
    """A module that predicts the features of all positions from the visible ones."""

    dim: int
    """C, the channels of the features."""

    def __call__(self, z: Tensor, *args: Any) -> Tensor:
        """Takes visible features and other arguments of the objective. Returns (N, G, G, C)."""


class ReconstructionModel(PretrainingModel):
    """Encodes the visible part, predicts the features of the rest, and decodes to pixels.

    The features have G x G positions, one per patch. Their stride is the side of a patch. In
    evaluation, ``forward`` of a subclass returns the results of ``inference``. If ``views`` lists
    quarters, its second argument are the visible quarters.
    """

    pretrain_only_modules = ("projection", "predictor", "decoder")
    grid_multiple = 1
    """G must be a multiple of this number."""

    views: Mapping[str, Sequence[str]] = {"patches": ()}
    """The kinds of visible parts. The values are the positions of visible quarters, if any."""

    def __init__(
        self,
        *,
        backbone: Backbone,
        predictor: FeaturePredictor,
        decoder: ReconstructionDecoder,
        loss: ReconstructionLoss,
        in_feature: str,
        **statistics: Any,
    ) -> None:
        """
        Args:
            backbone: has the output ``in_feature``.
            predictor: predicts the features of the image from those of the visible part.
            decoder: decodes features to pixels. Its grid and patch size define the image size.
            loss: compares predicted and true patches.
            in_feature: name of the backbone's feature map.
            statistics: ``pixel_mean`` and ``pixel_std`` of the images.

        Raises:
            ValueError: the backbone has no such feature map, its stride is not the decoder's patch
                size, or its side is not a multiple of ``grid_multiple``.
        """
        shape = find_feature_map(
            backbone.output_shape(), in_feature, decoder.image_size, multiple=self.grid_multiple
        )
        if shape.stride != decoder.patch_size:
            raise ValueError(
                f"'{in_feature}' has stride {shape.stride}, but the decoder has patches of "
                f"{decoder.patch_size} x {decoder.patch_size} pixels: both numbers must be equal"
            )
        super().__init__(
            backbone=backbone,
            in_feature=in_feature,
            head_in_features=[in_feature],
            image_size=decoder.image_size,
            **statistics,
        )
        self.projection = nn.Conv2d(shape.channels, predictor.dim, 1)
        nn.init.xavier_uniform_(self.projection.weight)
        nn.init.zeros_(self.projection.bias)  # type: ignore[arg-type]
        self.predictor = predictor
        self.decoder = decoder
        self.loss = loss

    @classmethod
    def shared_from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        """Returns all arguments of the constructor except ``predictor``."""
        node = cfg.MODEL.QB_HEAT
        image_size = cfg.INPUT.PRETRAIN.SIZE
        check_value(node.FEATURE_DIM >= 1, "QB_HEAT.FEATURE_DIM", node.FEATURE_DIM, "at least 1")
        backbone = build_backbone(cfg)
        shape = find_feature_map(
            backbone.output_shape(),
            node.IN_FEATURE,
            image_size,
            multiple=cls.grid_multiple,
            key="MODEL.QB_HEAT.IN_FEATURE",
        )
        return {
            "backbone": backbone,
            "decoder": ReconstructionDecoder(
                in_channels=node.FEATURE_DIM,
                grid_size=image_size // shape.stride,
                patch_size=shape.stride,
                dim=node.DECODER_DIM,
                depth=node.DECODER_DEPTH,
                num_heads=node.DECODER_HEADS,
            ),
            "loss": ReconstructionLoss(normalize_patches=node.NORM_PIXEL_LOSS),
            "in_feature": node.IN_FEATURE,
            "pixel_mean": cfg.MODEL.PIXEL_MEAN,
            "pixel_std": cfg.MODEL.PIXEL_STD,
        }

    def encode(self, visible: Tensor) -> Tensor:
        """Takes images or visible parts of images, (N, 3, H, W). Returns features (N, h, w, C)."""
        feature_map = self.backbone(visible)[self.in_feature]
        z: Tensor = self.projection(feature_map)  # (N, C, h, w)
        return z.permute(0, 2, 3, 1).contiguous()

    def training_losses(
        self, z: Tensor, images: Tensor, visible: Tensor, num_masked: int
    ) -> dict[str, Tensor]:
        """Returns the mean loss over masked patches. Only these patches are decoded.

        Takes features (N, G, G, C), normalized images (N, 3, S, S) and the mask ``visible``
        (N, G * G), which is False at ``num_masked`` patches of each image.
        """
        masked = masked_positions(visible, num_masked)  # (N, num_masked)
        predicted = self.decoder(z, masked)
        patches = patchify(images, self.decoder.patch_size, masked)
        target = self.loss.find_target(patches)
        return {"loss_reconstruction": F.mse_loss(predicted.float(), target)}

    def inference(self, z: Tensor, images: Tensor, visible: Tensor) -> list[dict[str, Any]]:
        """Returns the results of each image.

        They are "reconstruction" (3, S, S), "visible" (S, S), "loss_reconstruction", and
        ``PATCHES``, from which baselines of the loss are computed.

        Takes features (N, G, G, C), normalized images (N, 3, S, S) and the mask ``visible``
        (N, G * G). Reconstructions are not normalized: they have the range of pixel values of the
        dataset mapper.
        """
        patch_size = self.decoder.patch_size
        grid = (self.decoder.grid_size, self.decoder.grid_size)
        predicted = self.decoder(z)
        patches = patchify(images, patch_size)
        losses = self.loss(predicted, patches, visible)
        restored = self.loss.restore(predicted, patches).transpose(1, 2)  # (N, P, G * G)
        pixels = F.pixel_shuffle(restored.unflatten(2, grid), patch_size)  # (N, 3, S, S)
        reconstructions = pixels * self.pixel_std + self.pixel_mean
        pixel_masks = enlarge_mask(visible.unflatten(1, grid), patch_size)  # (N, S, S)
        results = []
        targets = self.loss.find_target(patches)
        for index, loss in enumerate(losses):
            result = {
                "reconstruction": reconstructions[index],
                "visible": pixel_masks[index],
                "loss_reconstruction": loss,
                PATCHES: MaskedPatches(patches[index], targets[index], visible[index]),
            }
            results.append(result)
        return results
