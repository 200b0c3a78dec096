# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Mappers that read cached features: in place of an image, or as targets beside it."""

from typing import Any

import torch
from detectron2.structures import Boxes, Instances

from qbheat_det.data import DataError, FixedViews
from qbheat_det.data.mappers.fixed_views import VIEW_ROW, choose_view

from .store import FeatureStore, View

_KEPT = ("file_name", "image_id", "label")


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
