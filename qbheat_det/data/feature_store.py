# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The outputs of a frozen encoder for every view of a data set, on the disk.

A folder of safetensors files of 32 views each. A file takes its name when it is complete, so that
an interrupted build resumes where it stopped; each is claimed with a lock, so that processes share
the work.
"""

import contextlib
import errno
import json
import logging
import os
import shutil
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically
from qbheat_det.core.text import format_bytes
from qbheat_det.data.checks import DataError

logger = logging.getLogger(__name__)

# To be raised whenever a file's layout changes, and whenever a view is drawn or encoded otherwise
# than before: the key of a cache knows settings and weights, not the code that reads them.
FORMAT_VERSION = 3
VIEWS_PER_CHUNK = 32
_METADATA_KEY = "qbheat_det"
_OPEN_CHUNKS = 1024  # headers of files that a process keeps
_OTHER_FOLDER = "set MODEL.CACHE_FEATURES.FOLDER to a folder that features can be cached in"


@dataclass(frozen=True)
class View:
    """An encoder's outputs for one view of an image, and what the mapper said of that view.

    Attributes:
        features: by the name of the output, a map (C, h, w) or tokens (M, D) each.
        image_size: height and width of the view, in pixels.
        ground_truth: "gt_boxes" (B, 4), xyxy in pixels of the view, and "gt_classes" (B,); or
            "label" (); or nothing.
        full_size: height and width of the image that the view is of, in pixels, to which detections
            are scaled; None if the mapper gave none.
    """

    features: dict[str, Tensor]
    image_size: tuple[int, int]
    ground_truth: dict[str, Tensor]
    full_size: tuple[int, int] | None = None


Stored = View | DataError | None
"""A view, or what the mapper gave in its place."""


class FeatureStore:
    """Views by their index; of K views of each image, view k of row r has the index r * K + k."""

    def __init__(
        self, folder: str | os.PathLike[str], num_views: int, *, dtype: torch.dtype = torch.float16
    ) -> None:
        """
        Args:
            folder: its name is that of the cache, which every file repeats.
            num_views: of all images together.
            dtype: of the features in the files.
        """
        self.folder = Path(folder)
        self.num_views = num_views
        self.dtype = dtype
        self._complete: set[int] = set()
        self._open: OrderedDict[int, _Chunk] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker reads the headers itself.
        return {**self.__dict__, "_open": OrderedDict()}

    @property
    def num_chunks(self) -> int:
        """Number of files."""
        return -(-self.num_views // VIEWS_PER_CHUNK)

    def views_of(self, chunk: int) -> range:
        """Returns the indices of the views of a file."""
        first = chunk * VIEWS_PER_CHUNK
        return range(first, min(first + VIEWS_PER_CHUNK, self.num_views))

    def path_of(self, chunk: int) -> Path:
        """Returns the name of a file."""
        return self.folder / f"{chunk:06d}.safetensors"

    def missing(self) -> list[int]:
        """Returns the chunks that are to be written; files of other caches or damaged ones too."""
        return [chunk for chunk in range(self.num_chunks) if not self._is_complete(chunk)]

    def read(self, view_index: int) -> Stored:
        """Returns a view, or what the mapper gave in its place.

        Raises:
            IndexError: there is no such view.
            UserError: its file is gone, or damaged.
        """
        if not 0 <= view_index < self.num_views:
            raise IndexError(f"view {view_index} of {self.num_views}")
        number = view_index // VIEWS_PER_CHUNK
        try:
            chunk = self._open.pop(number, None) or self._load(number)
            view = chunk.read(view_index)
        except ValueError as error:
            raise UserError(f"{error}: remove it and start again with --resume") from error
        self._open[number] = chunk  # the last to go
        if len(self._open) > _OPEN_CHUNKS:
            self._open.popitem(last=False)
        return view

    def write(self, chunk: int, views: Sequence[Stored]) -> None:
        """Writes the views of a file, complete or not at all.

        Raises:
            UserError: the disk is full, the folder cannot be written, or a feature is not finite.
        """
        by_index = dict(zip(self.views_of(chunk), views, strict=True))
        content = _pack(by_index, cache=self.folder.name, dtype=self.dtype)
        try:
            write_atomically(self.path_of(chunk), lambda stream: stream.write(content))
        except UserError as error:
            reason = getattr(error.__cause__, "errno", None)
            if reason in (errno.ENOSPC, errno.EDQUOT):
                left = self.num_chunks - len(self._complete)
                raise UserError(_explain_full_disk(self.folder, left * len(content))) from error
            raise UserError(f"{error}: {_OTHER_FOLDER}") from error
        self._open.pop(chunk, None)
        self._complete.add(chunk)

    @contextlib.contextmanager
    def claim(self, chunk: int) -> Iterator[bool]:
        """Yields whether this process is to write a chunk: it is missing, and no one else does.

        Raises:
            UserError: the folder cannot be written.
        """
        if self._is_complete(chunk):
            yield False
            return
        path = self.path_of(chunk).with_suffix(".lock")
        lock = FileLock(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except Timeout:  # another process holds it
            yield False
            return
        except NotImplementedError:  # not every file system has locks
            pass
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"cannot write '{path}' ({reason}): {_OTHER_FOLDER}") from error
        try:
            yield not self._is_complete(chunk)  # another may have written it since
        finally:
            if chunk in self._complete:
                # Who waits for the lock of a file that is gone finds the chunk written.
                path.unlink(missing_ok=True)
            lock.release()

    def _is_complete(self, chunk: int) -> bool:
        if chunk not in self._complete and self.path_of(chunk).is_file():
            try:
                self._load(chunk)
                self._complete.add(chunk)
            except ValueError as error:
                logger.warning(f"Cached features are written anew: {error}")
        return chunk in self._complete

    def _load(self, chunk: int) -> "_Chunk":
        return _Chunk(self.path_of(chunk), self.folder.name, self.views_of(chunk), self.dtype)


def check_space(folder: Path, needed: float) -> None:
    """Raises a ``UserError`` if a folder's disk has no room for ``needed`` further bytes."""
    if _free_bytes(folder) < needed:
        raise UserError(_explain_full_disk(folder, needed))


def _explain_full_disk(folder: Path, needed: float) -> str:
    return (
        f"the features to cache need {format_bytes(needed)}, but the disk of '{folder}' has "
        f"{format_bytes(_free_bytes(folder))} free: set MODEL.CACHE_FEATURES.FOLDER to another "
        "disk, or lower INPUT.FIXED_VIEWS.COUNT"
    )


def _free_bytes(folder: Path) -> int:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


class _Chunk:
    """A file of views, whose header is in memory."""

    def __init__(self, path: Path, cache: str, views: range, dtype: torch.dtype) -> None:
        self._path = path
        self._dtype = dtype
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                self._begin = 8 + int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(self._begin - 8)) if self._begin <= size else {}
        except OSError as error:
            raise ValueError(f"'{path}' cannot be read: {error}") from error
        text = header.pop("__metadata__", {}).get(_METADATA_KEY, "")
        checksum, text = text[:8], text[8:]
        if checksum != f"{zlib.crc32(text.encode()):08x}":
            raise ValueError(f"'{path}' is damaged or of another cache")
        about = json.loads(text)
        self._views: dict[str, dict[str, Any] | None] = about["views"]
        found = about["format"], about["cache"], list(self._views)
        if found != (FORMAT_VERSION, cache, [str(index) for index in views]):
            raise ValueError(f"'{path}' is of another cache")
        self._tensors: dict[str, dict[str, Any]] = header
        end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        if self._begin + end != size:
            raise ValueError(f"'{path}' was cut short")
        self._layouts: dict[int, _Layout] = {}  # of views that were verified

    def read(self, index: int) -> Stored:
        """Returns a view, in memory of its own."""
        about = self._views[str(index)]
        if about is None:
            return None
        if "error" in about:
            return DataError(**about["error"])
        layout = self._layouts.get(index) or self._find_layout(index, about["outputs"])
        block = bytearray(layout.size)
        try:
            with open(self._path, "rb", buffering=0) as file:
                file.seek(layout.start)
                if file.readinto(block) != len(block):
                    raise ValueError(f"'{self._path}' was cut short")
        except OSError as error:
            raise ValueError(f"'{self._path}' cannot be read: {error}") from error
        if index not in self._layouts:  # once is enough, while the header is kept
            if zlib.crc32(block) != about["checksum"]:
                raise ValueError(f"'{self._path}' is damaged")
            self._layouts[index] = layout
        values = torch.frombuffer(block or bytearray(8), dtype=self._dtype)
        features = {
            name: values[start:stop].view(shape) for name, start, stop, shape in layout.tensors
        }
        height, width = about["image_size"]
        full = about["full_size"]
        stored = about["ground_truth"]
        truth = {name: torch.tensor(stored[name]) for name in stored if name == "label"}
        if "gt_boxes" in stored:  # empty lists have neither shape nor dtype
            boxes = torch.tensor(stored["gt_boxes"], dtype=torch.float32)
            truth["gt_boxes"] = boxes.reshape(-1, 4)
            truth["gt_classes"] = torch.tensor(stored["gt_classes"], dtype=torch.int64)
        return View(features, (height, width), truth, full and tuple(full))

    def _find_layout(self, index: int, outputs: Sequence[str]) -> "_Layout":
        """Returns where a view is: its tensors lie side by side, and are read as one block."""
        tensors = {name: self._tensors[f"{index}/{name}"] for name in outputs}
        first = min((tensor["data_offsets"][0] for tensor in tensors.values()), default=0)
        end = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
        places = []
        for name, tensor in tensors.items():
            start, stop = (
                (offset - first) // self._dtype.itemsize for offset in tensor["data_offsets"]
            )
            places.append((name, start, stop, tensor["shape"]))
        return _Layout(self._begin + first, end - first, places)


class _Layout(NamedTuple):
    """Where a view is in its file, and its tensors in that block, by the element."""

    start: int
    size: int
    tensors: list[tuple[str, int, int, list[int]]]


def _pack(views: Mapping[int, Stored], *, cache: str, dtype: torch.dtype) -> bytes:
    """Returns the content of a file: features as its tensors, "<index>/<output>", all else JSON."""
    tensors: dict[str, Tensor] = {}
    about: dict[str, dict[str, Any] | None] = {}
    for index, view in views.items():
        if not isinstance(view, View):
            about[str(index)] = None if view is None else {"error": asdict(view)}
            continue
        checksum = 0
        for name, feature in sorted(view.features.items()):  # as safetensors orders them
            rounded = _round(feature, dtype, f"the encoder's output '{name}' for view {index}")
            checksum = zlib.crc32(rounded.view(-1).view(torch.uint8).numpy().data, checksum)
            tensors[f"{index}/{name}"] = rounded
        about[str(index)] = {
            "outputs": list(view.features),
            "checksum": checksum,
            "image_size": view.image_size,
            "full_size": view.full_size,
            # A number in single precision is the same after JSON, which has double.
            "ground_truth": {name: tensor.tolist() for name, tensor in view.ground_truth.items()},
        }
    text = json.dumps({"format": FORMAT_VERSION, "cache": cache, "views": about})
    return safetensors.torch.save(
        tensors, {_METADATA_KEY: f"{zlib.crc32(text.encode()):08x}{text}"}
    )


def _round(feature: Tensor, dtype: torch.dtype, named: str) -> Tensor:
    """Returns a contiguous copy on the CPU; slices of a batch share memory, which no file can."""
    rounded = torch.empty(feature.shape, dtype=dtype).copy_(feature.detach())
    # Rounding keeps the order, so that the extremes suffice, which are faster to find.
    extremes = torch.stack(feature.detach().aminmax()) if feature.numel() else feature.detach()
    if extremes.to(dtype).isfinite().all():
        return rounded
    hint = "check the weights and MODEL.PIXEL_MEAN"
    if extremes.isfinite().all():
        hint = "set MODEL.CACHE_FEATURES.DTYPE to bfloat16 or float32"
    raise UserError(f"{named} reaches {float(extremes.abs().max()):.4g}, beyond {dtype}: {hint}")
