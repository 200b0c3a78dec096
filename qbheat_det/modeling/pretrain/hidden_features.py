# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Two ways to fill in the features of hidden positions: interpolation, or one [MASK] token.

The former is a question that "Self-Supervised Learning based on Heat Equation" (QB-Heat,
arXiv:2211.13228) left to a reader of it: where visible positions are scattered, its assumption,
that neighbouring features differ by a linear map, lets a hidden feature be *inter*polated from
visible ones on both sides. No paper fixes the details; chosen here: the nearest visible features
along each axis, mixed linearly by distance, one matrix I + M an axis that starts at M = 0 as
QB-Heat's do, and the mean over the axes. The latter is that of "Masked Autoencoders Are Scalable
Vision Learners" (MAE), arXiv:2111.06377.
"""

import torch
from torch import Tensor, nn

from qbheat_det.layers import linear


class InterpolatedFeatures(nn.Module):
    """Hidden features are mapped mixtures of the nearest visible ones along x and along y.

    With l and r the nearest visible columns on both sides of a hidden column j of the same row,
    x-neighbours give (I + M_x) ((r - j) z_l + (j - l) z_r) / (r - l); next to the border, where
    there is but one, that one. The same along y, with M_y; the result is the mean over the axes
    that have any neighbour. A position that is alone in its row and in its column takes the mean of
    the visible features of the image. Visible features stay as they are.

    At M = 0 this is exact, between neighbours, for features that are linear along the axis.
    """

    def __init__(self, *, dim: int) -> None:
        """
        Args:
            dim: C of the features.

        Raises:
            ValueError: there are none.
        """
        super().__init__()
        check_dim(dim)
        self.dim = dim
        self.x = nn.Parameter(torch.zeros(dim, dim))  # M_x
        self.y = nn.Parameter(torch.zeros(dim, dim))  # M_y

    def forward(self, z: Tensor, visible: Tensor) -> Tensor:
        """
        Args:
            z: (N, G, G, C); what it holds at hidden positions has no influence.
            visible: (N, G, G), True where the encoder saw the patch.

        Returns:
            (N, G, G, C).
        """
        along_x, any_x = interpolate(z, visible)
        along_y, any_y = interpolate(z.transpose(1, 2), visible.transpose(1, 2))
        along_y, any_y = along_y.transpose(1, 2), any_y.transpose(1, 2)
        # The identity is added apart: in bfloat16, I + M would lose a small M.
        mapped_x = along_x + linear(along_x, self.x)
        mapped_y = along_y + linear(along_y, self.y)
        weights = torch.stack([any_x, any_y]).float()
        weights = (weights / weights.sum(dim=0).clamp(min=1)).unsqueeze(-1)
        filled = weights[0] * mapped_x + weights[1] * mapped_y
        alone = ~(any_x | any_y).unsqueeze(-1)
        filled = torch.where(alone, mean_visible(z, visible), filled)
        return torch.where(visible.unsqueeze(-1), z, filled.to(z.dtype))


class MaskToken(nn.Module):
    """Every hidden feature is the same learned vector.

    MAE's token has the decoder's width and stands behind its first linear layer; this one stands
    where interpolated features do, in front of it.
    """

    def __init__(self, *, dim: int) -> None:
        """
        Args:
            dim: C of the features.

        Raises:
            ValueError: there are none.
        """
        super().__init__()
        check_dim(dim)
        self.dim = dim
        self.token = nn.Parameter(nn.init.normal_(torch.empty(dim), std=0.02))  # as in MAE

    def forward(self, z: Tensor, visible: Tensor) -> Tensor:
        """
        Args:
            z: (N, G, G, C); what it holds at hidden positions has no influence.
            visible: (N, G, G), True where the encoder saw the patch.

        Returns:
            (N, G, G, C).
        """
        return torch.where(visible.unsqueeze(-1), z, self.token.to(z.dtype))


def interpolate(z: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Mixes the nearest visible features on both sides within a row, linearly by distance.

    Args:
        z: (N, H, W, C).
        visible: (N, H, W).

    Returns:
        (N, H, W, C) in float32, where visible features are themselves and rows without any are 0;
        and (N, H, W), True in rows with a visible position.
    """
    # One matrix a row, and not gathered neighbours, whose gradients add up in any order on a GPU.
    with torch.autocast(z.device.type, enabled=False):
        weights, has_any = interpolation_weights(visible)
        # Hidden features are weighted by 0, and must not be infinite for that.
        return weights @ torch.where(visible.unsqueeze(-1), z.float(), 0.0), has_any


def interpolation_weights(visible: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what each visible position of a row counts for each position of it.

    Args:
        visible: (..., W).

    Returns:
        (..., W, W), float32, from the second of the two positions to the first: rows that sum to 1,
        or are 0 where nothing is visible; and (..., W), True where something is.
    """
    width = visible.shape[-1]
    place = torch.arange(width, device=visible.device)
    before = torch.where(visible, place, -1).cummax(dim=-1).values
    behind = torch.where(visible, place, width).flip(-1).cummin(dim=-1).values.flip(-1)
    has_before, has_behind = before >= 0, behind < width
    between = (place - before) / (behind - before).clamp(min=1)  # 0 at visible positions
    weight_behind = torch.where(has_before & has_behind, between, has_behind.float())
    weight_before = torch.where(has_before, 1 - weight_behind, 0.0)
    weights = weight_before.unsqueeze(-1) * (before.unsqueeze(-1) == place)
    weights = weights + weight_behind.unsqueeze(-1) * (behind.unsqueeze(-1) == place)
    return weights, has_before | has_behind


def mean_visible(z: Tensor, visible: Tensor) -> Tensor:
    """From (N, H, W, C) to the mean over the visible positions of each image, (N, 1, 1, C)."""
    weights = visible.unsqueeze(-1).float()
    total = torch.where(visible.unsqueeze(-1), z.float(), 0.0).sum(dim=(1, 2), keepdim=True)
    return total / weights.sum(dim=(1, 2), keepdim=True)


def check_dim(dim: int) -> None:
    """
    Raises:
        ValueError: a width below 1.
    """
    if dim < 1:
        raise ValueError(f"FEATURE_DIM is at least 1, not {dim}")
