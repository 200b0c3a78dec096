# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Interpolated features against a double loop over positions, and exact where they must be."""

import pytest
import torch
from torch import Tensor

from qbheat_det.modeling.pretrain import InterpolatedFeatures, MaskToken
from qbheat_det.modeling.pretrain.random_masking import interpolation_weights

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


def linear_field(grid: int, along_x: float, along_y: float) -> Tensor:
    """Returns (1, G, G, 2): the field c + a x + b y, and another with other signs."""
    y, x = torch.meshgrid(torch.arange(grid), torch.arange(grid), indexing="ij")
    one = 3 + along_x * x + along_y * y
    return torch.stack([one, -2 * one + 1], dim=-1)[None]


def frame(grid: int, *, rows: bool, columns: bool) -> Tensor:
    visible = torch.zeros(1, grid, grid, dtype=torch.bool)
    visible[:, :, [0, -1]] |= columns
    visible[:, [0, -1]] |= rows
    return visible


def test_scattered_positions_with_neighbours_on_all_sides_are_exact_on_linear_fields() -> None:
    torch.manual_seed(0)
    field, visible = linear_field(16, 0.4, 0.9), draw_visible(16, 64, num_images=20)
    found = make_filling(2)(field.expand(20, -1, -1, -1), visible)
    seen = visible.long()
    before, behind = (
        (seen.cumsum(d) > 0 for d in (1, 2)),
        (seen.flip(d).cumsum(d).flip(d) > 0 for d in (1, 2)),
    )
    surrounded = torch.stack([*before, *behind]).all(dim=0)
    assert (surrounded & ~visible).sum() > 1000
    expected = field.expand_as(found)
    torch.testing.assert_close(found[surrounded], expected[surrounded], rtol=1e-5, atol=1e-4)
    assert not torch.allclose(found[~surrounded], expected[~surrounded], atol=0.1)


def test_a_row_by_hand() -> None:
    row = torch.tensor([False, True, False, False, True, False])
    weights, has_any = interpolation_weights(row)
    third = 1 / 3
    expected = torch.zeros(6, 6)
    expected[[0, 1], 1] = 1.0
    expected[2, [1, 4]] = torch.tensor([2 * third, third])
    expected[3, [1, 4]] = torch.tensor([third, 2 * third])
    expected[[4, 5], 4] = 1.0
    torch.testing.assert_close(weights, expected)
    assert has_any.all()
    weights, has_any = interpolation_weights(torch.zeros(2, 3, dtype=torch.bool))
    torch.testing.assert_close(weights, torch.zeros(2, 3, 3))
    assert not has_any.any()


@pytest.mark.parametrize("filling", [make_filling(3, std=0.5), MaskToken(dim=3)])
def test_hidden_features_have_no_influence_and_visible_ones_stay(filling: torch.nn.Module) -> None:
    z, visible = torch.randn(4, 6, 6, 3), draw_visible(6, 7)
    found = filling(z, visible)
    for value in (7.0, torch.inf, torch.nan):
        changed = filling(torch.where(visible.unsqueeze(-1), z, value), visible)
        torch.testing.assert_close(changed, found, rtol=0, atol=0)
    torch.testing.assert_close(found[visible], z[visible], rtol=0, atol=0)


def test_a_token_stands_at_every_hidden_position() -> None:
    filling, z = MaskToken(dim=3), torch.randn(4, 6, 6, 3)
    visible = draw_visible(6, 7)
    hidden = filling(z, visible)[~visible]
    torch.testing.assert_close(hidden, filling.token.detach().expand(4 * 29, 3), rtol=0, atol=0)


def test_the_matrices_start_with_a_gradient_although_they_are_zero() -> None:
    filling = InterpolatedFeatures(dim=3)
    filling(torch.randn(2, 4, 4, 3), draw_visible(4, 5, num_images=2)).square().sum().backward()
    assert filling.x.grad.abs().min() > 0
    assert filling.y.grad.abs().min() > 0


def test_bfloat16_features_stay_bfloat16_and_mix_with_exact_weights() -> None:
    z, visible = torch.randn(2, 8, 8, 4), draw_visible(8, 16, num_images=2)
    filling = make_filling(4, std=0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = filling(z.bfloat16(), visible)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), filling(z, visible), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kind", [InterpolatedFeatures, MaskToken])
def test_no_features_are_refused(kind: type[InterpolatedFeatures | MaskToken]) -> None:
    with pytest.raises(ValueError, match="FEATURE_DIM"):
        kind(dim=0)
