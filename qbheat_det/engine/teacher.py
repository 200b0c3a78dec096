# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Features of a frozen teacher for every view of a training set, computed once, on the disk."""

import functools
import logging
from collections.abc import Sequence

import torch
from detectron2.config import CfgNode

from qbheat_det.checkpoint import SafeCheckpointer
from qbheat_det.core.errors import UserError
from qbheat_det.data import FixedViews, TrainStream, build_mapper
from qbheat_det.data.feature_store import Stored
from qbheat_det.data.mappers.fixed_views import TargetViews
from qbheat_det.modeling.backbone.timm_backbone import Teacher

from .feature_build import AllViews, Mapped, describe_cache, fill, make_view, open_store

logger = logging.getLogger(__name__)


class TeacherFeatures:
    """The targets of a run: made by ``prepare``, read by the stream."""

    def __init__(self, cfg: CfgNode) -> None:
        """
        Raises:
            UserError: there is no fixed number of views, or no teacher.
        """
        if cfg.INPUT.FIXED_VIEWS.COUNT < 1:
            raise UserError(
                "INPUT.FIXED_VIEWS.COUNT is 0, expected 1 or more: the teacher's features are "
                "computed once for each view"
            )
        if not cfg.MODEL.TEACHER.WEIGHTS:
            raise UserError("MODEL.TEACHER.WEIGHTS is empty, expected the teacher's weights")
        self._cfg = cfg.clone()
        self._cfg.defrost()
        self._cfg.INPUT.PRETRAIN.SIZE = cfg.MODEL.TEACHER.IMAGE_SIZE
        self._cfg.MODEL.PIXEL_MEAN = cfg.MODEL.TEACHER.PIXEL_MEAN
        self._cfg.MODEL.PIXEL_STD = cfg.MODEL.TEACHER.PIXEL_STD

    def prepare(self, stream: TrainStream) -> None:
        """Encodes what the cache lacks, and makes the stream read from it.

        To be called on all processes, before the first batch. The stream's mapper is replaced.

        Raises:
            UserError: the teacher's weights do not fit, or the disk is too small.
        """
        cfg = self._cfg
        assert isinstance(stream.mapper, FixedViews)
        teacher = Teacher(cfg).to(cfg.MODEL.DEVICE, memory_format=torch.channels_last)
        SafeCheckpointer(teacher).load(cfg.MODEL.TEACHER.WEIGHTS)
        mapper, count = build_mapper(cfg, is_train=True), stream.mapper.count
        views = AllViews(stream.dataset, FixedViews(mapper, count, stream.mapper.seed))
        description = describe_cache(
            cfg,
            teacher.backbone,
            stream.dataset,
            outputs=teacher.head_in_features,
            views=stream.mapper,
            is_train=True,
            device=teacher.device,
            size_divisibility=1,
        )
        store = open_store(cfg, description, len(views))
        logger.info(f"The teacher's features: cached in '{store.folder}'")
        title, workers = "Encoding the training set", cfg.DATALOADER.NUM_WORKERS
        fill(store, views, functools.partial(_encode, teacher), title=title, num_workers=workers)
        flips = cfg.INPUT.RANDOM_FLIP == "horizontal"
        name = cfg.MODEL.TEACHER.IN_FEATURE
        stream.mapper = TargetViews(stream.mapper, store, name=name, flips=flips)


def _encode(teacher: Teacher, entries: Sequence[Mapped]) -> list[Stored]:
    """Returns a view for each entry; an error, or None, stays what it is."""
    views: list[Stored] = [None if isinstance(entry, dict) else entry for entry in entries]
    images = {i: entry for i, entry in enumerate(entries) if isinstance(entry, dict)}
    if images:
        outputs = {k: v.float().cpu() for k, v in teacher([*images.values()]).items()}
        for position, (index, entry) in enumerate(images.items()):
            views[index] = make_view(entry, {k: v[position].clone() for k, v in outputs.items()})
    return views
