# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Features propagated over any distance by the linear equations of QB-Heat, and beyond the image.

Paper: QB-Heat, arXiv:2211.13228, Eq. 1, 3 and 5. With ∂z/∂x = A z and ∂z/∂y = B z a feature is
z(x, y) = e^{Ax} e^{By} z(0, 0). Distances x (to the right) and y (down) are in sides of the image,
which has G positions.

A step over the offset Δx is learned, z(x + Δx) = (I + M) z(x). Two A belong to it: the paper's,
M = Δx A, of the first order of the exponential (Eq. 5), so that e^{AΔx} is I + M only as far as M
is small; and log(I + M) / Δx, whose exponential over Δx is the learned step exactly. Matrices that
do not commute, as learned ones never quite do, are applied in the order of Eq. 3, y before x.

The paper stops at the image's border. Chosen here: A1 goes to the right, A2 to the left, B1 down
and B2 up, each for distances that are not negative; and the decoder, which knows the positions of
one image only, is moved over the larger grid in windows of its size.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Literal

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

Order = Literal["exact", "first"]
DIRECTIONS = {"right": "A1", "left": "A2", "down": "B1", "up": "B2"}
"""The linear model that propagates features in each direction."""
Decode = Callable[[Tensor], Tensor]
"""From features (N, G, G, C) to patches (N, G * G, P)."""


def find_generator(step: Tensor, offset: float, *, order: Order = "exact") -> Tensor:
    """Returns the A that belongs to a learned step.

    Args:
        step: (C, C), M: a feature is I + M times that at Δx before.
        offset: Δx, in sides of the image.
        order: "exact" for log(I + M) / Δx, the principal logarithm; "first" for M / Δx.

    Returns:
        (C, C), float64. The exact one is complex128 where an eigenvalue of I + M is negative:
        no real A reverses a direction within one step.

    Raises:
        ValueError: I + M is singular and has no logarithm.
    """
    step = step.detach().cpu().double()
    if order == "first":
        return step / offset
    whole = torch.eye(len(step), dtype=step.dtype) + step
    singular = torch.linalg.svdvals(whole)
    if float(singular[-1]) <= float(singular[0]) * torch.finfo(step.dtype).eps:
        raise ValueError("I + M is singular, so it has no logarithm")
    return torch.from_numpy(np.asarray(scipy.linalg.logm(whole.numpy()))) / offset


def propagate(z: Tensor, a: Tensor, x: float) -> Tensor:
    """Returns e^{Ax} z for features z (..., C), in the wider type of A (C, C) and z."""
    wide = torch.promote_types(a.dtype, z.dtype)
    return z.to(wide) @ torch.matrix_exp(a * x).to(wide).mT


def extend_map(z: Tensor, generators: Mapping[str, Tensor], margin: int, *, stride: int) -> Tensor:
    """Propagates the features of an image beyond all its borders.

    The feature at a position outside is that of a position inside, propagated over the distance
    between them, which is the least multiple of ``stride`` that reaches inside. With the offset of
    the generators' scale these are the learned steps; with 1 everything outside comes from the
    outermost features. Beyond a corner, features go along y and then along x, as in Eq. 3.

    Args:
        z: (N, G, G, C).
        generators: A1, A2, B1 and B2 by name, (C, C), per side of the image.
        margin: positions on each side of the image, 0 or more.
        stride: positions, 1 to G.

    Returns:
        (N, G + 2 margin, G + 2 margin, C), with z itself in the middle.
    """
    along = {way: generators[name] for way, name in DIRECTIONS.items()}
    tall = _extend_axis(z.transpose(1, 2), along["down"], along["up"], margin, stride)
    wide = _extend_axis(tall.transpose(1, 2), along["right"], along["left"], margin, stride)
    return (wide.real if wide.is_complex() else wide).to(z.dtype)


def decode_map(z: Tensor, decode: Decode, size: int) -> Tensor:
    """Decodes a map larger than the image in windows of the image's size.

    The window in the middle is the image. Others are moved by half a window, further out until
    they end with the map; a position is decoded by the one that is moved least, along each axis.

    Args:
        z: (N, L, L, C), L - G even.
        decode: for windows, (n, G, G, C) to (n, G * G, P).
        size: G, positions of a window.

    Returns:
        (N, L, L, P).
    """
    length = z.shape[1]
    starts = [_find_window(position, length, size) for position in range(length)]
    decoded: Tensor | None = None
    for row, column in product(sorted(set(starts)), repeat=2):
        patches = decode(z[:, row : row + size, column : column + size]).unflatten(1, (size, size))
        if decoded is None:
            decoded = patches.new_zeros(len(z), length, length, patches.shape[-1])
        # The positions of one window are adjacent.
        rows, columns = (
            slice(starts.index(start), starts.index(start) + starts.count(start))
            for start in (row, column)
        )
        decoded[:, rows, columns] = patches[
            :, rows.start - row : rows.stop - row, columns.start - column : columns.stop - column
        ]
    assert decoded is not None  # a map has positions
    return decoded


def restore_pixels(
    patches: Tensor, predicted: Tensor, restore: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Puts the image into the middle of what was decoded, on the scale of its pixels.

    Outside the image no patch has a known mean and deviation: every one gets those of the image's
    patches on average, so that nothing of the layout is given to it.

    Args:
        patches: (N, G, G, P), of the image.
        predicted: (N, L, L, P), decoded.
        restore: from predictions (N, K, P) and true patches (N, K, P), whose statistics it takes,
            to pixels, as of ``ReconstructionLoss``.

    Returns:
        (N, L, L, P), float32.
    """
    size, length = patches.shape[1], predicted.shape[1]
    mean = patches.mean(dim=(1, 2, 3)).view(-1, 1, 1)
    deviation = patches.std(dim=-1).mean(dim=(1, 2)).view(-1, 1, 1)
    ramp = torch.linspace(-1, 1, patches.shape[-1], device=patches.device)
    typical = (mean + deviation * ramp / ramp.std()).expand(-1, length * length, -1)
    made = restore(predicted.flatten(1, 2), typical).unflatten(1, (length, length))
    start = (length - size) // 2
    made[:, start : start + size, start : start + size] = patches
    return made


def measure_growth(
    z: Tensor, generators: Mapping[str, Tensor], distances: Sequence[float]
) -> dict[str, list[float]]:
    """Returns the root mean square norm of propagated features over that at distance 0.

    Args:
        z: (..., C).
        generators: as of ``extend_map``.
        distances: in sides of the image.

    Returns:
        By direction, a number for each distance.
    """
    norm = float(z.double().norm())
    return {
        way: [float(propagate(z, generators[name], x).real.norm()) / norm for x in distances]
        for way, name in DIRECTIONS.items()
    }


def measure_error(z: Tensor, generators: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Returns how far propagated features are from the encoder's own, inside the image.

    Args:
        z: (N, G, G, C).
        generators: as of ``extend_map``.

    Returns:
        By direction, for distances of 1 to G - 1 positions, the norm of all errors over the norm
        of all true deviations from the mean feature: 1 is no better than the mean of the map.
    """
    size = z.shape[1]
    z = z.double()
    mean = z.mean(dim=(0, 1, 2))
    found: dict[str, list[float]] = {}
    for way, name in DIRECTIONS.items():
        # Along the last axis but one, towards higher positions.
        maps = z if way in ("right", "left") else z.transpose(1, 2)
        maps = maps if way in ("right", "down") else maps.flip(2)
        found[way] = []
        for steps in range(1, size):
            predicted = propagate(maps[:, :, :-steps], generators[name], steps / size).real
            true = maps[:, :, steps:]
            found[way].append(float((predicted - true).norm() / (true - mean).norm()))
    return found


def _extend_axis(z: Tensor, forth: Tensor, back: Tensor, margin: int, stride: int) -> Tensor:
    """Extends (N, K, G, C) along G, by ``forth`` at the end and by ``back`` at the start."""
    after = _extend_end(z, forth, margin, stride)
    before = _extend_end(z.flip(2), back, margin, stride).flip(2)
    wide = torch.promote_types(before.dtype, after.dtype)
    return torch.cat([before.to(wide), z.to(wide), after.to(wide)], dim=2)


def _extend_end(z: Tensor, a: Tensor, margin: int, stride: int) -> Tensor:
    """Returns the features of ``margin`` positions behind the last of (N, K, G, C)."""
    size = z.shape[2]
    blocks = [z[:, :, :0].to(torch.promote_types(a.dtype, z.dtype))]
    for start in range(0, margin, stride):
        # From the last ``stride`` positions to those behind ``start``.
        source = z[:, :, size - stride : size - stride + min(stride, margin - start)]
        blocks.append(propagate(source, a, (start + stride) / size))
    return torch.cat(blocks, dim=2)


def _find_window(position: int, length: int, size: int) -> int:
    """Returns the start of the window that decodes a position of an axis."""
    middle = (length - size) // 2
    beyond = max(middle - position, position - (middle + size - 1), 0)
    half = max(size // 2, 1)
    shift = min(math.ceil(beyond / half) * half, middle)
    return middle + shift if position > middle else middle - shift
