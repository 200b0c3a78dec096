# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Training a head on the outputs of a frozen encoder, computed once and read from the disk.

The encoder is replaced in the model before the optimizer is built; the cache is made when the
weights are loaded, and shared by every run that has the same encoder, images and views.
"""

import functools
import hashlib
import importlib
import json
import logging
import operator
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import build_detection_test_loader, get_detection_dataset_dicts
from detectron2.data.samplers import InferenceSampler
from detectron2.utils import comm
from torch import Tensor, nn

from qbheat_det.config import find_memory_format
from qbheat_det.core.files import hash_tensors, write_atomically
from qbheat_det.data import (
    MAPPERS_OF_CLASSES,
    FixedViews,
    ImageBatches,
    TrainStream,
    build_mapper,
    get_cache_dir,
    load_classes,
    number_records,
)
from qbheat_det.data.feature_store import FORMAT_VERSION, VIEWS_PER_CHUNK, FeatureStore
from qbheat_det.data.mappers import VIEW_ROW, CachedViews
from qbheat_det.modeling.backbone import CachedBackbone
from qbheat_det.modeling.contracts import get_backbone

from .cacheable import DTYPES, check_cacheable, replace_encoder
from .feature_build import AllViews, CachedSet, ViewEncoder, fill

logger = logging.getLogger(__name__)

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


class CachedFeatures:
    """The cache of a run: made by ``prepare``, read by the stream and by test loaders."""

    def __init__(self, cfg: CfgNode, model: nn.Module, backbone: CachedBackbone) -> None:
        """``backbone`` is a part of ``model`` and gives the features."""
        self._cfg = cfg
        self._model = model
        self._backbone = backbone
        self._dtype = DTYPES[cfg.MODEL.CACHE_FEATURES.DTYPE]
        self._views: FixedViews | None = None
        self._tests: dict[str, CachedSet] = {}

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def prepare(self, stream: TrainStream) -> None:
        """Encodes what the caches lack, and makes the stream read from them.

        To be called on all processes, after the weights are loaded and before the first batch. The
        stream's mapper is replaced.

        Raises:
            UserError: the disk is too small, or the features cannot be kept.
        """
        if self._views is None:
            assert isinstance(stream.mapper, FixedViews)  # see check_cacheable
            self._views = stream.mapper
        with self._backbone.encoding(self._device):
            self._share_weights()
            training = self._open("training set", stream.dataset, self._views, is_train=True)
            self._make([training])
        stream.mapper = CachedViews(training.store, self._views.count)

    def build_test_loader(self, cfg: CfgNode, dataset_name: str) -> Any:
        """As ``Trainer.build_test_loader``, with features in the place of images.

        Without ``prepare``, as where nothing is left to train, the test sets alone are encoded.
        """
        if not (self._backbone.is_trusted and dataset_name in self._tests):
            with self._backbone.encoding(self._device):
                self._share_weights()
                self._make([])
        cached = self._tests[dataset_name]
        records, mapper = cached.views.records, CachedViews(cached.store, cached.views.count)
        workers = cfg.DATALOADER.NUM_WORKERS
        if cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_CLASSES:
            return ImageBatches(records, mapper=mapper, num_workers=workers)
        return build_detection_test_loader(
            records, mapper=mapper, sampler=InferenceSampler(len(records)), num_workers=workers
        )

    def _make(self, training: Sequence[CachedSet]) -> None:
        """Encodes what is missing, of test sets too."""
        self._tests = {name: self._open_test_set(name) for name in self._cfg.DATASETS.TEST}
        for cached in (*training, *self._tests.values()):
            logger.info(f"{cached.title}: cached in '{cached.store.folder}'")
            fill(cached, num_workers=self._cfg.DATALOADER.NUM_WORKERS)
        self._backbone.trust()

    def _share_weights(self) -> None:
        """Gives all processes the main one's encoder, which differs if no weights are loaded."""
        if comm.get_world_size() > 1:
            for tensor in self._backbone.encoder.state_dict().values():
                sent = tensor.contiguous()  # not every layout can be sent
                torch.distributed.broadcast(sent, src=0)
                tensor.copy_(sent)

    def _open_test_set(self, name: str) -> CachedSet:
        cfg = self._cfg
        if cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_CLASSES:
            records = load_classes([name], cfg.MODEL.CLASS_NAMES)
        else:
            records = get_detection_dataset_dicts(name, filter_empty=False)
        views = FixedViews(build_mapper(cfg, is_train=False), count=1)
        return self._open(f"test set '{name}'", number_records(records), views, is_train=False)

    def _open(
        self, title: str, records: Sequence[dict[str, Any]], views: FixedViews, *, is_train: bool
    ) -> CachedSet:
        whole: Any = get_backbone(self._model)
        description = describe_cache(
            self._cfg,
            self._backbone,
            records,
            views=views,
            is_train=is_train,
            device=self._device,
            size_divisibility=whole.size_divisibility,
        )
        named = self._cfg.MODEL.CACHE_FEATURES.FOLDER
        caches = Path(named).expanduser() if named else get_cache_dir() / "feature_cache"
        folder = caches / name_cache(description)
        about = folder / "meta.json"
        if not about.is_file():
            text = json.dumps(description, indent=2, sort_keys=True)
            write_atomically(about, lambda stream: stream.write(text.encode()))
        encoder = ViewEncoder(
            self._model,
            self._backbone,
            at_once=self._count_at_once(is_train),
            is_train=is_train,
            is_exact=self._dtype == torch.float32,
        )
        store = FeatureStore(folder, len(records) * views.count, dtype=self._dtype)
        return CachedSet(f"Encoding the {title}", AllViews(records, views), store, encoder)

    def _count_at_once(self, is_train: bool) -> int:
        """Returns how many images the model would encode at once without a cache."""
        cfg = self._cfg
        if is_train:
            parts = comm.get_world_size() * cfg.SOLVER.ACCUMULATE
            return min(VIEWS_PER_CHUNK, max(1, cfg.SOLVER.IMS_PER_BATCH // parts))
        # Detectors are evaluated image by image.
        return VIEWS_PER_CHUNK if cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_CLASSES else 1


def use_cached_features(cfg: CfgNode, model: nn.Module) -> CachedFeatures | None:
    """Replaces a model's encoder by a ``CachedBackbone``, if the config asks for it.

    The model is changed in place, before an optimizer, wrapper or copy is made of it.

    Raises:
        UserError: this cannot be trained from a cache; the message says why.
    """
    if not cfg.MODEL.CACHE_FEATURES.ENABLED:
        return None
    check_cacheable(cfg)
    return CachedFeatures(cfg, model, replace_encoder(cfg, model))


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

    Threads and versions of other libraries do not enter: caches are moved and shared, and what they
    change is far below half precision.

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
