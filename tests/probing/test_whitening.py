# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Whitened maps have even variances, whatever the units, and hold what they held."""

import torch
from torch import Tensor

from qbheat_det.probing import Whitening
from qbheat_det.probing.whitening import channel_statistics


def draw_maps() -> Tensor:
    mixed = torch.randn(600, 2, 2, 4) @ torch.randn(4, 4) * torch.tensor([1.0, 30.0, 1e-2, 5.0])
    return mixed.permute(0, 3, 1, 2) + 4.0


def flat(maps: Tensor) -> Tensor:
    return maps.double().transpose(0, 1).flatten(1)


def test_variances_along_the_axes_are_even_but_for_the_floor() -> None:
    maps = draw_maps()
    variances = torch.linalg.eigvalsh(torch.corrcoef(flat(maps)))
    found = torch.cov(flat(Whitening.of(maps)(maps)), correction=0)
    torch.testing.assert_close(
        found, torch.diag(variances / (variances + 0.01)), rtol=1e-3, atol=1e-3
    )


def test_it_is_affine_and_can_be_undone() -> None:
    maps = draw_maps()
    whiten = Whitening.of(maps)
    undone = torch.linalg.inv(whiten.matrix.double()).T @ flat(whiten(maps))
    torch.testing.assert_close(
        undone + whiten.mean.double()[:, None], flat(maps), rtol=1e-3, atol=1e-3
    )


def test_statistics_of_other_images_are_not_looked_at() -> None:
    maps = draw_maps()
    whiten = Whitening.of(maps[:300])
    torch.testing.assert_close(whiten(maps)[300:], whiten(maps[300:]))


def test_units_of_channels_change_nothing_and_a_constant_channel_becomes_zero() -> None:
    maps = draw_maps()
    units = torch.tensor([3.0, 1e-3, 1.0, 50.0])[:, None, None]
    first, second = (Whitening.of(m)(m) for m in (maps, maps * units + 2))
    # An axis may point either way.
    torch.testing.assert_close(first.abs(), second.abs(), rtol=1e-2, atol=1e-2)
    constant = torch.cat([maps, torch.full_like(maps[:, :1], 0.3)], dim=1)
    assert bool(Whitening.of(constant)(constant).isfinite().all())
    assert bool((Whitening.of(constant).matrix[-1] == 0).all())


def test_statistics_of_channels_are_those_over_all_images_and_positions() -> None:
    maps = torch.randn(600, 3, 2, 2) * torch.tensor([1.0, 5.0, 0.0]).view(3, 1, 1) + 4
    mean, scale = channel_statistics(maps.half())
    values = flat(maps.half())
    torch.testing.assert_close(mean, values.mean(dim=1).float())
    torch.testing.assert_close(scale[:2], 1 / values[:2].std(dim=1, correction=0).float())
    assert scale[2] == 0
