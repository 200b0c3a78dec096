# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Pre-training on the features of a frozen teacher, computed once and read from the disk.

The cache is made when training starts, of fixed views of the training images and of the held-out
images, and shared by every run that has the same teacher, images and views.
"""

import functools
import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog
from detectron2.utils import comm

from qbheat_det.checkpoint import SafeCheckpointer, WeightsInfo, info_of
from qbheat_det.config import find_memory_format, with_values
from qbheat_det.core.errors import UserError
from qbheat_det.core.seeding import preserved_randomness, seed_place
from qbheat_det.data import (
    FixedViews,
    ImageBatches,
    TrainStream,
    build_image_batches,
    build_mapper,
    number_records,
)
from qbheat_det.modeling.backbone.timm_backbone import Teacher

from .build import (
    AllViews,
    check_cache_keys,
    describe_cache,
    encode_images,
    fill,
    find_store,
    open_store,
)
from .store import VIEWS_PER_FILE, FeatureStore, Stored
from .views import TargetViews

logger = logging.getLogger(__name__)
Records = Sequence[dict[str, Any]]


def _find_pixels(cfg: CfgNode) -> dict[str, Any]:
    """Returns the keys of the pixels that the teacher sees: those of its file, if it says them."""
    node = cfg.MODEL.TEACHER
    info = (info_of(node.WEIGHTS) if node.WEIGHTS else None) or WeightsInfo()
    mean, std = list(info.pixel_mean or node.PIXEL_MEAN), list(info.pixel_std or node.PIXEL_STD)
    return {
        "MODEL.PIXEL_MEAN": mean,
        "MODEL.PIXEL_STD": std,
        "MODEL.TEACHER.PIXEL_MEAN": mean,
        "MODEL.TEACHER.PIXEL_STD": std,
        "INPUT.FORMAT": info.pixel_format or "RGB",  # as timm's networks have it
    }


@dataclass(frozen=True)
class CacheCost:
    """What a cache still lacks, forecast from a few views, and the free space of its disk."""

    num_views: int
    seconds: float
    num_bytes: int
    free_bytes: int


class TeacherFeatures:
    """The targets of a run: made by ``prepare``, read by the stream and by test loaders."""

    def __init__(self, cfg: CfgNode) -> None:
        self._student_cfg = cfg
        self._tests: dict[str, TargetViews] = {}

    @functools.cached_property
    def _cfg(self) -> CfgNode:
        """The config of the teacher, which is fetched for it."""
        cfg = self._student_cfg
        check_cache_keys(cfg)
        if not cfg.MODEL.TEACHER.WEIGHTS:
            logger.warning("MODEL.TEACHER.WEIGHTS is empty: the teacher's weights are random")
        changes = {"INPUT.PRETRAIN.SIZE": cfg.MODEL.TEACHER.IMAGE_SIZE, "MODEL.CHANNELS_LAST": True}
        return with_values(cfg, {**_find_pixels(cfg), **changes})

    @functools.cached_property
    def _teacher(self) -> Teacher:
        cfg = self._cfg
        with preserved_randomness():
            seed_place(0)  # a random teacher is the same in every run
            teacher = Teacher(cfg).to(cfg.MODEL.DEVICE, memory_format=find_memory_format(cfg))
        try:
            SafeCheckpointer(teacher).load(cfg.MODEL.TEACHER.WEIGHTS)
        except UserError as error:
            name = cfg.MODEL.TEACHER.NAME
            raise UserError(
                f"MODEL.TEACHER.WEIGHTS are not of MODEL.TEACHER.NAME {name}, whose weights are "
                f"'timm://{name}', or 'qbheat://timm/{name}' where `qbheat zoo list` has it "
                f"({str(error).partition(';')[0]})"
            ) from error
        return teacher

    def prepare(self, stream: TrainStream) -> None:
        """Encodes what the caches lack, and makes the stream read from them.

        To be called on all processes, before the first batch. The stream's mapper is replaced.
        Raises a ``UserError`` if there is no fixed number of views, the teacher's weights do not
        fit, or the disk is too small.
        """
        if isinstance(stream.mapper, FixedViews):
            views = self._views(stream.dataset, stream.mapper, is_train=True)
            store = self._make("training set", views, is_train=True)
            flips = self._cfg.INPUT.RANDOM_FLIP == "horizontal"
            stream.mapper = TargetViews(stream.mapper, store, flips=flips)
        for name in self._cfg.DATASETS.TEST:
            self._prepare_test_set(name)
        vars(self).pop("_teacher", None)  # the training can use its memory

    def build_test_loader(self, cfg: CfgNode, dataset_name: str) -> ImageBatches:
        """As ``Trainer.build_test_loader``, with the teacher's features in each entry."""
        self._prepare_test_set(dataset_name)
        return build_image_batches(cfg, dataset_name, mapper=self._tests[dataset_name])

    def rehearse(self, stream: TrainStream, cfg: CfgNode) -> CacheCost:
        """Encodes a few views, which the stream then reads in the place of all; for a dry run.

        The caches of ``cfg``, of the whole run, are looked at but not changed. Returns the cost of
        what they lack: seconds of all processes working side by side, bytes of all of them.
        """
        assert isinstance(stream.mapper, FixedViews)
        views = self._views(stream.dataset, stream.mapper, is_train=True)
        number = min(VIEWS_PER_FILE, len(views))
        folder = Path(self._cfg.MODEL.CACHE_FEATURES.FOLDER) / f"few_{comm.get_rank()}"
        store = find_store(cfg, self._describe(views, is_train=True), len(views))
        few = _FewViews(folder, number, dtype=store.dtype)
        encode_images([views[0]], self._teacher)  # the first image takes longer
        start = time.perf_counter()
        entries = [views[i * len(views) // number] for i in range(number)]
        loading = time.perf_counter() - start
        encoded = encode_images(entries, self._teacher)
        encoding = time.perf_counter() - start - loading
        few.write(0, encoded)
        stream.mapper = TargetViews(stream.mapper, few, flips=False)

        lacking = sum(len(store.views_of(file)) for file in store.missing())
        for name in cfg.DATASETS.TEST:
            tests = self._test_views(name)
            store = find_store(cfg, self._describe(tests, is_train=False), len(tests))
            lacking += sum(len(store.views_of(file)) for file in store.missing())
        workers = cfg.DATALOADER.NUM_WORKERS
        seconds = max(loading / workers, encoding) if workers else loading + encoding
        share = lacking / number
        there = next(folder for folder in store.folder.parents if folder.is_dir())
        return CacheCost(
            num_views=lacking,
            seconds=seconds * share / comm.get_world_size(),
            num_bytes=round(few.path_of(0).stat().st_size * share),
            free_bytes=shutil.disk_usage(there).free,
        )

    def _prepare_test_set(self, name: str) -> None:
        if name not in self._tests:
            store = self._make(f"test set '{name}'", self._test_views(name), is_train=False)
            views = FixedViews(build_mapper(self._student_cfg, is_train=False), count=1)
            self._tests[name] = TargetViews(views, store, flips=False)

    def _test_views(self, name: str) -> AllViews:
        views = FixedViews(build_mapper(self._cfg, is_train=False), count=1)
        return AllViews(number_records(DatasetCatalog.get(name)), views)

    def _views(self, records: Records, views: FixedViews, *, is_train: bool) -> AllViews:
        """Returns the views of a student, at the teacher's size."""
        mapper = build_mapper(self._cfg, is_train=is_train)
        return AllViews(records, FixedViews(mapper, views.count, views.seed))

    def _describe(self, views: AllViews, *, is_train: bool) -> dict[str, Any]:
        return describe_cache(
            self._cfg,
            self._teacher.backbone,
            views.records,
            outputs=self._teacher.head_in_features,
            views=views.views,
            is_train=is_train,
            device=self._teacher.device,
            size_divisibility=1,
        )

    def _make(self, title: str, views: AllViews, *, is_train: bool) -> FeatureStore:
        store = open_store(self._cfg, self._describe(views, is_train=is_train), len(views))
        logger.info(f"The teacher's features of the {title}: cached in '{store.folder}'")
        encode = functools.partial(encode_images, encode=self._teacher)
        workers = self._cfg.DATALOADER.NUM_WORKERS
        fill(store, views, encode, title=f"Encoding the {title}", num_workers=workers)
        return store


class _FewViews(FeatureStore):
    """A store of some views that are read in the place of all others."""

    def read(self, view_index: int) -> Stored:
        return super().read(view_index % self.num_views)
