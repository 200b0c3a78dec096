# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What lies outside the picture, by QB-Heat: features carried beyond the frame, and their pixels.

Paper: QB-Heat, arXiv:2211.13228, Eq. 3. It says that features go on by e^{Ax} e^{By} any distance;
the paper itself stops at the frame. Chosen here: to the right and left A1 and A2 are used, down and
up B1 and B2, each for a distance that is not negative; what lies beyond a corner is carried along y
and then along x, as Eq. 3 has it; and the decoder, which knows positions of one image only, is
moved over the larger grid in windows of its size.

Maps here are (N, H, W, C), positions of one patch each. Distances are in sides of the image, G
positions.
"""

import math
from collections.abc import Callable, Mapping
from itertools import product

import torch
from torch import Tensor

from .propagation import apply, exponential

GOES = {"right": "A1", "left": "A2", "down": "B1", "up": "B2"}
"""The linear model that carries features in each direction."""

Decode = Callable[[Tensor], Tensor]
"""From features (N, G, G, C) to patches (N, G * G, P)."""


def continue_map(
    z: Tensor, generators: Mapping[str, Tensor], margin: int, *, stride: int
) -> Tensor:
    """Carries the features of an image beyond its frame on all sides.

    The feature at a position outside is that of a position inside, carried over the distance
    between them, which is the least multiple of ``stride`` that reaches inside. With the offset of
    the generators' scale these are the steps that were learned; with 1 everything outside comes
    from the outermost features, over every distance.

    Args:
        z: (N, G, G, C).
        generators: A1, A2, B1 and B2 by name, (C, C), per side of the image.
        margin: positions on each side of the image.
        stride: positions, at least 1 and at most G.

    Returns:
        (N, G + 2 margin, G + 2 margin, C), like z, in whose frame it is z itself.

    Raises:
        ValueError: a ``stride`` or a ``margin`` that cannot be.
    """
    size = z.shape[1]
    if not 1 <= stride <= size or margin < 0:
        raise ValueError(
            f"the stride is 1 to {size} positions, not {stride}, and the margin not below 0, "
            f"which {margin} is"
        )
    along = {way: generators[name] for way, name in GOES.items()}
    tall = _extend(z.transpose(1, 2), along["down"], along["up"], margin, stride)
    wide = _extend(tall.transpose(1, 2), along["right"], along["left"], margin, stride)
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
    starts = [_find_window(place, length, size) for place in range(length)]
    decoded: Tensor | None = None
    for row, column in product(sorted(set(starts)), sorted(set(starts))):
        window = z[:, row : row + size, column : column + size]
        patches = decode(window).unflatten(1, (size, size))
        if decoded is None:
            decoded = patches.new_zeros(len(z), length, length, patches.shape[-1])
        rows = [place for place in range(length) if starts[place] == row]
        columns = [place for place in range(length) if starts[place] == column]
        # Those of one window lie side by side.
        inside = patches[:, rows[0] - row : rows[-1] - row + 1]
        inside = inside[:, :, columns[0] - column : columns[-1] - column + 1]
        decoded[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] = inside
    assert decoded is not None  # a map has positions
    return decoded


def frame_image(
    patches: Tensor, predicted: Tensor, restore: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Puts the image itself into the frame of what was decoded, on the scale of its pixels.

    Beyond the frame no patch has a mean and a deviation of its own: every one is given those of
    all patches of the image, on the average, so that nothing of the layout is lent to it.

    Args:
        patches: (N, G, G, P), of the image.
        predicted: (N, L, L, P), decoded.
        restore: from predictions (N, K, P) and true patches (N, K, P), whose statistics it takes,
            to pixels, as of ``ReconstructionLoss``.

    Returns:
        (N, L, L, P), float32.
    """
    size, length = patches.shape[1], predicted.shape[1]
    typical = _typical_patch(patches).expand(-1, length * length, -1)
    made = restore(predicted.flatten(1, 2), typical).unflatten(1, (length, length))
    start = (length - size) // 2
    made[:, start : start + size, start : start + size] = patches
    return made


def measure_growth(
    z: Tensor, generators: Mapping[str, Tensor], distances: list[float]
) -> dict[str, list[float]]:
    """Returns how features grow: the root mean square of their norms over that at distance 0.

    Args:
        z: (..., C).
        generators: as of ``continue_map``.
        distances: in sides of the image.

    Returns:
        For "right", "left", "down" and "up", a number for each distance.
    """
    norm = float(z.double().norm())
    return {
        way: [
            float(apply(exponential(generators[name], x), z).real.norm()) / norm for x in distances
        ]
        for way, name in GOES.items()
    }


def measure_error(z: Tensor, generators: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Returns how far carried features are from those that the encoder gives where they come to.

    Inside the frame both are known: z(p) carried over x, and z(p + x).

    Args:
        z: (N, G, G, C).
        generators: as of ``continue_map``.

    Returns:
        For "right", "left", "down" and "up", for distances of 1 to G - 1 positions, the norm of
        all errors over the norm of all true deviations from the mean feature: 1 is no better than
        to know the mean of the map.
    """
    size = z.shape[1]
    z = z.double()
    mean = z.mean(dim=(0, 1, 2))
    found: dict[str, list[float]] = {}
    for way, name in GOES.items():
        # Along the last but one axis, towards higher places.
        maps = z if way in ("right", "left") else z.transpose(1, 2)
        maps = maps if way in ("right", "down") else maps.flip(2)
        errors = []
        for steps in range(1, size):
            carried = apply(exponential(generators[name], steps / size), maps[:, :, :-steps]).real
            true = maps[:, :, steps:]
            errors.append(float((carried - true).norm() / (true - mean).norm()))
        found[way] = errors
    return found


def _typical_patch(patches: Tensor) -> Tensor:
    """Returns (N, 1, P), patches with the mean and the mean deviation of (N, G, G, P)."""
    mean = patches.mean(dim=-1).mean(dim=(1, 2)).view(-1, 1, 1)
    deviation = patches.std(dim=-1).mean(dim=(1, 2)).view(-1, 1, 1)
    ramp = torch.linspace(-1, 1, patches.shape[-1], device=patches.device)
    return mean + deviation * ramp / ramp.std()


def _extend(z: Tensor, forth: Tensor, back: Tensor, margin: int, stride: int) -> Tensor:
    """Carries (N, K, G, C) along G, ``forth`` towards higher places and ``back`` to lower ones."""
    after = _carry_beyond(z, forth, margin, stride)
    before = _carry_beyond(z.flip(2), back, margin, stride).flip(2)
    wide = torch.promote_types(before.dtype, after.dtype)
    return torch.cat([before.to(wide), z.to(wide), after.to(wide)], dim=2)


def _carry_beyond(z: Tensor, a: Tensor, margin: int, stride: int) -> Tensor:
    """Returns the features of ``margin`` positions behind the last of (N, K, G, C)."""
    size = z.shape[2]
    blocks = [z[:, :, :0].to(torch.promote_types(a.dtype, z.dtype))]
    for start in range(0, margin, stride):
        steps = start + stride  # from the last ``stride`` positions to those behind ``start``
        source = z[:, :, size - stride : size - stride + min(stride, margin - start)]
        blocks.append(apply(exponential(a, steps / size), source))
    return torch.cat(blocks, dim=2)


def _find_window(place: int, length: int, size: int) -> int:
    """Returns where the window starts that decodes a place of an axis."""
    middle = (length - size) // 2
    beyond = max(middle - place, place - (middle + size - 1), 0)
    half = max(size // 2, 1)
    shift = min(math.ceil(beyond / half) * half, middle)
    return middle + shift if place > middle else middle - shift
