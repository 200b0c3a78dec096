# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Random masking: pre-training by reconstruction of patches masked all over the image.

Two objectives that differ in the features of masked positions: one learned [MASK] token as in MAE,
arXiv:2111.06377, or interpolation of visible features, by QB-Heat's assumption that neighbouring
features differ by a linear map. Deviations from MAE: the convolutional encoder takes the whole
image with zeros at masked patches, at its full cost, and its outputs there are discarded. Decoder,
target and their config keys, ``MODEL.QB_HEAT``, are QB-Heat's.
"""

import zlib
from collections.abc import Iterable
from typing import Any

import torch
from detectron2.config import CfgNode, configurable
from detectron2.modeling import META_ARCH_REGISTRY
from torch import Tensor, nn

from qbheat_det.layers import linear
from qbheat_det.modeling.image_model import check_value

from .reconstruction import ReconstructionDecoder, ReconstructionModel


class RandomMask:
    """Draws masks with the same number of visible positions, K of G x G, in each image."""

    def __init__(self, *, grid_size: int, mask_ratio: float = 0.75) -> None:
        """Takes G and the masked share; a ``ValueError`` if it masks none or all positions."""
        positions = grid_size**2
        num_visible = round((1 - mask_ratio) * positions) if 0 < mask_ratio < 1 else 0
        masks_some = 0 < num_visible < positions
        allowed = f"a share that masks some of {positions} positions, and not all"
        check_value(masks_some, "RANDOM_MASKING.MASK_RATIO", mask_ratio, allowed)
        self.grid_size = grid_size
        self.num_visible = num_visible

    def draw(self, num_images: int, *, device: torch.device) -> Tensor:
        """Draws from the device's global generator: (N, G, G), True where visible."""
        return self._choose(torch.rand(num_images, self.grid_size**2, device=device))

    def of_images(self, names: Iterable[str], *, device: torch.device) -> Tensor:
        """Returns a mask for each image that depends on its name alone."""
        seeded = (torch.Generator().manual_seed(zlib.crc32(name.encode())) for name in names)
        noise = [torch.rand(self.grid_size**2, generator=generator) for generator in seeded]
        return self._choose(torch.stack(noise).to(device))

    def _choose(self, noise: Tensor) -> Tensor:
        """Makes the K smallest of each row (N, G * G) visible."""
        chosen = noise.argsort(dim=1)[:, : self.num_visible]
        visible = torch.zeros_like(noise, dtype=torch.bool).scatter_(1, chosen, True)
        return visible.unflatten(1, (self.grid_size, self.grid_size))


class InterpolatedFeatures(nn.Module):
    """Masked features are linear maps of mixtures of the nearest visible ones along x and y.

    If l and r are the nearest visible columns on both sides of a masked column j in a row, the
    feature is (I + M_x) ((r - j) z_l + (j - l) z_r) / (r - l); next to the border, only one counts.
    The same holds along y, with M_y. The result is the mean over the axes with a visible neighbour,
    or the mean of the image's visible features without one. M starts at 0.
    """

    def __init__(self, *, dim: int) -> None:
        """Takes C of the features."""
        super().__init__()
        self.dim = dim
        self.x = nn.Parameter(torch.zeros(dim, dim))  # M_x
        self.y = nn.Parameter(torch.zeros(dim, dim))  # M_y

    def forward(self, z: Tensor, visible: Tensor) -> Tensor:
        """From (N, G, G, C) to the same shape; features that are ``visible`` (N, G, G) stay."""
        along_x, any_x = interpolate(z, visible)
        along_y, any_y = interpolate(z.transpose(1, 2), visible.transpose(1, 2))
        along_y, any_y = along_y.transpose(1, 2), any_y.transpose(1, 2)
        # The identity is added apart: in bfloat16, I + M would lose a small M.
        mapped_x = along_x + linear(along_x, self.x)
        mapped_y = along_y + linear(along_y, self.y)
        weights = torch.stack([any_x, any_y]).float()
        weights = (weights / weights.sum(dim=0).clamp(min=1)).unsqueeze(-1)
        predicted = weights[0] * mapped_x + weights[1] * mapped_y
        alone = ~(any_x | any_y).unsqueeze(-1)
        predicted = torch.where(alone, mean_visible(z, visible), predicted)
        return torch.where(visible.unsqueeze(-1), z, predicted.to(z.dtype))


class MaskToken(nn.Module):
    """All masked features are the same learned vector, before the decoder's first linear layer."""

    def __init__(self, *, dim: int) -> None:
        """Takes C of the features."""
        super().__init__()
        self.dim = dim
        self.token = nn.Parameter(nn.init.normal_(torch.empty(dim), std=0.02))  # as in MAE

    def forward(self, z: Tensor, visible: Tensor) -> Tensor:
        """As ``InterpolatedFeatures.forward``."""
        return torch.where(visible.unsqueeze(-1), z, self.token.to(z.dtype))


def interpolate(z: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Mixes the nearest visible features on both sides within a row, linearly by distance.

    From (N, H, W, C) and (N, H, W) to (N, H, W, C), float32, 0 in rows without visible features,
    and (N, H, W), True in the other rows.
    """
    width = visible.shape[-1]
    index = torch.arange(width, device=visible.device)
    before = torch.where(visible, index, -1).cummax(dim=-1).values
    after = torch.where(visible, index, width).flip(-1).cummin(dim=-1).values.flip(-1)
    has_before, has_after = before >= 0, after < width
    between = (index - before) / (after - before).clamp(min=1)  # 0 at visible positions
    weight_after = torch.where(has_before & has_after, between, has_after.float())
    weight_before = torch.where(has_before, 1 - weight_after, 0.0)
    # A matrix (W, W) for each row: a GPU adds gradients of gathered neighbours in random order.
    weights = weight_before.unsqueeze(-1) * (before.unsqueeze(-1) == index)
    weights = weights + weight_after.unsqueeze(-1) * (after.unsqueeze(-1) == index)
    with torch.autocast(z.device.type, enabled=False):
        # Masked features have weight 0, but may not be finite.
        mixed = weights @ torch.where(visible.unsqueeze(-1), z.float(), 0.0)
    return mixed, has_before | has_after


def mean_visible(z: Tensor, visible: Tensor) -> Tensor:
    """From (N, H, W, C) to the mean over the visible positions of each image, (N, 1, 1, C)."""
    weights = visible.unsqueeze(-1).float()
    total = torch.where(visible.unsqueeze(-1), z.float(), 0.0).sum(dim=(1, 2), keepdim=True)
    return total / weights.sum(dim=(1, 2), keepdim=True)


class RandomMasking(ReconstructionModel):
    """An encoder of an image with masked patches, predicted features, a decoder to pixels."""

    predictor: InterpolatedFeatures | MaskToken
    predictor_class: type[InterpolatedFeatures] | type[MaskToken]

    @configurable
    def __init__(
        self, *, decoder: ReconstructionDecoder, mask_ratio: float = 0.75, **others: Any
    ) -> None:
        """As ``ReconstructionModel``, with ``mask_ratio`` of ``RandomMask``."""
        super().__init__(decoder=decoder, **others)
        self.mask = RandomMask(grid_size=decoder.grid_size, mask_ratio=mask_ratio)

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        return {
            **cls.shared_from_config(cfg),
            "predictor": cls.predictor_class(dim=cfg.MODEL.QB_HEAT.FEATURE_DIM),
            "mask_ratio": cfg.MODEL.RANDOM_MASKING.MASK_RATIO,
        }

    def forward(self, batched_inputs: list[dict[str, Any]], visible: Tensor | None = None) -> Any:
        """From dicts with "image" (3, S, S) and a name to losses or ``inference``'s results.

        ``visible`` (N, G, G) is True where the encoder gets the patch, equally often in each image;
        by default random in training, and a function of the image's name in evaluation.
        """
        images = self.preprocess_image(batched_inputs)
        if visible is None:
            visible, num_visible = self.choose_visible(batched_inputs), self.mask.num_visible
        else:
            num_visible = int(visible[0].sum())
        z = self.predictor(self.encode(self.hide(images, visible)), visible)
        visible = visible.flatten(1)
        if self.training:
            return self.training_losses(z, images, visible, visible.shape[1] - num_visible)
        return self.inference(z, images, visible)

    def choose_visible(self, batched_inputs: list[dict[str, Any]]) -> Tensor:
        """Returns the visible positions (N, G, G), see ``forward``."""
        if self.training:
            return self.mask.draw(len(batched_inputs), device=self.device)
        names = [
            str(entry.get("image_id", entry.get("file_name", i)))
            for i, entry in enumerate(batched_inputs)
        ]
        return self.mask.of_images(names, device=self.device)

    def hide(self, images: Tensor, visible: Tensor) -> Tensor:
        """Returns normalised images (N, 3, S, S) with zeros at masked patches."""
        size = self.decoder.patch_size
        pixels = visible.repeat_interleave(size, dim=1).repeat_interleave(size, dim=2)
        return torch.where(pixels.unsqueeze(1), images, 0.0)


@META_ARCH_REGISTRY.register()
class InterpolatedMasking(RandomMasking):
    """Random masking with interpolated features; the matrices are ``predictor.x`` and ``.y``."""

    predictor_class = InterpolatedFeatures


@META_ARCH_REGISTRY.register()
class MaskTokenMasking(RandomMasking):
    """Random masking with one learned feature, ``predictor.token``."""

    predictor_class = MaskToken
