# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Statistics, warnings and errors of datasets as text, and augmented training images."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from detectron2.config import CfgNode
from detectron2.data.detection_utils import convert_image_to_rgb
from detectron2.structures import BoxMode
from numpy.typing import NDArray
from tabulate import tabulate  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.core.errors import UserError
from qbheat_det.data import build_mapper, preserved_randomness, seed_place
from qbheat_det.data.checks import DataError

from .box_drawing import RGBImage, add_heading, draw_instances, tile_images
from .datasets import Inspection, list_objects

_TINY_SIDE = 8  # pixels at the network's input: one cell of the finest map of most heads
_CLASSES_SHOWN, _ERRORS_SHOWN = 40, 10  # errors: of each kind
_COCO_SIZES = (32.0, 96.0)  # sides of squares between small, medium and large boxes


def format_report(
    inspections: Sequence[Inspection],
    errors: Sequence[DataError],
    warnings: Sequence[str],
    cfg: CfgNode,
) -> str:
    """Returns statistics, boxes of each class, warnings and errors of all datasets as text."""
    columns = {one.source.name: measure(one, cfg) for one in inspections}
    names = list(next(iter(columns.values())))
    rows = [(name, *(own[name] for own in columns.values())) for name in names]
    counts = [one.boxes_per_class for one in inspections]
    total: dict[str, int] = defaultdict(int)
    for own in counts:
        for name, number in own.items():
            total[name] += number
    order = sorted(total, key=lambda name: -total[name])[:_CLASSES_SHOWN]
    classes = [(name, *(own.get(name, 0) for own in counts)) for name in order]
    by_kind: dict[str, list[DataError]] = defaultdict(list)
    for error in errors:
        by_kind[error.kind].append(error)
    lines = [f"warning: {text}" for text in warnings]
    lines.append(f"{len(errors):,} errors" if errors else "No errors.")
    for kind, found in by_kind.items():
        lines.append(f"  {kind}: {len(found):,}")
        lines += [f"    {error.message}" for error in found[:_ERRORS_SHOWN]]
        if len(found) > _ERRORS_SHOWN:
            lines.append(f"    and {len(found) - _ERRORS_SHOWN:,} more")
    return "\n\n".join(
        [
            tabulate(rows, ("median (5 % to 95 %)", *columns), "plain", disable_numparse=True),
            tabulate(classes, ("class", *columns), tablefmt="plain", intfmt=","),
            "\n".join(lines),
        ]
    )


def measure(inspection: Inspection, cfg: CfgNode) -> dict[str, str]:
    """Returns statistics of a dataset by name; boxes are those that are no crowds."""
    records = inspection.records
    rows = [
        (*BoxMode.convert(list(one["bbox"]), one["bbox_mode"], BoxMode.XYWH_ABS), index)
        for index, record in enumerate(records)
        for one in list_objects(record)
    ]
    table = np.array(rows, dtype=np.float64).reshape(-1, 5)
    image_of = table[:, 4].astype(np.int64)
    sizes = np.array([(r["width"], r["height"]) for r in records], np.float64).reshape(-1, 2)
    sides = np.sqrt(table[:, 2] * table[:, 3])
    relative = sides / np.sqrt(sizes.prod(axis=1))[image_of]
    numbers = np.bincount(np.digitize(sides, _COCO_SIZES), minlength=3)
    per_image = np.bincount(image_of, minlength=len(records))
    shortest, longest = cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST
    scales = np.minimum(shortest / sizes.min(axis=1), longest / sizes.max(axis=1))
    if not shortest:  # no resize
        scales = np.ones(len(records))
    tiny = table[:, 2:4].min(axis=1) * scales[image_of] < _TINY_SIDE
    shares = [_percent(int(n), len(sides)) for n in (*numbers, tiny.sum())]
    crowds = sum(len(r.get("annotations", ())) - len(list_objects(r)) for r in records)
    return {
        "images": f"{len(records):,}",
        "images without boxes": f"{(per_image == 0).sum():,}",
        "boxes": f"{len(sides):,}",
        "crowd regions": f"{crowds:,}",
        "boxes in an image": _quantiles(per_image, "{:.0f}"),
        "box size (px)": _quantiles(sides, "{:.0f}"),
        "box size (share of image)": _quantiles(100 * relative, "{:.1f} %"),
        "small / medium / large": " / ".join(shares[:3]),
        f"below {_TINY_SIDE} px at the input of evaluation": shares[3],
    }


def draw_samples(inspection: Inspection, cfg: CfgNode, number: int) -> RGBImage | None:
    """Draws random images of a dataset after the config's training mapper, on one sheet.

    Images without boxes, and those that cannot be read, are left out; None if no image is left.
    ``SEED`` decides which images are drawn and how each is augmented.
    """
    seed = max(cfg.SEED, 0)
    records = [record for record in inspection.records if list_objects(record)]
    mapper = build_mapper(cfg, is_train=True) if number and records else None
    cells: list[RGBImage] = []
    for position, index in enumerate(np.random.default_rng(seed).permutation(len(records))):
        if mapper is None or len(cells) == number:
            break
        try:
            with preserved_randomness():
                seed_place(seed, position)
                mapped = mapper(records[index])
        except UserError:
            continue
        if isinstance(mapped, dict):
            pixels = mapped["image"].permute(1, 2, 0).numpy()
            pixels = np.ascontiguousarray(convert_image_to_rgb(pixels, cfg.INPUT.FORMAT))
            drawn = draw_instances(pixels, mapped["instances"], inspection.class_names)
            height, width = pixels.shape[:2]
            name = Path(records[index]["file_name"]).name
            cells.append(add_heading(drawn, f"{name}: {width} x {height}"))
    return tile_images(cells, columns=4) if cells else None


def _quantiles(values: NDArray[np.number], form: str) -> str:
    if not len(values):
        return "none"
    low, middle, high = (form.format(value) for value in np.quantile(values, (0.05, 0.5, 0.95)))
    return f"{middle} ({low} to {high})"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "n/a"
