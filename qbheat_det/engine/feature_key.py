# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What cached features depend on, and the name that distinguishes caches of different things."""

import functools
import hashlib
import importlib
import json
import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from torch import Tensor

from qbheat_det.config import find_memory_format
from qbheat_det.core.files import hash_tensors
from qbheat_det.data import FORMAT_VERSION, VIEW_ROW, FixedViews
from qbheat_det.modeling.backbone import CachedBackbone

# Outlines and keypoints move no box of a model without masks, and can be most of a record.
_IGNORED_IN_RECORDS = (VIEW_ROW, "file_name")
_IGNORED_IN_ANNOTATIONS = ("segmentation", "keypoints")
# Number and seed of the views have entries of their own; fixed views are never read from memory.
_IGNORED_IN_INPUT = ("FIXED_VIEWS", "PRETRAIN.MEMORY_GB")
_OF_TEST_SETS = ("MIN_SIZE_TEST", "MAX_SIZE_TEST", "CLASSIFY.TEST_CROP")
_OF_TRAINING_SETS = (
    "MIN_SIZE_TRAIN",
    "MIN_SIZE_TRAIN_SAMPLING",
    "MAX_SIZE_TRAIN",
    "RANDOM_FLIP",
    "CROP",
    "DETR_CROP_RESIZE",
    "DETR_CROP_RANGE",
    "PRETRAIN.SCALE",
    "PRETRAIN.RATIO",
    "CLASSIFY.RAND_AUGMENT",
    "CLASSIFY.RANDOM_ERASING",
    "TWO_VIEWS",
)


def describe_cache(
    cfg: CfgNode,
    backbone: CachedBackbone,
    records: Sequence[Mapping[str, Any]],
    *,
    views: FixedViews,
    is_train: bool,
    device: torch.device,
    size_divisibility: int,
) -> dict[str, Any]:
    """Returns all that the features of a data set depend on, long things by their SHA-256.

    Two descriptions that differ show by their keys why a cache is not used again. Threads and
    versions of other libraries do not enter: caches are moved and shared, and what they change is
    far below half precision.

    Args:
        cfg: of the run; of ``INPUT``, what the views of such a set depend on enters.
        backbone: with the encoder.
        records: of the data set. Of a file enter its name below the folder of all files, its size
            and when it was changed, not its content. Outlines and keypoints do not enter.
        views: of each image.
        is_train: whether views are drawn as in training, or are those of inference.
        device: that encodes.
        size_divisibility: that images are padded to before they are encoded.
    """
    return {
        "format": FORMAT_VERSION,
        "weights": hash_tensors(backbone.encoder.state_dict()),
        "encoder": _hash(repr(backbone.encoder)),  # what no weight shows
        "outputs": backbone.outputs,
        "pixel_mean": [float(value) for value in cfg.MODEL.PIXEL_MEAN],
        "pixel_std": [float(value) for value in cfg.MODEL.PIXEL_STD],
        "size_divisibility": size_divisibility,
        "dtype": cfg.MODEL.CACHE_FEATURES.DTYPE,
        "views_per_image": views.count,
        "views_seed": views.seed,
        "is_train": is_train,
        "input": _dump_input(cfg.INPUT, is_train),
        "qbheat_det": importlib.import_module("qbheat_det").__version__,
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
        kept = {key: value for key, value in record.items() if key not in _IGNORED_IN_RECORDS}
        kept["annotations"] = [
            {key: value for key, value in annotation.items() if key not in _IGNORED_IN_ANNOTATIONS}
            for annotation in record.get("annotations", ())
        ]
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


def _dump_input(config: CfgNode, is_train: bool) -> list[str]:
    """Returns the lines of ``INPUT`` that the views of a training set, or a test set, depend on."""
    kept = config.clone()
    for path in (*_IGNORED_IN_INPUT, *(_OF_TEST_SETS if is_train else _OF_TRAINING_SETS)):
        *parents, key = path.split(".")
        functools.reduce(operator.getitem, parents, kept).pop(key, None)
    lines: list[str] = kept.dump().splitlines()
    return lines


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
