# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The loss of pre-training: squared error of pixels.

Papers: QB-Heat, arXiv:2211.13228, Sec. 4; normalised patches are those of MAE, arXiv:2111.06377.
Not said in the former and chosen here, as MAE has it: masked positions count, patches are
normalised.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LOSS_POSITIONS = ("masked", "all")
_EPSILON = 1e-6  # added to the variance of a patch, as in MAE


class ReconstructionLoss(nn.Module):
    """Mean squared error over the pixels of patches, P = 3 * patch_size ** 2 in each."""

    def __init__(self, *, positions: str = "masked", normalize_patches: bool = True) -> None:
        """
        Args:
            positions: "masked" leaves out those that the encoder saw, "all" does not.
            normalize_patches: bring each true patch to mean 0 and variance 1.

        Raises:
            ValueError: other ``positions``.
        """
        super().__init__()
        if positions not in LOSS_POSITIONS:
            raise ValueError(f"LOSS_ON is one of {LOSS_POSITIONS}, not '{positions}'")
        self.positions = positions
        self.normalize_patches = normalize_patches

    def forward(self, predicted: Tensor, patches: Tensor, visible: Tensor) -> Tensor:
        """
        Args:
            predicted: (N, L, P), of any precision.
            patches: (N, L, P), the true ones.
            visible: (N, L), True where the encoder saw the patch, equally often in each image.

        Returns:
            (N,), the loss of each image, whose mean is that of the batch.
        """
        error = (predicted.float() - self.find_target(patches)).square().mean(dim=-1)
        if self.positions == "all":
            return error.mean(dim=1)
        masked = ~visible
        return (error * masked).sum(dim=1) / masked.sum(dim=1)

    def over_batch(self, predicted: Tensor, patches: Tensor) -> Tensor:
        """From predictions and true patches (N, K, P), all of which count, to their mean, 0-d."""
        return F.mse_loss(predicted.float(), self.find_target(patches))

    def find_target(self, patches: Tensor) -> Tensor:
        """From true patches (N, L, P) to what predictions are compared with, of the same shape."""
        if not self.normalize_patches:
            return patches
        mean, deviation = _statistics(patches)
        return (patches - mean) / deviation

    def restore(self, predicted: Tensor, patches: Tensor) -> Tensor:
        """Brings predictions to the scale of the true patches, whose statistics it takes.

        Args:
            predicted: (N, L, P).
            patches: (N, L, P).

        Returns:
            (N, L, P), for pictures.
        """
        if not self.normalize_patches:
            return predicted.float()
        mean, deviation = _statistics(patches)
        return predicted.float() * deviation + mean


def _statistics(patches: Tensor) -> tuple[Tensor, Tensor]:
    """Returns mean and standard deviation of each patch, (N, L, 1)."""
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    return mean, (variance + _EPSILON).sqrt()
