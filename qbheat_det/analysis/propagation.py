# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Features carried any distance by the linear equations of QB-Heat, by two ways that must agree.

Paper: QB-Heat, arXiv:2211.13228, Eq. 1, 3, 4 and 5. With ∂z/∂x = A z and ∂z/∂y = B z a feature is
z(x, y) = e^{Ax} e^{By} z(0, 0); where A and B commute they have eigenvectors in common, and it is
the sum of c_i e^{λ_i x + π_i y} v_i. Distances x and y are in sides of the image, x to the right
and y down.

What is learned is a step over the offset Δx, z(x + Δx) = (I + M) z(x). Two A belong to it: the
paper's, M = Δx A, which Eq. 5 has from the first order of the exponential, so that e^{AΔx} is
I + M only as far as M is small; and log(I + M) / Δx, whose exponential over Δx is the learned step
exactly, and over twice Δx two of them. Matrices that do not commute, as learned ones never quite
do, are taken in the order of Eq. 3, y before x; the paper takes it that the order is the same.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

Order = Literal["exact", "first"]
"""Of the generator of a step: by the logarithm, or to the first order."""


@dataclass(frozen=True)
class Eigenbasis:
    """A matrix A as V diag(λ) V⁻¹.

    Attributes:
        eigenvalues: (C,), λ, complex128.
        vectors: (C, C), V, an eigenvector v_i a column.
        inverse: (C, C), V⁻¹.
        real: whether A is.
    """

    eigenvalues: Tensor
    vectors: Tensor
    inverse: Tensor
    real: bool

    @classmethod
    def of(cls, a: Tensor) -> "Eigenbasis":
        """Decomposes A (C, C), real or complex.

        Raises:
            ValueError: A has fewer than C eigenvectors, to the digits of float64.
        """
        a = _double(a)
        eigenvalues, vectors = torch.linalg.eig(a)
        inverse, fault = torch.linalg.inv_ex(vectors)
        basis = cls(eigenvalues, vectors, inverse, not a.is_complex())
        # Rounding in V is carried into A times the condition of V: beyond this no digit is left.
        if int(fault) or not basis.condition < 1 / torch.finfo(torch.float64).eps:
            raise ValueError("a defective matrix has no basis of eigenvectors: exponentiate it")
        return basis

    @property
    def condition(self) -> float:
        """Largest singular value of V over the smallest: by how much rounding errors grow."""
        singular = torch.linalg.svdvals(self.vectors)
        return float(singular[0] / singular[-1])

    def exponential(self, distance: float) -> Tensor:
        """Returns e^{A distance}, (C, C), float64, or complex128 where A is complex."""
        scaled = self.vectors * (self.eigenvalues * distance).exp()
        found = scaled @ self.inverse
        return found.real if self.real else found


@dataclass(frozen=True)
class JointEigenbasis:
    """A and B in the eigenvectors of A, Eq. 4.

    Attributes:
        basis: of A.
        eigenvalues_b: (C,), π: the diagonal of V⁻¹ B V.
        remainder: norm of V⁻¹ B V off its diagonal, over its norm: 0 where A and B commute and A
            has distinct eigenvalues, which is where Eq. 4 holds.
    """

    basis: Eigenbasis
    eigenvalues_b: Tensor
    remainder: float

    @classmethod
    def of(cls, a: Tensor, b: Tensor) -> "JointEigenbasis":
        """Decomposes A and B, (C, C) each.

        Raises:
            ValueError: A has fewer than C eigenvectors.
        """
        basis = Eigenbasis.of(a)
        turned = basis.inverse @ _double(b).to(torch.complex128) @ basis.vectors
        diagonal = turned.diagonal()
        norm = float(turned.norm())
        off = float((turned - torch.diag(diagonal)).norm())
        return cls(basis, diagonal, off / norm if norm else 0.0)

    def carry(self, z: Tensor, x: float, y: float) -> Tensor:
        """From z (..., C) to the sum of c_i e^{λ_i x + π_i y} v_i, (..., C)."""
        c = z.to(torch.complex128) @ self.basis.inverse.mT
        factor = (self.basis.eigenvalues * x + self.eigenvalues_b * y).exp()
        return ((c * factor) @ self.basis.vectors.mT).real.to(z.dtype)


def find_generator(step: Tensor, offset: float, *, order: Order = "exact") -> Tensor:
    """Returns the A that belongs to a learned step.

    Args:
        step: (C, C), M: a feature is I + M times that at Δx before.
        offset: Δx, in sides of the image.
        order: "exact" for log(I + M) / Δx, the principal logarithm; "first" for M / Δx.

    Returns:
        (C, C), float64. The exact one is complex128 where an eigenvalue of I + M is negative:
        no real A turns a direction round within one step. Over whole steps its exponential is
        real all the same, and between them its real part is taken.

    Raises:
        ValueError: I + M is singular and has no logarithm, or ``order`` is unknown.
    """
    if order not in get_args(Order):
        raise ValueError(f"the order of a generator is one of {get_args(Order)}, not '{order}'")
    step = _double(step.detach().cpu())
    if order == "first":
        return step / offset
    whole = torch.eye(len(step), dtype=step.dtype) + step
    singular = torch.linalg.svdvals(whole)
    if float(singular[-1]) <= float(singular[0]) * torch.finfo(step.dtype).eps:
        raise ValueError("I + M is singular: no feature comes from it, and it has no logarithm")
    logarithm = np.asarray(scipy.linalg.logm(whole.numpy()))
    return torch.from_numpy(logarithm) / offset


def exponential(a: Tensor, distance: float) -> Tensor:
    """Returns e^{A distance} of A (C, C), by scaling and squaring; in the precision of A."""
    return torch.matrix_exp(a * distance)


def carry(z: Tensor, a: Tensor, b: Tensor, x: float, y: float) -> Tensor:
    """Carries features by Eq. 3, e^{Ax} e^{By} z.

    Args:
        z: (..., C).
        a: (C, C), A.
        b: (C, C), B.
        x: distance to the right, in the unit of A.
        y: distance down, in the unit of B.

    Returns:
        (..., C), in the precision of z; the real part where A or B is complex.
    """
    return apply(exponential(a, x), apply(exponential(b, y), z)).real.to(z.dtype)


def apply(matrix: Tensor, z: Tensor) -> Tensor:
    """Returns a matrix (C, C) times each feature of z (..., C), in the wider of the two types."""
    wide = torch.promote_types(matrix.dtype, z.dtype)
    return z.to(wide) @ matrix.to(wide).mT


def _double(matrix: Tensor) -> Tensor:
    return matrix.to(torch.complex128 if matrix.is_complex() else torch.float64)
