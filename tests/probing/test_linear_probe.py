# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The linear probe ends at the optimum, whatever the scale of features, for the best penalty."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from qbheat_det.probing.probes import fit_linear_probe, fit_penalised
from tests.probing.drawn_features import draw_classes

_K = 3


def objective(weight: Tensor, features: Tensor, labels: Tensor, l2: float) -> Tensor:
    """Mean cross-entropy and penalty, image by image."""
    loss = torch.zeros((), dtype=torch.float64)
    for row, label in zip(features, labels.tolist(), strict=True):
        shares = (weight[:, :-1] @ row + weight[:, -1]).exp()
        loss = loss - torch.log(shares[label] / shares.sum())
    return loss / len(labels) + l2 / 2 * weight[:, :-1].square().sum()


def standardised(features: Tensor) -> Tensor:
    features = features.double()
    return (features - features.mean(dim=0)) / features.std(dim=0, correction=0)


@pytest.mark.parametrize("l2", [1.0, 1e-3])
def test_it_ends_where_scipy_ends(l2: float) -> None:
    features, labels = draw_classes(20, num_features=4, num_classes=_K)
    inputs = standardised(features)

    def value_and_gradient(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weight = torch.tensor(flat).view(_K, 5).requires_grad_()
        loss = objective(weight, inputs, labels, l2)
        (gradient,) = torch.autograd.grad(loss, weight)
        return float(loss.detach()), gradient.numpy().ravel()

    expected = minimize(
        value_and_gradient, np.zeros(_K * 5), jac=True, method="BFGS", options={"gtol": 1e-8}
    )
    probe = fit_penalised(features, labels, num_classes=_K, l2=l2, tolerance=1e-9)
    assert probe.gradient < 1e-8
    weight = torch.tensor(expected.x).view(_K, 5)
    torch.testing.assert_close(probe.weight[:, :-1], weight[:, :-1], rtol=1e-4, atol=1e-5)
    # The bias is only known up to a shift of all classes.
    shifted = [b - b.mean() for b in (probe.weight[:, -1], weight[:, -1])]
    torch.testing.assert_close(*shifted, rtol=1e-4, atol=1e-5)


def test_start_units_and_constant_features_change_nothing() -> None:
    features, labels = draw_classes(50, num_features=4, num_classes=_K)
    arguments = {"num_classes": _K, "l2": 1e-2, "tolerance": 1e-9}
    probe = fit_penalised(features, labels, **arguments)
    moved = features * torch.tensor([1e-3, 1.0, 50.0, 1e3]) + torch.tensor([0.0, 5.0, -3.0, 1.0])
    moved = torch.cat([moved, torch.full((50, 1), 0.1)], dim=1)
    other = fit_penalised(moved, labels, start=torch.randn(_K, 6).double(), **arguments)
    torch.testing.assert_close(
        other(moved).softmax(dim=1), probe(features).softmax(dim=1), rtol=1e-4, atol=1e-5
    )
    assert other.scale[-1] == 0


def test_the_best_penalty_is_chosen_and_fits_all_images() -> None:
    # Two features that separate classes and many that do not: little penalty overfits.
    signal, labels = draw_classes(90, num_features=2, num_classes=_K, spread=1.5)
    features = torch.cat([signal, torch.randn(90, 60)], dim=1)
    probe, chosen = fit_linear_probe(features, labels, num_classes=_K)
    trials = chosen["trials"]
    assert trials[f"{chosen['l2']:.2g}"] == max(trials.values())
    assert chosen["l2"] > 1e-3
    expected = fit_penalised(features, labels, num_classes=_K, l2=chosen["l2"])
    torch.testing.assert_close(
        probe(features).softmax(dim=1), expected(features).softmax(dim=1), rtol=1e-3, atol=1e-4
    )
