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
FORMAT_VERSION = 7
VIEWS_PER_FILE = 32
_METADATA_KEY = "qbheat_det"
_CHECKSUM_KEY = "qbheat_det_crc32"
"""Key of the checksum of the metadata, which has the boxes, classes and shapes of all views."""
_TRUTH_DTYPES = {"gt_boxes": torch.float32, "gt_classes": torch.int64, "label": torch.int64}
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
"""An entry of a store: a view, or the error or None that the mapper returned for it."""
Mapped = dict[str, Any] | DataError | None
"""An output of a mapper: a dict with an image, or an error, or None for an image to leave out."""
Encode = Callable[[list[Mapped]], list[Stored]]
"""A function that runs an encoder on outputs of a mapper, such as ``encode_images``."""


class AllViews(Dataset[Mapped]):
    """A data set of all views of all records.

    There are K views of each record. View k of record r has the index r * K + k.
    """

    def __init__(self, records: Sequence[dict[str, Any]], views: FixedViews) -> None:
        self.records = records
        self.views = views

    def __len__(self) -> int:
        return len(self.records) * self.views.count

    def __getitem__(self, index: int) -> Mapped:
        row, view_number = divmod(index, self.views.count)
        return self.views.view(self.records[row], view_number)


class FeatureStore:
    """A folder of views on disk. Its indices are those of ``AllViews``."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        num_views: int,
        *,
        dtype: torch.dtype = torch.float16,
        key: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            folder: the folder, which may be missing or incomplete.
            num_views: number of views in the complete store.
            dtype: type of the stored features.
            key: everything that affects the features. ``fill`` writes it to ``meta.json``.
        """
        self.folder = Path(folder)
        self.num_views = num_views
        self.dtype = dtype
        self.key = key
        # Open files by number: the metadata of the views, and the handle of the mapped file.
        self._files: dict[int, tuple[dict[str, Any], Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}  # spawned workers open the files themselves

    @property
    def num_files(self) -> int:
        """Number of files of the complete store."""
        return math.ceil(self.num_views / VIEWS_PER_FILE)

    def views_of(self, file: int) -> range:
        """Returns the indices of the views in a file."""
        first = file * VIEWS_PER_FILE
        return range(first, min(first + VIEWS_PER_FILE, self.num_views))

    def path_of(self, file: int) -> Path:
        return self.folder / f"{file:06d}.safetensors"

    def missing(self) -> list[int]:
        """Returns the numbers of files that are missing, damaged or from another cache."""
        missing = []
        for file in range(self.num_files):
            try:
                self._read_header(file)
            except UserError:
                missing.append(file)
        return missing

    def read(self, view_index: int) -> Stored:
        """Returns a copy of a view, or the error or None that the mapper returned for it.

        Raises:
            UserError: the file is missing, damaged or from another cache.
        """
        if not 0 <= view_index < self.num_views:
            raise IndexError(f"view {view_index} of {self.num_views}")
        file = view_index // VIEWS_PER_FILE
        try:
            if file not in self._files:
                self._files[file] = self._read_header(file)
            views, tensors = self._files[file]
            return self._parse(view_index, views, tensors)
        except _DAMAGES as error:
            raise UserError(f"'{self.path_of(file)}' is damaged ({error}): {_REMOVE}") from error

    def _parse(self, view_index: int, views: dict[str, Any], tensors: Any) -> Stored:
        """Builds a view from an open file: the metadata of its views, and the handle."""
        metadata = views[str(view_index)]
        if metadata is None:
            return None
        if "error" in metadata:
            return DataError(**metadata["error"])
        # All features of a view stay in one tensor, because a worker process sends each block of
        # memory separately.
        values = tensors.get_tensor(str(view_index)).clone()  # (sum of all sizes,)
        if _hash(values) != metadata["crc32"]:
            raise ValueError("its checksum differs")
        shapes = metadata["shapes"]
        flat_features = values.split([math.prod(shape) for shape in shapes.values()])
        features: dict[str, Tensor] = {}
        for name, flat in zip(shapes, flat_features, strict=True):
            features[name] = flat.view(shapes[name])
        ground_truth: dict[str, Tensor] = {}
        for name, value in metadata["ground_truth"].items():
            tensor = torch.tensor(value, dtype=_TRUTH_DTYPES[name])
            if name == "gt_boxes":
                tensor = tensor.reshape(-1, 4)  # an empty list becomes (0, 4)
            ground_truth[name] = tensor
        height, width = metadata["image_size"]
        full_size = metadata["full_size"]
        if full_size is not None:
            full_size = tuple(full_size)
        return View(features, (height, width), ground_truth, full_size)

    def write(self, file: int, views: Sequence[Stored]) -> None:
        """Writes the views of a file atomically. Raises a ``UserError`` if it cannot store them."""
        tensors: dict[str, Tensor] = {}  # the features of each view, flat, by index of the view
        metadata: dict[str, Any] = {}  # by index of the view
        for index, view in zip(self.views_of(file), views, strict=True):
            if view is None:
                metadata[str(index)] = None
                continue
            if isinstance(view, DataError):
                metadata[str(index)] = {"error": asdict(view)}
                continue
            flat_features = []
            for name, feature in view.features.items():
                title = f"the encoder's output '{name}' for view {index}"
                flat_features.append(_round(feature, self.dtype, title).flatten())
            values = torch.cat(flat_features)
            tensors[str(index)] = values
            metadata[str(index)] = {
                "crc32": _hash(values),
                "shapes": {name: list(feature.shape) for name, feature in view.features.items()},
                "image_size": view.image_size,
                "full_size": view.full_size,
                # JSON has double precision, which represents single precision exactly.
                "ground_truth": {name: value.tolist() for name, value in view.ground_truth.items()},
            }
        header = {"format": FORMAT_VERSION, "cache": self.folder.name, "views": metadata}
        text = json.dumps(header)
        described = {_METADATA_KEY: text, _CHECKSUM_KEY: str(zlib.crc32(text.encode()))}
        content = safetensors.torch.save(tensors, described)
        with naming_the_key():
            write_atomically(self.path_of(file), content)
        self._files.pop(file, None)  # if an old version is open, ``read`` opens the file again

    def check_space(self) -> None:
        """Raises a ``UserError`` if the disk lacks space for the files that are still missing.

        Assumes that each of them is as large as the largest existing file.
        """
        sizes = [path.stat().st_size for path in self.folder.glob("*.safetensors")]
        needed = (self.num_files - len(sizes)) * max(sizes)
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise UserError(
                f"the features to cache need {format_bytes(needed)} more, but the disk of "
                f"'{self.folder}' has {format_bytes(free)} free: set MODEL.CACHE_FEATURES.FOLDER "
                "to another disk, or lower INPUT.FIXED_VIEWS.COUNT"
            )

    def _read_header(self, file: int) -> tuple[dict[str, Any], Any]:
        """Opens a file. Returns the metadata of its views, by index, and the handle of the file.

        Raises a ``UserError`` if the file is missing, damaged or from another cache.
        """
        path = self.path_of(file)
        expected_indices = [str(index) for index in self.views_of(file)]
        expected = (FORMAT_VERSION, self.folder.name, expected_indices)
        try:
            tensors = safetensors.safe_open(path, framework="pt")
            described = tensors.metadata()
            text = described[_METADATA_KEY]
            if described[_CHECKSUM_KEY] != str(zlib.crc32(text.encode())):
                raise ValueError("the checksum of its boxes and classes differs")
            header = json.loads(text)
            stored = (header["format"], header["cache"], list(header["views"]))
        except _DAMAGES as error:
            raise UserError(f"'{path}' cannot be read ({error}): {_REMOVE}") from error
        if stored != expected:
            raise UserError(f"'{path}' belongs to another cache: {_REMOVE}")
        return header["views"], tensors


@contextlib.contextmanager
def naming_the_key() -> Iterator[None]:
    """Context that adds the config key of the folder to the message of a ``UserError``."""
    try:
        yield
    except UserError as error:
        advice = "set MODEL.CACHE_FEATURES.FOLDER to a writable folder"
        raise UserError(f"{error}: {advice}") from error


def _hash(values: Tensor) -> int:
    """Returns a checksum of the values and their type."""
    type_checksum = zlib.crc32(str(values.dtype).encode())
    return zlib.crc32(values.view(torch.uint8).numpy().data, type_checksum)


def _round(feature: Tensor, dtype: torch.dtype, title: str) -> Tensor:
    """Converts a feature to the stored type; raises a ``UserError`` if a value is not finite."""
    rounded = feature.detach().to(dtype)
    if rounded.isfinite().all():
        return rounded
    hint = "check the weights and MODEL.PIXEL_MEAN"
    if feature.isfinite().all():
        hint = "set MODEL.CACHE_FEATURES.DTYPE to bfloat16 or float32"
    largest = float(feature.detach().abs().max())
    raise UserError(f"{title} reaches {largest:.4g}, beyond {dtype}: {hint}")
