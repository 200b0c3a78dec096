# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Random masking: pre-training by reconstructing patches that are masked at random.

The features of masked positions are a learned [MASK] token as in MAE, arXiv:2111.06377
(``MaskTokenMasking``). Or they are interpolated from visible features under QB-Heat's assumption
that neighboring features differ by a linear map (``InterpolatedMasking``).

Deviation from MAE: the convolutional encoder processes the whole image, with zeros in masked
patches. So masking saves no time. The encoder's outputs at masked patches are discarded. Decoder
and target are those of QB-Heat (``MODEL.QB_HEAT``).
"""

import zlib
from collections.abc import Iterable
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling import META_ARCH_REGISTRY
from torch import Tensor, nn
from torch.nn import functional as F

from qbheat_det.config import configurable
from qbheat_det.modeling.checks import check_value

from .reconstruction import ReconstructionDecoder, ReconstructionModel, enlarge_mask


class RandomMask:
    """Draws masks in which K of the G x G positions of each image are visible."""

    def __init__(self, *, grid_size: int, mask_ratio: float = 0.75) -> None:
        """Takes G and the share of masked positions. Raises a ``ValueError`` if K is 0 or G * G."""
        num_positions = grid_size**2
        num_visible = round((1 - mask_ratio) * num_positions)
        masks_some = 0 < num_visible < num_positions
        allowed = f"a share that masks some of {num_positions} positions, and not all"
        check_value(masks_some, "RANDOM_MASKING.MASK_RATIO", mask_ratio, allowed)
        self.grid_size = grid_size
        self.num_visible = num_visible

    def draw(self, num_images: int, *, device: torch.device) -> Tensor:
        """Draws masks (N, G, G), True where visible, from the device's global generator."""
        noise = torch.rand(num_images, self.grid_size**2, device=device)
        return self._choose(noise)

    def of_images(self, names: Iterable[str], *, device: torch.device) -> Tensor:
        """Returns masks (N, G, G), True where visible. A mask depends only on the image's name."""
        noise = []
        for name in names:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise.append(torch.rand(self.grid_size**2, generator=generator))
        return self._choose(torch.stack(noise).to(device))

    def _choose(self, noise: Tensor) -> Tensor:
        """Takes random values (N, G * G). Positions with the K smallest values are visible."""
        chosen = noise.argsort(dim=1)[:, : self.num_visible]
        visible = torch.zeros_like(noise, dtype=torch.bool).scatter_(1, chosen, True)
        return visible.unflatten(1, (self.grid_size, self.grid_size))


class InterpolatedFeatures(nn.Module):
    """Predicts masked features by a linear map of interpolated visible features along x and y.

    In each row, let l and r be the nearest visible columns on the left and right of a masked column
    j, and z_l and z_r their features. The prediction along x is (I + M_x) times the interpolated
    feature, ((r - j) z_l + (j - l) z_r) / (r - l). If only one of the two columns exists, its
    feature is used instead of the interpolated feature. The prediction along y is computed in the
    same way in each column, with M_y.

    The result is the mean of the two predictions, or one of them if the row or the column has no
    visible position. If neither has one, the result is the mean of all visible features. The
    matrices M_x and M_y are learned, and start at 0.
    """

    def __init__(self, *, dim: int) -> None:
        """Takes the number of channels C of the features."""
        super().__init__()
        self.dim = dim
        self.x = nn.Parameter(torch.zeros(dim, dim))  # M_x
        self.y = nn.Parameter(torch.zeros(dim, dim))  # M_y

    def forward(self, z: Tensor, visible: Tensor) -> Tensor:
        """Replaces the features of ``z`` (N, G, G, C) where ``visible`` (N, G, G) is False."""
        along_x, has_x = interpolate(z, visible)
        along_y, has_y = interpolate(z.transpose(1, 2), visible.transpose(1, 2))
        along_y = along_y.transpose(1, 2)
        has_y = has_y.transpose(1, 2)
        # The identity is added separately, because I + M in bfloat16 would round small M to zero.
        predicted_x = along_x + F.linear(along_x, self.x)
        predicted_y = along_y + F.linear(along_y, self.y)
        # The mean over the axes with a visible position: weights (2, N, G, G, 1).
        weights = torch.stack([has_x, has_y]).float()
        weights = (weights / weights.sum(dim=0).clamp(min=1)).unsqueeze(-1)
        predicted = weights[0] * predicted_x + weights[1] * predicted_y

        # Positions without a visible position in their row and column get the mean.
        is_alone = ~(has_x | has_y).unsqueeze(-1)  # (N, G, G, 1)
        is_visible = visible.unsqueeze(-1)  # (N, G, G, 1)
        total = torch.where(is_visible, z.float(), 0.0).sum(dim=(1, 2), keepdim=True)
        mean = total / is_visible.float().sum(dim=(1, 2), keepdim=True)  # (N, 1, 1, C)
        predicted = torch.where(is_alone, mean, predicted)
        return torch.where(is_visible, z, predicted.to(z.dtype))


class MaskToken(nn.Module):
    """Replaces all masked features by one learned vector, before the decoder's first layer."""

    def __init__(self, *, dim: int) -> None:
        """Takes the number of channels C of the features."""
        super().__init__()
        self.dim = dim
        self.token = nn.Parameter(nn.init.normal_(torch.empty(dim), std=0.02))  # as in MAE

    def forward(self, z: Tensor, visible: Tensor) -> Tensor:
        """Replaces the features of ``z`` (N, G, G, C) where ``visible`` (N, G, G) is False."""
        return torch.where(visible.unsqueeze(-1), z, self.token.to(z.dtype))


def interpolate(z: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Interpolates linearly between the nearest visible features on both sides within a row.

    Takes features (N, H, W, C) and a mask (N, H, W), True at visible positions. Returns the
    interpolated features (N, H, W, C) in float32, and a mask (N, H, W). In rows without visible
    features, the interpolated features are 0, and the mask is False.
    """
    width = visible.shape[-1]
    index = torch.arange(width, device=visible.device)
    # The nearest visible columns at or before, and at or after each position, (N, H, W). They are
    # -1 and ``width`` if there is none.
    before = torch.where(visible, index, -1).cummax(dim=-1).values
    after = torch.where(visible, index, width).flip(-1).cummin(dim=-1).values.flip(-1)
    has_before = before >= 0
    has_after = after < width
    between = (index - before) / (after - before).clamp(min=1)  # 0 at visible positions
    weight_after = torch.where(has_before & has_after, between, has_after.float())
    weight_before = torch.where(has_before, 1 - weight_after, 0.0)
    # The weights of all columns of a row at each of its positions, (N, H, W, W). A matrix product
    # is used, because the gradients of a gather would not be deterministic on a GPU.
    weights = weight_before.unsqueeze(-1) * (before.unsqueeze(-1) == index)
    weights = weights + weight_after.unsqueeze(-1) * (after.unsqueeze(-1) == index)
    with torch.autocast(z.device.type, enabled=False):
        # Masked features have weight 0, but are set to 0 because they may be infinite or NaN.
        visible_features = torch.where(visible.unsqueeze(-1), z.float(), 0.0)
        interpolated = weights @ visible_features
    return interpolated, has_before | has_after


class RandomMasking(ReconstructionModel):
    """Encodes an image with masked patches, predicts their features, and decodes to pixels."""

    predictor: InterpolatedFeatures | MaskToken
    predictor_class: type[InterpolatedFeatures] | type[MaskToken]

    @configurable
    def __init__(
        self, *, decoder: ReconstructionDecoder, mask_ratio: float = 0.75, **others: Any
    ) -> None:
        """Takes the arguments of ``ReconstructionModel``, and the share of masked positions."""
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
        """
        Args:
            batched_inputs: dicts with "image" (3, S, S).
            visible: mask (N, G, G), True at visible patches. Images must have equally many. By
                default, the mask is random in training. In evaluation, it depends on "image_id" or
                "file_name".

        Returns:
            In training, a dict of losses. In evaluation, a dict per image: "reconstruction"
            (3, S, S), "visible" (S, S) and "loss_reconstruction".
        """
        images = self.preprocess_image(batched_inputs)
        if visible is None:
            visible = self.choose_visible(batched_inputs)
            num_visible = self.mask.num_visible
        else:
            num_visible = int(visible[0].sum())
        z = self.encode(self.hide(images, visible))  # (N, G, G, C)
        z = self.predictor(z, visible)
        visible = visible.flatten(1)
        if self.training:
            num_masked = visible.shape[1] - num_visible
            return self.training_losses(z, images, visible, num_masked)
        return self.inference(z, images, visible)

    def choose_visible(self, batched_inputs: list[dict[str, Any]]) -> Tensor:
        """Returns the mask of visible positions (N, G, G), random in training.

        In evaluation, it depends on the "image_id" of the image, or else its "file_name", or else
        its index in the batch.
        """
        if self.training:
            return self.mask.draw(len(batched_inputs), device=self.device)
        names = []
        for index, entry in enumerate(batched_inputs):
            names.append(str(entry.get("image_id", entry.get("file_name", index))))
        return self.mask.of_images(names, device=self.device)

    def hide(self, images: Tensor, visible: Tensor) -> Tensor:
        """Returns normalized images (N, 3, S, S) with zeros in masked patches."""
        pixels = enlarge_mask(visible, self.decoder.patch_size)
        return torch.where(pixels.unsqueeze(1), images, 0.0)


@META_ARCH_REGISTRY.register()
class InterpolatedMasking(RandomMasking):
    """Random masking with ``InterpolatedFeatures``.

    The matrices M_x and M_y are ``predictor.x`` and ``predictor.y``.
    """

    predictor_class = InterpolatedFeatures


@META_ARCH_REGISTRY.register()
class MaskTokenMasking(RandomMasking):
    """Random masking with a learned mask token, which is ``predictor.token``."""

    predictor_class = MaskToken
