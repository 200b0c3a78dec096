# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Builds a cache of features: makes its key, encodes the missing views, and stores them.

All processes of a run build a cache together; other runs that need the same cache wait for them.
"""

import contextlib
import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data.build import trivial_batch_collator
from detectron2.utils import comm
from filelock import FileLock, Timeout
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from qbheat_det.config import find_memory_format
from qbheat_det.core.environment import VERSION
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import get_cache_dir, hash_tensors, remove_leftovers, write_atomically
from qbheat_det.data import DataError, FixedViews, cut
from qbheat_det.data.mappers import VIEW_ROW

from .store import FORMAT_VERSION, VIEWS_PER_FILE, FeatureStore, Stored, View

logger = logging.getLogger(__name__)
Mapped = dict[str, Any] | DataError | None

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_MAX_VIEWS = 1000
_SECONDS_BETWEEN_LINES = 30  # of progress in a log
_FULL_SIZE = {"height", "width"}


class AllViews(Dataset[Mapped]):
    """The K views of each numbered record; view k of row r has the index r * K + k."""

    def __init__(self, records: Sequence[dict[str, Any]], views: FixedViews) -> None:
        self.records = records
        self.views = views

    def __len__(self) -> int:
        return len(self.records) * self.views.count

    def __getitem__(self, index: int) -> Mapped:
        row, number = divmod(index, self.views.count)
        return self.views.view(self.records[row], number)


def encode_images(
    entries: Sequence[Mapped],
    encode: Callable[[list[dict[str, Any]]], Mapping[str, Tensor]],
    *,
    at_once: int = VIEWS_PER_FILE,
    is_exact: bool = False,
) -> list[Stored]:
    """Returns a view for each entry of a mapper; errors and None pass through.

    Views of one size share a batch. Rounding depends on the size of a batch, not on its images.

    Args:
        entries: outputs of a mapper.
        encode: returns the outputs by name, (N, …), of N entries whose images have one size.
        at_once: the largest N.
        is_exact: whether the last bits matter. If so, and all views have one size, every batch has
            ``at_once`` entries, some of them repeated. Otherwise batches are about equally large.
    """
    views: list[Stored] = [None if isinstance(entry, dict) else entry for entry in entries]
    images = {i: entry for i, entry in enumerate(entries) if isinstance(entry, dict)}
    of_size: dict[tuple[int, ...], list[int]] = {}
    for index, entry in images.items():
        of_size.setdefault(tuple(entry["image"].shape), []).append(index)
    for indices in of_size.values():
        for part in cut(indices, -(-len(indices) // at_once)):
            size = at_once if is_exact and len(of_size) == 1 else len(part)
            outputs = encode([images[i] for i in islice(cycle(part), size)])
            outputs = {name: value.float().cpu() for name, value in outputs.items()}
            for position, index in enumerate(part):
                features = {name: value[position] for name, value in outputs.items()}
                views[index] = make_view(images[index], features)
    return views


def make_view(entry: Mapping[str, Any], features: dict[str, Tensor]) -> View:
    """Returns the view of a mapper's entry, given the encoder's outputs for it."""
    height, width = entry["image"].shape[-2:]
    truth: dict[str, Tensor] = {}
    if "instances" in entry:
        truth["gt_boxes"] = entry["instances"].gt_boxes.tensor.float()
        truth["gt_classes"] = entry["instances"].gt_classes.long()
    if "label" in entry:
        truth["label"] = torch.tensor(int(entry["label"]))
    full = (int(entry["height"]), int(entry["width"])) if entry.keys() >= _FULL_SIZE else None
    return View(features, (int(height), int(width)), truth, full)


def fill(
    store: FeatureStore,
    views: AllViews,
    encode: Callable[[list[Mapped]], list[Stored]],
    *,
    title: str,
    num_workers: int,
) -> None:
    """Encodes and writes the missing files of a store. All processes of a run must call it.

    If another run fills the same store, this one waits until that run is done or killed.

    Args:
        store: where views are written.
        views: all views, by their index in the store.
        encode: maps entries of a mapper to views, see ``encode_images``.
        title: names the work in progress bars and logs.
        num_workers: processes that load views ahead.

    Raises:
        UserError: the folder is not writable, the disk is too small, or a feature is not finite.
    """
    is_main = comm.is_main_process()
    if not _share_missing(store):
        return
    with _build_lock(store, f"{title}: waits for another run that does it"):
        remove_leftovers(store.folder)
        if store.key and is_main:
            key = json.dumps(store.key, indent=2, sort_keys=True)
            write_atomically(store.folder / "meta.json", key.encode())
        missing = _share_missing(store)
        damaged = [path for path in map(store.path_of, missing) if path.is_file()]
        if damaged and is_main:
            logger.warning(f"'{damaged[0]}' and {len(damaged) - 1} more are damaged: rewritten")
        files = missing[comm.get_rank() :: comm.get_world_size()]
        indices = [index for file in files for index in store.views_of(file)]
        loader: DataLoader[Any] = DataLoader(
            views,
            batch_size=None,
            sampler=indices,
            num_workers=num_workers,
            collate_fn=trivial_batch_collator,
            generator=torch.Generator(),  # else it draws from the global one
        )
        interval = 0.1 if sys.stderr.isatty() else _SECONDS_BETWEEN_LINES
        loaded, total, hidden = iter(loader), len(indices), not (is_main and files)
        with tqdm(
            desc=title, total=total, unit=" views", mininterval=interval, disable=hidden
        ) as bar:
            for file in files:
                entries = list(islice(loaded, len(store.views_of(file))))
                store.write(file, encode(entries))
                bar.update(len(entries))
                if file == files[0]:  # its size tells how much space all files need
                    store.check_space()
        comm.synchronize()


def _share_missing(store: FeatureStore) -> list[int]:
    """Returns on all processes the missing files that the main process sees."""
    return comm.all_gather(store.missing() if comm.is_main_process() else [])[0]


@contextlib.contextmanager
def _build_lock(store: FeatureStore, waiting: str) -> Iterator[None]:
    """Holds the lock of a store on the main process, while the other processes wait.

    Another run may hold it for hours, so the processes communicate in between: a collective call
    times out after half an hour.
    """
    lock, is_main, seconds = FileLock(store.folder / "build.lock"), comm.is_main_process(), 0.1
    if is_main:
        store.check_writable()
    store.folder.mkdir(parents=True, exist_ok=True)
    try:
        while True:
            if is_main:
                with contextlib.suppress(Timeout):
                    lock.acquire(timeout=seconds)
            if comm.all_gather(lock.is_locked)[0]:
                break
            if is_main and seconds < 1:
                logger.info(waiting)
            seconds = _SECONDS_BETWEEN_LINES
        yield
    finally:
        lock.release()


def check_cache_keys(cfg: CfgNode) -> None:
    """Checks the config keys that every cache needs; raises a ``UserError`` that names one."""
    if not 1 <= cfg.INPUT.FIXED_VIEWS.COUNT <= _MAX_VIEWS:
        raise UserError(
            f"INPUT.FIXED_VIEWS.COUNT is {cfg.INPUT.FIXED_VIEWS.COUNT}, but cached features need a "
            f"fixed number of views of each image, from 1 to {_MAX_VIEWS}"
        )
    dtype = cfg.MODEL.CACHE_FEATURES.DTYPE
    if dtype not in _DTYPES:
        raise UserError(f"MODEL.CACHE_FEATURES.DTYPE is '{dtype}', not one of {', '.join(_DTYPES)}")


def open_store(cfg: CfgNode, key: Mapping[str, Any], num_views: int) -> FeatureStore:
    """Returns the store of a key, a subfolder of ``MODEL.CACHE_FEATURES.FOLDER``."""
    named = cfg.MODEL.CACHE_FEATURES.FOLDER
    caches = Path(named).expanduser() if named else get_cache_dir() / "feature_cache"
    dtype = _DTYPES[cfg.MODEL.CACHE_FEATURES.DTYPE]
    return FeatureStore(caches / hash_key(key), num_views, dtype=dtype, key=key)


def make_key(
    cfg: CfgNode,
    encoder: nn.Module,
    records: Sequence[Mapping[str, Any]],
    *,
    outputs: Sequence[str],
    views: FixedViews,
    is_train: bool,
    device: torch.device,
    size_divisibility: int,
) -> dict[str, Any]:
    """Returns the key of a cache as plain JSON. Caches with equal keys hold equal features.

    In the key: the encoder's weights and structure, how images are normalised and padded, all of
    ``INPUT``, the views, precision, layout, device, and the versions of this package and PyTorch;
    of each record its annotations and its file's relative path, size and modification time.

    Not in the key: the files' content, the folder of all files, the number of threads, the batch
    size, and the versions of other libraries. Their effect is far below half precision, and caches
    can be moved and shared.

    Args:
        cfg: of the run, or of its teacher.
        encoder: the frozen network.
        records: of the data set, in their order.
        outputs: names of the encoder's outputs that are stored.
        views: of each record.
        is_train: whether views are drawn as in training.
        device: that the encoder runs on.
        size_divisibility: to which images are padded.
    """
    return {
        "format": FORMAT_VERSION,
        "weights": hash_tensors(encoder.state_dict()),
        "encoder": _hash(repr(encoder)),  # covers settings that the weights do not show
        "outputs": list(outputs),
        "pixel_mean": [float(value) for value in cfg.MODEL.PIXEL_MEAN],
        "pixel_std": [float(value) for value in cfg.MODEL.PIXEL_STD],
        "size_divisibility": size_divisibility,
        "dtype": cfg.MODEL.CACHE_FEATURES.DTYPE,
        "views_per_image": views.count,
        "views_seed": views.seed,
        "is_train": is_train,
        "input": _dump_input(cfg.INPUT),
        "qbheat_det": VERSION,
        "torch": torch.__version__.partition("+")[0],
        "device": device.type,
        "float32_precision": str(cfg.get("FLOAT32_PRECISION", "")),  # missing in Detectron2 0.6
        "channels_last": find_memory_format(cfg) == torch.channels_last,
        "num_images": len(records),
        "records": _hash_records(records),
    }


def hash_key(key: Mapping[str, Any]) -> str:
    """Returns the folder name of a key's cache."""
    return _hash(json.dumps(key, sort_keys=True))[:32]


def _hash_records(records: Sequence[Mapping[str, Any]]) -> str:
    names = [os.path.abspath(os.fspath(record["file_name"])) for record in records]
    folder = os.path.commonpath([os.path.dirname(name) for name in names]) if names else ""
    digest = hashlib.sha256()
    for record, name in zip(records, names, strict=True):
        kept = {k: value for k, value in record.items() if k not in (VIEW_ROW, "file_name")}
        try:
            found = os.stat(name)
            state = found.st_size, found.st_mtime_ns
        except OSError:  # missing, which the mapper reports, or on another machine
            state = -1, -1
        line = [os.path.relpath(name, folder), *state, kept]
        digest.update(json.dumps(line, sort_keys=True, default=_make_plain).encode() + b"\n")
    return digest.hexdigest()


def _make_plain(value: Any) -> Any:
    is_array = isinstance(value, np.ndarray | np.generic | Tensor)
    return value.tolist() if is_array else repr(value)


def _dump_input(config: CfgNode) -> list[str]:
    kept = config.clone()
    del kept["FIXED_VIEWS"]  # the key has their number and seed
    del kept.PRETRAIN["MEMORY_GB"]  # fixed views are never read from memory
    lines: list[str] = kept.dump().splitlines()
    return lines


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
