# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Spatial correlation of maps whose positions say the same, nothing in common, or something."""

import pytest
import torch

from qbheat_det.analysis.spatial_correlation import measure_spatial_correlation


def test_one_direction_gives_one_and_orthogonal_ones_give_zero() -> None:
    direction = torch.tensor([1.0, -2.0, 3.0, 0.5])
    factors = torch.tensor([[1.0, -2.0], [0.1, 5.0]])
    same = direction[:, None, None] * factors
    orthogonal = torch.eye(4).view(4, 2, 2) * 7
    torch.testing.assert_close(
        measure_spatial_correlation(torch.stack([same, orthogonal])), torch.tensor([1.0, 0.0])
    )


def test_it_is_the_mean_over_all_pairs_of_positions() -> None:
    torch.manual_seed(0)
    maps = torch.randn(3, 5, 2, 3)
    expected = []
    for features in maps.flatten(2):
        pairs = [
            abs(
                float(
                    features[:, i] @ features[:, j] / features[:, i].norm() / features[:, j].norm()
                )
            )
            for i in range(6)
            for j in range(6)
            if i != j
        ]
        expected.append(sum(pairs) / len(pairs))
    torch.testing.assert_close(measure_spatial_correlation(maps), torch.tensor(expected))


def test_positions_without_features_count_as_orthogonal() -> None:
    maps = torch.zeros(1, 2, 2, 2)
    maps[0, :, 0] = 1.0  # two of four positions, equal: one pair of six
    torch.testing.assert_close(measure_spatial_correlation(maps), torch.tensor([1 / 6]))
    torch.testing.assert_close(measure_spatial_correlation(0 * maps), torch.zeros(1))
    with pytest.raises(ValueError, match="two positions"):
        measure_spatial_correlation(torch.zeros(1, 2, 1, 1))
