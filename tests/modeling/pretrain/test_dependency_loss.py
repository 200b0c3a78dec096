# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Both forms of the dependency against loops, and what changes neither."""

import math

import pytest
import torch
from torch import Tensor

from qbheat_det.modeling.pretrain import DependencyLoss
from qbheat_det.modeling.pretrain.wasserstein import dual_distance

FLAT = torch.zeros(3)


def naive_distance(values: Tensor, partners: Tensor) -> float:
    joint, product = [], []
    for i in range(len(values)):
        for j in range(values.shape[1]):
            (joint if partners[i] == j else product).append(values[i, j].item())
    return sum(joint) / len(joint) - sum(product) / len(product)


def naive_contrast(values: Tensor, partners: Tensor) -> float:
    total = 0.0
    for row, partner in zip(values.tolist(), partners.tolist(), strict=True):
        total -= row[partner] - math.log(sum(map(math.exp, row)))
    return total / len(values)


def make_values() -> tuple[Tensor, Tensor]:
    """Of five x, as one process has them of the eight y of two."""
    torch.manual_seed(0)
    return torch.randn(5, 8), torch.tensor([3, 4, 5, 6, 7])


def dependency(form: str, values: Tensor, partners: Tensor) -> Tensor:
    return DependencyLoss(form=form)(values, partners, FLAT)["loss_dependency"]


def test_the_dual_is_the_mean_over_own_pairs_minus_that_over_all_others() -> None:
    values, partners = make_values()
    expected = torch.tensor(naive_distance(values, partners))
    torch.testing.assert_close(dual_distance(values, partners), expected)
    torch.testing.assert_close(dependency("dual", values, partners), -expected)


def test_the_contrast_is_the_log_share_of_the_own_pair_in_each_row() -> None:
    values, partners = make_values()
    expected = torch.tensor(naive_contrast(values, partners))
    torch.testing.assert_close(dependency("contrastive", values, partners), expected)


@pytest.mark.parametrize("form", ["dual", "contrastive"])
def test_the_penalty_is_one_sided(form: str) -> None:
    values, partners = make_values()
    slopes = torch.tensor([0.0, 0.9, 1.0, 1.5, 3.0])
    found = DependencyLoss(form=form, penalty_weight=2.0)(values, partners, slopes)
    torch.testing.assert_close(found["loss_penalty"], torch.tensor(2.0 * (0.25 + 4.0) / 5))
