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

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog
from detectron2.utils import comm

from qbheat_det.checkpoint import SafeCheckpointer, info_of
from qbheat_det.config import with_values
from qbheat_det.core.errors import UserError
from qbheat_det.data import (
    FixedViews,
    ImageBatches,
    TrainStream,
    build_image_batches,
    build_mapper,
    number_records,
)
from qbheat_det.data.feature_store import VIEWS_PER_FILE, FeatureStore, Stored
from qbheat_det.data.mappers.fixed_views import TargetViews
from qbheat_det.modeling.backbone.timm_backbone import Teacher

from .feature_build import (
    AllViews,
    Mapped,
    describe_cache,
    fill,
    find_store,
    make_view,
    open_store,
)

logger = logging.getLogger(__name__)
Records = Sequence[dict[str, Any]]


def _find_pixels(weights: str) -> dict[str, list[float]]:
    """Returns the keys of the teacher's pixel statistics that its file has."""
    info = info_of(weights)
    if info is None or not info.pixel_mean:
        return {}
    return {
        "MODEL.TEACHER.PIXEL_MEAN": list(info.pixel_mean),
        "MODEL.TEACHER.PIXEL_STD": list(info.pixel_std),
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
        """
        Raises:
            UserError: there is no fixed number of views.
        """
        if cfg.INPUT.FIXED_VIEWS.COUNT < 1:
            raise UserError("INPUT.FIXED_VIEWS.COUNT is 0, but the teacher needs views that stay")
        self._student_cfg = cfg
        node = cfg.MODEL.TEACHER
        if node.WEIGHTS:
            cfg = with_values(cfg, _find_pixels(node.WEIGHTS))
            node = cfg.MODEL.TEACHER
        else:
            logger.warning("MODEL.TEACHER.WEIGHTS is empty: the teacher's weights are random")
        pixels = {"MODEL.PIXEL_MEAN": node.PIXEL_MEAN, "MODEL.PIXEL_STD": node.PIXEL_STD}
        self._cfg = with_values(cfg, {"INPUT.PRETRAIN.SIZE": node.IMAGE_SIZE, **pixels})
        self._tests: dict[str, TargetViews] = {}

    @functools.cached_property
    def _teacher(self) -> Teacher:
        cfg = self._cfg
        teacher = Teacher(cfg).to(cfg.MODEL.DEVICE, memory_format=torch.channels_last)
        try:
            SafeCheckpointer(teacher).load(cfg.MODEL.TEACHER.WEIGHTS)
        except UserError as error:
            name = cfg.MODEL.TEACHER.NAME
            raise UserError(
                f"MODEL.TEACHER.WEIGHTS are not of MODEL.TEACHER.NAME {name}: 'timm://{name}' "
                f"downloads timm's ({error})"
            ) from error
        return teacher

    def prepare(self, stream: TrainStream) -> None:
        """Encodes what the caches lack, and makes the stream read from them.

        To be called on all processes, before the first batch. The stream's mapper is replaced.
        Raises a ``UserError`` if the teacher's weights do not fit, or the disk is too small.
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
        what they lack, for this process's share.
        """
        assert isinstance(stream.mapper, FixedViews)
        views = self._views(stream.dataset, stream.mapper, is_train=True)
        number = min(VIEWS_PER_FILE, len(views))
        folder = Path(self._cfg.MODEL.CACHE_FEATURES.FOLDER) / f"few_{comm.get_rank()}"
        store = find_store(cfg, self._describe(views, is_train=True), len(views))
        few = _FewViews(folder, number, dtype=store.dtype)
        _encode_by_teacher(self._teacher, [views[0]])  # the first image takes longer
        start = time.perf_counter()
        entries = [views[i * len(views) // number] for i in range(number)]
        loading = time.perf_counter() - start
        encoded = _encode_by_teacher(self._teacher, entries)
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
        encode = functools.partial(_encode_by_teacher, self._teacher)
        workers = self._cfg.DATALOADER.NUM_WORKERS
        fill(store, views, encode, title=f"Encoding the {title}", num_workers=workers)
        return store


class _FewViews(FeatureStore):
    """A store of some views that are read in the place of all others."""

    def read(self, view_index: int) -> Stored:
        return super().read(view_index % self.num_views)


def _encode_by_teacher(teacher: Teacher, entries: Sequence[Mapped]) -> list[Stored]:
    """Returns a view for each entry; an error, or None, stays what it is."""
    views: list[Stored] = [None if isinstance(entry, dict) else entry for entry in entries]
    images = {i: entry for i, entry in enumerate(entries) if isinstance(entry, dict)}
    if images:
        outputs = {k: v.float().cpu() for k, v in teacher([*images.values()]).items()}
        for position, (index, entry) in enumerate(images.items()):
            views[index] = make_view(entry, {k: v[position].clone() for k, v in outputs.items()})
    return views
