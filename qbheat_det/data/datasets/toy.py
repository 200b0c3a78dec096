# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The built-in toy set: drawn on first use, for the quick start and for tests.

Each set is a folder with ``annotations.json`` (COCO format) and ``images/``. ``bbox`` is tight
around the *visible* pixels, ``area`` counts them, and ``segmentation`` lists polygons that
rasterise to exactly these pixels. Category ids have holes, as COCO's have.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import load_coco_json
from numpy.typing import NDArray

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import file_lock

from .toy_scenes import CLASS_NAMES, Scene, sample_scene

CATEGORY_IDS = (1, 2, 4, 7, 9, 12)  # in the order of CLASS_NAMES
ANNOTATION_FILE = "annotations.json"

# To be raised with every change of the images or the annotations: old caches are then unused.
_GENERATOR_VERSION = 2
_JPEG_QUALITY = 95


@dataclass(frozen=True)
class ToySpec:
    """What determines a set of square images, down to the byte; names make sets differ."""

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


def get_cache_dir() -> Path:
    """Returns ``$QBHEAT_CACHE``, or ``qbheat_det`` in the user's cache folder (XDG)."""
    if os.environ.get("QBHEAT_CACHE"):
        return Path(os.environ["QBHEAT_CACHE"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "qbheat_det"


def prepare_toy_set(spec: ToySpec, cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Returns the folder of a toy set, drawn now if the cache does not hold it.

    Processes that ask at the same time wait for the first of them. A set appears under its name
    only when it is complete. Raises a ``UserError`` if the cache cannot be written.
    """
    cache = get_cache_dir() if cache_dir is None else Path(cache_dir)
    folder = cache / spec.folder_name
    if folder.is_dir():
        return folder
    try:
        with file_lock(f"{folder}.lock"):
            if not folder.is_dir():
                partial = Path(tempfile.mkdtemp(prefix=f".{spec.folder_name}.", dir=cache))
                try:
                    _draw(spec, partial)
                    partial.chmod(0o755)  # mkdtemp's folder is its owner's alone
                    os.replace(partial, folder)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise UserError(f"cannot write to '{cache}' (QBHEAT_CACHE): {error}") from error
    return folder


def register_toy_set(
    name: str, spec: ToySpec, cache_dir: str | os.PathLike[str] | None = None
) -> None:
    """Registers a toy set with Detectron2; nothing is drawn before it is first loaded."""
    cache = get_cache_dir() if cache_dir is None else Path(cache_dir)
    folder = cache / spec.folder_name
    json_file, image_root = str(folder / ANNOTATION_FILE), str(folder / "images")

    def load() -> list[dict[str, Any]]:
        prepare_toy_set(spec, cache)
        return load_coco_json(json_file, image_root, name)

    DatasetCatalog.register(name, load)
    MetadataCatalog.get(name).set(
        json_file=json_file,
        image_root=image_root,
        evaluator_type="coco",
        drawn_on_first_use=True,  # so that no one misses the json_file before
        thing_classes=list(CLASS_NAMES),
        thing_dataset_id_to_contiguous_id={id_: i for i, id_ in enumerate(CATEGORY_IDS)},
    )


def sample_scenes(spec: ToySpec) -> Iterator[Scene]:
    """Yields the scenes of a set in the order of its images."""
    split = int.from_bytes(hashlib.sha256(spec.name.encode()).digest()[:4], "big")
    for index in range(spec.num_images):
        # A generator of its own makes an image independent of how many come before it.
        yield sample_scene(np.random.default_rng([spec.seed, split, index]), spec.image_size)


def annotate(scene: Scene) -> list[dict[str, Any]]:
    """Returns a scene's objects as COCO annotations, still without ``id`` and ``image_id``."""
    annotations: list[dict[str, Any]] = []
    for index, item in enumerate(scene.items):
        if item.label < 0:
            continue
        mask = scene.owner == index
        columns, rows = np.flatnonzero(mask.any(0)), np.flatnonzero(mask.any(1))
        left, top = int(columns[0]), int(rows[0])
        annotations.append(
            {
                "category_id": CATEGORY_IDS[item.label],
                "bbox": [left, top, int(columns[-1]) + 1 - left, int(rows[-1]) + 1 - top],
                "area": int(mask.sum()),
                "iscrowd": 0,
                "segmentation": trace_polygons(mask),
            }
        )
    return annotations


def trace_polygons(mask: NDArray[np.bool_]) -> list[list[int]]:
    """Returns polygons [x, y, …] along the pixel borders of a mask (H, W), holes by slits."""
    # Contours run through pixel centres. At twice the size, the two centres 2x and 2x + 1 of
    # a pixel tell its left border x from its right border x + 1: both are (c + 1) // 2.
    doubled = np.repeat(np.repeat(mask.astype(np.uint8), 2, axis=0), 2, axis=1)
    contours, hierarchy = cv2.findContours(doubled, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
    loops = [_without_midpoints((contour[:, 0].astype(np.int64) + 1) // 2) for contour in contours]
    polygons = {i: loop for i, loop in enumerate(loops) if hierarchy[0][i][3] < 0}
    for i, loop in enumerate(loops):
        parent = int(hierarchy[0][i][3])
        if parent >= 0:
            # There and back along the same slit, which therefore encloses nothing.
            outer = polygons[parent]
            polygons[parent] = np.concatenate([outer, outer[:1], loop, loop[:1]])
    return [polygon.ravel().tolist() for polygon in polygons.values()]


def _without_midpoints(loop: NDArray[np.int64]) -> NDArray[np.int64]:
    """Drops repeated points of a closed loop and those inside a straight line, (P, 2)."""
    loop = loop[(loop != np.roll(loop, 1, axis=0)).any(axis=1)]
    before, after = loop - np.roll(loop, 1, axis=0), np.roll(loop, -1, axis=0) - loop
    corners: NDArray[np.bool_] = before[:, 0] * after[:, 1] != before[:, 1] * after[:, 0]
    return loop[corners]


def _draw(spec: ToySpec, folder: Path) -> None:
    (folder / "images").mkdir()
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for image_id, scene in enumerate(sample_scenes(spec), start=1):
        file_name = f"{image_id:06d}.jpg"
        bgr = scene.render()[..., ::-1]
        encoded = cv2.imencode(".jpg", bgr, [cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY])[1]
        (folder / "images" / file_name).write_bytes(encoded.tobytes())
        size = spec.image_size
        images.append({"id": image_id, "file_name": file_name, "height": size, "width": size})
        for annotation in annotate(scene):
            annotations.append({"id": len(annotations) + 1, "image_id": image_id, **annotation})
    categories = [
        {"id": id_, "name": name} for id_, name in zip(CATEGORY_IDS, CLASS_NAMES, strict=True)
    ]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (folder / ANNOTATION_FILE).write_text(json.dumps(content), encoding="utf-8")
