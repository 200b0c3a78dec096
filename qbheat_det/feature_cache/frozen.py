# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Trains the head of a model on cached outputs of its frozen encoder.

``CachedBackbone`` replaces the encoder before the optimizer is built. The cache is built after the
weights are loaded. All runs with the same encoder, images and views share a cache.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetFromList
from detectron2.modeling import Backbone, GeneralizedRCNN
from detectron2.modeling.backbone import FPN
from detectron2.structures import Boxes, Instances
from detectron2.utils import comm
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torchvision.ops import StochasticDepth

from qbheat_det.config import find_memory_format, get_value
from qbheat_det.core.errors import UserError
from qbheat_det.data import (
    DataError,
    FixedViews,
    ImageBatches,
    Mapper,
    StrongViews,
    TrainStream,
    build_mapper,
    number_records,
)
from qbheat_det.data.mappers import VIEW_ROW, choose_view
from qbheat_det.modeling.contracts import (
    ANNOTATED_CLASSES,
    TILE,
    PreparesImages,
    PretrainingObjective,
    get_backbone,
    get_freeze_all,
    get_in_features,
    keeps_backbone_in_eval,
)
from qbheat_det.tasks import find_task

from .cache_key import check_cache_config, open_store
from .cached_backbone import OFF, CachedBackbone
from .encoding import encode_images
from .filling import Fill, fill
from .store import VIEWS_PER_FILE, AllViews, FeatureStore, Mapped, Stored, View

_KEPT = ("file_name", "image_id", "label", TILE, ANNOTATED_CLASSES)


class CachedViews:
    """A mapper that reads cached views from a store, with features instead of pixels.

    Returns a dict with these keys:

    - "file_name", "image_id", "label", "tile" and "annotated_classes" of the record, if they exist;
    - "features": the encoder's outputs (C, h, w) or (M, D) by name;
    - "image_size": (height, width) of the view;
    - "height", "width" and "instances", if the original mapper returned them.

    If the original mapper returned a ``DataError`` or None, returns this value.
    """

    def __init__(self, store: FeatureStore, count: int) -> None:
        """``store`` contains ``count`` views of each image."""
        self.store = store
        self.count = count

    def __call__(self, dataset_dict: dict[str, Any]) -> dict[str, Any] | DataError | None:
        view_number = choose_view(self.count)
        view = self.store.read(dataset_dict[VIEW_ROW] * self.count + view_number)
        if not isinstance(view, View):
            return view
        entry = {key: dataset_dict[key] for key in _KEPT if key in dataset_dict}
        entry["features"] = view.features
        entry["image_size"] = view.image_size
        if view.full_size is not None:
            height, width = view.full_size
            entry["height"] = height
            entry["width"] = width
        truth = view.ground_truth
        if "gt_boxes" in truth:
            entry["instances"] = Instances(
                view.image_size,
                gt_boxes=Boxes(truth["gt_boxes"]),
                gt_classes=truth["gt_classes"],
            )
        if "label" in truth:
            entry["label"] = int(truth["label"])
        return entry


class CachedFeatures:
    """Builds the caches of a run, from which the training stream and the test loaders read."""

    def __init__(
        self, cfg: CfgNode, model: nn.Module, backbone: CachedBackbone, *, fill: Fill = fill
    ) -> None:
        """
        Args:
            cfg: config of the run.
            model: the model to train.
            backbone: the part of ``model`` that outputs the features.
            fill: completes a store. A dry run passes a function that encodes only a few views.
        """
        self._cfg = cfg
        self._model = model
        self._backbone = backbone
        self._task = find_task(cfg)
        self._fill = fill
        self._views: dict[str, FixedViews] = {}  # by title of the training stream
        # By name of the test set: its records, and the mapper that reads their features.
        self._tests: dict[str, tuple[Sequence[dict[str, Any]], CachedViews]] = {}

    def prepare(self, stream: TrainStream) -> None:
        """Completes the caches and replaces the stream's mapper by one that reads them.

        Call it on all processes, after the weights are loaded and before the first batch. Raises a
        ``UserError`` if the disk is too small.
        """
        with self._backbone.encoding(self._device):
            self._share_weights()
            stream.mapper = self._cache_stream("training set", stream, stream.mapper)
            unlabelled = stream.unlabelled
            if unlabelled and isinstance(unlabelled.mapper, StrongViews):
                strong_views = unlabelled.mapper
                weak = self._cache_stream("unlabelled images", unlabelled, strong_views.mapper)
                unlabelled.mapper = dataclasses.replace(strong_views, mapper=weak)
            self._cache_test_sets()

    def _cache_stream(self, title: str, stream: TrainStream, mapper: Mapper) -> CachedViews:
        """Completes the cache of a stream, and returns the mapper that reads it.

        ``mapper`` is the stream's present mapper, which must be ``FixedViews`` at the first call.
        If it is the result of an earlier call, the same views are cached again.
        """
        if isinstance(mapper, FixedViews):
            self._views[title] = mapper
        return self._cache(title, AllViews(stream.dataset, self._views[title]), is_train=True)

    def build_test_loader(self, cfg: CfgNode, dataset_name: str) -> ImageBatches:
        """Returns a loader of this process's share of a test set, with features instead of pixels.

        If ``prepare`` was not called for the current weights, encodes the test sets first.
        """
        is_cached = self._backbone.is_trusted and dataset_name in self._tests
        if not is_cached:
            with self._backbone.encoding(self._device):
                self._share_weights()
                self._cache_test_sets()
        records, mapper = self._tests[dataset_name]
        return ImageBatches(
            records,
            mapper=mapper,
            batch_size=self._task.batch_size,
            num_workers=cfg.DATALOADER.NUM_WORKERS,
        )

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def _share_weights(self) -> None:
        """Broadcasts the main process's encoder, as random weights differ between processes."""
        if comm.get_world_size() > 1:
            for tensor in self._backbone.encoder.state_dict().values():
                contiguous = tensor.contiguous()  # as ``broadcast`` needs it; may be a copy
                torch.distributed.broadcast(contiguous, src=0)
                tensor.copy_(contiguous)

    def _cache_test_sets(self) -> None:
        """Completes the caches of all test sets, and then declares the features to be valid."""
        cfg = self._cfg
        for name in cfg.DATASETS.TEST:
            records = self._task.load_test_set(cfg, name)
            # Forked workers share one serialized array instead of copying records.
            numbered: Any = DatasetFromList(number_records(records), copy=False, serialize=True)
            views = FixedViews(build_mapper(cfg, is_train=False), count=1)
            cached = self._cache(f"test set '{name}'", AllViews(numbered, views), is_train=False)
            self._tests[name] = (numbered, cached)
        self._backbone.trust()

    def _cache(self, title: str, views: AllViews, *, is_train: bool) -> CachedViews:
        """Completes the cache of a data set, and returns the mapper that reads it."""
        cfg = self._cfg
        # The feature pyramid, if there is one, sets the padding of images.
        backbone: Any = get_backbone(self._model)
        store = open_store(
            cfg,
            self._backbone.encoder,
            views,
            outputs=self._backbone.outputs,
            is_train=is_train,
            device=self._device,
            size_divisibility=backbone.size_divisibility,
        )
        encode = functools.partial(
            self._encode, is_train=is_train, is_exact=store.dtype == torch.float32
        )
        store = self._fill(
            store, views, encode, title=title, num_workers=cfg.DATALOADER.NUM_WORKERS
        )
        return CachedViews(store, views.views.count)

    def _encode(self, entries: Sequence[Mapped], *, is_train: bool, is_exact: bool) -> list[Stored]:
        """Encodes outputs of a mapper, with the batch size and mode of a run without a cache.

        Both affect rounding. ``is_exact`` fills up small batches, as in ``encode_images``.
        """
        if is_train:
            num_micro_batches = comm.get_world_size() * self._cfg.SOLVER.ACCUMULATE
            batch_size = max(1, self._cfg.SOLVER.IMS_PER_BATCH // num_micro_batches)
        else:
            batch_size = self._task.batch_size
        at_once = min(VIEWS_PER_FILE, batch_size)
        was_training = self._model.training
        self._model.train(is_train)  # attention rounds differently in each mode
        try:
            encode = functools.partial(self._backbone.encode, self._model)
            return encode_images(entries, encode, at_once=at_once, is_exact=is_exact)
        finally:
            self._model.train(was_training)


def use_cached_features(
    cfg: CfgNode, model: nn.Module, *, fill: Fill = fill
) -> CachedFeatures | None:
    """Replaces a model's encoder by a ``CachedBackbone``, if ``MODEL.CACHE_FEATURES.ENABLED``.

    Changes the model in place, and must be called before the optimizer is built, and before the
    model is wrapped or copied.

    Args:
        cfg: config of the run.
        model: the model to train.
        fill: completes a store. A dry run passes a function that encodes only a few views.

    Returns:
        The object that builds the caches; None if they are not enabled.

    Raises:
        UserError: the model cannot be trained from a cache; the message gives the reason.
    """
    if not cfg.MODEL.CACHE_FEATURES.ENABLED:
        return None
    check_cacheable(cfg)
    backbone = get_backbone(model)
    if backbone is None:
        raise UserError(f"{type(model).__name__} has no backbone to cache: {OFF}")
    if isinstance(backbone, FPN):
        encoder = backbone.bottom_up
        outputs = get_in_features(backbone)
    else:
        encoder = backbone
        outputs = get_in_features(model)
    check_frozen(model, encoder, cfg.MODEL.BACKBONE.FREEZE_AT)
    cached = CachedBackbone(
        encoder=encoder.to("cpu"),
        outputs=outputs or list(encoder.output_shape()),
        channels_last=find_memory_format(cfg) == torch.channels_last,
    )
    if isinstance(backbone, FPN):
        backbone.bottom_up = cached
    else:
        model.backbone = cached
    return CachedFeatures(cfg, model, cached, fill=fill)


def check_cacheable(cfg: CfgNode) -> None:
    """Checks that a config with an enabled cache has fixed views and uses only cached data.

    Raises a ``UserError`` that names the key to change.
    """
    check_cache_config(cfg)
    refused = {
        "MODEL.MASK_ON": "needs masks, which are not cached",
        "MODEL.KEYPOINT_ON": "needs keypoints, which are not cached",
        "MODEL.LOAD_PROPOSALS": "needs proposals, which are not cached",
        "VIS_PERIOD": "draws training images, which are not loaded",
    }
    if cfg.MODEL.META_ARCHITECTURE == "ImageClassifier":
        mixes = "mixes images before the encoder, differently in every step"
        refused |= {"MODEL.CLASSIFIER.MIXUP": mixes, "MODEL.CLASSIFIER.CUTMIX": mixes}
    for key, reason in refused.items():
        if get_value(cfg, key):
            raise UserError(f"{key} {reason}: switch it off, or {OFF}")


def check_frozen(model: nn.Module, encoder: Backbone, freeze_at: int) -> None:
    """Checks that a model's encoder returns the same features in every step.

    Raises a ``UserError`` if the model pre-trains its encoder, if it does not support cached
    features, or if a part of the encoder changes in training or drops values at random.
    """
    model_name = type(model).__name__
    encoder_name = type(encoder).__name__
    if isinstance(model, PretrainingObjective):
        raise UserError(f"{model_name} pre-trains its encoder, which cannot be cached: {OFF}")
    if isinstance(model, GeneralizedRCNN) or not isinstance(model, PreparesImages):
        raise UserError(f"{model_name} does not support cached features: {OFF}")
    changing = [path for path, p in encoder.named_parameters() if p.requires_grad]
    if keeps_backbone_in_eval(model) and not changing:
        return  # in eval mode, BatchNorm and dropout do not change the features
    modules = list(encoder.named_modules())
    changing += [path for path, module in modules if isinstance(module, _BatchNorm)]
    if changing:
        raise UserError(
            f"'{changing[0]}' and {len(changing) - 1} more of {encoder_name} change in training: "
            f"set MODEL.BACKBONE.FREEZE_AT to {get_freeze_all(encoder)} instead of {freeze_at}, or "
            f"{OFF}"
        )
    for path, module in modules:
        if _get_drop_rate(module):
            raise UserError(f"'{path}' of {encoder_name} drops values in training: {OFF}")


def _get_drop_rate(module: nn.Module) -> float:
    """Returns the probability with which a module drops values in training; 0 if it drops none."""
    if isinstance(module, _DropoutNd | StochasticDepth):
        return float(module.p)
    if isinstance(module, nn.MultiheadAttention):
        return float(module.dropout)
    return float(getattr(module, "drop_prob", 0.0) or 0.0)  # timm's DropPath; it may be None
