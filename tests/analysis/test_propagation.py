# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The exponential solution of QB-Heat, against known spectra and the equation that it solves."""

import math

import pytest
import torch
from torch import Tensor

from qbheat_det.analysis.propagation import (
    Eigenbasis,
    JointEigenbasis,
    apply,
    carry,
    exponential,
    find_generator,
)

DIM = 6
# Two pairs that turn, one direction that grows, one that fades.
BLOCKS = ((0.3, 2.0), (-0.5, 1.0))
REAL = (0.8, -1.2)


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (DIM, DIM)), dtype=torch.float64, generator=generator)


def known(
    blocks: tuple[tuple[float, float], ...], real: tuple[float, ...], seed: int = 0
) -> Tensor:
    """A real matrix with eigenvalues a ± bi of its blocks and those that are real, in one basis."""
    parts = [torch.tensor([[a, -b], [b, a]], dtype=torch.float64) for a, b in blocks]
    parts += [torch.tensor([[value]], dtype=torch.float64) for value in real]
    basis = torch.eye(DIM, dtype=torch.float64) + 0.3 * draw(seed)
    return basis @ torch.block_diag(*parts) @ basis.inverse()


def test_the_spectrum_that_was_put_in_is_found_with_its_complex_pairs() -> None:
    found = Eigenbasis.of(known(BLOCKS, REAL)).eigenvalues
    expected = [complex(0.3, 2), complex(0.3, -2), complex(-0.5, 1), complex(-0.5, -1), 0.8, -1.2]
    for value in expected:
        assert float((found - value).abs().min()) < 1e-9


def test_both_ways_agree_and_are_real_for_a_real_matrix() -> None:
    a = known(BLOCKS, REAL)
    for distance in (0.1, 1.0, 3.0, -2.0):
        by_vectors = Eigenbasis.of(a).exponential(distance)
        assert by_vectors.dtype == torch.float64
        torch.testing.assert_close(by_vectors, exponential(a, distance), rtol=1e-9, atol=1e-9)


def test_both_ways_agree_as_far_as_the_condition_of_the_eigenvectors_allows() -> None:
    # Eigenvalues 1 and 1 + δ of vectors that all but coincide: a condition of about 2 / δ.
    a = torch.tensor([[1.0, 1.0], [0.0, 1.0 + 1e-6]], dtype=torch.float64)
    basis = Eigenbasis.of(a)
    assert 1e6 < basis.condition < 1e7
    error = (basis.exponential(1.0) - exponential(a, 1.0)).abs().max()
    assert float(error) < 10 * basis.condition * torch.finfo(torch.float64).eps


def test_a_defective_matrix_has_an_exponential_and_no_eigenbasis() -> None:
    shear = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    with pytest.raises(ValueError, match="defective"):
        Eigenbasis.of(shear)
    expected = torch.tensor([[1.0, 2.5], [0.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(exponential(shear, 2.5), expected)


def test_a_turn_by_right_angles_is_what_it_should_be() -> None:
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    quarter = carry(torch.tensor([[1.0, 0.0]]), turn, torch.zeros(2, 2).double(), math.pi / 2, 0)
    torch.testing.assert_close(quarter, torch.tensor([[0.0, 1.0]]))
    assert quarter.dtype == torch.float32  # that of the features


def test_no_distance_changes_nothing_and_there_and_back_is_the_same() -> None:
    a, b, z = known(BLOCKS, REAL), draw(1), draw(2, 3, 4, DIM)
    torch.testing.assert_close(carry(z, a, b, 0, 0), z)
    there = carry(z, a, b, 0.7, 0)
    torch.testing.assert_close(carry(there, a, b, -0.7, 0), z)
    torch.testing.assert_close(carry(carry(z, a, b, 0.3, 0), a, b, 0.4, 0), there)


@pytest.mark.parametrize(
    "exponentiate", [exponential, lambda a, x: Eigenbasis.of(a).exponential(x)]
)
def test_the_exponential_solves_the_equation_to_the_first_order_of_the_step(
    exponentiate: object,
) -> None:
    assert callable(exponentiate)
    a, z = known(BLOCKS, REAL), draw(3, DIM)
    here = apply(exponentiate(a, 0.6), z)
    errors = []
    for h in (1e-3, 5e-4, 2.5e-4):
        slope = (apply(exponentiate(a, 0.6 + h), z) - here) / h
        errors.append(float((slope - a @ here).norm()))
    # z'' h / 2 is left: it halves with h.
    assert errors[0] == pytest.approx(float((a @ a @ here).norm()) * 1e-3 / 2, rel=0.01)
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.01)
    assert errors[1] / errors[2] == pytest.approx(2, rel=0.01)


def slope_down(a: Tensor, b: Tensor, z: Tensor, h: float = 1e-5) -> Tensor:
    """∂z/∂y at (0.5, 0.4), from both sides."""
    return (carry(z, a, b, 0.5, 0.4 + h) - carry(z, a, b, 0.5, 0.4 - h)) / (2 * h)


def test_where_a_and_b_commute_both_equations_hold_at_once_and_eq_4_is_eq_3() -> None:
    a, b = known(BLOCKS, REAL), known(((-0.2, 0.4), (0.6, -0.3)), (0.1, 0.9))
    z = draw(4, 5, DIM)
    here = carry(z, a, b, 0.5, 0.4)
    torch.testing.assert_close(slope_down(a, b, z), here @ b.T, rtol=1e-6, atol=1e-7)
    joint = JointEigenbasis.of(a, b)
    assert joint.remainder < 1e-12
    torch.testing.assert_close(joint.carry(z, 0.5, 0.4), here)
    torch.testing.assert_close(
        apply(exponential(b, 0.4), apply(exponential(a, 0.5), z)), here
    )  # in the other order


def test_where_they_do_not_commute_the_order_counts_and_eq_4_fails() -> None:
    a, b, z = draw(5), draw(6), draw(7, 5, DIM)
    here = carry(z, a, b, 0.5, 0.4)
    assert float((slope_down(a, b, z) - here @ b.T).norm() / here.norm()) > 0.1
    joint = JointEigenbasis.of(a, b)
    assert joint.remainder > 0.3
    assert float((joint.carry(z, 0.5, 0.4) - here).norm() / here.norm()) > 0.1
    # The two orders part by xy(AB - BA) z, to the second order of the distance.
    h = 1e-4
    other = apply(exponential(b, h), apply(exponential(a, h), z))
    parted = (carry(z, a, b, h, h) - other) / h**2
    torch.testing.assert_close(parted, z @ (a @ b - b @ a).T, rtol=1e-2, atol=1e-2)


def test_the_exact_generator_gives_the_learned_step_and_the_first_order_one_nearly() -> None:
    step, eye = 0.08 * draw(8), torch.eye(DIM, dtype=torch.float64)
    exact = find_generator(step, 0.25)
    torch.testing.assert_close(exponential(exact, 0.25), eye + step)
    torch.testing.assert_close(exponential(exact, 0.5), (eye + step) @ (eye + step))
    first = find_generator(step, 0.25, order="first")
    torch.testing.assert_close(first, step / 0.25)
    # e^M - (I + M) is M² / 2 and higher: a quarter for half of M.
    errors = []
    for part in (step, step / 2):
        carried = exponential(find_generator(part, 0.25, order="first"), 0.25)
        errors.append(float((carried - eye - part).norm()))
    assert 3.5 < errors[0] / errors[1] < 4.6


def test_a_step_that_turns_a_direction_round_has_a_complex_generator() -> None:
    step = torch.diag(torch.tensor([-1.5, 0.2]))  # I + M has the eigenvalues -0.5 and 1.2
    a = find_generator(step, 0.5)
    assert a.is_complex()
    z = torch.tensor([[2.0, 1.0]])
    still = torch.zeros(2, 2)
    torch.testing.assert_close(carry(z, a, still, 0.5, 0), torch.tensor([[-1.0, 1.2]]))
    torch.testing.assert_close(carry(z, a, still, 1.0, 0), torch.tensor([[0.5, 1.44]]))
    # Half a step is half of the turn: the real part is 0 there.
    torch.testing.assert_close(carry(z, a, still, 0.25, 0), torch.tensor([[0.0, 1.2**0.5]]))


def test_two_complex_factors_are_multiplied_before_the_real_part_is_taken() -> None:
    step = torch.diag(torch.tensor([-1.5, 0.2]))
    a, z = find_generator(step, 0.5), torch.tensor([[2.0, 1.0]])
    # Half a turn along x and half along y: a whole one, although each alone is 0.
    torch.testing.assert_close(carry(z, a, a, 0.25, 0.25), torch.tensor([[-1.0, 1.2]]))


def test_what_has_no_logarithm_and_an_unknown_order_are_refused() -> None:
    with pytest.raises(ValueError, match="singular"):
        find_generator(-torch.eye(3), 0.5)
    with pytest.raises(ValueError, match="not 'second'"):
        find_generator(torch.eye(3), 0.5, order="second")  # type: ignore[arg-type]
