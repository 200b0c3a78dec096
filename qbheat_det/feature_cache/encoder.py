# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Encodes images for a cache, computes the key of a cache, and replaces the encoder in training.

``CachedBackbone`` returns the same features as the encoder, except for batches of images of
different sizes. In such batches, the encoder would see padding, but cached images have no padding.
MF-DETR masks the padding, so its outputs are the same. RetinaNet's and FCOS's outputs differ.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import Backbone
from torch import Tensor, nn

from qbheat_det.config import find_memory_format
from qbheat_det.core.environment import VERSION
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import get_cache_dir, hash_tensors
from qbheat_det.data import cut
from qbheat_det.data.mappers import VIEW_ROW, VIEW_SEED, find_root
from qbheat_det.modeling.cached_images import CachedImages
from qbheat_det.modeling.contracts import optional_modules

from .store import FORMAT_VERSION, VIEWS_PER_FILE, AllViews, FeatureStore, Mapped, Stored, View

OFF = "set MODEL.CACHE_FEATURES.ENABLED False"
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_MAX_VIEWS = 1000
_NOT_IN_VIEWS = (VIEW_ROW, VIEW_SEED, "file_name", "image_id")


class CachedBackbone(Backbone):
    """A backbone that returns the cached features of images instead of running its encoder.

    The encoder stays on the CPU and is not a child module, so optimizers, ``to`` and data-parallel
    wrappers ignore it. Its weights are loaded and saved under their usual names. Copies of the
    model share the encoder.

    ``forward`` raises an error until ``trust`` is called, and again after other weights are loaded.
    """

    def __init__(
        self, *, encoder: Backbone, outputs: Sequence[str], channels_last: bool = False
    ) -> None:
        """Takes the encoder, names of the cached outputs, and whether maps are channels-last."""
        super().__init__()
        self.outputs = list(outputs)
        self._shapes: dict[str, ShapeSpec] = encoder.output_shape()
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        self._shared = _Shared(encoder)
        self._is_encoding = False
        # Weights files may contain these parts even if the config does not use them.
        self.optional_modules = tuple(optional_modules(encoder))

    @property
    def encoder(self) -> Backbone:
        return self._shared.encoder

    @property
    def size_divisibility(self) -> int:
        return int(self.encoder.size_divisibility)

    def output_shape(self) -> dict[str, ShapeSpec]:
        return dict(self._shapes)

    def train(self, mode: bool = True) -> "CachedBackbone":
        """Sets the mode of this module and of the encoder."""
        super().train(mode)
        self.encoder.train(mode)
        return self

    @property
    def is_trusted(self) -> bool:
        """Whether the cached features were computed with the encoder's current weights."""
        return self._shared.trusted

    def trust(self) -> None:
        """Declares that the cached features were computed with the encoder's current weights."""
        self._shared.trusted = True

    def forward(
        self, x: CachedImages | Tensor, image_sizes: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Returns the cached outputs of ``x`` by name. While ``encode`` runs, ``x`` is pixels.

        For images (N, 3, H, W), a feature map with stride s is (N, C, ceil(H / s), ceil(W / s)).
        "tokens" are (N, M, D). Both are float32. ``image_sizes`` (N, 2) is for encoders that mask
        padding. Raises a ``UserError`` if the images have no features, or if the encoder's weights
        have changed since the features were computed.
        """
        if self._is_encoding:
            raise _Encoded(self.encoder(x) if image_sizes is None else self.encoder(x, image_sizes))
        if not self.is_trusted:
            raise UserError(
                "the encoder's weights are not those that the cached features were computed with: "
                f"train through qbheat_det.engine.Trainer, or {OFF}"
            )
        if not isinstance(x, CachedImages):
            raise UserError(f"images come without cached features: {OFF}")
        return {
            name: x.batch(name, self._shapes[name].stride, self._layout) for name in self.outputs
        }

    @contextmanager
    def encoding(self, device: torch.device) -> Iterator[None]:
        """Moves the encoder to a device while the context is active, for calls of ``encode``."""
        self.encoder.to(device)
        try:
            yield
        finally:
            self.encoder.to("cpu")

    def encode(self, model: nn.Module, batch: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Returns the encoder's outputs by name for a batch of inputs of ``model``.

        The model prepares the images, so that normalization, padding and masks are the same as
        without a cache. The forward pass of the model stops after the encoder.
        """
        self._is_encoding = True
        try:
            # On CPUs, gradients change the choice of kernels, and kernels round differently.
            with torch.set_grad_enabled(model.training):
                model(list(batch))
        except _Encoded as encoded:
            return {name: encoded.outputs[name] for name in self.outputs}
        finally:
            self._is_encoding = False
        raise RuntimeError(f"{type(model).__name__} did not run its backbone")

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        self.encoder.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # The encoder is not a child module, so the base class would report unexpected names.
        own = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
        before = self.encoder.state_dict()
        self._shared.trusted &= all(
            name in before and torch.equal(before[name].cpu(), value.cpu())
            for name, value in own.items()
        )
        try:
            found = self.encoder.load_state_dict(own, strict=False)
        except RuntimeError as error:
            error_msgs.append(str(error))
            return
        missing_keys.extend(prefix + name for name in found.missing_keys)
        unexpected_keys.extend(prefix + name for name in found.unexpected_keys)


class _Shared:
    """The state that all copies of a cached backbone share."""

    def __init__(self, encoder: Backbone) -> None:
        self.encoder = encoder
        self.trusted = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Shared":
        return self


class _Encoded(Exception):
    """Stops a model's forward pass after its encoder. It contains the encoder's outputs."""

    def __init__(self, outputs: Mapping[str, Tensor]) -> None:
        super().__init__("the encoder has run")
        self.outputs = outputs


def encode_images(
    entries: Sequence[Mapped],
    encode: Callable[[list[dict[str, Any]]], Mapping[str, Tensor]],
    *,
    at_once: int = VIEWS_PER_FILE,
    is_exact: bool = False,
) -> list[Stored]:
    """Encodes outputs of a mapper to views, in batches of images of equal size.

    Args:
        entries: outputs of a mapper. Errors and None are returned unchanged.
        encode: returns the outputs (N, …) by name for N entries whose images have equal size.
        at_once: largest batch size N.
        is_exact: use batches of exactly ``at_once`` entries, because rounding depends on the batch
            size. Entries are repeated to fill a batch. If the images have different sizes, this has
            no effect, and batches are about equally large.
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
    """Builds a view from an output of a mapper, and the encoder's outputs for this image."""
    height, width = entry["image"].shape[-2:]
    truth: dict[str, Tensor] = {}
    if "instances" in entry:
        truth["gt_boxes"] = entry["instances"].gt_boxes.tensor.float()
        truth["gt_classes"] = entry["instances"].gt_classes.long()
    if "label" in entry:
        truth["label"] = torch.tensor(int(entry["label"]))
    full = (int(entry["height"]), int(entry["width"])) if "height" in entry else None
    return View(features, (int(height), int(width)), truth, full)


def check_cache_keys(cfg: CfgNode) -> None:
    """Checks the config keys of caches, and raises a ``UserError`` if one is invalid."""
    if not 1 <= cfg.INPUT.FIXED_VIEWS.COUNT <= _MAX_VIEWS:
        raise UserError(
            f"INPUT.FIXED_VIEWS.COUNT is {cfg.INPUT.FIXED_VIEWS.COUNT}, but cached features need a "
            f"fixed number of views of each image, from 1 to {_MAX_VIEWS}"
        )
    dtype = cfg.MODEL.CACHE_FEATURES.DTYPE
    if dtype not in _DTYPES:
        raise UserError(f"MODEL.CACHE_FEATURES.DTYPE is '{dtype}', not one of {', '.join(_DTYPES)}")


def open_store(cfg: CfgNode, encoder: nn.Module, every: AllViews, **of_key: Any) -> FeatureStore:
    """Returns a store in ``MODEL.CACHE_FEATURES.FOLDER``. For the arguments, see ``make_key``.

    The root folder of the images is in ``meta.json``, but not in the name of the store's folder.
    """
    named, key = cfg.MODEL.CACHE_FEATURES.FOLDER, make_key(cfg, encoder, every, **of_key)
    caches = Path(named).expanduser() if named else get_cache_dir() / "feature_cache"
    dtype = _DTYPES[cfg.MODEL.CACHE_FEATURES.DTYPE]
    about = {**key, "root": find_root(every.records)[0]}
    return FeatureStore(caches / hash_key(key), len(every), dtype=dtype, key=about)


def make_key(
    cfg: CfgNode,
    encoder: nn.Module,
    every: AllViews,
    *,
    outputs: Sequence[str],
    is_train: bool,
    device: torch.device,
    size_divisibility: int,
) -> dict[str, Any]:
    """Returns the key of a cache as JSON data. If the key changes, a new cache is built.

    The key contains the encoder's weights and structure, the normalization and padding of images,
    all of ``INPUT``, the views, the precision, the memory format, the device, and the versions of
    this package and PyTorch. "records" has a hash for each record: of the annotations, and of the
    relative path, size and modification time of the file.

    The key does not contain the root folder of the files, so that caches can be moved and shared.
    Other pixels in a file of the same size and modification time are not detected. The number of
    threads, the batch size and the versions of other libraries are not in the key, because their
    effect on features is far below the precision of float16.

    Args:
        cfg: config of the run, or of its teacher.
        encoder: the frozen network.
        every: the views of all records of the data set.
        outputs: names of the encoder's outputs that are stored.
        is_train: whether views are augmented as in training.
        device: device of the encoder.
        size_divisibility: the sides of padded images are multiples of this number.
    """
    kept = cfg.INPUT.clone()
    del kept["FIXED_VIEWS"]  # the key contains their number and seed elsewhere
    return {
        "format": FORMAT_VERSION,
        "weights": hash_tensors(encoder.state_dict()),
        "encoder": _hash(repr(encoder)),  # includes settings that do not affect the weights
        "outputs": list(outputs),
        "pixel_mean": [float(value) for value in cfg.MODEL.PIXEL_MEAN],
        "pixel_std": [float(value) for value in cfg.MODEL.PIXEL_STD],
        "size_divisibility": size_divisibility,
        "dtype": cfg.MODEL.CACHE_FEATURES.DTYPE,
        "views_per_image": every.views.count,
        "views_seed": every.views.seed,
        "is_train": is_train,
        "input": kept.dump().splitlines(),
        "qbheat_det": VERSION,
        "torch": torch.__version__.partition("+")[0],
        "device": device.type,
        "float32_precision": str(cfg.get("FLOAT32_PRECISION", "")),  # missing in Detectron2 0.6
        "channels_last": find_memory_format(cfg) == torch.channels_last,
        "records": _hash_records(every.records),
    }


def hash_key(key: Mapping[str, Any]) -> str:
    """Returns the folder name of the cache with this key."""
    return _hash(json.dumps(key, sort_keys=True))[:32]


def _hash_records(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a hash of each record and of the state of its file."""
    hashes = []
    for record, name in zip(records, find_root(records)[1], strict=True):
        kept = {key: value for key, value in record.items() if key not in _NOT_IN_VIEWS}
        try:
            found = os.stat(record["file_name"])
            state = found.st_size, found.st_mtime_ns
        except OSError:  # not a local file; the mapper reports missing files
            state = -1, -1
        line = json.dumps([name, *state, kept], sort_keys=True, default=_make_plain)
        hashes.append(_hash(line)[:32])
    return hashes


def _make_plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic | Tensor) else repr(value)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
