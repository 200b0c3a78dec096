# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A mapper that takes a view of an image, already encoded, from the disk."""

from typing import Any

import torch
from detectron2.structures import Boxes, Instances

from .faults import Fault
from .feature_chunk import View
from .feature_store import FeatureStore
from .fixed_views import VIEW_ROW, choose_view

_KEPT = ("file_name", "image_id", "label")


class CachedViews:
    """From a record to what its mapper returned, with features in the place of pixels.

    Chooses views as ``FixedViews`` does, so that training from a cache sees the same. Returns the
    record's "file_name", "image_id" and "label", as far as it has them, with:

    - "features": the encoder's outputs by name, (C, h, w) or (M, D) each, in the cache's dtype;
    - "image" (3, H, W), uint8: zeros in the size of the view, which take no memory;
    - "height" and "width" of the whole image, and "instances" with ``gt_boxes`` and
      ``gt_classes``, where the mapper gave them.

    What the mapper left out, is left out: a ``Fault`` or None.
    """

    def __init__(self, store: FeatureStore | None, count: int) -> None:
        """
        Args:
            store: what it reads from; it can be set later, before the first image is asked for.
            count: K, views of each image.
        """
        self.store = store
        self.count = count
        # Of all images: what a worker sends takes an open file a tensor, unless they share memory.
        self._pixel = torch.zeros((), dtype=torch.uint8)

    def __call__(self, dataset_dict: dict[str, Any]) -> dict[str, Any] | Fault | None:
        if self.store is None:
            raise RuntimeError("the cache of features is read before it is made")
        view = self.store.read(dataset_dict[VIEW_ROW] * self.count + choose_view(self.count))
        if not isinstance(view, View):
            return view
        entry = {key: dataset_dict[key] for key in _KEPT if key in dataset_dict}
        entry["features"] = view.features
        entry["image"] = self._pixel.expand(3, *view.image_size)
        if view.full_size is not None:
            entry["height"], entry["width"] = view.full_size
        if "gt_boxes" in view.ground_truth:
            entry["instances"] = Instances(
                view.image_size,
                gt_boxes=Boxes(view.ground_truth["gt_boxes"]),
                gt_classes=view.ground_truth["gt_classes"],
            )
        if "label" in view.ground_truth:
            entry["label"] = int(view.ground_truth["label"])
        return entry
