# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Spatial correlation of maps whose positions say the same, nothing in common, or something."""

import numpy as np
import pytest
import torch

from qbheat_det.analysis.spatial_correlation import measure_spatial_correlation


def test_one_direction_gives_one_and_orthogonal_ones_give_zero() -> None:
    direction = torch.tensor([1.0, -2.0, 3.0, 0.5])
    factors = torch.tensor([[1.0, -2.0], [0.1, 5.0]])
    same = direction[:, None, None] * factors + torch.tensor([[3.0, 0.0], [-7.0, 1.0]])
    # Rows of a Hadamard matrix: orthogonal to each other and to the constant one, left out here.
    signs = [[1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
    orthogonal = torch.tensor(signs).T.reshape(4, 1, 3) * 7.0 + 2.0
    torch.testing.assert_close(measure_spatial_correlation(same[None]), torch.tensor([1.0]))
    torch.testing.assert_close(measure_spatial_correlation(orthogonal[None]), torch.tensor([0.0]))


def test_unrelated_features_behind_a_rectifier_are_not_correlated() -> None:
    torch.manual_seed(0)
    maps = torch.randn(1, 4096, 3, 3).relu()
    assert float(measure_spatial_correlation(maps)) < 0.05


def test_it_is_the_mean_over_all_pairs_of_positions() -> None:
    torch.manual_seed(0)
    maps = torch.randn(3, 5, 2, 3)
    expected = []
    for features in maps.flatten(2).numpy():
        matrix = np.abs(np.corrcoef(features.T))
        expected.append([matrix[i, j] for i in range(6) for j in range(6) if i != j])
    torch.testing.assert_close(
        measure_spatial_correlation(maps), torch.tensor(expected).mean(dim=1).float()
    )


def test_positions_without_features_count_as_unrelated() -> None:
    maps = torch.zeros(1, 2, 2, 2)
    maps[0, 0, 0] = 1.0  # two of four positions, equal: one pair of six
    torch.testing.assert_close(measure_spatial_correlation(maps), torch.tensor([1 / 6]))
    torch.testing.assert_close(measure_spatial_correlation(0 * maps), torch.zeros(1))
    equal = torch.full((1, 720, 2, 2), 0.1)  # whose mean is not 0.1 to the last bit
    torch.testing.assert_close(measure_spatial_correlation(equal), torch.zeros(1))
    with pytest.raises(ValueError, match="two positions"):
        measure_spatial_correlation(torch.zeros(1, 2, 1, 1))
