# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Interpolated features against a double loop over positions, and exact where they must be."""

import pytest
import torch
from torch import Tensor

from qbheat_det.modeling.pretrain.random_masking import InterpolatedFeatures, MaskToken

Position = tuple[int, int]


def make_filling(dim: int, *, std: float = 0.0) -> InterpolatedFeatures:
    filling = InterpolatedFeatures(dim=dim)
    for matrix in (filling.x, filling.y):
        torch.nn.init.normal_(matrix, std=std)
    return filling


def draw_visible(grid: int, count: int, num_images: int = 4) -> Tensor:
    order = torch.rand(num_images, grid * grid).argsort(dim=1)
    return (order < count).unflatten(1, (grid, grid))


def nearest(visible: Tensor, start: Position, step: Position) -> Position | None:
    """Walks from a position until it stands on a visible one, or over the border."""
    row, column = start[0] + step[0], start[1] + step[1]
    while 0 <= row < len(visible) and 0 <= column < len(visible):
        if visible[row, column]:
            return row, column
        row, column = row + step[0], column + step[1]
    return None


def fill_by_hand(z: Tensor, visible: Tensor, maps: tuple[Tensor, Tensor]) -> Tensor:
    """One image, position by position."""
    filled = z.clone()
    for row in range(len(z)):
        for column in range(len(z)):
            if visible[row, column]:
                continue
            found = []
            for matrix, step in zip(maps, ((0, 1), (1, 0)), strict=True):
                ends = [
                    nearest(visible, (row, column), (sign * step[0], sign * step[1]))
                    for sign in (-1, 1)
                ]
                distance = [
                    0 if end is None else abs(end[0] - row) + abs(end[1] - column) for end in ends
                ]
                if ends[0] is not None and ends[1] is not None:
                    near, far = z[ends[0]], z[ends[1]]
                    mixed = (distance[1] * near + distance[0] * far) / sum(distance)
                elif ends[0] is not None or ends[1] is not None:
                    mixed = z[ends[0] or ends[1]]
                else:
                    continue
                found.append(mixed + matrix @ mixed)
            filled[row, column] = torch.stack(found).mean(0) if found else z[visible].mean(0)
    return filled


@pytest.mark.parametrize(("grid", "count"), [(1, 1), (2, 1), (4, 4), (5, 1), (8, 16), (8, 5)])
def test_features_are_those_of_a_walk_to_the_neighbours(grid: int, count: int) -> None:
    torch.manual_seed(grid + count)
    filling = make_filling(3, std=0.5)
    z, visible = torch.randn(4, grid, grid, 3), draw_visible(grid, count)
    expected = [
        fill_by_hand(*pair, (filling.x, filling.y)) for pair in zip(z, visible, strict=True)
    ]
    torch.testing.assert_close(filling(z, visible), torch.stack(expected), rtol=1e-5, atol=1e-5)


def frame(grid: int, *, rows: bool, columns: bool) -> Tensor:
    visible = torch.zeros(1, grid, grid, dtype=torch.bool)
    visible[:, :, [0, -1]] |= columns
    visible[:, [0, -1]] |= rows
    return visible


@pytest.mark.parametrize("filling", [make_filling(3, std=0.5), MaskToken(dim=3)])
def test_hidden_features_have_no_influence_and_visible_ones_stay(filling: torch.nn.Module) -> None:
    z, visible = torch.randn(4, 6, 6, 3), draw_visible(6, 7)
    found = filling(z, visible)
    for value in (7.0, torch.inf, torch.nan):
        changed = filling(torch.where(visible.unsqueeze(-1), z, value), visible)
        torch.testing.assert_close(changed, found, rtol=0, atol=0)
    torch.testing.assert_close(found[visible], z[visible], rtol=0, atol=0)
