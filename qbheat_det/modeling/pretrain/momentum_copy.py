# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A copy of a module that follows it slowly.

"Momentum Contrast for Unsupervised Visual Representation Learning" (MoCo), arXiv:1911.05722,
Eq. 2. As there, it is the weights that follow; statistics of BatchNorm are what the copy itself has
seen.
"""

import copy
from typing import Any

import torch
from torch import nn


class MomentumCopy(nn.Module):
    """The same module with other weights, which no gradient reaches."""

    def __init__(self, module: nn.Module, *, momentum: float) -> None:
        """
        Args:
            module: what is copied, weights and buffers.
            momentum: m, what the copy keeps of its own weights in each step, in [0, 1].

        Raises:
            ValueError: ``momentum`` is not in [0, 1].
        """
        super().__init__()
        if not 0 <= momentum <= 1:
            raise ValueError(f"MODEL.MOCO.MOMENTUM must be in [0, 1], not {momentum}")
        self.copied = copy.deepcopy(module).requires_grad_(False)
        self.momentum = momentum

    @torch.no_grad()
    def forward(self, *args: Any) -> Any:
        """Calls the copy."""
        return self.copied(*args)

    @torch.no_grad()
    def follow(self, module: nn.Module) -> None:
        """Moves each weight k towards that of ``module``, q: k becomes m k + (1 - m) q."""
        # As k + (1 - m)(q - k), so that weights which are equal keep their bits; all at once.
        torch._foreach_lerp_(
            list(self.copied.parameters()), list(module.parameters()), 1 - self.momentum
        )

    def become(self, module: nn.Module) -> None:
        """Takes over weights and buffers of ``module``."""
        self.copied.load_state_dict(module.state_dict())
