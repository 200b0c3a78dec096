# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Training a head on the outputs of a frozen encoder, computed once and read from the disk.

The encoder is replaced in the model before the optimizer is built; the cache is made when the
weights are loaded, and shared by every run that has the same encoder, images and views.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import build_detection_test_loader, get_detection_dataset_dicts
from detectron2.data.samplers import InferenceSampler
from detectron2.utils import comm
from torch import nn

from qbheat_det.core.files import write_atomically
from qbheat_det.core.text import format_bytes, format_duration
from qbheat_det.data import (
    MAPPERS_OF_CLASSES,
    VIEWS_PER_CHUNK,
    CachedViews,
    FeatureStore,
    FixedViews,
    ImageBatches,
    Stored,
    TrainStream,
    build_mapper,
    check_space,
    get_cache_dir,
    load_classes,
    number_records,
)
from qbheat_det.modeling.backbone import CachedBackbone
from qbheat_det.modeling.contracts import get_backbone

from .cacheable import DTYPES, check_cacheable, replace_encoder
from .feature_build import (
    AllViews,
    CachedSet,
    CacheEstimate,
    ViewEncoder,
    estimate_sets,
    fill,
    sample_views,
)
from .feature_key import describe_cache, name_cache

logger = logging.getLogger(__name__)


class CachedFeatures:
    """The cache of a run: made by ``prepare``, read by the stream and by test loaders.

    Attributes:
        estimate: of disk and time, once prepared.
    """

    def __init__(self, cfg: CfgNode, model: nn.Module, backbone: CachedBackbone) -> None:
        """
        Args:
            cfg: of the run.
            model: that ``backbone`` is a part of.
            backbone: gives the features.
        """
        self._cfg = cfg
        self._model = model
        self._backbone = backbone
        self._dtype = DTYPES[cfg.MODEL.CACHE_FEATURES.DTYPE]
        self._views: FixedViews | None = None
        self._tests: dict[str, CachedSet] = {}
        self.estimate = CacheEstimate()
        self._rehearsal: Path | None = None
        self._planned: Sequence[str] = ()

    @property
    def folder(self) -> Path:
        """That of all caches."""
        named = self._cfg.MODEL.CACHE_FEATURES.FOLDER
        return Path(named).expanduser() if named else get_cache_dir() / "feature_cache"

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def rehearse(self, folder: Path, test_sets: Sequence[str]) -> None:
        """Makes ``prepare`` encode a sample of the training set and repeat it as all views.

        Args:
            folder: of what is encoded; that of all caches is only read.
            test_sets: those of the whole run, which the estimate is about.
        """
        self._rehearsal, self._planned = folder, test_sets

    def prepare(self, stream: TrainStream) -> None:
        """Encodes what the caches lack, and makes the stream read from them.

        To be called on all processes, after the weights are loaded and before the first batch.

        Args:
            stream: of the run; its mapper is replaced.

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
        """Estimates and encodes what is missing, of test sets too."""
        self._tests = {name: self._open_test_set(name) for name in self._cfg.DATASETS.TEST}
        tests = list(self._tests.values())
        planned = [self._open_test_set(name) for name in self._planned]
        sets = [*training, *(planned or tests)]
        self.estimate = estimate_sets(sets)
        log_estimate(self.estimate, self.folder, used=[s.store.folder.name for s in sets])
        if self._rehearsal:
            for cached in training:
                cached.store = self._sample_store(self._rehearsal, cached)
            for cached in tests:
                folder = self._rehearsal / cached.store.folder.name
                cached.store = FeatureStore(folder, cached.store.num_views, dtype=self._dtype)
        for cached in tests if self._rehearsal else sets:
            if cached.store.missing():
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
        folder = self.folder / name_cache(description)
        about = folder / "meta.json"
        if not self._rehearsal and not about.is_file():
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

    def _sample_store(self, folder: Path, training: CachedSet) -> FeatureStore:
        """Returns a store of a few views, which it repeats in the place of all."""
        sampled = sample_views(range(training.store.num_views))
        store = _Repeating(folder / "sample", len(sampled), dtype=self._dtype)
        # All processes write the same, complete or not at all.
        for chunk in range(store.num_chunks):
            views = [training.views[sampled[index]] for index in store.views_of(chunk)]
            store.write(chunk, training.encoder(views))
        return store


class _Repeating(FeatureStore):
    """Gives the views that it has in turn, whatever their index."""

    def read(self, view_index: int) -> Stored:
        return super().read(view_index % self.num_views)


def use_cached_features(cfg: CfgNode, model: nn.Module) -> CachedFeatures | None:
    """Replaces a model's encoder by a ``CachedBackbone``, if the config asks for it.

    Args:
        cfg: ``MODEL.CACHE_FEATURES`` and ``INPUT.FIXED_VIEWS``.
        model: changed in place, before an optimizer, wrapper or copy is made of it.

    Raises:
        UserError: this cannot be trained from a cache; the message says why.
    """
    if not cfg.MODEL.CACHE_FEATURES.ENABLED:
        return None
    check_cacheable(cfg)
    return CachedFeatures(cfg, model, replace_encoder(cfg, model))


def log_estimate(estimate: CacheEstimate, folder: Path, *, used: Sequence[str]) -> None:
    """Logs where the caches are and what they take.

    Args:
        estimate: of all caches of the run.
        folder: of all caches.
        used: names of those of the run.

    Raises:
        UserError: the disk has no room for what is missing.
    """
    free = check_space(folder, estimate.missing_bytes)
    if not comm.is_main_process():
        return
    logger.info(
        f"Cached features of {estimate.num_views:,} views in '{folder}' ({', '.join(used)}): "
        f"{format_bytes(estimate.num_bytes)}, free are {format_bytes(free)}"
    )
    if estimate.num_missing:
        seconds = estimate.seconds / comm.get_world_size()
        logger.info(
            f"{estimate.num_missing:,} views are to be encoded: about {format_duration(seconds)}"
        )
