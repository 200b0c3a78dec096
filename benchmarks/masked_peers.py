# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Two other methods that hide three quarters of an image from an encoder, as peers of QB-Heat.

"Masked Autoencoders Are Scalable Vision Learners" (MAE), arXiv:2111.06377: hidden patches are
removed before a vision transformer (timm's). "Designing BERT for Convolutional Networks: Sparse and
Hierarchical Masked Modeling" (SparK), arXiv:2301.03580: a convolutional encoder computes only
visible positions, which is emulated by masks and dense convolutions on the whole image.

The models are for measuring time and memory, not for pre-training. They have the decoder, the loss
and the share of visible patches of QB-Heat, not those of the papers. SparK is simplified where this
is faster: masks are applied only before 3 x 3 convolutions, since 1 x 1 does not mix positions, and
BatchNorm uses all positions instead of gathering the visible ones.
"""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import timm
import torch
from timm.models import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from qbheat_det.layers import MobileFormerBlock
from qbheat_det.modeling.backbone import MobileFormer
from qbheat_det.modeling.pretrain import ReconstructionDecoder, ReconstructionLoss, patchify, take
from qbheat_det.modeling.pretrain.reconstruction import masked_positions


class TokenDroppingEncoder(nn.Module):
    """MAE's encoder: timm's ViT on the visible patches only, without a class token."""

    def __init__(self, *, image_size: int, name: str = "vit_small_patch16_224") -> None:
        super().__init__()
        vit = timm.create_model(
            name, img_size=image_size, num_classes=0, class_token=False, global_pool=""
        )
        self.vit = cast(VisionTransformer, vit)
        self.channels = self.vit.embed_dim

    def forward(self, images: Tensor, visible: Tensor) -> Tensor:
        """Takes images (N, 3, S, S) and indices (N, V) of visible patches, counted row by row.

        Returns features (N, V, C).
        """
        patches = self.vit.patch_embed(images) + self.vit.pos_embed
        encoded: Tensor = self.vit.norm(self.vit.blocks(take(patches, visible)))
        return encoded


class MaskedConvolutionEncoder(nn.Module):
    """SparK's encoder: Mobile-Former on the whole image, with hidden patches set to zero.

    Hidden patches are treated like the padding of Mobile-Former's batches: they are zero before
    each 3 x 3 convolution, and have no weight in the attention of the tokens.
    """

    def __init__(self, *, backbone: MobileFormer, stride: int = 16) -> None:
        super().__init__()
        self.backbone = backbone
        self.stride = stride
        self.channels = backbone.output_shape()[f"s{stride}_expanded"].channels

    def forward(self, images: Tensor, visible: Tensor) -> Tensor:
        """See ``TokenDroppingEncoder.forward``."""
        net = self.backbone
        grid = images.shape[-1] // self.stride
        patches = hidden_patches(visible, grid**2).view(len(images), 1, grid, grid)
        hidden = patches.repeat_interleave(self.stride, dim=2)
        hidden = hidden.repeat_interleave(self.stride, dim=3)
        x = F.relu6(net.stem(images.masked_fill(hidden, 0)))
        hidden = hidden[..., ::2, ::2].contiguous()
        tokens = net.tokens.expand(len(x), -1, -1)
        for stage in net.stages:
            for block in cast(Iterable[MobileFormerBlock], stage):
                x, tokens = block(x, tokens, hidden)
                hidden = hidden[..., ::2, ::2].contiguous() if block.stride == 2 else hidden
        return take(F.relu6(net.expand(x)).flatten(2).transpose(1, 2), visible)


class MaskedReconstruction(nn.Module):
    """Encodes visible patches, fills in a mask embedding, and applies QB-Heat's decoder and loss.

    The inputs are those of ``QBHeat``.
    """

    def __init__(
        self,
        *,
        encoder: TokenDroppingEncoder | MaskedConvolutionEncoder,
        decoder: ReconstructionDecoder,
        loss: ReconstructionLoss,
        dim: int,
        pixel_mean: Sequence[float],
        pixel_std: Sequence[float],
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.projection = nn.Linear(encoder.channels, dim)
        self.mask_embedding = nn.Parameter(torch.zeros(dim))
        nn.init.normal_(self.mask_embedding, std=0.02)
        self.decoder = decoder
        self.loss = loss
        self.register_buffer("pixel_mean", torch.tensor(pixel_mean).view(-1, 1, 1), False)
        self.register_buffer("pixel_std", torch.tensor(pixel_std).view(-1, 1, 1), False)
        self.pixel_mean: Tensor
        self.pixel_std: Tensor

    def forward(
        self, batched_inputs: list[dict[str, Any]], visible: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Takes dicts with "image" (3, S, S), and indices (N, V) of visible patches (None: random).

        Returns the reconstruction loss in a dict.
        """
        images = torch.stack([entry["image"] for entry in batched_inputs])
        images = (images.to(self.pixel_mean.device) - self.pixel_mean) / self.pixel_std
        num_patches = self.decoder.grid_size**2
        if visible is None:
            visible = draw_visible(len(images), num_patches, images.device)
        z = self.fill(self.projection(self.encoder(images, visible)), visible)
        # As in QB-Heat, the loss is computed only at hidden patches.
        shown = ~hidden_patches(visible, num_patches)
        hidden = masked_positions(shown, num_patches - visible.shape[1])
        patches = patchify(images, self.decoder.patch_size, hidden)
        loss = F.mse_loss(self.decoder(z, hidden).float(), self.loss.find_target(patches))
        return {"loss_reconstruction": loss}

    def fill(self, z: Tensor, visible: Tensor) -> Tensor:
        """Takes visible features (N, V, C); returns (N, G, G, C), mask embeddings elsewhere."""
        grid = self.decoder.grid_size
        whole = self.mask_embedding.to(z.dtype).expand(len(z), grid**2, -1)
        whole = whole.scatter(1, visible[:, :, None].expand_as(z), z)
        return whole.view(len(z), grid, grid, -1)


def draw_visible(num_images: int, num_patches: int, device: torch.device) -> Tensor:
    """Returns (N, V): ascending indices of a random quarter of each image's patches."""
    order = torch.rand(num_images, num_patches, device=device).argsort(dim=1)
    return order[:, : num_patches // 4].sort(dim=1).values


def hidden_patches(visible: Tensor, num_patches: int) -> Tensor:
    """Takes indices (N, V) of visible patches; returns (N, num_patches), True if hidden."""
    hidden = torch.ones(len(visible), num_patches, dtype=torch.bool, device=visible.device)
    return hidden.scatter(1, visible, torch.zeros_like(visible, dtype=torch.bool))
