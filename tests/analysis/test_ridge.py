# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Ridge regression from sums, against least squares on all rows at once."""

import numpy as np
import pytest
import torch
from torch import Tensor

from qbheat_det.analysis.reconstruction_baselines import RidgeRegression

D, G, P = 7, 3, 2


def make_rows(num_rows: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Returns x (N, D) away from zero and of unequal scales, and noisy y (N, G, P)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, D, generator=generator) * torch.logspace(-1, 1, D) + 5
    truth = torch.randn(D, G * P, generator=torch.Generator().manual_seed(99))
    noise = torch.randn(num_rows, G * P, generator=generator) * 20
    return x, (x @ truth + noise + 3).view(num_rows, G, P)


def regress(x: Tensor, y: Tensor, held: Tensor, *, batch: int = 1000) -> RidgeRegression:
    model = RidgeRegression(num_inputs=x.shape[1], num_groups=y.shape[1], group_size=y.shape[2])
    for rows in zip(x.split(batch), y.split(batch), held.split(batch), strict=True):
        model.add(*rows)
    return model


def fit_naively(x: Tensor, y: Tensor, penalty: float) -> np.ndarray:
    """Least squares with a row for each penalised weight; y (N, P)."""
    rows = np.concatenate([x.double().numpy(), np.ones((len(x), 1))], axis=1)
    centred = x.double() - x.double().mean(dim=0)
    mean_eigenvalue = float(torch.trace(centred.T @ centred)) / x.shape[1]
    extra = np.sqrt(penalty * mean_eigenvalue) * np.eye(x.shape[1], x.shape[1] + 1)
    targets = np.concatenate([y.double().numpy(), np.zeros((x.shape[1], y.shape[1]))])
    solution: np.ndarray = np.linalg.lstsq(np.concatenate([rows, extra]), targets, rcond=None)[0]
    return solution


@pytest.mark.parametrize("batch", [3, 1000])
@pytest.mark.parametrize("penalty", [1e-4, 0.3, 50.0])
def test_predictions_are_those_of_least_squares_on_all_rows(penalty: float, batch: int) -> None:
    x, y = make_rows(40, seed=0)
    model = regress(x, y, torch.arange(40) % 5 == 1, batch=batch)
    assert model.solve([penalty]) == [penalty] * G
    torch.testing.assert_close(model.mean_outputs, y.double().mean(dim=0))
    new, _ = make_rows(9, seed=3)
    rows = torch.cat([new.double(), torch.ones(9, 1)], dim=1)
    for group in range(G):
        expected = rows @ torch.from_numpy(fit_naively(x, y[:, group], penalty))
        torch.testing.assert_close(model.predict(new)[:, group], expected, rtol=1e-7, atol=1e-6)


@pytest.mark.parametrize("num_rows", [9, 60])
def test_the_penalty_chosen_has_the_least_error_on_the_rows_held_out(num_rows: int) -> None:
    grid = [1e-4, 1e-2, 0.1, 1.0, 10.0, 1000.0]
    x, y = make_rows(num_rows, seed=1)
    held_x, held_y = make_rows(30, seed=2)
    held = torch.arange(num_rows + 30) >= num_rows
    chosen = regress(torch.cat([x, held_x]), torch.cat([y, held_y]), held).solve(grid)
    rows = torch.cat([held_x.double(), torch.ones(30, 1)], dim=1)
    for group in range(G):
        errors = [
            (rows @ torch.from_numpy(fit_naively(x, y[:, group], penalty)) - held_y[:, group])
            .square()
            .sum()
            for penalty in grid
        ]
        assert chosen[group] == grid[int(torch.stack(errors).argmin())]
    assert {grid[0], grid[-1]} - set(chosen)  # a choice was to be made
