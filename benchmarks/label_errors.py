# Copyright (c) qbheat_det contributors. Apache-2.0.
"""How many errors that are planted in the labels of a data set `qbheat inspect --labels` finds.

Errors are planted in 5 % of the boxes, for each seed anew. By default, a third of these boxes is
deleted, a third is moved, and a third gets another class. A moved box is shifted in a random
direction by 0.4 to 1.2 of its sides, so the IoU with its old place is between 0.45 and 0. Then the
labels are inspected. Each seed is a cell, a file `seed_S.json` in the output folder. A cell that
exists is not measured again.

python -m benchmarks.label_errors --data train.json --images images/ --seeds 1 2 --output out/
python -m benchmarks.label_errors --data train.json --seeds 1 --output out/ --kinds extra duplicate
"""

import argparse
import copy
import json
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tabulate import tabulate  # type: ignore[import-untyped, unused-ignore]
from torchvision.ops import box_iou

from qbheat_det.core.errors import exit_on_user_error
from qbheat_det.core.files import write_atomically
from qbheat_det.labelling import inspect_labels
from qbheat_det.labelling.labels import open_labels

KINDS = ("missing", "location", "class", "extra", "duplicate")
_SHARE = 0.05  # of the boxes with an error
_SHIFT = (0.4, 1.2)  # length of the shift of a moved box, relative to its sides
_SAME_IOU = 0.5  # smallest IoU of a missing box and the deleted box that it finds
_EMPTY_IOU = 0.1  # largest IoU of a box on the background with every other box
_NUM_TRIES = 200  # of finding a place
Box = Sequence[float]
Generator = np.random.Generator


@dataclass(frozen=True)
class Planted:
    """A planted error.

    Attributes:
        kind: one of ``KINDS``.
        image_id: id of the image.
        annotation_id: id of the wrong annotation; that of the deleted one if ``kind`` is "missing".
        bbox: the box that is right, XYWH in pixels. It is the annotated box if ``kind`` is "extra"
            or "duplicate", because there is no right one.
        partner_id: id of the annotation that a duplicate repeats.
    """

    kind: str
    image_id: int
    annotation_id: int
    bbox: tuple[float, ...]
    partner_id: int | None = None


def plant(content: dict[str, Any], kinds: Sequence[str], seed: int) -> list[Planted]:
    """Plants errors in COCO's ``content``, in place. Returns the errors.

    The kinds take turns. A box that cannot be moved, because its image has no place for it, is left
    as it is.
    """
    generator = np.random.default_rng(seed)
    images = {image["id"]: image for image in content["images"]}
    category_ids = [category["id"] for category in content["categories"]]
    entries = [entry for entry in content["annotations"] if not entry["iscrowd"]]
    boxes = defaultdict(list)  # of each image, before the errors
    for entry in entries:
        boxes[entry["image_id"]].append(entry["bbox"])
    next_id = 1 + max(entry["id"] for entry in content["annotations"])
    planted = []
    order = generator.permutation(len(entries))[: round(_SHARE * len(entries))]
    for number, index in enumerate(order):
        entry = entries[index]
        kind = kinds[number % len(kinds)]
        image = images[entry["image_id"]]
        right = tuple(entry["bbox"])
        identity = entry["id"]
        partner = None
        if kind == "missing":
            content["annotations"].remove(entry)
        elif kind == "class":
            others = [label for label in category_ids if label != entry["category_id"]]
            if not others:
                continue
            entry["category_id"] = int(generator.choice(others))
        elif kind == "location":
            place = move(entry["bbox"], image, generator)
            if place is None:
                continue
            entry["bbox"] = place
        else:
            new = copy.deepcopy(entry)
            if kind == "extra":
                place = find_background(entry["bbox"], image, boxes[image["id"]], generator)
            else:
                place = move(entry["bbox"], image, generator, (0.0, 0.1))
                new["category_id"] = int(generator.choice(category_ids))
                partner = entry["id"]
            if place is None:
                continue
            new["id"] = next_id
            new["bbox"] = place
            content["annotations"].append(new)
            identity = next_id
            right = tuple(place)
            next_id += 1
        planted.append(Planted(kind, image["id"], identity, right, partner))
    return planted


def move(
    box: Box, image: dict[str, Any], generator: Generator, shift: tuple[float, float] = _SHIFT
) -> list[float] | None:
    """Returns a box (XYWH) that is shifted inside the image, or None if there is no place for it.

    The length of the shift is between the bounds ``shift``, relative to the box's sides.
    """
    x, y, width, height = box
    for _ in range(_NUM_TRIES):
        angle = generator.uniform(0, 2 * np.pi)
        length = generator.uniform(*shift)
        left = x + length * np.cos(angle) * width
        top = y + length * np.sin(angle) * height
        fits = left + width <= image["width"] and top + height <= image["height"]
        if min(left, top) >= 0 and fits:
            return [float(left), float(top), float(width), float(height)]
    return None


def find_background(
    box: Box, image: dict[str, Any], others: Sequence[Box], generator: Generator
) -> list[float] | None:
    """Returns a box of the same size where no other box is, or None if there is no such place."""
    _, _, width, height = box
    corners = to_corners(others)
    for _ in range(_NUM_TRIES):
        left = generator.uniform(0, max(0, image["width"] - width))
        top = generator.uniform(0, max(0, image["height"] - height))
        place = [float(left), float(top), float(width), float(height)]
        if float(box_iou(to_corners([place]), corners).max()) <= _EMPTY_IOU:
            return place
    return None


def to_corners(boxes: Sequence[Box]) -> torch.Tensor:
    """Converts boxes XYWH to a tensor (n, 4), XYXY."""
    corners = torch.tensor([list(box) for box in boxes], dtype=torch.float64).reshape(-1, 4)
    corners[:, 2:] += corners[:, :2]
    return corners


def match(suspects: Sequence[Any], errors: Sequence[Planted], *, same_kind: bool) -> list[int]:
    """Returns for each suspect the index of the error that it finds, or -1.

    An error is found by the first suspect of its annotation. A deleted box is found by the first
    missing box with an IoU of at least 0.5. If not ``same_kind``, any suspect of a wrong
    annotation finds it, and also a missing box at the old place of a moved one.
    """
    by_image = defaultdict(list)
    for index, error in enumerate(errors):
        by_image[error.image_id].append(index)
    found = []
    taken: set[int] = set()
    for suspect in suspects:
        hit = -1
        for index in by_image[suspect.image_id]:
            error = errors[index]
            if index in taken or (same_kind and suspect.kind != error.kind):
                continue
            if suspect.annotation_id is not None:
                hits = suspect.annotation_id in (error.annotation_id, error.partner_id)
            elif error.kind in ("missing", "location"):
                overlap = box_iou(to_corners([suspect.bbox]), to_corners([error.bbox]))
                hits = float(overlap) >= _SAME_IOU
            else:
                hits = False
            if hits:
                hit = index
                break
        if hit >= 0:
            taken.add(hit)
        found.append(hit)
    return found


def average_precision(hits: npt.NDArray[np.bool_], num_errors: int) -> float:
    """Returns the mean over all errors of the precision at their rank; 0 if they are not found."""
    ranks = np.flatnonzero(hits) + 1
    if not num_errors:
        return float("nan")
    return float((np.arange(1, len(ranks) + 1) / ranks).sum() / num_errors)


def area_under_curve(scores: npt.NDArray[np.float64], is_error: npt.NDArray[np.bool_]) -> float:
    """Returns the share of pairs of an error and another box in which the error scores higher.

    Ties count half.
    """
    wrong = scores[is_error]
    right = np.sort(scores[~is_error])
    if not len(wrong) or not len(right):
        return float("nan")
    below = np.searchsorted(right, wrong, side="left")
    not_above = np.searchsorted(right, wrong, side="right")
    return float((below + not_above).mean() / 2 / len(right))


def measure(
    suspects: Sequence[Any], errors: Sequence[Planted], annotation_ids: Sequence[int]
) -> dict[str, Any]:
    """Returns the figures of a ranking of suspects.

    Args:
        suspects: the suspects, most probable first.
        errors: the planted errors.
        annotation_ids: ids of all annotations after the errors were planted.

    Returns:
        "ap" and "precision" (of the first K suspects, where K is the number of errors) over all
        kinds, where a suspect must name the right kind; "ap_any_kind" and "precision_any_kind",
        where it need not; the same figures for each kind alone; and "auc_location", how well
        suspects of the kind "location" separate moved boxes from all others.
    """
    figures: dict[str, Any] = {"errors": len(errors), "suspects": len(suspects)}
    for name, same_kind in (("", True), ("_any_kind", False)):
        hits = np.array(match(suspects, errors, same_kind=same_kind)) >= 0
        figures[f"ap{name}"] = average_precision(hits, len(errors))
        figures[f"precision{name}"] = float(hits[: len(errors)].sum() / max(1, len(errors)))
        figures[f"first_200{name}"] = int(hits[:200].sum())
    hits = np.array(match(suspects, errors, same_kind=True))
    for kind in sorted({error.kind for error in errors}):
        own_errors = [error for error in errors if error.kind == kind]
        own = [suspect for suspect in suspects if suspect.kind == kind]
        own_hits = np.array(match(own, own_errors, same_kind=True)) >= 0
        among_first = hits[: len(errors)]
        listed = [suspect.kind == kind for suspect in suspects[: len(errors)]]
        figures[kind] = {
            "errors": len(own_errors),
            "ap": average_precision(own_hits, len(own_errors)),
            "first_k_listed": sum(listed),
            "first_k_found": sum(errors[index].kind == kind for index in among_first if index >= 0),
        }
    scores = dict.fromkeys(annotation_ids, 0.0)
    for suspect in suspects:
        if suspect.kind == "location":
            scores[suspect.annotation_id] = max(scores[suspect.annotation_id], suspect.score)
    moved = {error.annotation_id for error in errors if error.kind == "location"}
    is_moved = np.array([identity in moved for identity in scores])
    figures["auc_location"] = area_under_curve(np.array([*scores.values()]), is_moved)
    return figures


def cpu_seconds() -> float:
    """Returns the user and system seconds of this process and of its finished children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def run_cell(
    data: str,
    images: str,
    folder: Path,
    seed: int,
    kinds: Sequence[str],
    inspect: Callable[..., Any],
) -> dict[str, Any]:
    """Plants errors with a seed, inspects the labels, and returns the figures."""
    labels = open_labels(data, images)
    content = copy.deepcopy(labels.file.keep())
    errors = plant(content, kinds, seed)
    planted = folder / f"seed_{seed}_planted.json"
    write_atomically(planted, json.dumps(content).encode())
    start = cpu_seconds()
    _, suspects, ap50 = inspect(
        str(planted), folder / f"seed_{seed}", images=labels.file.image_root, seed=seed
    )
    seconds = cpu_seconds() - start
    identities = [entry["id"] for entry in content["annotations"]]
    return {
        "data": data,
        "seed": seed,
        "images": len(content["images"]),
        "boxes": len(content["annotations"]),
        "detectors_ap50": ap50,
        "cpu_minutes": seconds / 60,
        **measure(suspects, errors, identities),
    }


def format_cells(cells: Sequence[dict[str, Any]]) -> str:
    """Returns a table in Markdown with a row for each cell."""
    kinds = [kind for kind in KINDS if any(kind in cell for cell in cells)]
    rows = []
    for cell in cells:
        row = {
            "seed": cell["seed"],
            "AP50 of the detectors": " ".join(f"{value:.1f}" for value in cell["detectors_ap50"]),
            "all": f"{cell['ap']:.2f} ({cell['precision']:.2f})",
            "any kind": f"{cell['ap_any_kind']:.2f} ({cell['precision_any_kind']:.2f})",
        }
        for kind in kinds:
            row[kind] = f"{cell[kind]['ap']:.2f}"
        row["AUC of moved"] = f"{cell['auc_location']:.2f}"
        row["of the first 200"] = str(cell["first_200"])
        row["CPU minutes"] = f"{cell['cpu_minutes']:.1f}"
        rows.append(row)
    return str(tabulate(rows, headers="keys", tablefmt="github"))


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Measures the cells that are missing, and prints a table of all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--images", default="")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS[:3])
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    cells = []
    for seed in args.seeds:
        path = args.output / f"seed_{seed}.json"
        if not path.exists():
            cell = run_cell(args.data, args.images, args.output, seed, args.kinds, inspect_labels)
            write_atomically(path, json.dumps(cell, indent=1).encode())
        cells.append(json.loads(path.read_bytes()))
    print(format_cells(cells))


if __name__ == "__main__":
    main()
