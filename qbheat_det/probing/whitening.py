# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Maps along their principal axes with about unit variance, where a decoder learns quickly.

The variances of a backbone's channels along these axes span six orders of magnitude, and a decoder
that is trained by gradients finds what lies along the small ones only after very long. What is done
here is affine, so that the decoder's own projection could do it, or undo it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK = 256  # images at a time
_FLAT = 1e-6  # spread of a channel, relative to the largest, below which it is constant
_FLOOR = 1e-2  # added to the variances along the axes, of which the mean is 1


@dataclass(frozen=True)
class Whitening:
    """Standardises channels, turns them to the principal axes, and evens out the variances.

    An axis of variance s, of standardised channels, ends with s / (s + 0.01): the least, which
    are noise, stay small.

    Attributes:
        mean: of each channel, (C,).
        matrix: what the difference to ``mean`` is multiplied by, (C, C).
    """

    mean: Tensor
    matrix: Tensor

    @classmethod
    def of(cls, maps: Tensor) -> "Whitening":
        """Reads it off maps (N, C, H, W), over all images and positions."""
        mean, scale = channel_statistics(maps)
        covariance = maps.new_zeros(maps.shape[1], maps.shape[1], dtype=torch.float64)
        for part in maps.split(_CHUNK):
            flat = ((part.float().transpose(0, 1).flatten(1).T) - mean) * scale
            covariance += (flat.T @ flat).double()
        variances, axes = torch.linalg.eigh(covariance * maps.shape[1] / maps.numel())
        matrix = scale.double()[:, None] * axes / (variances.clamp(min=0) + _FLOOR).sqrt()
        return cls(mean, matrix.float())

    def __call__(self, maps: Tensor) -> Tensor:
        """Applies it to maps (N, C, H, W), and returns them as the type they have."""
        result = torch.empty_like(maps)
        for part, into in zip(maps.split(_CHUNK), result.split(_CHUNK), strict=True):
            flat = part.float().flatten(2).transpose(1, 2) - self.mean  # (N, HW, C)
            into.copy_((flat @ self.matrix).transpose(1, 2).view_as(part))
        return result


def channel_statistics(maps: Tensor) -> tuple[Tensor, Tensor]:
    """Returns mean (C,), and one over the standard deviation (C,), over images and positions.

    Channels that are constant have 0 instead.
    """
    count = maps.numel() // maps.shape[1]
    parts = maps.split(_CHUNK)
    mean = torch.stack([part.double().sum(dim=(0, 2, 3)) for part in parts]).sum(dim=0) / count
    centred = mean[:, None, None]
    squares = [(part.double() - centred).square().sum(dim=(0, 2, 3)) for part in parts]
    spread = (torch.stack(squares).sum(dim=0) / count).sqrt()
    varies = spread > _FLAT * spread.max()
    scale = torch.where(varies, 1 / spread.clamp(min=torch.finfo(spread.dtype).tiny), 0.0)
    return mean.float(), scale.float()
