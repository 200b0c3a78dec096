# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Holds out a part of a data set for evaluation, stratified by class."""

import json
import random
from collections import Counter
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

from qbheat_det.core.errors import UserError

from .coco_file import CocoFile

SPLIT_FILE = "split.json"


def choose_val(groups: Sequence[Hashable], *, fraction: float, seed: int) -> set[int]:
    """Returns the indices of the images to hold out, which depend on the seed alone.

    ``groups`` (N,) has the group of each image. Each group's share is within one image of
    ``fraction``, in (0, 1). The only image of a group is never held out.
    """
    generator = random.Random(f"{seed} hold out")
    sizes = Counter(groups)
    order = sorted(
        (repr(group), generator.random(), index)
        for index, group in enumerate(groups)
        if sizes[group] > 1
    )
    start = max(generator.random(), 1 - len(order) * fraction)  # at least one, if there are two
    # For a fraction of 1/5: every fifth image in the order of groups, from a random start.
    return {
        index
        for place, (_, _, index) in enumerate(order)
        if int((place + 1) * fraction + start) > int(place * fraction + start)
    }


def group_by_rarest_class(annotations: CocoFile) -> list[Hashable]:
    """Returns each image's rarest class, counted in images; None without boxes."""
    classes: dict[int, set[int]] = {image["id"]: set() for image in annotations.images}
    for entry in annotations.annotations:
        if not entry.get("iscrowd", 0):
            classes[entry["image_id"]].add(entry["category_id"])
    counts = Counter(class_id for own in classes.values() for class_id in own)
    return [
        min(own, key=lambda class_id: (counts[class_id], class_id)) if own else None
        for own in classes.values()
    ]


def split_names(
    names: Sequence[str], groups: Sequence[Hashable], *, fraction: float, seed: int
) -> dict[str, Any]:
    """Returns the content of ``split.json``: "seed", "fraction", names in "train" and "val".

    Raises a ``UserError`` if there are too few images.
    """
    chosen = choose_val(groups, fraction=fraction, seed=seed)
    if not chosen or len(chosen) == len(names):
        raise UserError(
            f"a share of {fraction:g} of {len(names)} images cannot be held out: name a set to "
            "evaluate on with --val, or set DATASETS.VAL_FRACTION 0 to evaluate on none"
        )
    parts: dict[str, list[str]] = {"train": [], "val": []}
    for index, name in enumerate(names):
        parts["val" if index in chosen else "train"].append(name)
    return {"seed": seed, "fraction": fraction, **parts}


def read_split(path: str | Path) -> dict[str, Any]:
    """Returns the content of a ``split.json``, or raises a ``UserError``."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        parts = [content["train"], content["val"]]
        if all(isinstance(name, str) for part in parts for name in part):
            return dict(content)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise UserError(f'\'{path}\' does not list the images of a split by "train" and "val"')
