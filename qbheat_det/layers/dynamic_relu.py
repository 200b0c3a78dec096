# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Dynamic ReLU: an activation whose slopes depend on the image.

Paper: "Dynamic ReLU", Chen et al., arXiv:2003.10027, variant B: slopes differ between channels, but
not between positions. As in Mobile-Former, arXiv:2108.05895, the first global token determines
them.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class DynamicReLU(nn.Module):
    """Computes max(a1 * x, a2 * x), with slopes a1 in [0, 2] and a2 in [-1, 1] for each channel.

    A token of the image determines the slopes.
    """

    def __init__(self, *, token_dim: int, channels: int) -> None:
        """Takes the token's width D, divisible by 4, and the channels C of the feature map."""
        super().__init__()
        self.squeeze = nn.Linear(token_dim, token_dim // 4)
        self.slopes = nn.Linear(token_dim // 4, 2 * channels)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes weights near zero, so that a1 is near 1 and a2 near 0, as in a plain ReLU."""
        for layer in (self.squeeze, self.slopes):
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, token: Tensor) -> Tensor:
        """Takes a feature map (N, C, H, W) and a token (N, D). Returns (N, C, H, W)."""
        a1, a2 = to_slopes(self.theta(token))
        return torch.maximum(a1 * x, a2 * x)

    def theta(self, token: Tensor) -> Tensor:
        """Takes a token (N, D). Returns theta (N, 2 C) in [0, 1], from which slopes are computed.

        The first C columns are for a1, and the last C for a2. ``to_slopes`` scales them.
        """
        return F.hardsigmoid(self.slopes(F.relu(self.squeeze(token))))


def to_slopes(theta: Tensor) -> tuple[Tensor, Tensor]:
    """Takes theta (N, 2 C) in [0, 1]. Returns a1 in [0, 2] and a2 in [-1, 1], (N, C, 1, 1) each."""
    first, second = theta[:, :, None, None].chunk(2, dim=1)
    a1 = 2 * first
    a2 = 2 * second - 1
    return a1, a2
