# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What cached features depend on, and the name that tells caches of different things apart."""

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

from .feature_chunk import FORMAT_VERSION
from .fixed_views import VIEW_ROW

_NAME_LENGTH = 32  # of 64 hexadecimal digits
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
    *,
    weights: Mapping[str, Tensor],
    encoder: str,
    outputs: Sequence[str],
    pixel_mean: Sequence[float],
    pixel_std: Sequence[float],
    size_divisibility: int,
    dtype: str,
    count: int,
    views_seed: int,
    is_train: bool,
    input_config: CfgNode,
    arithmetic: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Returns all that the features of a data set depend on, long things by their SHA-256.

    Two descriptions that differ say by their keys why a cache is not used again.

    Args:
        weights: the encoder's ``state_dict()``, buffers with it.
        encoder: its ``repr``, which tells what no weight does.
        outputs: names of the outputs that are kept.
        pixel_mean: of normalisation.
        pixel_std: as ``pixel_mean``.
        size_divisibility: that images are padded to before they are encoded.
        dtype: of the features on the disk.
        count: K, views of each image.
        views_seed: of the views.
        is_train: whether views are drawn as in training, or are those of inference.
        input_config: ``cfg.INPUT``. What the views of such a set do not depend on does not enter.
        arithmetic: by what else sums are rounded, see ``describe_arithmetic``.
        records: of the data set. Of a file enter its name below the folder of all files, its size
            and when it was changed, not its content. Outlines and keypoints do not enter.
    """
    return {
        "format": FORMAT_VERSION,
        "weights": hash_weights(weights),
        "encoder": _hash(encoder.encode()),
        "outputs": list(outputs),
        "pixel_mean": [float(value) for value in pixel_mean],
        "pixel_std": [float(value) for value in pixel_std],
        "size_divisibility": size_divisibility,
        "dtype": dtype,
        "views_per_image": count,
        "views_seed": views_seed,
        "is_train": is_train,
        "input": _dump_input(input_config, is_train),
        "arithmetic": dict(arithmetic),
        "num_images": len(records),
        "records": hash_records(records),
    }


def describe_arithmetic(cfg: CfgNode, device: torch.device) -> dict[str, Any]:
    """Returns versions and settings by which an encoder's sums are rounded.

    Threads do not enter, nor versions of other libraries: caches are moved and shared, and what
    they change is far below half precision.

    Args:
        cfg: of the run.
        device: that encodes.
    """
    return {
        "qbheat_det": importlib.import_module("qbheat_det").__version__,
        "torch": torch.__version__.partition("+")[0],
        "device": device.type,
        "float32_precision": str(cfg.get("FLOAT32_PRECISION", "")),  # Detectron2 0.6 has no such
        "channels_last": find_memory_format(cfg) == torch.channels_last,
    }


def name_cache(description: Mapping[str, Any]) -> str:
    """Returns a name that equal descriptions share, and others do not."""
    return _hash(json.dumps(description, sort_keys=True).encode())[:_NAME_LENGTH]


def hash_weights(weights: Mapping[str, Tensor]) -> str:
    """Returns the SHA-256 of names, dtypes, shapes and values, whatever the device and order."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


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
        line = [os.path.relpath(name, folder), *_stat(record["file_name"]), kept]
        digest.update(json.dumps(line, sort_keys=True, default=_make_plain).encode() + b"\n")
    return digest.hexdigest()


def _stat(file_name: str | os.PathLike[str]) -> tuple[int, int]:
    try:
        found = os.stat(file_name)
    except OSError:  # not there, which the mapper reports, or not on a disk of this machine
        return -1, -1
    return found.st_size, found.st_mtime_ns


def _make_plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic | Tensor):
        return value.tolist()
    return repr(value)


def _dump_input(config: CfgNode, is_train: bool) -> list[str]:
    """Returns the lines of ``INPUT`` that the views of a training set, or a test set, depend on."""
    kept = config.clone()
    for path in (*_IGNORED_IN_INPUT, *(_OF_TEST_SETS if is_train else _OF_TRAINING_SETS)):
        *parents, key = path.split(".")
        node = functools.reduce(operator.getitem, parents, kept)
        node.pop(key, None)
    lines: list[str] = kept.dump().splitlines()
    return lines


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
