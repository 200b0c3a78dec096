# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A fixed number of augmented views of every image, drawn once, in place of ever new ones.

What a frozen encoder makes of such a view is the same at every visit, so that it can be cached:
``CachedViews`` reads from the disk what ``FixedViews`` draws.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from detectron2.structures import Boxes, Instances

from qbheat_det.data.checks import DataError, check_input_keys
from qbheat_det.data.feature_store import FeatureStore, View
from qbheat_det.data.seeding import VIEW, preserved_randomness, seed_place

Mapper = Callable[[dict[str, Any]], dict[str, Any] | DataError | None]
"""From a record to what the model takes; None skips an image, an error also reports why."""

VIEW_ROW = "view_row"
"""Key of a record that holds its index in the dataset, by which its views are seeded."""

_KEPT = ("file_name", "image_id", "label")


@runtime_checkable
class PreparedMapper(Protocol):
    """A mapper that is given all records once: before training, and before workers are started."""

    def prepare(self, dataset_dicts: Sequence[dict[str, Any]]) -> None:
        """Does what takes all records, such as decoding a small set of images into memory."""

    def __call__(self, dataset_dict: dict[str, Any], /) -> dict[str, Any] | DataError | None:
        """As any ``Mapper``."""


class FixedViews:
    """A mapper through which each image has K augmented views, the same at every visit.

    Which of them a visit gets is the first number drawn from torch's generator, which the stream
    seeds by position; everything else is a function of the views' seed, the record's index
    (``VIEW_ROW``, see ``number_records``) and the number of the view.
    """

    def __init__(self, mapper: Mapper, count: int, seed: int = 0) -> None:
        """Takes a mapper that draws a view, K of each image, and the seed of the views."""
        check_input_keys(
            ("FIXED_VIEWS.COUNT", count, count >= 1, "positive"),
            ("FIXED_VIEWS.SEED", seed, seed >= 0, "0 or more"),
        )
        self.mapper = mapper
        self.count = count
        self.seed = seed

    def __call__(self, dataset_dict: dict[str, Any]) -> dict[str, Any] | DataError | None:
        return self.view(dataset_dict, choose_view(self.count))

    def view(self, dataset_dict: dict[str, Any], number: int) -> dict[str, Any] | DataError | None:
        """Returns what the mapper makes of a record in view ``number``, from 0 to K - 1."""
        row = dataset_dict[VIEW_ROW]
        record = {key: value for key, value in dataset_dict.items() if key != VIEW_ROW}
        with preserved_randomness():
            seed_place(self.seed, VIEW, row, number)
            return self.mapper(record)


class CachedViews:
    """From a record to what its mapper returned, with features in the place of pixels.

    Chooses views as ``FixedViews`` does. Returns the record's "file_name", "image_id" and "label",
    as far as it has them; "features", the encoder's outputs by name, (C, h, w) or (M, D); "image"
    (3, H, W), zeros in the size of the view, which take no memory; "height" and "width" of the
    whole image, and "instances", if the mapper gave them. What the mapper skipped is a
    ``DataError`` or None.
    """

    def __init__(self, store: FeatureStore, count: int) -> None:
        """``store`` holds ``count`` views of each image."""
        self.store = store
        self.count = count
        # Of all images: what a worker sends takes an open file a tensor, unless they share memory.
        self._pixel = torch.zeros((), dtype=torch.uint8)

    def __call__(self, dataset_dict: dict[str, Any]) -> dict[str, Any] | DataError | None:
        view = self.store.read(dataset_dict[VIEW_ROW] * self.count + choose_view(self.count))
        if not isinstance(view, View):
            return view
        entry = {key: dataset_dict[key] for key in _KEPT if key in dataset_dict}
        entry["features"] = view.features
        entry["image"] = self._pixel.expand(3, *view.image_size)
        if view.full_size is not None:
            entry["height"], entry["width"] = view.full_size
        truth = view.ground_truth
        if "gt_boxes" in truth:
            boxes, classes = Boxes(truth["gt_boxes"]), truth["gt_classes"]
            entry["instances"] = Instances(view.image_size, gt_boxes=boxes, gt_classes=classes)
        if "label" in truth:
            entry["label"] = int(truth["label"])
        return entry


class TargetViews:
    """From a record to one of its views, with a teacher's maps (C, h, w) of it as "targets"."""

    def __init__(self, views: FixedViews, store: FeatureStore, *, flips: bool) -> None:
        """``flips`` mirrors one view in two, image and targets, anew at every visit.

        A teacher's own maps of a mirrored view are not quite these: see docs/objectives.md.
        """
        self.views = views
        self.store = store
        self.flips = flips

    def __call__(self, dataset_dict: dict[str, Any]) -> dict[str, Any] | DataError | None:
        number = choose_view(self.views.count)
        is_flipped = self.flips and bool(torch.rand(()) < 0.5)
        entry = self.views.view(dataset_dict, number)
        stored = self.store.read(dataset_dict[VIEW_ROW] * self.views.count + number)
        if not isinstance(entry, dict):
            return entry
        if not isinstance(stored, View):
            return stored
        entry["targets"] = stored.features
        if is_flipped:
            entry["image"] = entry["image"].flip(-1)
            entry["targets"] = {name: target.flip(-1) for name, target in stored.features.items()}
        return entry


def choose_view(count: int) -> int:
    """Draws a view from 0 to ``count`` - 1; nothing is drawn if there is one."""
    return 0 if count == 1 else int(torch.randint(count, ()))


def number_records(dataset: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the records with their index in the dataset as ``VIEW_ROW``."""
    return [{**record, VIEW_ROW: row} for row, record in enumerate(dataset)]
