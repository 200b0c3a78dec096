# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The built-in toy data set for the quick start and tests, which is generated at first use.

Each set is a folder with ``annotations.json`` (COCO format) and ``images/``. An image shows
textured shapes of six classes on a cluttered background. Only the outline depends on the class.
Bars and blobs are distractors without a class or annotation.

Annotations are exact, because every pixel belongs to at most one object. ``bbox`` encloses the
visible pixels tightly, ``area`` is their number, and ``segmentation`` is their RLE.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import load_coco_json
from numpy.typing import NDArray
from pycocotools import mask as coco_mask

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import file_lock, get_cache_dir

BoolArray = NDArray[np.bool_]
ByteArray = NDArray[np.uint8]
FloatArray = NDArray[np.float64]
Shape = Callable[[FloatArray, FloatArray], BoolArray]

# Increase this number when the images or annotations change, so that old caches are not used.
_GENERATOR_VERSION = 3
_JPEG_QUALITY = 95
# Objects are drawn only if this share of each object stays visible, that is, inside the image and
# not covered by later objects. Therefore, every object of a class has an annotation.
_MIN_VISIBLE = 0.5
_MIN_PIXELS = 24
_SIZE_RANGE = (0.11, 0.55)  # diameter of an object relative to the side of the image
_MAX_TILT = 0.5  # radians; small, so that a square never looks like a diamond


@dataclass(frozen=True)
class ToySpec:
    """The parameters of a toy set. Equal parameters give bit-identical square images."""

    name: str
    num_images: int
    image_size: int = 128
    seed: int = 0

    @property
    def folder_name(self) -> str:
        content = json.dumps([_GENERATOR_VERSION, _JPEG_QUALITY, asdict(self)], sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()[:10]
        return f"toy_{self.name}_{self.num_images}x{self.image_size}px_{digest}"


TOY_SETS = {
    "qbheat_toy_train": ToySpec(name="train", num_images=2400),
    "qbheat_toy_val": ToySpec(name="val", num_images=400),
}


def prepare_toy_set(spec: ToySpec, cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Returns the folder of a toy set, and generates the set if it is not in the cache.

    The folder is created atomically, and concurrent processes wait until it is complete.

    Raises:
        UserError: the cache cannot be written.
    """
    cache = get_cache_dir() if cache_dir is None else Path(cache_dir)
    folder = cache / spec.folder_name
    if folder.is_dir():
        return folder
    try:
        with file_lock(f"{folder}.lock"):
            if not folder.is_dir():
                with tempfile.TemporaryDirectory(prefix=".toy_", dir=cache) as partial:
                    _draw(spec, Path(partial, "set"))
                    os.replace(Path(partial, "set"), folder)
    except OSError as error:
        raise UserError(f"cannot write to '{cache}' (QBHEAT_CACHE): {error}") from error
    return folder


def register_toy_set(name: str, spec: ToySpec) -> None:
    """Registers a toy set with Detectron2. It is generated when it is first loaded."""
    cache = get_cache_dir()
    folder = cache / spec.folder_name
    json_file, image_root = str(folder / "annotations.json"), str(folder / "images")

    def load() -> list[dict[str, Any]]:
        prepare_toy_set(spec, cache)
        return load_coco_json(json_file, image_root, name)

    DatasetCatalog.register(name, load)
    MetadataCatalog.get(name).set(
        json_file=json_file,
        image_root=image_root,
        evaluator_type="coco",
        drawn_on_first_use=True,  # json_file may not exist yet
        thing_classes=list(CLASS_NAMES),
        thing_dataset_id_to_contiguous_id={id_: i for i, id_ in enumerate(CATEGORY_IDS)},
    )


def _draw(spec: ToySpec, folder: Path) -> None:
    (folder / "images").mkdir(parents=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for image_id, scene in enumerate(sample_scenes(spec), start=1):
        file_name, size = f"{image_id:06d}.jpg", spec.image_size
        encoded = cv2.imencode(".jpg", scene.render(), [cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY])[1]
        (folder / "images" / file_name).write_bytes(encoded.tobytes())
        images.append({"id": image_id, "file_name": file_name, "height": size, "width": size})
        for annotation in scene.annotate():
            annotations.append({"id": len(annotations) + 1, "image_id": image_id, **annotation})
    categories = [
        {"id": id_, "name": name} for id_, name in zip(CATEGORY_IDS, CLASS_NAMES, strict=True)
    ]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "annotations.json").write_text(json.dumps(content), encoding="utf-8")


def sample_scenes(spec: ToySpec) -> Iterator["Scene"]:
    """Yields the scenes of a set in the order of its images."""
    split = int.from_bytes(hashlib.sha256(spec.name.encode()).digest()[:4], "big")
    for index in range(spec.num_images):
        # Each image has its own random generator, so images do not depend on each other.
        yield Scene(np.random.default_rng([spec.seed, split, index]), spec.image_size)


class Scene:
    """A random image of S x S pixels, drawn from back to front.

    ``owner`` (S, S) has the index of the visible shape at each pixel, or -1. ``labels`` has the
    class index of each shape, or -1 for shapes without a class. ``areas`` has the number of pixels
    of each shape, including hidden pixels.
    """

    def __init__(self, rng: np.random.Generator, size: int) -> None:
        self._rng = rng
        amplitude = int(rng.integers(2, 13))
        self._noise = rng.integers(-amplitude, amplitude + 1, (size, size, 3), dtype=np.int16)
        self._background = _sample_background(rng, size)
        self._image = self._background.copy()
        self.owner = np.full((size, size), -1, dtype=np.int16)
        self.labels: list[int] = []
        self.areas: list[int] = []
        for _ in range(rng.integers(0, 3)):
            shape = DISTRACTORS[rng.integers(len(DISTRACTORS))]
            self._add(-1, shape, rng.uniform(0, size, 2))

        kind = rng.random()
        is_crowded = kind > 0.88
        count = 0 if kind < 0.06 else int(rng.integers(6, 10) if is_crowded else rng.integers(1, 5))
        middle = rng.uniform(0.3, 0.7, 2) * size
        for _ in range(count):
            label = int(rng.integers(len(CLASS_NAMES)))
            for _attempt in range(4):
                spread = rng.normal(0, 0.2 * size, 2)
                centre = middle + spread if is_crowded else rng.uniform(0.05, 0.95, 2) * size
                if self._add(label, OBJECTS[CLASS_NAMES[label]], centre):
                    break
        if rng.random() < 0.3:
            self._add(-1, _bar, rng.uniform(0, size, 2))

    def render(self) -> ByteArray:
        """Returns the image (S, S, 3) in BGR order."""
        return np.clip(self._image + self._noise, 0, 255).astype(np.uint8)[..., ::-1]

    def annotate(self) -> list[dict[str, Any]]:
        """Returns the objects as COCO annotations without ``id`` and ``image_id``."""
        annotations: list[dict[str, Any]] = []
        for index, label in enumerate(self.labels):
            if label < 0:
                continue
            mask = self.owner == index
            columns, rows = np.flatnonzero(mask.any(0)), np.flatnonzero(mask.any(1))
            left, top = int(columns[0]), int(rows[0])
            rle = coco_mask.encode(np.asfortranarray(mask, dtype=np.uint8))
            annotations.append(
                {
                    "category_id": CATEGORY_IDS[label],
                    "bbox": [left, top, int(columns[-1]) + 1 - left, int(rows[-1]) + 1 - top],
                    "area": int(mask.sum()),
                    "iscrowd": 0,
                    "segmentation": {"size": list(mask.shape), "counts": rle["counts"].decode()},
                }
            )
        return annotations

    def _add(self, label: int, shape: Shape, centre: FloatArray) -> bool:
        """Draws a shape at ``centre`` (y, x), unless it or an object behind it would be too hidden.

        Size, aspect ratio, rotation and texture are random. Returns whether the shape was drawn.
        """
        rng, size = self._rng, len(self.owner)
        low, high = _SIZE_RANGE
        diameter = size * low * (high / low) ** rng.beta(1.7, 1.5)
        side = int(np.ceil(diameter * 1.15)) + 2
        angle, aspect = rng.uniform(-_MAX_TILT, _MAX_TILT), rng.uniform(0.87, 1.15)
        axis = (np.arange(side) - (side - 1) / 2) / (diameter / 2)
        x, y = axis[None, :], axis[:, None]
        u = (x * np.cos(angle) + y * np.sin(angle)) / aspect
        v = (y * np.cos(angle) - x * np.sin(angle)) * aspect
        behind = self._background[tuple(np.clip(centre, 0, size - 1).astype(int))]
        top, left = np.round(centre - side / 2).astype(int)
        mask, texture = shape(u, v), _sample_texture(rng, side, behind)

        pixels = np.argwhere(mask)
        places = pixels + np.array([top, left])
        is_inside = ((places >= 0) & (places < size)).all(1)
        rows, columns = places[is_inside].T
        covered = self.owner[rows, columns]
        if label >= 0 and not _is_visible(len(rows), len(pixels)):
            return False
        for index in np.unique(covered[covered >= 0]):
            left_over = int((self.owner == index).sum()) - int((covered == index).sum())
            if self.labels[index] >= 0 and not _is_visible(left_over, self.areas[index]):
                return False
        self.owner[rows, columns] = len(self.labels)
        self._image[rows, columns] = texture[tuple(pixels[is_inside].T)]
        self.labels.append(label)
        self.areas.append(len(pixels))
        return True


def _is_visible(pixels: int, area: int) -> bool:
    return pixels >= max(_MIN_PIXELS, _MIN_VISIBLE * area)


def _sample_texture(rng: np.random.Generator, side: int, behind: ByteArray) -> ByteArray:
    """Samples a texture (side, side, 3) whose main color differs from the pixels ``behind``."""
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


def _sample_background(rng: np.random.Generator, size: int) -> ByteArray:
    """Samples a background (size, size, 3) with smooth changes of color and thin lines."""
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


# A shape returns whether points (u, v) are inside it. Before rotation, u points right and v down.
def _triangle(u: FloatArray, v: FloatArray) -> BoolArray:
    sides = [v, -0.5 * v + 0.8660254 * u, -0.5 * v - 0.8660254 * u]
    return np.asarray(np.maximum.reduce(sides) < 0.5)


def _star(u: FloatArray, v: FloatArray) -> BoolArray:
    # The outline of a star is a straight line from each tip (radius 1) to the next notch (radius
    # 0.42), which is 36 degrees away. ``angle`` is the angular distance to the nearest tip.
    radius, angle = np.hypot(u, v), np.arctan2(v, u)
    angle = np.abs((angle + np.pi / 5) % (2 * np.pi / 5) - np.pi / 5)
    notch_u, notch_v = 0.42 * np.cos(np.pi / 5), 0.42 * np.sin(np.pi / 5)
    across = (1.0 - notch_u) * np.sin(angle) + notch_v * np.cos(angle)
    return np.asarray(radius * across < notch_v)


def _cross(u: FloatArray, v: FloatArray) -> BoolArray:
    short, long = np.minimum(np.abs(u), np.abs(v)), np.maximum(np.abs(u), np.abs(v))
    return (short < 0.3) & (long < 0.95)


def _bar(u: FloatArray, v: FloatArray) -> BoolArray:
    return (np.abs(u) < 1.0) & (np.abs(v) < 0.12)


def _blob(u: FloatArray, v: FloatArray) -> BoolArray:
    radius, angle = np.hypot(u, v), np.arctan2(v, u)
    return radius < 0.6 + 0.2 * np.sin(2 * angle + 1.0) + 0.18 * np.cos(3 * angle)


OBJECTS: dict[str, Shape] = {
    "disc": lambda u, v: np.asarray(np.hypot(u, v) < 1.0),
    "square": lambda u, v: np.maximum(np.abs(u), np.abs(v)) < 0.75,
    "triangle": _triangle,
    "star": _star,
    "ring": lambda u, v: np.asarray(np.abs(np.hypot(u, v) - 0.75) < 0.25),
    "cross": _cross,
}
DISTRACTORS = (_bar, _blob)
CLASS_NAMES = tuple(OBJECTS)
CATEGORY_IDS = (1, 2, 4, 7, 9, 12)  # with gaps, as in COCO
