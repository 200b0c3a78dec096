# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The linear models of QB-Heat, arXiv:2211.13228, in checkpoints, their controls and measures.

"Random" matrices have independent normal entries; "rotated" ones have the learned singular values
in random directions, so that only what depends on size and rank is learned. What opposite
directions share by construction (A2 = -A1, Eq. 9) the controls share.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import cast

import torch
from torch import Tensor

from qbheat_det.checkpoint import read_weights
from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import NotApplicable
from qbheat_det.modeling.contracts import LinearModels
from qbheat_det.modeling.pretrain import HeatPredictor

Models = Mapping[str, tuple[float, Mapping[str, Tensor]]]
"""For each scale, "corner" or "centre", its offset Δx and M = Δx A (C, C) by name."""

AXES = {"A": ("A1", "A2"), "B": ("B1", "B2")}
"""The two opposite directions of each axis; A is horizontal, B vertical."""
NAMES = tuple(name for pair in AXES.values() for name in pair)
_PREFIX = "predictor."
_EQUAL = 1e-6  # relative spread of magnitudes that is rounding
_CHECKPOINT = re.compile(r"model_(\d+)")


def list_linear_models(scales: Mapping[str, LinearModels]) -> Models:
    """Returns the linear models of ``contracts.get_linear_models``, on the CPU."""
    found = {}
    for scale, models in scales.items():
        matrices = {name: matrix.detach().cpu() for name, matrix in models.matrices().items()}
        found[scale] = models.offset, matrices
    return found


def read_linear_models(path: Path, label: str) -> Models:
    """Reads the linear models of a checkpoint.

    Raises:
        NotApplicable: the file has no linear models.
        UserError: the file cannot be read, or its linear models are incomplete.
    """
    weights, _ = read_weights(str(path))
    state = {
        key.removeprefix(_PREFIX): value
        for key, value in weights.items()
        if key.startswith(f"{_PREFIX}scales.")
    }
    if not state:
        raise NotApplicable(f"'{label}' has no linear models, which QB-Heat's pre-training has")
    scales = {key.split(".")[1] for key in state}
    try:
        predictor = HeatPredictor(
            dim=len(next(iter(state.values()))),
            num_models=len(state) // len(scales),
            visible="both" if len(scales) > 1 else scales.pop(),
        )
        predictor.load_state_dict(state)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"'{path}' has incomplete linear models: {error}") from error
    return list_linear_models(cast(Mapping[str, LinearModels], predictor.scales))


def list_checkpoints(folder: Path, number: int) -> dict[int, Path]:
    """Returns so many checkpoints of a run's folder, spread over training, by their steps."""
    found = {}
    for path in sorted(folder.glob("model_*.pth")):
        if match := _CHECKPOINT.fullmatch(path.resolve().stem):  # model_best.pth may be a link
            found[int(match[1]) + 1] = path  # the name has the index of the last step
    steps, number = sorted(found), min(number, len(found))
    chosen = [steps[len(steps) * (index + 1) // number - 1] for index in range(number)]
    return {step: found[step] for step in chosen}


def draw_random_models(models: Models, seed: int = 0) -> Models:
    """Returns matrices of independent normal entries, all of a scale with the mean learned norm."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {}
    for scale, (offset, matrices) in models.items():
        norm = fmean(float(matrices[name].norm()) for name in NAMES) or 1.0
        found = {name: torch.randn(matrices[name].shape, generator=generator) for name in NAMES}
        found = {name: entries * (norm / entries.norm()) for name, entries in found.items()}
        drawn[scale] = offset, _share_opposites(found, matrices)
    return drawn


def rotate_models(models: Models, seed: int = 0) -> Models:
    """Returns matrices with the same singular values, in random directions."""
    rotated = {}
    for index, (scale, (offset, matrices)) in enumerate(models.items()):
        generator = torch.Generator().manual_seed(2 * seed + index)
        found = {}
        for name in NAMES:
            left, right = (_draw_rotation(matrices[name], generator) for _ in range(2))
            found[name] = (left * torch.linalg.svdvals(matrices[name].float())) @ right
        rotated[scale] = offset, _share_opposites(found, matrices)
    return rotated


def _draw_rotation(matrix: Tensor, generator: torch.Generator) -> Tensor:
    """Returns an orthogonal matrix, uniform over all rotations and reflections."""
    q, r = torch.linalg.qr(torch.randn(matrix.shape, generator=generator))
    return q * r.diagonal().sign()


def _share_opposites(drawn: dict[str, Tensor], learned: Mapping[str, Tensor]) -> dict[str, Tensor]:
    for one, other in AXES.values():
        if learned[one].any() and torch.equal(learned[other], -learned[one]):
            drawn[other] = -drawn[one]
    return drawn


def sort_eigenvalues(matrix: Tensor) -> Tensor:
    """Returns the eigenvalues of a matrix (C, C), (C,), complex, by falling magnitude."""
    eigenvalues = torch.linalg.eigvals(matrix)
    return eigenvalues[eigenvalues.abs().argsort(descending=True, stable=True)]


def effective_rank(matrix: Tensor) -> float:
    """Returns the exponential of the entropy of the normalised singular values, in [1, C]."""
    singular = torch.linalg.svdvals(matrix)
    return float(torch.special.entr(singular / singular.sum()).sum().exp())


def commutator(a: Tensor, b: Tensor) -> float:
    """Returns ‖AB - BA‖ / (‖A‖‖B‖) of two (C, C), in the Frobenius norm: 0 if they commute."""
    return _ratio((a @ b - b @ a).norm(), a.norm() * b.norm())


def inverse_error(forth: Tensor, back: Tensor) -> float:
    """Returns ‖(I + M1)(I + M2) - I‖ / (‖M1‖ + ‖M2‖) of two (C, C), in the Frobenius norm.

    0 if they are inverse to each other, as Eq. 8 has it. Small unrelated matrices give 0.7, small
    equal ones 1. Divided by the size of M, because near M = 0 any two would pass.
    """
    # Without the identity, in which small matrices would be lost.
    return _ratio((forth + back + forth @ back).norm(), forth.norm() + back.norm())


def cosine(a: Tensor, b: Tensor) -> float:
    """Returns the cosine of the angle between two matrices as vectors; nan if one is zero."""
    return _ratio((a * b).sum(), a.norm() * b.norm())


def magnitude_correlation(a: Tensor, b: Tensor) -> float:
    """Returns Pearson's correlation of sorted magnitudes (C,); nan if those of one are equal."""
    if any(float(x.std()) <= _EQUAL * float(x.norm()) for x in (a, b)):
        return math.nan
    return float(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1])


def _ratio(numerator: Tensor, denominator: Tensor) -> float:
    return float(numerator / denominator) if float(denominator) > 0 else math.nan
