# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What a frozen encoder made of a view, and a file that holds that of a few dozen views."""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from qbheat_det.errors import UserError

from .faults import Fault

FORMAT_VERSION = 1
# safetensors holds strings by name; one name, as the order of several changes from run to run.
_METADATA_KEY = "qbheat_det"
_IMAGE_SIZE = "image_size"
_GROUND_TRUTH = ("gt_boxes", "gt_classes", "label")


@dataclass(frozen=True)
class View:
    """An encoder's outputs for one view of an image, and what the mapper said of that view.

    Attributes:
        features: by the name of the output, a map (C, h, w) or tokens (M, D) each.
        image_size: height and width of the view, in pixels.
        ground_truth: "gt_boxes" (B, 4), xyxy in pixels of the view, and "gt_classes" (B,); or
            "label" (); or nothing, where nothing is trained.
    """

    features: dict[str, Tensor]
    image_size: tuple[int, int]
    ground_truth: dict[str, Tensor]


Stored = View | Fault | None
"""A view, or what the mapper gave in its place."""


def make_view(entry: Mapping[str, Any], features: Mapping[str, Tensor]) -> View:
    """Returns a view of a mapper's result.

    Args:
        entry: with "image" (3, H, W) and, if they are to be kept, "instances" or "label".
        features: the encoder's outputs for that image.
    """
    height, width = entry["image"].shape[-2:]
    truth: dict[str, Tensor] = {}
    if "instances" in entry:
        truth["gt_boxes"] = entry["instances"].gt_boxes.tensor.float()
        truth["gt_classes"] = entry["instances"].gt_classes.long()
    if "label" in entry:
        truth["label"] = torch.tensor(int(entry["label"]))
    return View(dict(features), (int(height), int(width)), truth)


def pack_views(views: Mapping[int, Stored], *, cache: str, dtype: torch.dtype) -> bytes:
    """Returns the content of a file that holds some views.

    Args:
        views: by their index.
        cache: name of the cache, without which the file is not taken for one of its own.
        dtype: of the features.

    Raises:
        UserError: a feature is not finite in ``dtype``.
    """
    tensors: dict[str, Tensor] = {}
    left_out: dict[str, dict[str, str] | None] = {}
    for index, view in views.items():
        if not isinstance(view, View):
            left_out[str(index)] = None if view is None else asdict(view)
            continue
        for name, feature in view.features.items():
            if name in (*_GROUND_TRUTH, _IMAGE_SIZE):
                raise ValueError(f"an output of an encoder cannot be called '{name}'")
            tensors[f"{index}/{name}"] = _round(feature, dtype, name, index)
        for name, truth in view.ground_truth.items():
            tensors[f"{index}/{name}"] = _copy(truth, truth.dtype)
        tensors[f"{index}/{_IMAGE_SIZE}"] = torch.tensor(view.image_size)
    about = {"format": FORMAT_VERSION, "cache": cache, "views": list(views), "left_out": left_out}
    return safetensors.torch.save(tensors, {_METADATA_KEY: json.dumps(about)})


class FeatureChunk:
    """An open file of views, mapped into memory."""

    def __init__(self, path: Path, *, cache: str, views: range) -> None:
        """
        Args:
            path: file.
            cache: name of the cache that it must belong to.
            views: indices of the views that it must hold.

        Raises:
            ValueError: there is no such file, or it is damaged or another's.
        """
        try:
            self._file: Any = safetensors.safe_open(path, framework="pt")
        except (safetensors.SafetensorError, OSError) as error:
            raise ValueError(f"'{path}' cannot be read: {error}") from error
        about = json.loads((self._file.metadata() or {}).get(_METADATA_KEY, "null"))
        wanted = {"format": FORMAT_VERSION, "cache": cache, "views": list(views)}
        if not isinstance(about, dict) or any(about.get(key) != wanted[key] for key in wanted):
            raise ValueError(f"'{path}' does not belong there")
        self._left_out: dict[str, dict[str, str] | None] = about.get("left_out", {})
        self._names: dict[int, list[str]] = defaultdict(list)
        for key in self._file.keys():  # noqa: SIM118 (not a dict)
            index, _, name = key.partition("/")
            self._names[int(index)].append(name)
        if any(view not in self._names and str(view) not in self._left_out for view in views):
            raise ValueError(f"'{path}' is not complete")

    def read(self, index: int) -> Stored:
        """Returns a view, in memory of its own."""
        if str(index) in self._left_out:
            fault = self._left_out[str(index)]
            return None if fault is None else Fault(**fault)
        # A copy: a mapped tensor breaks off the process if its file is cut short under it.
        tensors = {
            name: self._file.get_tensor(f"{index}/{name}").clone() for name in self._names[index]
        }
        height, width = tensors.pop(_IMAGE_SIZE).tolist()
        truth = {name: tensors.pop(name) for name in _GROUND_TRUTH if name in tensors}
        return View(tensors, (height, width), truth)


def _round(feature: Tensor, dtype: torch.dtype, name: str, index: int) -> Tensor:
    rounded = _copy(feature, dtype)
    if rounded.isfinite().all():
        return rounded
    where = f"the encoder's output '{name}' for view {index}"
    if feature.isfinite().all():
        raise UserError(
            f"{where} reaches {float(feature.abs().max()):.4g}, beyond the range of "
            f"{_name(dtype)}: set MODEL.CACHE_FEATURES.DTYPE to bfloat16 or float32"
        )
    raise UserError(
        f"{where} is not finite: check the weights, or that they were trained for images "
        "normalised as here (MODEL.PIXEL_MEAN, MODEL.PIXEL_STD, INPUT.FORMAT)"
    )


def _copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a contiguous copy on the CPU; slices of a batch share memory, which no file can."""
    return torch.empty(tensor.shape, dtype=dtype).copy_(tensor.detach())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
