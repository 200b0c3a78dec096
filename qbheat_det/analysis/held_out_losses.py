# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reconstruction losses of single images, seen from a corner and from the centre."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from qbheat_det.evaluation.reconstruction import mean_and_standard_error

VIEWS = ("corner", "centre")


class HeldOutLosses:
    """Losses by view and image; what is added to one twice is summed."""

    def __init__(self) -> None:
        self._values: dict[str, dict[Any, float]] = {view: {} for view in VIEWS}

    def add(self, entries: Sequence[Mapping[str, Any]], losses: Tensor) -> None:
        """Adds losses (N,) of dicts with "image_id" and "place"."""
        for entry, loss in zip(entries, losses.double().tolist(), strict=True):
            values = self._values["centre" if entry["place"] == "centre" else "corner"]
            values[entry["image_id"]] = values.get(entry["image_id"], 0.0) + loss

    @property
    def num_images(self) -> int:
        """How many images were seen."""
        return max(map(len, self._values.values()))

    def summarise(self) -> dict[str, tuple[float, float]]:
        """Returns mean and standard error over images by view, and as "mean" those of each
        image's own mean over its views.

        Views that no image was seen from are left out. The error of a single image is nan.
        """
        rows = {view: list(values.values()) for view, values in self._values.items() if values}
        by_image: dict[Any, list[float]] = {}
        for values in self._values.values():
            for image, loss in values.items():
                by_image.setdefault(image, []).append(loss)
        rows["mean"] = [statistics.fmean(losses) for losses in by_image.values()]
        return {name: mean_and_standard_error(row) for name, row in rows.items()}

    def minus(self, other: "HeldOutLosses") -> "HeldOutLosses":
        """Returns the differences of images that both have seen.

        Images differ more than predictors do, so their mean is known better than either's.
        """
        difference = HeldOutLosses()
        for view, values in self._values.items():
            known = other._values[view]
            difference._values[view] = {
                image: loss - known[image] for image, loss in values.items() if image in known
            }
        return difference
