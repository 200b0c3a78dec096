# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Figures of the linear models, against matrices whose spectra are known by construction."""

import json
import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from qbheat_det.analysis.spectrum import (
    NAMES,
    RotatedControl,
    commutator,
    condition,
    cosine,
    describe_models,
    effective_rank,
    inverse_error,
    magnitude_correlation,
    rank,
    sort_eigenvalues,
)

DIM = 6
Models = Mapping[str, tuple[float, Mapping[str, Tensor]]]


def draw(seed: int, dim: int = DIM) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dim, dim, dtype=torch.float64, generator=generator)


def with_eigenvalues(values: list[float], seed: int = 0) -> Tensor:
    """A matrix that is not symmetric, of given real eigenvalues."""
    basis = draw(seed, len(values))
    return basis @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ basis.inverse()


def test_eigenvalues_come_by_magnitude_as_they_were_put_in() -> None:
    values = [0.5, -3.0, 2.0, 0.0]
    found = sort_eigenvalues(with_eigenvalues(values))
    torch.testing.assert_close(
        found, torch.tensor([-3.0, 2.0, 0.5, 0.0], dtype=torch.complex128), rtol=0, atol=1e-9
    )
    turn = torch.tensor([[0.0, -2.0], [2.0, 0.0]])  # by 90 degrees and twice as long: ± 2i
    torch.testing.assert_close(sort_eigenvalues(turn).abs(), torch.tensor([2.0, 2.0]))
    torch.testing.assert_close(sort_eigenvalues(turn).real, torch.zeros(2))


def test_energy_is_the_sum_of_the_magnitudes_of_a_not_of_m() -> None:
    values = {"A1": [1.0, -2.0], "A2": [3.0, 0.5], "B1": [1.0, 1.5], "B2": [-2.0, 0.5]}
    matrices = {name: with_eigenvalues(found) for name, found in values.items()}
    scale = describe_models({"centre": (0.25, matrices)}).scales["centre"]
    assert scale.matrices["A1"].energy == pytest.approx((1 + 2) / 0.25)
    # Both directions of an axis count: (3 + 3.5) / (2.5 + 2.5).
    assert scale.energy_ratio == pytest.approx(6.5 / 5.0)


def test_rank_counts_the_directions_that_are_not_lost() -> None:
    column = draw(1)[:, :2]
    assert rank(column @ column.T) == 2
    assert rank((column @ column.T).float()) == 2
    assert rank(draw(2)) == DIM
    assert rank(torch.zeros(3, 3)) == 0


def test_effective_rank_says_how_many_directions_share_the_work() -> None:
    equal = torch.linalg.qr(draw(1))[0] @ torch.diag(torch.tensor([5.0] * 3 + [0.0] * 3).double())
    assert effective_rank(equal) == pytest.approx(3.0)
    # Shares 1/2, 1/4, 1/4: an entropy of 3/2 log 2.
    assert effective_rank(torch.diag(torch.tensor([2.0, 1.0, 1.0]))) == pytest.approx(2**1.5)
    assert math.isnan(effective_rank(torch.zeros(3, 3)))


def test_condition_is_that_of_the_singular_values() -> None:
    orthogonal = torch.linalg.qr(draw(3))[0]
    assert condition(orthogonal) == pytest.approx(1.0)
    stretched = orthogonal @ torch.diag(torch.tensor([8.0, 4, 4, 4, 2, 2], dtype=torch.float64))
    assert condition(stretched) == pytest.approx(4.0)
    assert condition(torch.diag(torch.tensor([1.0, 0.0]))) == math.inf


def test_matrices_of_one_basis_commute_and_others_do_not() -> None:
    a, b = with_eigenvalues([1.0, 2, 3, 4]), with_eigenvalues([0.5, -1, 2, 7])
    assert commutator(a, b) == pytest.approx(0.0, abs=1e-12)
    # AB - BA = diag(1, -1) of two matrices of norm 1.
    up = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    assert commutator(up, up.T) == pytest.approx(math.sqrt(2))
    assert commutator(5 * up, 0.1 * up.T) == pytest.approx(math.sqrt(2))
    assert math.isnan(commutator(up, torch.zeros(2, 2)))


def test_there_and_back_again_is_no_error_for_an_exact_inverse() -> None:
    identity = torch.eye(DIM, dtype=torch.float64)
    forth = 0.1 * draw(4)
    back = torch.linalg.inv(identity + forth) - identity
    assert inverse_error(forth, back) == pytest.approx(0.0, abs=1e-12)
    # The opposite matrix misses by M squared, and the same one by twice M.
    assert inverse_error(1e-4 * forth, -1e-4 * forth) < 1e-4
    assert inverse_error(1e-4 * forth, 1e-4 * forth) == pytest.approx(1.0, abs=1e-4)
    assert inverse_error(1e-6 * draw(5, 200), 1e-6 * draw(6, 200)) == pytest.approx(0.707, abs=0.02)
    assert math.isnan(inverse_error(0 * forth, 0 * forth))


def test_scales_are_compared_by_angle_and_by_the_course_of_their_spectra() -> None:
    a, b = draw(7), draw(8)
    assert cosine(a, 3 * a) == pytest.approx(1.0)
    assert cosine(a, -a) == pytest.approx(-1.0)
    assert cosine(a, b - cosine(a, b) * b.norm() / a.norm() * a) == pytest.approx(0.0, abs=1e-12)
    falling = torch.tensor([4.0, 3.0, 2.0, 1.0])
    assert magnitude_correlation(falling, 7 * falling) == pytest.approx(1.0)
    # Deviations (1.5, .5, -.5, -1.5) and (6, -2, -2, -2): 12 / (sqrt(5) sqrt(48)).
    steep = torch.tensor([9.0, 1.0, 1.0, 1.0])
    assert magnitude_correlation(falling, steep) == pytest.approx(12 / math.sqrt(240))
    assert math.isnan(magnitude_correlation(falling, torch.ones(4)))
    assert math.isnan(magnitude_correlation(falling, torch.zeros(4)))


def make_models(factor: float) -> Models:
    scales = {"corner": 0.5, "centre": 0.25}
    return {
        scale: (
            offset,
            {name: (factor * draw(10 * i + j)).float() for j, name in enumerate(NAMES)},
        )
        for i, (scale, offset) in enumerate(scales.items())
    }


def test_models_at_zero_leave_out_what_is_undefined_and_say_why() -> None:
    content = describe_models(make_models(0.0)).to_dict()
    json.dumps(content, allow_nan=False)
    scale = content["scales"]["corner"]
    assert scale["matrices"]["A1"] == {
        "eigenvalues": [[0.0, 0.0]] * DIM, "energy": 0.0, "rank": 0, "condition": 1.0,
    }  # fmt: skip
    assert "energy_ratio" not in scale
    assert scale["commutators"] == content["cosines"] == content["correlations"] == {}
    assert "a matrix is zero" in content["left_out"]["scales/corner/energy_ratio"]
    assert "a matrix is zero" in content["left_out"]["scales/centre/inverse_errors/B"]


def test_a_singular_model_is_named_instead_of_an_infinite_number() -> None:
    models = {"corner": (0.5, dict.fromkeys(NAMES, -torch.eye(2)))}
    content = describe_models(models).to_dict()
    assert content["left_out"]["scales/corner/matrices/A1/condition"] == "I + M is singular"
    assert "cosines" not in content  # there is one scale


def test_the_control_has_the_same_singular_values_and_chance_directions() -> None:
    models = make_models(0.3)
    control = RotatedControl(seed=1)
    first, second = control.describe(models), RotatedControl(seed=1).describe(models)
    larger = control.describe(make_models(0.6))
    for scale, (_, matrices) in models.items():
        for name in NAMES:
            found = first.scales[scale].matrices[name].eigenvalues
            torch.testing.assert_close(found, second.scales[scale].matrices[name].eigenvalues)
            again = larger.scales[scale].matrices[name].eigenvalues
            torch.testing.assert_close(2 * found.abs(), again.abs(), rtol=1e-3, atol=1e-5)
            # |det M| is the product of the singular values, and of the eigenvalues of A, times Δx.
            offset = models[scale][0]
            expected = torch.linalg.svdvals(matrices[name]).log().sum()
            torch.testing.assert_close(
                (found.abs() * offset).log().sum(), expected, rtol=1e-3, atol=1e-2
            )
    other = RotatedControl(seed=2).describe(models)
    assert other.scales["corner"].energy_ratio != first.scales["corner"].energy_ratio


def test_low_rank_alone_does_not_pass_for_learning() -> None:
    # Directions of chance: the commutator of the control is that of the matrices themselves.
    torch.manual_seed(0)
    low = {name: torch.randn(64, 4) @ torch.randn(4, 64) for name in NAMES}
    full = {name: torch.randn(64, 64) for name in NAMES}
    for matrices in (low, full):
        models = {"corner": (0.5, matrices)}
        own = describe_models(models).scales["corner"].commutators
        control = RotatedControl().describe(models).scales["corner"].commutators
        assert sum(own.values()) / sum(control.values()) == pytest.approx(1, abs=0.25)


def test_the_control_shares_what_opposite_directions_share_by_construction() -> None:
    matrices = {"A1": torch.randn(8, 8), "B1": torch.randn(8, 8)}
    matrices |= {"A2": -matrices["A1"], "B2": torch.randn(8, 8)}
    models = {"corner": (0.5, matrices)}
    control = RotatedControl().describe(models).scales["corner"]
    torch.testing.assert_close(control.matrices["A1"].magnitudes, control.matrices["A2"].magnitudes)
