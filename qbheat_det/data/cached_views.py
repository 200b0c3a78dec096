# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A mapper that reads a view of an image, already encoded, from the disk."""

from typing import Any

import torch
from detectron2.structures import Boxes, Instances

from .errors import DataError
from .feature_store import FeatureStore, View
from .mappers import VIEW_ROW, choose_view

_KEPT = ("file_name", "image_id", "label")


class CachedViews:
    """From a record to what its mapper returned, with features in the place of pixels.

    Chooses views as ``FixedViews`` does, so that training from a cache gets the same. Returns the
    record's "file_name", "image_id" and "label", as far as it has them, with:

    - "features": the encoder's outputs by name, (C, h, w) or (M, D) each, in the cache's dtype;
    - "image" (3, H, W), uint8: zeros in the size of the view, which take no memory;
    - "height" and "width" of the whole image, and "instances" with ``gt_boxes`` and
      ``gt_classes``, if the mapper gave them.

    An image that the mapper skipped is skipped here: a ``DataError`` or None.
    """

    def __init__(self, store: FeatureStore, count: int) -> None:
        """
        Args:
            store: of all views.
            count: K, views of each image.
        """
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
