# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Images of the toy set: textured shapes of six classes before a cluttered background.

Only the outline depends on the class: colours, textures, sizes and rotations are drawn alike for
all of them, and bars and blobs of no class are drawn with the same textures. Outlines are
hard (a pixel belongs to one object or to none), so that masks, areas and boxes are exact.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import cv2
import numpy as np
from numpy.typing import NDArray

BoolArray = NDArray[np.bool_]
ByteArray = NDArray[np.uint8]
FloatArray = NDArray[np.float64]

# An object is painted only if this share of it stays in view, outside the image and behind
# later objects counted as hidden. Nothing in an image is therefore left without annotation.
MIN_VISIBLE = 0.5
MIN_PIXELS = 24
SIZE_RANGE = (0.11, 0.55)  # diameter of an object relative to the side of the image
MAX_TILT = 0.5  # radians: a square stays a square and not a diamond


def _triangle(u: FloatArray, v: FloatArray) -> BoolArray:
    sides = [v, -0.5 * v + 0.8660254 * u, -0.5 * v - 0.8660254 * u]
    return np.asarray(np.maximum.reduce(sides) < 0.5)


def _star(u: FloatArray, v: FloatArray) -> BoolArray:
    # Between a tip at radius 1 and a notch at radius 0.42, 36 degrees apart, the outline is
    # a straight line; ``angle`` is the distance from the nearest tip.
    radius, angle = np.hypot(u, v), np.arctan2(v, u)
    angle = np.abs((angle + np.pi / 5) % (2 * np.pi / 5) - np.pi / 5)
    notch_u, notch_v = 0.42 * np.cos(np.pi / 5), 0.42 * np.sin(np.pi / 5)
    across = (1.0 - notch_u) * np.sin(angle) + notch_v * np.cos(angle)
    return np.asarray(radius * across < notch_v)


def _cross(u: FloatArray, v: FloatArray) -> BoolArray:
    short, long = np.minimum(np.abs(u), np.abs(v)), np.maximum(np.abs(u), np.abs(v))
    return (short < 0.3) & (long < 0.95)


def _blob(u: FloatArray, v: FloatArray) -> BoolArray:
    radius, angle = np.hypot(u, v), np.arctan2(v, u)
    return radius < 0.6 + 0.2 * np.sin(2 * angle + 1.0) + 0.18 * np.cos(3 * angle)


# (u, v) in [-1, 1], right and down, of the unrotated shape -> inside or not.
OBJECTS: dict[str, Callable[[FloatArray, FloatArray], BoolArray]] = {
    "disc": lambda u, v: np.asarray(np.hypot(u, v) < 1.0),
    "square": lambda u, v: np.maximum(np.abs(u), np.abs(v)) < 0.75,
    "triangle": _triangle,
    "star": _star,
    "ring": lambda u, v: np.asarray(np.abs(np.hypot(u, v) - 0.75) < 0.25),
    "cross": _cross,
}
DISTRACTORS: dict[str, Callable[[FloatArray, FloatArray], BoolArray]] = {
    "bar": lambda u, v: (np.abs(u) < 1.0) & (np.abs(v) < 0.12),
    "blob": _blob,
}
CLASS_NAMES = tuple(OBJECTS)


@dataclass(frozen=True)
class Item:
    """One painted shape; ``label`` is -1 for a distractor.

    ``top`` and ``left`` are where the patch's first pixel lies in the image and may be negative;
    ``mask`` (P, P) is the whole shape, also where it is hidden; ``texture`` (P, P, 3) is RGB.
    """

    label: int
    top: int
    left: int
    mask: BoolArray
    texture: ByteArray


@dataclass
class Scene:
    """A background (S, S, 3), noise that is added last, and the shapes, first painted first.

    ``owner`` (S, S) is the index of the item that a pixel shows, or -1.
    """

    background: ByteArray
    noise: NDArray[np.int16]
    items: list[Item] = field(default_factory=list)
    owner: NDArray[np.int16] = field(init=False)

    def __post_init__(self) -> None:
        self.owner = np.full(self.background.shape[:2], -1, dtype=np.int16)

    def add(self, item: Item) -> bool:
        """Adds a shape on top, unless it or an object below it would be hidden too much."""
        image_part, patch_part = _overlap(item, len(self.owner))
        mask = item.mask[patch_part]
        if item.label >= 0 and not _in_view(int(mask.sum()), item):
            return False
        covered = self.owner[image_part][mask]
        for index in np.unique(covered[covered >= 0]):
            below = self.items[index]
            left_over = int((self.owner == index).sum()) - int((covered == index).sum())
            if below.label >= 0 and not _in_view(left_over, below):
                return False
        self.owner[image_part][mask] = len(self.items)
        self.items.append(item)
        return True

    def render(self) -> ByteArray:
        """Returns the image, (S, S, 3) RGB."""
        image = self.background.copy()
        for item in self.items:
            image_part, patch_part = _overlap(item, len(image))
            mask = item.mask[patch_part]
            image[image_part][mask] = item.texture[patch_part][mask]
        return np.clip(image + self.noise, 0, 255).astype(np.uint8)


def sample_scene(rng: np.random.Generator, size: int) -> Scene:
    """Draws a random scene of ``size`` x ``size`` pixels."""
    amplitude = int(rng.integers(2, 13))
    noise = rng.integers(-amplitude, amplitude + 1, size=(size, size, 3), dtype=np.int16)
    scene = Scene(background=_background(rng, size), noise=noise)
    distractors = list(DISTRACTORS.values())
    for _ in range(rng.integers(0, 3)):
        shape = distractors[rng.integers(len(distractors))]
        scene.add(_sample_item(rng, scene.background, -1, shape, rng.uniform(0, size, 2)))

    kind = rng.random()
    crowded = kind > 0.88
    count = 0 if kind < 0.06 else int(rng.integers(6, 10) if crowded else rng.integers(1, 5))
    middle = rng.uniform(0.3, 0.7, 2) * size
    for _ in range(count):
        label = int(rng.integers(len(CLASS_NAMES)))
        for _attempt in range(4):
            spread = rng.normal(0, 0.2 * size, 2)
            centre = middle + spread if crowded else rng.uniform(0.05, 0.95, 2) * size
            shape = OBJECTS[CLASS_NAMES[label]]
            if scene.add(_sample_item(rng, scene.background, label, shape, centre)):
                break
    if rng.random() < 0.3:
        centre = rng.uniform(0, size, 2)
        scene.add(_sample_item(rng, scene.background, -1, DISTRACTORS["bar"], centre))
    return scene


def _sample_item(
    rng: np.random.Generator,
    background: ByteArray,
    label: int,
    shape: Callable[[FloatArray, FloatArray], BoolArray],
    centre: FloatArray,
) -> Item:
    """Draws size, aspect, rotation and texture of a shape around ``centre`` (y, x)."""
    size = len(background)
    low, high = SIZE_RANGE
    diameter = size * low * (high / low) ** rng.beta(1.7, 1.5)
    side = int(np.ceil(diameter * 1.15)) + 2
    angle = rng.uniform(-MAX_TILT, MAX_TILT)
    aspect = rng.uniform(0.87, 1.15)
    axis = (np.arange(side) - (side - 1) / 2) / (diameter / 2)
    x, y = axis[None, :], axis[:, None]
    u = (x * np.cos(angle) + y * np.sin(angle)) / aspect
    v = (y * np.cos(angle) - x * np.sin(angle)) * aspect
    behind = background[tuple(np.clip(centre, 0, size - 1).astype(int))]
    top, left = np.round(centre - side / 2).astype(int)
    return Item(label, int(top), int(left), shape(u, v), _texture(rng, side, behind))


def _texture(rng: np.random.Generator, side: int, behind: ByteArray) -> ByteArray:
    """Draws a (side, side, 3) texture whose main colour differs from the one behind it."""
    main = rng.integers(0, 256, 3)
    for _ in range(8):
        if np.abs(main - behind.astype(np.int64)).sum() >= 180:
            break
        main = rng.integers(0, 256, 3)
    second = np.clip(main + rng.integers(-70, 71, 3), 0, 255)
    angle, phase = rng.uniform(0, 2 * np.pi, 2)
    wave = 2 * np.pi / rng.uniform(4, 12)
    axis = np.arange(side)
    along = axis[None, :] * np.cos(angle) + axis[:, None] * np.sin(angle)
    across = axis[:, None] * np.cos(angle) - axis[None, :] * np.sin(angle)
    kind = rng.integers(5)
    if kind == 0:
        weight: FloatArray = np.zeros((side, side))
    elif kind == 1:  # stripes
        weight = (np.sin(wave * along + phase) > 0).astype(np.float64)
    elif kind == 2:  # checks
        weight = (np.sin(wave * along + phase) * np.sin(wave * across) > 0).astype(np.float64)
    elif kind == 3:  # gradient
        weight = (along - along.min()) / np.ptp(along)
    else:
        cells = max(2, side // int(rng.integers(2, 6)))
        weight = np.asarray(cv2.resize(rng.random((cells, cells)), (side, side)), np.float64)
    return np.asarray(main + weight[..., None] * (second - main), dtype=np.uint8)


def _background(rng: np.random.Generator, size: int) -> ByteArray:
    """Draws slow changes of colour with thin lines over them, (size, size, 3)."""
    cells = int(rng.integers(2, 9))
    contrast = rng.uniform(10, 50)
    coarse = rng.uniform(30, 225, 3) + contrast * rng.uniform(-1, 1, (cells, cells, 3))
    smooth = cv2.resize(coarse, (size, size), interpolation=cv2.INTER_CUBIC)
    image: ByteArray = np.clip(smooth, 0, 255).astype(np.uint8)
    for _ in range(rng.integers(0, 5)):
        x1, y1, x2, y2 = rng.integers(-size // 4, size + size // 4, 4).tolist()
        colour = rng.integers(0, 256, 3).tolist()
        cv2.line(image, (x1, y1), (x2, y2), colour, int(rng.integers(1, 3)))
    return image


def _in_view(pixels: int, item: Item) -> bool:
    return pixels >= max(MIN_PIXELS, MIN_VISIBLE * int(item.mask.sum()))


def _overlap(item: Item, size: int) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
    """Returns where the patch lies in the image, and which part of the patch that is."""
    side = len(item.mask)
    image_part, patch_part = [], []
    for start in (item.top, item.left):
        low, high = min(max(start, 0), size), min(max(start + side, 0), size)
        image_part.append(slice(low, high))
        patch_part.append(slice(low - start, high - start))
    return (image_part[0], image_part[1]), (patch_part[0], patch_part[1])
