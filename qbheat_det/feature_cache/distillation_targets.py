# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The targets of distillation: cached features of the teacher, a frozen network.

The caches are built when training starts, from fixed views of the training images and from the
test images. All runs with the same teacher, images and views share a cache.
"""

import functools
import logging
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog

from qbheat_det.checkpoint import SafeCheckpointer, WeightsInfo, info_of
from qbheat_det.config import find_memory_format, with_values
from qbheat_det.core.errors import UserError
from qbheat_det.core.seeding import preserved_randomness, seed_place
from qbheat_det.data import (
    DataError,
    FixedViews,
    ImageBatches,
    TrainStream,
    build_mapper,
    number_records,
)
from qbheat_det.data.mappers import VIEW_ROW, choose_view
from qbheat_det.modeling.distillation_teacher import DistillationTeacher
from qbheat_det.tasks import PRETRAINING

from .cache_key import check_cache_config, open_store
from .encoding import encode_images
from .filling import Fill, fill
from .store import AllViews, FeatureStore, View

logger = logging.getLogger(__name__)


class DistillationTargets:
    """Builds the caches of the teacher's features, which are the targets of a run."""

    def __init__(self, cfg: CfgNode, *, fill: Fill = fill) -> None:
        """
        Args:
            cfg: config of the run.
            fill: completes a store. A dry run passes a function that encodes only a few views.
        """
        self._student_cfg = cfg
        self._fill = fill
        self._tests: dict[str, TargetViews] = {}  # by name of the test set

    @functools.cached_property
    def _cfg(self) -> CfgNode:
        """The config of the teacher.

        It has the pixel statistics in the file of the teacher's weights, or else the config's.
        """
        cfg = self._student_cfg
        teacher = cfg.MODEL.TEACHER
        check_cache_config(cfg)
        info = None
        if teacher.WEIGHTS:
            info = info_of(teacher.WEIGHTS)
        else:
            logger.warning("MODEL.TEACHER.WEIGHTS is empty: the teacher's weights are random")
        info = info or WeightsInfo()
        mean = list(info.pixel_mean or teacher.PIXEL_MEAN)
        std = list(info.pixel_std or teacher.PIXEL_STD)
        changes = {
            "INPUT.FORMAT": info.pixel_format or "RGB",  # as in timm
            "INPUT.PRETRAIN.SIZE": teacher.IMAGE_SIZE,
            "MODEL.CHANNELS_LAST": True,
            "MODEL.PIXEL_MEAN": mean,
            "MODEL.PIXEL_STD": std,
            "MODEL.TEACHER.PIXEL_MEAN": mean,
            "MODEL.TEACHER.PIXEL_STD": std,
        }
        return with_values(cfg, changes)

    @functools.cached_property
    def _teacher(self) -> DistillationTeacher:
        """The teacher with its weights, on the device of the run."""
        cfg = self._cfg
        with preserved_randomness():
            seed_place(0)  # so that a random teacher is the same in every run
            teacher = DistillationTeacher(cfg)
            teacher.to(torch.device(cfg.MODEL.DEVICE))
            teacher.to(memory_format=find_memory_format(cfg))
        try:
            SafeCheckpointer(teacher).load(cfg.MODEL.TEACHER.WEIGHTS)
        except UserError as error:
            name = cfg.MODEL.TEACHER.NAME
            raise UserError(
                f"MODEL.TEACHER.WEIGHTS do not fit MODEL.TEACHER.NAME {name}: use "
                f"'timm://{name}', or 'qbheat://timm/{name}' if it is in `qbheat zoo list` "
                f"({str(error).partition(';')[0]})"
            ) from error
        return teacher

    def prepare(self, stream: TrainStream) -> None:
        """Completes the caches and replaces the stream's mapper by one that reads them.

        Must be called on all processes before the first batch. Raises a ``UserError`` if
        ``INPUT.FIXED_VIEWS.COUNT`` is 0 or too large, if the teacher's weights do not match, or if
        the disk is too small.
        """
        if isinstance(stream.mapper, FixedViews):
            # The teacher sees the same crops as the student, in another size.
            student_views = stream.mapper
            teacher_views = FixedViews(
                build_mapper(self._cfg, is_train=True), student_views.count, student_views.seed
            )
            views = AllViews(stream.dataset, teacher_views)
            store = self._complete("training set", views, is_train=True)
            flips = self._cfg.INPUT.RANDOM_FLIP == "horizontal"
            stream.mapper = TargetViews(student_views, store, flips=flips)
        for name in self._cfg.DATASETS.TEST:
            self._prepare_test_set(name)
        vars(self).pop("_teacher", None)  # clears the cached property, to free memory

    def build_test_loader(self, cfg: CfgNode, dataset_name: str) -> ImageBatches:
        """Returns a loader of this process's share of a test set, with the teacher's "targets"."""
        self._prepare_test_set(dataset_name)
        return PRETRAINING.build_test_loader(cfg, dataset_name, mapper=self._tests[dataset_name])

    def _prepare_test_set(self, name: str) -> None:
        if name in self._tests:
            return
        student_views = FixedViews(build_mapper(self._student_cfg, is_train=False), count=1)
        teacher_views = FixedViews(build_mapper(self._cfg, is_train=False), count=1)
        views = AllViews(number_records(DatasetCatalog.get(name)), teacher_views)
        store = self._complete(f"test set '{name}'", views, is_train=False)
        self._tests[name] = TargetViews(student_views, store, flips=False)

    def _complete(self, title: str, views: AllViews, *, is_train: bool) -> FeatureStore:
        """Returns a complete store of the teacher's features for all views of a data set."""
        cfg = self._cfg
        store = open_store(
            cfg,
            self._teacher.backbone,
            views,
            outputs=self._teacher.head_in_features,
            is_train=is_train,
            device=self._teacher.device,
            size_divisibility=1,
        )
        encode = functools.partial(encode_images, encode=self._teacher)
        workers = cfg.DATALOADER.NUM_WORKERS
        title = f"{title} with the teacher"
        return self._fill(store, views, encode, title=title, num_workers=workers)


class TargetViews:
    """A mapper that returns fixed views and, as "targets", the teacher's maps (C, h, w) by name."""

    def __init__(self, views: FixedViews, store: FeatureStore, *, flips: bool) -> None:
        """
        Args:
            views: the student's views.
            store: the teacher's features for the same views.
            flips: whether the image and the targets are flipped with probability 1/2. Flipped
                features differ slightly from the features of a flipped image, as
                docs/objectives.md explains.
        """
        self.views = views
        self.store = store
        self.flips = flips

    def __call__(self, dataset_dict: dict[str, Any]) -> dict[str, Any] | DataError | None:
        view_number = choose_view(self.views.count)
        is_flipped = self.flips and bool(torch.rand(()) < 0.5)
        entry = self.views.view(dataset_dict, view_number)
        teacher_view = self.store.read(dataset_dict[VIEW_ROW] * self.views.count + view_number)
        if not isinstance(entry, dict):
            return entry
        if not isinstance(teacher_view, View):
            return teacher_view
        targets = teacher_view.features
        if is_flipped:
            entry["image"] = entry["image"].flip(-1)
            targets = {name: target.flip(-1) for name, target in targets.items()}
        entry["targets"] = targets
        return entry
