# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Training a head on the outputs of its frozen encoder, computed once and read from the disk.

The encoder is replaced in the model before the optimizer is built. The cache is made when the
weights are loaded, and shared by every run that has the same encoder, images and views.
"""

import functools
import logging
import operator
from collections.abc import Sequence
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import (
    DatasetFromList,
    build_detection_test_loader,
    get_detection_dataset_dicts,
)
from detectron2.data.samplers import InferenceSampler
from detectron2.modeling import Backbone, GeneralizedRCNN
from detectron2.modeling.backbone import FPN
from detectron2.utils import comm
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torchvision.ops import StochasticDepth

from qbheat_det.config import find_memory_format
from qbheat_det.core.errors import UserError
from qbheat_det.data import (
    MAPPERS_OF_CLASSES,
    FixedViews,
    ImageBatches,
    TrainStream,
    build_mapper,
    load_classes,
    number_records,
)
from qbheat_det.modeling.contracts import (
    PretrainingObjective,
    get_backbone,
    get_freeze_all,
    get_in_features,
    keeps_backbone_in_eval,
)

from .backbone import CachedBackbone
from .build import (
    AllViews,
    ViewEncoder,
    check_cache_keys,
    describe_cache,
    fill,
    open_store,
)
from .store import VIEWS_PER_FILE
from .views import CachedViews

logger = logging.getLogger(__name__)

_OFF = "set MODEL.CACHE_FEATURES.ENABLED False"


class CachedFeatures:
    """The cache of a run: made by ``prepare``, read by the stream and by test loaders."""

    def __init__(self, cfg: CfgNode, model: nn.Module, backbone: CachedBackbone) -> None:
        """``backbone`` is a part of ``model`` and gives the features."""
        self._cfg = cfg
        self._model = model
        self._backbone = backbone
        self._views: FixedViews | None = None
        self._tests: dict[str, tuple[AllViews, CachedViews]] = {}

    def prepare(self, stream: TrainStream) -> None:
        """Encodes what the caches lack, and makes the stream read from them.

        To be called on all processes, after the weights are loaded and before the first batch. The
        stream's mapper is replaced. Raises a ``UserError`` if the disk is too small.
        """
        if self._views is None:
            assert isinstance(stream.mapper, FixedViews)  # see check_cacheable
            self._views = stream.mapper
        with self._backbone.encoding(self._device):
            self._share_weights()
            _, cached = self._make("training set", stream.dataset, self._views, is_train=True)
            self._make_test_sets()
        stream.mapper = cached

    def build_test_loader(self, cfg: CfgNode, dataset_name: str) -> Any:
        """As ``Trainer.build_test_loader``, with features in the place of images.

        Without ``prepare``, as where nothing is left to train, the test sets alone are encoded.
        """
        if not (self._backbone.is_trusted and dataset_name in self._tests):
            with self._backbone.encoding(self._device):
                self._share_weights()
                self._make_test_sets()
        views, mapper = self._tests[dataset_name]
        records, workers = views.records, cfg.DATALOADER.NUM_WORKERS
        if cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_CLASSES:
            return ImageBatches(records, mapper=mapper, num_workers=workers)
        return build_detection_test_loader(
            records, mapper=mapper, sampler=InferenceSampler(len(records)), num_workers=workers
        )

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def _share_weights(self) -> None:
        """Gives all processes the main one's encoder, which differs if no weights are loaded."""
        if comm.get_world_size() > 1:
            for tensor in self._backbone.encoder.state_dict().values():
                sent = tensor.contiguous()  # not every layout can be sent
                torch.distributed.broadcast(sent, src=0)
                tensor.copy_(sent)

    def _make_test_sets(self) -> None:
        cfg = self._cfg
        for name in cfg.DATASETS.TEST:
            if cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_CLASSES:
                records = load_classes([name], cfg.MODEL.CLASS_NAMES)
            else:
                records = get_detection_dataset_dicts(name, filter_empty=False)
            views = FixedViews(build_mapper(cfg, is_train=False), count=1)
            # One array of bytes, which forked workers share instead of copying.
            numbered = DatasetFromList(number_records(records), copy=False, serialize=True)
            self._tests[name] = self._make(f"test set '{name}'", numbered, views, is_train=False)
        self._backbone.trust()

    def _make(
        self, title: str, records: Sequence[dict[str, Any]], views: FixedViews, *, is_train: bool
    ) -> tuple[AllViews, CachedViews]:
        """Encodes what is missing of a set; returns its views, and the mapper that reads them."""
        cfg = self._cfg
        whole: Any = get_backbone(self._model)
        description = describe_cache(
            cfg,
            self._backbone.encoder,
            records,
            outputs=self._backbone.outputs,
            views=views,
            is_train=is_train,
            device=self._device,
            size_divisibility=whole.size_divisibility,
        )
        store = open_store(cfg, description, len(records) * views.count)
        logger.info(f"The {title}: cached in '{store.folder}'")
        encoder = ViewEncoder(
            self._model,
            self._backbone,
            at_once=self._count_at_once(is_train),
            is_train=is_train,
            is_exact=store.dtype == torch.float32,
        )
        every = AllViews(records, views)
        title, workers = f"Encoding the {title}", cfg.DATALOADER.NUM_WORKERS
        fill(store, every, encoder, title=title, num_workers=workers)
        return every, CachedViews(store, views.count)

    def _count_at_once(self, is_train: bool) -> int:
        """Returns how many images the model would encode at once without a cache."""
        cfg = self._cfg
        if is_train:
            parts = comm.get_world_size() * cfg.SOLVER.ACCUMULATE
            return min(VIEWS_PER_FILE, max(1, cfg.SOLVER.IMS_PER_BATCH // parts))
        # Detectors are evaluated image by image.
        return VIEWS_PER_FILE if cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_CLASSES else 1


def use_cached_features(cfg: CfgNode, model: nn.Module) -> CachedFeatures | None:
    """Replaces a model's encoder by a ``CachedBackbone``, if the config asks for it.

    The model is changed in place, before an optimizer, wrapper or copy is made of it. A
    ``UserError`` says why it cannot be trained from a cache.
    """
    if not cfg.MODEL.CACHE_FEATURES.ENABLED:
        return None
    check_cacheable(cfg)
    return CachedFeatures(cfg, model, replace_encoder(cfg, model))


def check_cacheable(cfg: CfgNode) -> None:
    """Checks the keys of a config that has the cache on.

    Raises a ``UserError`` if there is no fixed number of views, or the recipe needs what a cache
    cannot give.
    """
    check_cache_keys(cfg)
    refused = {
        "MODEL.MASK_ON": "needs masks, which are not cached",
        "MODEL.KEYPOINT_ON": "needs keypoints, which are not cached",
        "MODEL.LOAD_PROPOSALS": "needs proposals, which are not cached",
        "TEST.KNN.TRAIN": "scores an encoder that stays frozen",
        "VIS_PERIOD": "draws training images, which are not loaded",
    }
    if cfg.MODEL.META_ARCHITECTURE == "ImageClassifier":
        mixes = "mixes images before the encoder, anew in every step"
        refused |= {"MODEL.CLASSIFIER.MIXUP": mixes, "MODEL.CLASSIFIER.CUTMIX": mixes}
    for key, reason in refused.items():
        if functools.reduce(operator.getitem, key.split("."), cfg):
            raise UserError(f"{key} {reason}: switch it off, or {_OFF}")


def replace_encoder(cfg: CfgNode, model: nn.Module) -> CachedBackbone:
    """Puts a ``CachedBackbone`` in the place of a model's frozen encoder, and returns it."""
    backbone = get_backbone(model)
    if backbone is None:
        raise UserError(f"{type(model).__name__} has no backbone to cache: {_OFF}")
    has_pyramid = isinstance(backbone, FPN)
    encoder = backbone.bottom_up if has_pyramid else backbone
    check_frozen(model, encoder, cfg.MODEL.BACKBONE.FREEZE_AT)
    cached = CachedBackbone(
        encoder=encoder.to("cpu"),
        outputs=get_in_features(backbone if has_pyramid else model) or list(encoder.output_shape()),
        channels_last=find_memory_format(cfg) == torch.channels_last,
    )
    if has_pyramid:
        backbone.bottom_up = cached
    else:
        model.backbone = cached
    return cached


def check_frozen(model: nn.Module, encoder: Backbone, freeze_at: int) -> None:
    """Checks that the encoder of a model gives the same features in every step.

    Raises a ``UserError`` if the model pre-trains its encoder or reads pixels alone, or part of the
    encoder changes in training, or draws random numbers.
    """
    kind, name = type(model).__name__, type(encoder).__name__
    if isinstance(model, PretrainingObjective):
        raise UserError(f"{kind} pre-trains its encoder, which cannot be cached: {_OFF}")
    if isinstance(model, GeneralizedRCNN):
        raise UserError(f"Detectron2's {kind} reads pixels alone, not cached features: {_OFF}")
    changing = [path for path, p in encoder.named_parameters() if p.requires_grad]
    stays_in_eval = keeps_backbone_in_eval(model) and not changing
    modules = [] if stays_in_eval else list(encoder.named_modules())
    changing += [path for path, module in modules if isinstance(module, _BatchNorm)]
    if changing:
        raise UserError(
            f"'{changing[0]}' and {len(changing) - 1} more of {name} change in training: set "
            f"MODEL.BACKBONE.FREEZE_AT to {get_freeze_all(encoder)} instead of {freeze_at}, or "
            f"{_OFF}"
        )
    for path, module in modules:
        if _get_drop_rate(module):
            raise UserError(f"'{path}' of {name} drops values in training: {_OFF}")


def _get_drop_rate(module: nn.Module) -> float:
    if isinstance(module, _DropoutNd | StochasticDepth):
        return float(module.p)
    if isinstance(module, nn.MultiheadAttention):
        return float(module.dropout)
    return float(getattr(module, "drop_prob", 0.0) or 0.0)  # timm's name, and others'
