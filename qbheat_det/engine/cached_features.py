# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Training a head on what a frozen encoder makes of each view, computed once and read from a disk.

The encoder's place in the model is taken before the optimizer is built; the cache is made when the
weights are loaded, and shared by every run that has the same encoder, images and views.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import build_detection_test_loader, get_detection_dataset_dicts
from detectron2.data.samplers import InferenceSampler
from detectron2.modeling.backbone import FPN
from detectron2.utils import comm
from torch import nn

from qbheat_det.config import find_memory_format
from qbheat_det.core.errors import UserError
from qbheat_det.data import (
    MAPPERS_OF_CLASSES,
    VIEWS_PER_CHUNK,
    CachedViews,
    Fault,
    FeatureStore,
    FixedViews,
    ImageBatches,
    TrainStream,
    View,
    build_mapper,
    describe_arithmetic,
    describe_cache,
    get_cache_dir,
    load_classes,
    name_cache,
    number_records,
    open_feature_store,
)
from qbheat_det.modeling.backbone import CachedBackbone

from .cache_estimate import CacheEstimate, estimate_sets, sample_views, tell_estimate
from .cache_refusals import check_cacheable, check_frozen
from .evaluation import TestLoader
from .feature_build import CachedSet, ViewEncoder, ViewsOf, fill

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class CachedFeatures:
    """The cache of a run: made by ``prepare``, read by the stream and by test loaders.

    Attributes:
        estimate: of disk and time, once prepared.
    """

    def __init__(self, cfg: CfgNode, model: nn.Module, backbone: CachedBackbone) -> None:
        """
        Args:
            cfg: of the run.
            model: in which ``backbone`` stands.
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

    def rehearse(self, folder: Path, test_sets: Sequence[str]) -> None:
        """Makes ``prepare`` encode a sample of the training set, and show it in place of all views.

        Args:
            folder: of what is encoded; that of all caches is only looked at.
            test_sets: those of the whole run, which the estimate is about.
        """
        self._rehearsal, self._planned = folder, test_sets

    def prepare(self, stream: TrainStream) -> None:
        """Encodes what the caches lack, and makes the stream read from them.

        To be called on all processes, after the weights are loaded and before the first batch.

        Args:
            stream: of the run; its mapper is exchanged.

        Raises:
            UserError: the disk is too small, or the features cannot be kept.
        """
        if self._views is None:
            assert isinstance(stream.mapper, FixedViews)  # check_cacheable saw to it
            self._views = stream.mapper
        views = self._views
        with self._backbone.encoding(next(self._model.parameters()).device):
            self._share_weights()
            training = self._open("training set", stream.dataset, views, is_train=True)
            self._make([training])
        stream.mapper = CachedViews(training.store, views.count)

    def build_test_loader(self, cfg: CfgNode, dataset_name: str) -> TestLoader:
        """As ``Trainer.build_test_loader``, with features in the place of images.

        Without ``prepare``, as where nothing is left to train, the test sets alone are encoded.
        """
        if not (self._backbone.is_trusted and dataset_name in self._tests):
            with self._backbone.encoding(next(self._model.parameters()).device):
                self._share_weights()
                self._make([])
        cached = self._tests[dataset_name]
        records, mapper = cached.views.records, CachedViews(cached.store, cached.views.count)
        workers = cfg.DATALOADER.NUM_WORKERS
        if cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_CLASSES:
            return ImageBatches(records, mapper=mapper, num_workers=workers)
        loader: TestLoader = build_detection_test_loader(
            records, mapper=mapper, sampler=InferenceSampler(len(records)), num_workers=workers
        )
        return loader

    def _make(self, training: Sequence[CachedSet]) -> None:
        """Estimates and encodes what is missing, of test sets too."""
        self._tests = {name: self._open_test_set(name) for name in self._cfg.DATASETS.TEST}
        tests = list(self._tests.values())
        planned = [self._open_test_set(name) for name in self._planned]
        sets = [*training, *(planned or tests)]
        self.estimate = estimate_sets(sets)
        tell_estimate(self.estimate, self.folder, used=[s.store.folder.name for s in sets])
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
        """Gives all processes the main one's encoder, which differs where no weights are loaded."""
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
        cfg, encoder = self._cfg, self._backbone.encoder
        description = describe_cache(
            weights=encoder.state_dict(),
            encoder=repr(encoder),
            outputs=self._backbone.outputs,
            pixel_mean=cfg.MODEL.PIXEL_MEAN,
            pixel_std=cfg.MODEL.PIXEL_STD,
            size_divisibility=getattr(self._model, "backbone", encoder).size_divisibility,
            dtype=cfg.MODEL.CACHE_FEATURES.DTYPE,
            count=views.count,
            views_seed=views.seed,
            is_train=is_train,
            input_config=cfg.INPUT,
            arithmetic=describe_arithmetic(cfg, next(self._model.parameters()).device),
            records=records,
        )
        num_views = len(records) * views.count
        if self._rehearsal:  # looks at what is there, and leaves nothing behind
            folder = self.folder / name_cache(description)
            store = FeatureStore(folder, num_views, dtype=self._dtype)
        else:
            store = open_feature_store(self.folder, description, num_views, dtype=self._dtype)
        encoder_of = ViewEncoder(
            self._model,
            self._backbone,
            at_once=self._count_at_once(is_train),
            is_train=is_train,
            is_exact=self._dtype == torch.float32,
        )
        return CachedSet(f"Encoding the {title}", ViewsOf(records, views), store, encoder_of)

    def _count_at_once(self, is_train: bool) -> int:
        """Returns how many images the model would encode at once without a cache."""
        cfg = self._cfg
        if is_train:
            parts = comm.get_world_size() * cfg.SOLVER.ACCUMULATE
            return min(VIEWS_PER_CHUNK, max(1, cfg.SOLVER.IMS_PER_BATCH // parts))
        # Detectors are evaluated image by image.
        return VIEWS_PER_CHUNK if cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_CLASSES else 1

    def _sample_store(self, folder: Path, training: CachedSet) -> FeatureStore:
        """Returns a store of a few views, that shows them in the place of all."""
        sampled = sample_views(range(training.store.num_views))
        store = _Repeating(folder / "sample", len(sampled), dtype=self._dtype)
        # All processes write the same, whole or not at all.
        for chunk in range(store.num_chunks):
            views = [training.views[sampled[index]] for index in store.views_of(chunk)]
            store.write(chunk, training.encoder(views))
        return store


class _Repeating(FeatureStore):
    """Gives the views that it has in turn, whatever their index."""

    def read(self, view_index: int) -> View | Fault | None:
        return super().read(view_index % self.num_views)


def use_cached_features(cfg: CfgNode, model: nn.Module) -> CachedFeatures | None:
    """Puts a ``CachedBackbone`` in the place of a model's encoder, where the config asks for it.

    Args:
        cfg: ``MODEL.CACHE_FEATURES`` and ``INPUT.FIXED_VIEWS``.
        model: changed in place; no optimizer, wrapper or copy has seen it.

    Raises:
        UserError: this cannot be trained from a cache; the sentence says why.
    """
    if not cfg.MODEL.CACHE_FEATURES.ENABLED:
        return None
    check_cacheable(cfg)
    return CachedFeatures(cfg, model, swap_encoder(cfg, model))


def swap_encoder(cfg: CfgNode, model: nn.Module) -> CachedBackbone:
    """Does the exchange; returns what stands in the model now, with the encoder inside.

    Raises:
        UserError: the model has no frozen encoder.
    """
    dtype = cfg.MODEL.CACHE_FEATURES.DTYPE
    if dtype not in DTYPES:
        raise UserError(
            f"MODEL.CACHE_FEATURES.DTYPE is '{dtype}', but must be one of {', '.join(DTYPES)}"
        )
    backbone = getattr(model, "backbone", None)
    if backbone is None:
        raise UserError(
            f"MODEL.CACHE_FEATURES needs a model with a backbone, and {type(model).__name__} has "
            "none: set MODEL.CACHE_FEATURES.ENABLED False"
        )
    has_pyramid = isinstance(backbone, FPN)
    encoder = backbone.bottom_up if has_pyramid else backbone
    check_frozen(model, encoder, cfg.MODEL.BACKBONE.FREEZE_AT)
    reader = backbone if has_pyramid else model
    read = getattr(reader, "head_in_features", None) or getattr(reader, "in_features", None)
    cached = CachedBackbone(
        encoder=encoder.to("cpu"),
        outputs=list(read or encoder.output_shape()),
        channels_last=find_memory_format(cfg) == torch.channels_last,
    )
    if has_pyramid:
        backbone.bottom_up = cached
    else:
        model.backbone = cached
    return cached
