# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Computes the key of a cache, which names its folder, and opens the store in this folder."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from torch import Tensor, nn

from qbheat_det.config import find_memory_format
from qbheat_det.core.environment import VERSION
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import get_cache_dir, hash_tensors
from qbheat_det.data.mappers import VIEW_ROW, VIEW_SEED, find_root
from qbheat_det.modeling.contracts import ANNOTATED_CLASSES

from .store import FORMAT_VERSION, AllViews, FeatureStore

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_MAX_VIEWS = 1000
# Keys of a record that do not affect its views.
_NOT_IN_VIEWS = (VIEW_ROW, VIEW_SEED, "file_name", "image_id", ANNOTATED_CLASSES)


def check_cache_config(cfg: CfgNode) -> None:
    """Checks the config keys of caches, and raises a ``UserError`` if one is invalid."""
    if not 1 <= cfg.INPUT.FIXED_VIEWS.COUNT <= _MAX_VIEWS:
        raise UserError(
            f"INPUT.FIXED_VIEWS.COUNT is {cfg.INPUT.FIXED_VIEWS.COUNT}, but cached features need a "
            f"fixed number of views of each image, from 1 to {_MAX_VIEWS}"
        )
    dtype = cfg.MODEL.CACHE_FEATURES.DTYPE
    if dtype not in _DTYPES:
        raise UserError(f"MODEL.CACHE_FEATURES.DTYPE is '{dtype}', not one of {', '.join(_DTYPES)}")


def open_store(
    cfg: CfgNode, encoder: nn.Module, views: AllViews, **properties: Any
) -> FeatureStore:
    """Returns the store of an encoder's features, in a folder of ``MODEL.CACHE_FEATURES.FOLDER``.

    The name of the folder is a hash of the key. The store may be missing or incomplete.

    Args:
        cfg: config of the run, or of its teacher.
        encoder: the frozen network.
        views: the views of all records of the data set.
        properties: the other arguments of ``make_key``.
    """
    key = make_key(cfg, encoder, views, **properties)
    parent = get_cache_dir() / "feature_cache"
    if cfg.MODEL.CACHE_FEATURES.FOLDER:
        parent = Path(cfg.MODEL.CACHE_FEATURES.FOLDER).expanduser()
    dtype = _DTYPES[cfg.MODEL.CACHE_FEATURES.DTYPE]
    image_root, _ = find_root(views.records)
    # ``meta.json`` also has the root folder of the images, which does not affect the folder's name.
    stored_key = {**key, "root": image_root}
    return FeatureStore(parent / hash_key(key), len(views), dtype=dtype, key=stored_key)


def make_key(
    cfg: CfgNode,
    encoder: nn.Module,
    views: AllViews,
    *,
    outputs: Sequence[str],
    is_train: bool,
    device: torch.device,
    size_divisibility: int,
) -> dict[str, Any]:
    """Returns the key of a cache: a dict, for JSON, of everything that affects the features.

    If the key changes, a new cache is built. The key contains the encoder's weights and structure,
    the normalization and padding of images, all of ``INPUT``, the views, the precision, the memory
    format, the device, and the versions of this package and PyTorch. "records" has a hash for each
    record. It covers the annotations, and the relative path, size and modification time of the
    image file.

    The key does not contain the root folder of the files, so that caches can be moved and shared.
    Changed pixels are not detected if the file's size and modification time stay the same. The
    number of threads, the batch size and the versions of other libraries are not in the key,
    because their effect on features is far below the precision of float16.

    Args:
        cfg: config of the run, or of its teacher.
        encoder: the frozen network.
        views: the views of all records of the data set.
        outputs: names of the encoder's outputs that are stored.
        is_train: whether views are augmented as in training.
        device: device of the encoder.
        size_divisibility: the sides of padded images are multiples of this number.
    """
    input_cfg = cfg.INPUT.clone()
    # "views_per_image" and "views_seed" replace this node. The seed of a test set is always 0.
    del input_cfg["FIXED_VIEWS"]
    return {
        "format": FORMAT_VERSION,
        "weights": hash_tensors(encoder.state_dict()),
        "encoder": _hash(repr(encoder)),  # includes settings that do not affect the weights
        "outputs": list(outputs),
        "pixel_mean": [float(value) for value in cfg.MODEL.PIXEL_MEAN],
        "pixel_std": [float(value) for value in cfg.MODEL.PIXEL_STD],
        "size_divisibility": size_divisibility,
        "dtype": cfg.MODEL.CACHE_FEATURES.DTYPE,
        "views_per_image": views.views.count,
        "views_seed": views.views.seed,
        "is_train": is_train,
        "input": input_cfg.dump().splitlines(),
        "qbheat_det": VERSION,
        "torch": torch.__version__.partition("+")[0],
        "device": device.type,
        "float32_precision": str(cfg.get("FLOAT32_PRECISION", "")),  # missing in Detectron2 0.6
        "channels_last": find_memory_format(cfg) == torch.channels_last,
        "records": _hash_records(views.records),
    }


def hash_key(key: Mapping[str, Any]) -> str:
    """Returns the folder name of the cache with this key."""
    return _hash(json.dumps(key, sort_keys=True))[:32]


def _hash_records(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a hash of each record, and of the size and modification time of its file."""
    hashes = []
    _, relative_paths = find_root(records)
    for record, path in zip(records, relative_paths, strict=True):
        content = {key: value for key, value in record.items() if key not in _NOT_IN_VIEWS}
        try:
            status = os.stat(record["file_name"])
            size = status.st_size
            modified = status.st_mtime_ns
        except OSError:  # not a local file; the mapper reports missing files
            size = -1
            modified = -1
        text = json.dumps([path, size, modified, content], sort_keys=True, default=_make_plain)
        hashes.append(_hash(text)[:32])
    return hashes


def _make_plain(value: Any) -> Any:
    """Converts a value that JSON cannot represent: arrays to lists, other values to text."""
    if isinstance(value, np.ndarray | np.generic | Tensor):
        return value.tolist()
    return repr(value)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
