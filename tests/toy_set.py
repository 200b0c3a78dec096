# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Small data sets of drawn shapes, with boxes and masks in COCO's format."""

import json
import zlib

import numpy as np
from PIL import Image
from pycocotools import mask as coco_mask

CATEGORY_IDS = (1, 2, 4, 7, 9, 12)  # with gaps, as in COCO


def draw_toy_set(folder, num_images, *, name="tiny", size=64, seed=0):
    """Draws a set, ``annotations.json`` and ``images/``, in a folder below ``folder``.

    Equal parameters give equal files.
    """
    own = folder / f"{name}_{num_images}_{seed}"
    if own.is_dir():
        return own
    (own / "images").mkdir(parents=True)
    seed = zlib.crc32(name.encode()), seed
    images, annotations = [], []
    for number in range(1, num_images + 1):
        file_name = f"{number:06d}.jpg"
        pixels, objects = _draw(np.random.default_rng([*seed, number]), size)
        Image.fromarray(pixels).save(own / "images" / file_name, quality=95)
        images.append({"id": number, "file_name": file_name, "height": size, "width": size})
        for entry in objects:
            annotations.append({"id": len(annotations) + 1, "image_id": number, **entry})
    categories = [{"id": id_, "name": f"shape {id_}"} for id_ in CATEGORY_IDS]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (own / "annotations.json").write_text(json.dumps(content), encoding="utf-8")
    return own


def _draw(rng, size):
    """Returns pixels (S, S, 3), and one to four annotations without ids. Objects may overlap."""
    pixels = rng.integers(0, 256, (size, size, 3), dtype=np.uint8) // 8 + 100
    y, x = np.mgrid[:size, :size]
    objects = []
    for _ in range(rng.integers(1, 5)):
        label = int(rng.integers(len(CATEGORY_IDS)))
        radius = rng.uniform(0.08, 0.25) * size
        middle_x, middle_y = rng.uniform(0.3, 0.7, 2) * size
        # The classes differ in color and in how round they are.
        distance = np.abs(x - middle_x) ** (label + 1) + np.abs(y - middle_y) ** (label + 1)
        mask = distance < radius ** (label + 1)
        pixels[mask] = rng.integers(0, 40, 3) + np.array([40 * label, 200 - 30 * label, 100])
        columns, rows = np.flatnonzero(mask.any(0)), np.flatnonzero(mask.any(1))
        left, top = int(columns[0]), int(rows[0])
        rle = coco_mask.encode(np.asfortranarray(mask, dtype=np.uint8))
        objects.append(
            {
                "category_id": CATEGORY_IDS[label],
                "bbox": [left, top, int(columns[-1]) + 1 - left, int(rows[-1]) + 1 - top],
                "area": int(mask.sum()),
                "iscrowd": 0,
                "segmentation": {"size": [size, size], "counts": rle["counts"].decode()},
            }
        )
    return pixels, objects
