# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Linear prediction of masked features from visible ones.

Paper: QB-Heat, arXiv:2211.13228, Eq. 5, Sec. 4.1 and Appendix A. A feature moves by a finite
difference, z(x + Δx, y) = (I + Δx A) z(x, y), with one matrix for each of eight directions.

Not said there and chosen here: the learned matrix is M = Δx A itself and starts at zero; the
diagonal C_ij combines the directions of A_i and B_j.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import cast

import torch
from torch import Tensor, nn

from qbheat_det.layers import linear

DIRECTIONS: dict[str, tuple[int, int]] = {
    "A1": (1, 0),
    "A2": (-1, 0),
    "B1": (0, 1),
    "B2": (0, -1),
    "C11": (1, 1),
    "C12": (1, -1),
    "C21": (-1, 1),
    "C22": (-1, -1),
}
"""Signs of Δx (to the right) and Δy (down) of each matrix, by its name in the paper."""
_NAMES = {signs: name for name, signs in DIRECTIONS.items()}
OFFSETS = {"corner": 1 / 2, "centre": 1 / 4}
"""Side of a predicted block by the kind of visible quarter, as a part of the image's side."""
_EXPLICIT = {8: tuple(DIRECTIONS), 4: ("A1", "A2", "B1", "B2"), 2: ("A1", "B1")}


class LinearModels(nn.Module):
    """The matrices of one scale, each (C, C): A, B and C of the paper times their offset.

    The explicit ones are parameters of the same names, the implicit ones follow from these.
    """

    def __init__(self, *, dim: int, num_models: int, offset: float) -> None:
        """Takes C, the number of explicit models (8, 4 or 2) and Δx in sides of the image."""
        super().__init__()
        if num_models not in _EXPLICIT:
            raise ValueError(f"NUM_MODELS is one of {tuple(_EXPLICIT)}, not {num_models}")
        if dim < 1:
            raise ValueError(f"FEATURE_DIM is at least 1, not {dim}")
        self.offset = offset
        for name in _EXPLICIT[num_models]:
            self.register_parameter(name, nn.Parameter(torch.zeros(dim, dim)))

    def matrices(self) -> dict[str, Tensor]:
        """Returns all eight by the names of ``DIRECTIONS``, with gradients, in float32."""
        models: dict[str, Tensor] = dict(self.named_parameters(recurse=False))
        for name in ("A", "B"):  # Eq. 9
            models.setdefault(f"{name}2", -models[f"{name}1"])
        # Autocast would round the products, and with them what the eight have in common.
        with torch.autocast(models["A1"].device.type, enabled=False):
            for i, j in product("12", "12"):
                if f"C{i}{j}" not in models:  # Eq. 12
                    a, b = models[f"A{i}"], models[f"B{j}"]
                    models[f"C{i}{j}"] = a + b + (a @ b + b @ a) / 2
        return models


class HeatPredictor(nn.Module):
    """From the features of the visible quarter to those of the whole image.

    A visible corner predicts the three other quarters, over half the image. The four quarters of a
    visible centre each predict the three blocks outward of them, over a quarter of the image.
    Either way a block lies in one corner of an area of twice its side and predicts the rest.
    """

    def __init__(self, *, dim: int, num_models: int = 8, visible: str = "both") -> None:
        """Takes C, the number of explicit models of a scale, and the kinds of visible quarters."""
        super().__init__()
        if visible not in (*OFFSETS, "both"):
            raise ValueError(f"VISIBLE is one of {(*OFFSETS, 'both')}, not '{visible}'")
        self.dim = dim
        self.visible = visible
        self.scales = nn.ModuleDict(
            {
                kind: LinearModels(dim=dim, num_models=num_models, offset=offset)
                for kind, offset in OFFSETS.items()
                if visible in (kind, "both")
            }
        )

    def forward(self, z: Tensor, counts: Sequence[int]) -> Tensor:
        """From features (N, H, W, C) of visible quarters, ordered by position, to (N, 2H, 2W, C).

        ``counts`` are their numbers at each of the four corners and at the centre. Visible features
        stay in place, with the predicted ones around.
        """
        *corners, centre = z.split(list(counts))
        # Empty groups take part, so that every matrix has a gradient on every process.
        whole = []
        if "corner" in self.scales:
            models = self._matrices("corner")
            whole += [extend(group, corner, models) for corner, group in enumerate(corners)]
        if "centre" in self.scales:
            models = self._matrices("centre")
            # Each quarter of the centre lies in the inner corner of a quarter of the image.
            blocks = [block for row in centre.chunk(2, dim=1) for block in row.chunk(2, dim=2)]
            whole.append(_tile([extend(block, 3 - i, models) for i, block in enumerate(blocks)]))
        return torch.cat(whole)

    def _matrices(self, scale: str) -> dict[str, Tensor]:
        return cast(LinearModels, self.scales[scale]).matrices()


def extend(z: Tensor, corner: int, models: Mapping[str, Tensor]) -> Tensor:
    """Predicts from (N, H, W, C) away from a corner, to (N, 2H, 2W, C).

    The index of the ``corner`` where the block lies is twice its row plus its column; ``models``
    are (C, C) for each of ``DIRECTIONS``.
    """
    row, column = divmod(corner, 2)
    others = [block for block in product((0, 1), (0, 1)) if block != (row, column)]
    weight = torch.cat([models[_NAMES[right - column, down - row]] for down, right in others])
    # The identity is added apart: in bfloat16, I + M would lose a small M.
    blocks = [z + change for change in linear(z, weight).chunk(3, dim=-1)]
    blocks.insert(corner, z)
    return _tile(blocks)


def _tile(blocks: Sequence[Tensor]) -> Tensor:
    """Puts four blocks (N, H, W, C), in the order of the corners, into one (N, 2H, 2W, C)."""
    top_left, top_right, bottom_left, bottom_right = blocks
    top = torch.cat([top_left, top_right], dim=2)
    bottom = torch.cat([bottom_left, bottom_right], dim=2)
    return torch.cat([top, bottom], dim=1)
