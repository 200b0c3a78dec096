# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Features of a frozen teacher for every view of a training set, computed once, on the disk."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from detectron2.config import CfgNode
from torch import nn

from qbheat_det.checkpoint import SafeCheckpointer
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically
from qbheat_det.data import FixedViews, TrainStream, build_mapper, get_cache_dir
from qbheat_det.data.feature_store import VIEWS_PER_CHUNK, FeatureStore
from qbheat_det.data.mappers.fixed_views import TargetViews
from qbheat_det.modeling.backbone.teacher import Teacher

from .cacheable import DTYPES
from .feature_build import AllViews, CachedSet, Mapped, Stored, fill, make_view
from .feature_cache import describe_cache, name_cache

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
        views = FixedViews(
            build_mapper(cfg, is_train=True), stream.mapper.count, stream.mapper.seed
        )
        store = self._open(stream.dataset, views, teacher)
        records = AllViews(stream.dataset, views)
        cached = CachedSet(
            "Encoding the training set", records, store, lambda entries: _encode(teacher, entries)
        )
        logger.info(f"The teacher's features are cached in '{store.folder}'")
        fill(cached, num_workers=cfg.DATALOADER.NUM_WORKERS)
        flips = cfg.INPUT.RANDOM_FLIP == "horizontal"
        stream.mapper = TargetViews(
            stream.mapper, store, name=cfg.MODEL.TEACHER.IN_FEATURE, flips=flips
        )

    def _open(
        self, records: Sequence[dict[str, Any]], views: FixedViews, teacher: Teacher
    ) -> FeatureStore:
        cfg = self._cfg
        description = describe_cache(
            cfg,
            SimpleNamespace(encoder=teacher.backbone, outputs=teacher.head_in_features),
            records,
            views=views,
            is_train=True,
            device=teacher.device,
            size_divisibility=1,
        )
        named = cfg.MODEL.CACHE_FEATURES.FOLDER
        caches = Path(named).expanduser() if named else get_cache_dir() / "feature_cache"
        folder = caches / name_cache(description)
        about = folder / "meta.json"
        if not about.is_file():
            text = json.dumps(description, indent=2, sort_keys=True)
            write_atomically(about, lambda stream: stream.write(text.encode()))
        dtype = DTYPES[cfg.MODEL.CACHE_FEATURES.DTYPE]
        return FeatureStore(folder, len(records) * views.count, dtype=dtype)


def _encode(teacher: nn.Module, entries: Sequence[Mapped]) -> list[Stored]:
    """Returns a view for each entry; an error, or None, stays what it is."""
    views: list[Stored] = [None if isinstance(entry, dict) else entry for entry in entries]
    images = {i: entry for i, entry in enumerate(entries) if isinstance(entry, dict)}
    if not images:
        return views
    # One shape for all batches, so that a compiled teacher is compiled once.
    batch = [*images.values()]
    padding = [batch[-1]] * (VIEWS_PER_CHUNK - len(batch))
    outputs = {k: v.float().cpu().contiguous() for k, v in teacher(batch + padding).items()}
    for position, (index, entry) in enumerate(images.items()):
        views[index] = make_view(entry, {k: v[position].clone() for k, v in outputs.items()})
    return views
