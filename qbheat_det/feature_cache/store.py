# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Stores the outputs of a frozen encoder on disk, with one entry per view of each image.

A store is a folder of safetensors files with 32 views each. Files are created atomically.
``filling.py`` computes the views.
"""

import contextlib
import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from torch.utils.data import Dataset

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically
from qbheat_det.core.text import format_bytes
from qbheat_det.data import DataError, FixedViews

# Increase this number when the file layout or the code that draws or encodes views changes, because
# the key of a cache contains settings and weights, but not code.
FORMAT_VERSION = 6
VIEWS_PER_FILE = 32
_METADATA_KEY = "qbheat_det"
_TRUTH = {"gt_boxes": torch.float32, "gt_classes": torch.int64, "label": torch.int64}
_REMOVE = "remove it and start again with --resume"
# Reading a damaged file, or a file of another program, may raise any of these errors.
_DAMAGES = (
    OSError,
    RuntimeError,
    safetensors.SafetensorError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
)


@dataclass(frozen=True)
class View:
    """An encoder's outputs for one view of an image, and the view's ground truth.

    Attributes:
        features: feature maps (C, h, w) and tokens (M, D), by name.
        image_size: (height, width) of the view.
        ground_truth: "gt_boxes" (B, 4), XYXY in pixels of the view, and "gt_classes" (B,) of a
            detector; "label" () of a classifier; empty if there are no labels.
        full_size: (height, width) of the image, to which detections are scaled.
    """

    features: dict[str, Tensor]
    image_size: tuple[int, int]
    ground_truth: dict[str, Tensor]
    full_size: tuple[int, int] | None = None


Stored = View | DataError | None
"""A view, or the error or None that the mapper returned instead."""
Mapped = dict[str, Any] | DataError | None
"""A dict that a mapper returned, or the error or None that it returned instead."""
Encode = Callable[[list[Mapped]], list[Stored]]
"""Maps outputs of a mapper to views, see ``encode_images``."""


class AllViews(Dataset[Mapped]):
    """All views of all records. View k (of K) of the record in row r has the index r * K + k."""

    def __init__(self, records: Sequence[dict[str, Any]], views: FixedViews) -> None:
        self.records = records
        self.views = views

    def __len__(self) -> int:
        return len(self.records) * self.views.count

    def __getitem__(self, index: int) -> Mapped:
        row, number = divmod(index, self.views.count)
        return self.views.view(self.records[row], number)


class FeatureStore:
    """A store of views on disk, with the indices of ``AllViews``."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        num_views: int,
        *,
        dtype: torch.dtype = torch.float16,
        key: Mapping[str, Any] | None = None,
    ) -> None:
        """Opens a folder of ``num_views`` views. It may be missing or incomplete, see ``fill``.

        ``dtype`` is the type of the stored features. ``key`` is written to ``meta.json`` by
        ``fill``. It contains the values on which the features depend, see ``make_key``.
        """
        self.folder = Path(folder)
        self.num_views = num_views
        self.dtype = dtype
        self.key = key
        # Maps file numbers to the metadata of the views and a memory-mapped handle.
        self._files: dict[int, tuple[dict[str, Any], Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}  # spawned workers open the files themselves

    def views_of(self, file: int) -> range:
        """Returns the indices of the views in a file."""
        first = file * VIEWS_PER_FILE
        return range(first, min(first + VIEWS_PER_FILE, self.num_views))

    def path_of(self, file: int) -> Path:
        return self.folder / f"{file:06d}.safetensors"

    def missing(self) -> list[int]:
        """Returns the numbers of files that are missing, damaged or from another cache."""
        missing = []
        for file in range(-(-self.num_views // VIEWS_PER_FILE)):
            try:
                self._read_header(file)
            except UserError:
                missing.append(file)
        return missing

    def read(self, view_index: int) -> Stored:
        """Returns a copy of a view. If the mapper returned an error or None for it, returns that.

        Raises:
            UserError: the file is missing, damaged or from another cache.
        """
        if not 0 <= view_index < self.num_views:
            raise IndexError(f"view {view_index} of {self.num_views}")
        file = view_index // VIEWS_PER_FILE
        try:
            if file not in self._files:
                self._files[file] = self._read_header(file)
            return self._parse(view_index, *self._files[file])
        except _DAMAGES as error:
            raise UserError(f"'{self.path_of(file)}' is damaged ({error}): {_REMOVE}") from error

    def _parse(self, view_index: int, views: dict[str, Any], tensors: Any) -> Stored:
        about = views[str(view_index)]
        if about is None:
            return None
        if "error" in about:
            return DataError(**about["error"])
        # All outputs share one copy, because a worker sends each block of memory separately.
        values = tensors.get_tensor(str(view_index)).clone()
        if _hash(values) != about["crc32"]:
            raise ValueError("its checksum differs")
        shapes = about["shapes"]
        parts = values.split([math.prod(shape) for shape in shapes.values()])
        features = {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
        truth = {
            name: torch.tensor(value, dtype=_TRUTH[name])
            for name, value in about["ground_truth"].items()
        }
        if "gt_boxes" in truth:
            truth["gt_boxes"] = truth["gt_boxes"].reshape(-1, 4)  # (0, 4) without boxes
        height, width = about["image_size"]
        full_size = about["full_size"]
        if full_size is not None:
            full_size = tuple(full_size)
        return View(features, (height, width), truth, full_size)

    def write(self, file: int, views: Sequence[Stored]) -> None:
        """Writes the views of a file atomically. Raises a ``UserError`` if it cannot store them."""
        tensors: dict[str, Tensor] = {}
        abouts: dict[str, Any] = {}
        for index, view in zip(self.views_of(file), views, strict=True):
            if view is None:
                abouts[str(index)] = None
                continue
            if isinstance(view, DataError):
                abouts[str(index)] = {"error": asdict(view)}
                continue
            rounded = [
                _round(feature, self.dtype, f"the encoder's output '{name}' for view {index}")
                for name, feature in view.features.items()
            ]
            tensors[str(index)] = torch.cat([feature.flatten() for feature in rounded])
            abouts[str(index)] = {
                "crc32": _hash(tensors[str(index)]),
                "shapes": {name: list(feature.shape) for name, feature in view.features.items()},
                "image_size": view.image_size,
                "full_size": view.full_size,
                # JSON has double precision, which represents single precision exactly.
                "ground_truth": {name: value.tolist() for name, value in view.ground_truth.items()},
            }
        about = {"format": FORMAT_VERSION, "cache": self.folder.name, "views": abouts}
        content = safetensors.torch.save(tensors, {_METADATA_KEY: json.dumps(about)})
        with naming_the_key():
            write_atomically(self.path_of(file), content)
        self._files.pop(file, None)

    def check_space(self) -> None:
        """Raises a ``UserError`` if the disk lacks space for the files that are still missing."""
        sizes = [path.stat().st_size for path in self.folder.glob("*.safetensors")]
        num_files = -(-self.num_views // VIEWS_PER_FILE)
        needed = (num_files - len(sizes)) * max(sizes)
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise UserError(
                f"the features to cache need {format_bytes(needed)} more, but the disk of "
                f"'{self.folder}' has {format_bytes(free)} free: set MODEL.CACHE_FEATURES.FOLDER "
                "to another disk, or lower INPUT.FIXED_VIEWS.COUNT"
            )

    def _read_header(self, file: int) -> tuple[dict[str, Any], Any]:
        path = self.path_of(file)
        view_indices = [str(index) for index in self.views_of(file)]
        expected = (FORMAT_VERSION, self.folder.name, view_indices)
        try:
            tensors = safetensors.safe_open(path, framework="pt")
            about = json.loads(tensors.metadata()[_METADATA_KEY])
            stored = (about["format"], about["cache"], list(about["views"]))
        except _DAMAGES as error:
            raise UserError(f"'{path}' cannot be read ({error}): {_REMOVE}") from error
        if stored != expected:
            raise UserError(f"'{path}' belongs to another cache: {_REMOVE}")
        return about["views"], tensors


@contextlib.contextmanager
def naming_the_key() -> Iterator[None]:
    """Adds the config key of the folder to errors of writing."""
    try:
        yield
    except UserError as error:
        advice = "set MODEL.CACHE_FEATURES.FOLDER to a writable folder"
        raise UserError(f"{error}: {advice}") from error


def _hash(values: Tensor) -> int:
    return zlib.crc32(values.view(torch.uint8).numpy().data)


def _round(feature: Tensor, dtype: torch.dtype, named: str) -> Tensor:
    rounded = feature.detach().to(dtype)
    if rounded.isfinite().all():
        return rounded
    hint = "check the weights and MODEL.PIXEL_MEAN"
    if feature.isfinite().all():
        hint = "set MODEL.CACHE_FEATURES.DTYPE to bfloat16 or float32"
    reached = float(feature.detach().abs().max())
    raise UserError(f"{named} reaches {reached:.4g}, beyond {dtype}: {hint}")
