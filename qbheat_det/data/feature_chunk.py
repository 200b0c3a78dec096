# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What a frozen encoder made of a view, and a file that holds that of a few dozen views."""

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from qbheat_det.core.errors import UserError

from .faults import Fault

# To be raised whenever a file's layout changes, and whenever a view is drawn or encoded otherwise
# than before: the key of a cache knows settings and weights, not the code that reads them.
FORMAT_VERSION = 2
# safetensors holds strings by name; one name, as the order of several changes from run to run.
_METADATA_KEY = "qbheat_det"
_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_DIGITS = 8  # of its checksum, in front of it
_FULL_SIZE = {"height", "width"}


@dataclass(frozen=True)
class View:
    """An encoder's outputs for one view of an image, and what the mapper said of that view.

    Attributes:
        features: by the name of the output, a map (C, h, w) or tokens (M, D) each.
        image_size: height and width of the view, in pixels.
        ground_truth: "gt_boxes" (B, 4), xyxy in pixels of the view, and "gt_classes" (B,); or
            "label" (); or nothing, where nothing is trained.
        full_size: height and width of the image that the view is of, in pixels, to which detections
            are scaled; None where the mapper did not say.
    """

    features: dict[str, Tensor]
    image_size: tuple[int, int]
    ground_truth: dict[str, Tensor]
    full_size: tuple[int, int] | None = None


Stored = View | Fault | None
"""A view, or what the mapper gave in its place."""


def make_view(entry: Mapping[str, Any], features: Mapping[str, Tensor]) -> View:
    """Returns a view of a mapper's result.

    Args:
        entry: with "image" (3, H, W) and, if they are to be kept, "instances" or "label", and the
            "height" and "width" of the whole image, which mappers add where the record has none.
        features: the encoder's outputs for that image.
    """
    height, width = entry["image"].shape[-2:]
    truth: dict[str, Tensor] = {}
    if "instances" in entry:
        truth["gt_boxes"] = entry["instances"].gt_boxes.tensor.float()
        truth["gt_classes"] = entry["instances"].gt_classes.long()
    if "label" in entry:
        truth["label"] = torch.tensor(int(entry["label"]))
    full = (int(entry["height"]), int(entry["width"])) if entry.keys() >= _FULL_SIZE else None
    return View(dict(features), (int(height), int(width)), truth, full)


def pack_views(views: Mapping[int, Stored], *, cache: str, dtype: torch.dtype) -> bytes:
    """Returns the content of a file that holds some views.

    Features are its tensors, "<index>/<output>"; all that is small stands in its metadata, which
    is read once, when the file is opened. Each tensor and the metadata have a checksum.

    Args:
        views: by their index.
        cache: name of the cache, without which the file is not taken for one of its own.
        dtype: of the features.

    Raises:
        UserError: a feature is not finite in ``dtype``.
    """
    tensors = {
        f"{index}/{name}": _round(feature, dtype, name, index)
        for index, view in views.items()
        if isinstance(view, View)
        for name, feature in view.features.items()
    }
    about = {
        "format": FORMAT_VERSION,
        "cache": cache,
        "views": {str(index): _describe(view) for index, view in views.items()},
        "checksums": {name: _check_sum(tensor) for name, tensor in tensors.items()},
    }
    text = json.dumps(about)
    text = f"{zlib.crc32(text.encode()):0{_DIGITS}x}{text}"
    return safetensors.torch.save(tensors, {_METADATA_KEY: text})


class FeatureChunk:
    """A file of views, whose header is in memory.

    Views are read, not mapped: a file that is cut short under a map breaks off the process. It is
    not kept open, as a process may have about a thousand open files.
    """

    def __init__(self, path: Path, *, cache: str, views: range) -> None:
        """
        Args:
            path: file.
            cache: name of the cache that it must belong to.
            views: indices of the views that it must hold.

        Raises:
            ValueError: there is no such file, or it is damaged or another's.
        """
        self._path = path
        try:
            with safetensors.safe_open(path, framework="pt") as file:  # checks header and length
                text = (file.metadata() or {}).get(_METADATA_KEY, "")
            self._places = _read_places(path)
        except (safetensors.SafetensorError, OSError) as error:
            raise ValueError(f"'{path}' cannot be read: {error}") from error
        checksum, text = text[:_DIGITS], text[_DIGITS:]
        if checksum != f"{zlib.crc32(text.encode()):0{_DIGITS}x}":
            raise ValueError(f"'{path}' does not belong there, or is damaged")
        about = json.loads(text)
        wanted = {"format": FORMAT_VERSION, "cache": cache}
        if any(about.get(key) != wanted[key] for key in wanted):
            raise ValueError(f"'{path}' does not belong there")
        self._views: dict[str, dict[str, Any] | None] = about["views"]
        self._checksums: dict[str, int] = about["checksums"]
        if list(self._views) != [str(index) for index in views]:
            raise ValueError(f"'{path}' holds other views than its name says")
        if self._places.keys() != self._checksums.keys():
            raise ValueError(f"'{path}' holds other features than its header says")
        self._sound: set[int] = set()

    def read(self, index: int) -> Stored:
        """Returns a view, in memory of its own.

        Raises:
            ValueError: the file is gone, or was changed after it was written.
        """
        about = self._views[str(index)]
        if about is None:
            return None
        if "fault" in about:
            return Fault(**about["fault"])
        features = self._read_features({name: f"{index}/{name}" for name in about["outputs"]})
        if index not in self._sound:  # once is enough, while the header is kept
            for name, feature in features.items():
                if _check_sum(feature) != self._checksums[f"{index}/{name}"]:
                    raise ValueError(f"'{self._path}' is damaged")
            self._sound.add(index)
        truth, full = _read_truth(about["ground_truth"]), about["full_size"]
        height, width = about["image_size"]
        return View(features, (height, width), truth, (full[0], full[1]) if full else None)

    def _read_features(self, names: Mapping[str, str]) -> dict[str, Tensor]:
        """Returns the tensors of a view, which lie side by side, from one block of memory."""
        places = [self._places[full_name] for full_name in names.values()]
        first = min((place.start for place in places), default=0)
        block = bytearray(max((place.end for place in places), default=0) - first)
        try:
            with open(self._path, "rb", buffering=0) as file:
                file.seek(first)
                count = file.readinto(block)
        except OSError as error:
            raise ValueError(f"'{self._path}' cannot be read: {error}") from error
        if count != len(block):
            raise ValueError(f"'{self._path}' was cut short")
        if not block:
            return {
                n: torch.empty(p.shape, dtype=p.dtype) for n, p in zip(names, places, strict=True)
            }
        # One block for all: what a worker sends takes an open file a block.
        values = torch.frombuffer(block, dtype=places[0].dtype)
        size = values.itemsize
        return {
            name: values[(place.start - first) // size : (place.end - first) // size].view(
                place.shape
            )
            for name, place in zip(names, places, strict=True)
        }


class _Place(NamedTuple):
    """Where a tensor lies in a file, in bytes."""

    start: int
    end: int
    dtype: torch.dtype
    shape: list[int]


def _read_places(path: Path) -> dict[str, _Place]:
    """Returns the place of each tensor of a whole file; ``safe_open`` does not tell."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    begin = 8 + length
    return {
        name: _Place(
            begin + about["data_offsets"][0],
            begin + about["data_offsets"][1],
            _DTYPES[about["dtype"]],
            about["shape"],
        )
        for name, about in header.items()
        if name != "__metadata__"
    }


def _check_sum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def _describe(view: Stored) -> dict[str, Any] | None:
    if view is None:
        return None
    if isinstance(view, Fault):
        return {"fault": asdict(view)}
    # A number in single precision is the same after JSON, which has double.
    truth = {name: tensor.tolist() for name, tensor in view.ground_truth.items()}
    return {
        "outputs": list(view.features),
        "image_size": view.image_size,
        "full_size": view.full_size,
        "ground_truth": truth,
    }


def _read_truth(truth: Mapping[str, Any]) -> dict[str, Tensor]:
    found = {name: torch.tensor(truth[name]) for name in truth if name == "label"}
    if "gt_boxes" in truth:
        found["gt_boxes"] = torch.tensor(truth["gt_boxes"], dtype=torch.float32).reshape(-1, 4)
        found["gt_classes"] = torch.tensor(truth["gt_classes"], dtype=torch.int64)
    return found


def _round(feature: Tensor, dtype: torch.dtype, name: str, index: int) -> Tensor:
    """Returns a contiguous copy on the CPU; slices of a batch share memory, which no file can."""
    rounded = torch.empty(feature.shape, dtype=dtype).copy_(feature.detach())
    # Rounding keeps the order, so that the extremes tell, which are found faster than infinities.
    extremes = torch.stack(feature.detach().aminmax()) if feature.numel() else feature.detach()
    if extremes.to(dtype).isfinite().all():
        return rounded
    where = f"the encoder's output '{name}' for view {index}"
    if extremes.isfinite().all():
        raise UserError(
            f"{where} reaches {float(extremes.abs().max()):.4g}, beyond the range of "
            f"{_name(dtype)}: set MODEL.CACHE_FEATURES.DTYPE to bfloat16 or float32"
        )
    raise UserError(
        f"{where} is not finite: check the weights, or that they were trained for images "
        "normalised as here (MODEL.PIXEL_MEAN, MODEL.PIXEL_STD, INPUT.FORMAT)"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
