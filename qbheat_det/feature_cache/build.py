# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Encodes the views of a set of images and fills a store with them, in one or many processes.

The store's name is a hash of all that the features depend on.

Views of one size are encoded together, as many at once as a step of training has: how matrix
products are rounded depends on the number of images, but not on which these are.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import hash_tensors, remove_leftovers, write_atomically
from qbheat_det.core.versions import VERSION
from qbheat_det.data import DataError, FixedViews, cut, get_cache_dir
from qbheat_det.data.mappers import VIEW_ROW

from .backbone import CachedBackbone
from .store import (
    FORMAT_VERSION,
    VIEWS_PER_FILE,
    FeatureStore,
    Stored,
    View,
)

logger = logging.getLogger(__name__)
Mapped = dict[str, Any] | DataError | None

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_MAX_VIEWS = 1000
_SECONDS_BETWEEN_LINES = 30  # of progress in a log
_FULL_SIZE = {"height", "width"}


@dataclass(frozen=True)
class ViewEncoder:
    """Turns entries of a mapper into views of a store, through a model's own encoder.

    ``encoding`` of the ``backbone`` holds meanwhile; a batch has ``at_once`` images at most.
    Attention is computed otherwise in evaluation, and rounded otherwise, hence ``is_train``. If the
    last bits matter, ``is_exact``, and all views are of one size, a batch that is too small is
    filled up by repetition; else batches are cut evenly.
    """

    model: nn.Module
    backbone: CachedBackbone
    at_once: int
    is_train: bool
    is_exact: bool

    def __call__(self, entries: Sequence[Mapped]) -> list[Stored]:
        """See ``encode_images``."""
        encode = functools.partial(self.backbone.encode, self.model)
        was_training = self.model.training
        self.model.train(self.is_train)
        try:
            return encode_images(entries, encode, at_once=self.at_once, is_exact=self.is_exact)
        finally:
            self.model.train(was_training)


def encode_images(
    entries: Sequence[Mapped],
    encode: Callable[[list[dict[str, Any]]], Mapping[str, Tensor]],
    *,
    at_once: int = VIEWS_PER_FILE,
    is_exact: bool = False,
) -> list[Stored]:
    """Returns a view for each entry of a mapper; an error, or None, stays what it is.

    ``encode`` gives the outputs by name, (N, …), of N entries with images of one size, ``at_once``
    at most; see ``ViewEncoder`` for ``is_exact``.
    """
    views: list[Stored] = [None if isinstance(entry, dict) else entry for entry in entries]
    images = {i: entry for i, entry in enumerate(entries) if isinstance(entry, dict)}
    of_size: dict[tuple[int, ...], list[int]] = {}
    for index, entry in images.items():
        of_size.setdefault(tuple(entry["image"].shape), []).append(index)
    for indices in of_size.values():
        is_filled = is_exact and len(of_size) == 1
        for part in cut(indices, -(-len(indices) // at_once)):
            filled = at_once if is_filled else len(part)
            outputs = encode([images[i] for i in islice(cycle(part), filled)])
            outputs = {name: value.float().cpu() for name, value in outputs.items()}
            for position, index in enumerate(part):
                features = {name: value[position] for name, value in outputs.items()}
                views[index] = make_view(images[index], features)
    return views


def make_view(entry: Mapping[str, Any], features: Mapping[str, Tensor]) -> View:
    """Returns a view of a mapper's entry from the encoder's outputs for its "image" (3, H, W)."""
    height, width = entry["image"].shape[-2:]
    truth: dict[str, Tensor] = {}
    if "instances" in entry:
        truth["gt_boxes"] = entry["instances"].gt_boxes.tensor.float()
        truth["gt_classes"] = entry["instances"].gt_classes.long()
    if "label" in entry:
        truth["label"] = torch.tensor(int(entry["label"]))
    full = (int(entry["height"]), int(entry["width"])) if entry.keys() >= _FULL_SIZE else None
    return View(dict(features), (int(height), int(width)), truth, full)


class AllViews(Dataset[Mapped]):
    """The K views of each numbered record; those of row r have the indices from r * K on."""

    def __init__(self, records: Sequence[dict[str, Any]], views: FixedViews) -> None:
        self.records = records
        self.views = views
        self.count = views.count

    def __len__(self) -> int:
        return len(self.records) * self.count

    def __getitem__(self, index: int) -> Mapped:
        row, number = divmod(index, self.count)
        return self.views.view(self.records[row], number)


def fill(
    store: FeatureStore,
    views: AllViews,
    encode: Callable[[list[Mapped]], list[Stored]],
    *,
    title: str,
    num_workers: int,
) -> None:
    """Writes what is missing of a store; to be called by all processes of a run, which share it.

    If another run fills the same store, waits until it is done, or killed. ``encode`` maps views to
    what is stored of them, such as a ``ViewEncoder``; ``num_workers`` processes load views ahead.
    Raises a ``UserError`` if the store cannot be written, or cannot hold what there is.
    """
    is_main = comm.is_main_process()
    if not _share_missing(store):
        return
    with _build_lock(store, f"{title}: waits for another run that does it"):
        remove_leftovers(store.folder)
        missing = _share_missing(store)
        damaged = [path for path in map(store.path_of, missing) if path.is_file()]
        if damaged and is_main:
            logger.warning(f"'{damaged[0]}' and {len(damaged) - 1} more are damaged: written anew")
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
                if file == files[0]:  # the first file shows what all of them take
                    store.check_space()
        comm.synchronize()


def _share_missing(store: FeatureStore) -> list[int]:
    """Returns the files that the main process misses, on all processes."""
    return comm.all_gather(store.missing() if comm.is_main_process() else [])[0]


@contextlib.contextmanager
def _build_lock(store: FeatureStore, waiting: str) -> Iterator[None]:
    """Holds the lock of a store on the main process; the others wait with it.

    The other run may take hours, so the processes speak to each other on the way: a collective call
    that is not answered fails after half an hour.
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
    """Checks the keys of a config that all caches need; raises a ``UserError``."""
    if not 1 <= cfg.INPUT.FIXED_VIEWS.COUNT <= _MAX_VIEWS:
        raise UserError(
            f"INPUT.FIXED_VIEWS.COUNT is {cfg.INPUT.FIXED_VIEWS.COUNT}, but cached features need a "
            f"number of views of each image, from 1 to {_MAX_VIEWS}"
        )
    dtype = cfg.MODEL.CACHE_FEATURES.DTYPE
    if dtype not in _DTYPES:
        raise UserError(f"MODEL.CACHE_FEATURES.DTYPE is '{dtype}', not one of {', '.join(_DTYPES)}")


def open_store(cfg: CfgNode, description: Mapping[str, Any], num_views: int) -> FeatureStore:
    """Returns the store of what ``describe_cache`` gave, in the folder of all caches."""
    store = find_store(cfg, description, num_views)
    about = store.folder / "meta.json"
    if comm.is_main_process() and not about.is_file():
        store.check_writable()
        write_atomically(about, json.dumps(description, indent=2, sort_keys=True).encode())
    return store


def find_store(cfg: CfgNode, description: Mapping[str, Any], num_views: int) -> FeatureStore:
    """As ``open_store``, but writes nothing."""
    named = cfg.MODEL.CACHE_FEATURES.FOLDER
    caches = Path(named).expanduser() if named else get_cache_dir() / "feature_cache"
    dtype = _DTYPES[cfg.MODEL.CACHE_FEATURES.DTYPE]
    return FeatureStore(caches / name_cache(description), num_views, dtype=dtype)


def describe_cache(
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
    """Returns all that the features of a data set depend on, long things by their SHA-256.

    Threads and versions of other libraries do not enter: caches are moved and shared, and what they
    change is far below half precision; nor does the number of images that are encoded at once, for
    the same reason. All of ``INPUT`` enters, whatever the mapper reads of it; of a record's file
    its name below the folder of all files, its size and when it was changed, not its content.
    ``outputs`` are names of the encoder's outputs that are kept; ``is_train`` is whether views are
    drawn as in training.
    """
    return {
        "format": FORMAT_VERSION,
        "weights": hash_tensors(encoder.state_dict()),
        "encoder": _hash(repr(encoder)),  # what no weight shows
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
        "float32_precision": str(cfg.get("FLOAT32_PRECISION", "")),  # Detectron2 0.6 has no such
        "channels_last": find_memory_format(cfg) == torch.channels_last,
        "num_images": len(records),
        "records": hash_records(records),
    }


def name_cache(description: Mapping[str, Any]) -> str:
    """Returns a name that equal descriptions share, and others do not."""
    return _hash(json.dumps(description, sort_keys=True))[:32]


def hash_records(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns the SHA-256 of images, annotations and their order; see ``describe_cache``."""
    names = [os.path.abspath(os.fspath(record["file_name"])) for record in records]
    folder = os.path.commonpath([os.path.dirname(name) for name in names]) if names else ""
    digest = hashlib.sha256()
    for record, name in zip(records, names, strict=True):
        kept = {k: value for k, value in record.items() if k not in (VIEW_ROW, "file_name")}
        try:
            found = os.stat(name)
            state = found.st_size, found.st_mtime_ns
        except OSError:  # not there, which the mapper reports, or not on a disk of this machine
            state = -1, -1
        line = [os.path.relpath(name, folder), *state, kept]
        digest.update(json.dumps(line, sort_keys=True, default=_make_plain).encode() + b"\n")
    return digest.hexdigest()


def _make_plain(value: Any) -> Any:
    is_array = isinstance(value, np.ndarray | np.generic | Tensor)
    return value.tolist() if is_array else repr(value)


def _dump_input(config: CfgNode) -> list[str]:
    kept = config.clone()
    del kept["FIXED_VIEWS"]  # number and seed have entries of their own
    del kept.PRETRAIN["MEMORY_GB"]  # fixed views are never read from memory
    lines: list[str] = kept.dump().splitlines()
    return lines


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
