# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A critic of pairs whose slope is kept at 1 or below by a gradient penalty.

Papers: "Wasserstein Dependency Measure for Representation Learning", arXiv:1903.11780; the penalty
is that of "Improved Training of Wasserstein GANs", arXiv:1704.00028. Chosen here:

- the slope is that in x and y together, as a function on their joint space with Euclidean distance;
- one-sided: slopes below 1 cost nothing, since a function that is nowhere steep is Lipschitz too
  (arXiv:1709.08894 argues for it);
- a bilinear term beside the network, which has the covariance of x and y for its first gradient.
"""

import torch
from torch import Tensor, nn

Pairs = tuple[Tensor, Tensor]
"""x and y, (N, D) each."""


class LipschitzCritic(nn.Module):
    """f(x, y), a network with two hidden layers and a bilinear term; computes in float32."""

    def __init__(self, *, dim: int, hidden_dim: int = 256) -> None:
        """
        Args:
            dim: D of x and of y.
            hidden_dim: width of the hidden layers.

        Raises:
            ValueError: one of them is not positive.
        """
        super().__init__()
        if min(dim, hidden_dim) < 1:
            raise ValueError(
                f"DIM and CRITIC_DIM of the critic are at least 1, not {dim} and {hidden_dim}"
            )
        # The first layer of [x, y] in two halves: all pairs of N x and N y cost 2N rows of it.
        self.from_x = nn.Linear(dim, hidden_dim)
        self.from_y = nn.Linear(dim, hidden_dim, bias=False)
        self.rest = nn.Sequential(
            nn.LeakyReLU(0.2), nn.Linear(hidden_dim, hidden_dim), nn.LeakyReLU(0.2)
        )
        self.head = nn.Linear(hidden_dim, 1)
        self.interaction = nn.Parameter(torch.zeros(dim, dim))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """
        Args:
            x: (..., D).
            y: (..., D), of a shape that goes with x's: (N, 1, D) and (1, M, D) are all N x M pairs.

        Returns:
            (...), float32 whatever autocast says: differences of its values are what counts.
        """
        with torch.autocast(x.device.type, enabled=False):
            x, y = x.float(), y.float()
            values: Tensor = self.head(self.rest(self.from_x(x) + self.from_y(y))).squeeze(-1)
            return values + ((x @ self.interaction) * y).sum(dim=-1)

    def slopes(self, joint: Pairs, others: Pairs, mixing: Tensor) -> Tensor:
        """Measures how steep the critic is between pairs of two kinds.

        The gradient is with respect to the pairs, which are taken as given: what made them learns
        nothing from it, the critic does.

        Args:
            joint: pairs that belong together.
            others: pairs that do not.
            mixing: (N,), in [0, 1]: where on the line from the one to the other.

        Returns:
            (N,), norms of the gradient in (x, y); they can be differentiated.
        """
        share = mixing[:, None]
        between = [
            (share * one.detach().float() + (1 - share) * other.detach().float()).requires_grad_()
            for one, other in zip(joint, others, strict=True)
        ]
        # Autocast, left to the caller, would have the gradient's own products in half precision.
        # Gradients are wanted where a step is only tried, too.
        with torch.autocast(mixing.device.type, enabled=False), torch.enable_grad():
            values = self(*between)
            gradients = torch.autograd.grad(values.sum(), between, create_graph=True)
        # The norm has no derivative at zero, where the critic is flat: 1e-12 gives it one.
        return (torch.cat(gradients, dim=1).square().sum(dim=1) + 1e-12).sqrt()
