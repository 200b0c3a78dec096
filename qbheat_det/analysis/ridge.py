# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Ridge regression from sums over rows, so that the rows may be a stream of any length.

With x centred, the weights for a penalty λ are V (Λ + λ)⁻¹ Vᵀ Σxyᵀ, where V Λ Vᵀ = Σxxᵀ is
decomposed once for all λ. The error on held-out rows follows from their own sums, so no row is
read a second time to choose λ. All in float64.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class RidgeSums:
    """Sums over rows x of D inputs and y of G groups of P outputs; the constant is not penalised.

    Penalties are relative: 1 is the mean eigenvalue of the centred Σxxᵀ, so that one value means
    the same for any number of rows and any scale of x.
    """

    def __init__(self, *, num_inputs: int, num_groups: int, group_size: int) -> None:
        inputs = num_inputs + 1  # the last one is the constant 1
        self._xx = torch.zeros(inputs, inputs, dtype=torch.float64)
        self._xy = torch.zeros(num_groups, inputs, group_size, dtype=torch.float64)

    @property
    def num_rows(self) -> int:
        """N of all rows."""
        return int(self._xx[-1, -1])

    @property
    def mean_outputs(self) -> Tensor:
        """(G, P); nan without rows."""
        return self._xy[:, -1] / self._xx[-1, -1]

    @property
    def _mean_inputs(self) -> Tensor:
        return self._xx[:-1, -1] / self._xx[-1, -1]

    def add(self, x: Tensor, y: Tensor) -> None:
        """Adds rows x (N, D) and y (N, G, P)."""
        rows = with_constant(x)
        self._xx.addmm_(rows.T, rows)
        for sums, outputs in zip(self._xy, y.unbind(1), strict=True):
            sums.addmm_(rows.T, outputs.double())

    def merge(self, other: "RidgeSums") -> None:
        """Adds all rows of ``other``."""
        self._xx += other._xx
        self._xy += other._xy

    def choose_penalties(self, held: "RidgeSums", penalties: Sequence[float]) -> Tensor:
        """Returns (G,), the relative penalties with the least squared error on ``held``."""
        values, vectors = self._decompose()
        grid = torch.tensor(penalties, dtype=torch.float64)
        shrinkage = 1 / (values[:, None] + grid * _scale(values))  # (D, penalties)
        mean_x, mean_y = self._mean_inputs, self.mean_outputs
        held_xx = vectors.T @ held._sum_xx(mean_x) @ vectors
        chosen = []
        for group, mean in enumerate(mean_y):
            fitted = vectors.T @ self._sum_xy(group, mean_x, mean)
            held_xy = vectors.T @ held._sum_xy(group, mean_x, mean)
            linear = (fitted * held_xy).sum(dim=1)
            quadratic = (fitted @ fitted.T) * held_xx
            # By how much the squared error is below that of the mean, for each penalty.
            gain = 2 * linear @ shrinkage - (shrinkage * (quadratic @ shrinkage)).sum(dim=0)
            chosen.append(grid[gain.argmax()])
        return torch.stack(chosen)

    def solve(self, penalties: Tensor) -> Tensor:
        """Returns coefficients (G, D + 1, P) for relative penalties (G,), see ``with_constant``."""
        values, vectors = self._decompose()
        mean_x = self._mean_inputs
        coefficients = torch.empty_like(self._xy)
        for group, (mean, penalty) in enumerate(zip(self.mean_outputs, penalties, strict=True)):
            shrinkage = 1 / (values + penalty * _scale(values))
            fitted = vectors.T @ self._sum_xy(group, mean_x, mean)
            weight = vectors @ (shrinkage[:, None] * fitted)
            coefficients[group, :-1] = weight
            coefficients[group, -1] = mean - mean_x @ weight
        return coefficients

    def _decompose(self) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(self._sum_xx(self._mean_inputs))
        return values.clamp(min=0), vectors  # rounding can make them negative

    def _sum_xx(self, mean_x: Tensor) -> Tensor:
        """Returns the sum of (x - mean_x)(x - mean_x)ᵀ, (D, D)."""
        shift = torch.cat([torch.eye(len(mean_x), dtype=mean_x.dtype), -mean_x[:, None]], dim=1)
        return shift @ self._xx @ shift.T

    def _sum_xy(self, group: int, mean_x: Tensor, mean_y: Tensor) -> Tensor:
        """Returns the sum of (x - mean_x)(y - mean_y)ᵀ for a group, (D, P)."""
        sums, sum_x = self._xy[group], self._xx[:-1, -1]
        centred = sum_x - self._xx[-1, -1] * mean_x
        return sums[:-1] - torch.outer(mean_x, sums[-1]) - torch.outer(centred, mean_y)


def with_constant(x: Tensor) -> Tensor:
    """From rows (N, D) to (N, D + 1), float64, the last column 1."""
    return torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64)], dim=1)


def _scale(values: Tensor) -> float:
    return float(values.mean()) or 1.0  # inputs that never change are left alone by any penalty
