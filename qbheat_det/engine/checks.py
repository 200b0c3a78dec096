# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Checks of a config and of its data before a run starts, which take seconds instead of a night."""

from collections.abc import Mapping, Sequence

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog
from detectron2.modeling import META_ARCH_REGISTRY
from detectron2.utils import comm

from qbheat_det.checkpoint import check_weights_file, choose_device
from qbheat_det.config import Rules, at_least, check_values, one_of
from qbheat_det.core.errors import UserError
from qbheat_det.data import check_tile, find_image_errors, find_record_errors, raise_first
from qbheat_det.feature_cache import check_cacheable
from qbheat_det.modeling.contracts import has_held_out_loss
from qbheat_det.tasks import DETECTION, find_task

from .run_data import CUSTOM_SETS, RunData
from .step import PRECISIONS

_RULES: Rules = {
    "SOLVER.ACCUMULATE": at_least(1),
    "SOLVER.LOG_PERIOD": at_least(1),
    "SOLVER.CHECKPOINTS_KEPT": at_least(0),
    "SOLVER.WEIGHT_DECAY": at_least(0),
    "SOLVER.AMP.PRECISION": one_of(*PRECISIONS),
    "SOLVER.EMA.DECAY": (lambda value: 0 <= value < 1, "a factor in [0, 1)"),
    "DATASETS.MAX_LEFT_OUT": (lambda value: 0 <= value <= 1, "a share in [0, 1]"),
    "DATASETS.VAL_FRACTION": (lambda value: 0 <= value < 1, "a share in [0, 1)"),
    "DATALOADER.NUM_WORKERS": at_least(0),
    "INPUT.FORMAT": one_of("RGB", "BGR", "L", "YUV-BT.601"),
    "INPUT.MIN_SIZE_TRAIN": (lambda value: value and min(value) >= 1, "lengths in pixels"),
    "TEST.PRECISE_BN.ENABLED": (
        lambda value: not value,
        "False: use qbheat export --backbone --recalibrate-bn N",
    ),
}


def check_config(cfg: CfgNode, *, eval_only: bool) -> None:
    """Checks the values of a config that do not depend on the data.

    Raises:
        UserError: a value is invalid, or ``MODEL.WEIGHTS`` cannot be read.
    """
    check_values(cfg, _RULES)
    check_tile(cfg.INPUT.TILE)
    unsupported = {
        "MODEL.MASK_ON": cfg.MODEL.MASK_ON,
        "MODEL.KEYPOINT_ON": cfg.MODEL.KEYPOINT_ON,
        "MODEL.LOAD_PROPOSALS": cfg.MODEL.LOAD_PROPOSALS,
    }
    for key, is_on in unsupported.items():
        if cfg.INPUT.TILE and is_on:
            _refuse_tile(cfg, key)
    if cfg.MODEL.CACHE_FEATURES.ENABLED and not eval_only:
        check_cacheable(cfg)
    if cfg.MODEL.WEIGHTS:
        check_weights_file(cfg.MODEL.WEIGHTS)


def find_device(cfg: CfgNode, overrides: Mapping[str, str]) -> str:
    """Returns ``MODEL.DEVICE``, or "cpu" if a recipe names a GPU and there is none.

    Raises:
        UserError: the user has named a device that does not exist.
    """
    needs_gpu = cfg.MODEL.DEVICE.startswith("cuda") and not torch.cuda.is_available()
    if needs_gpu and "MODEL.DEVICE" not in overrides:
        return "cpu"
    return choose_device(cfg.MODEL.DEVICE)


def check_fit(cfg: CfgNode, data: RunData, overrides: Mapping[str, str]) -> None:
    """Checks that a config and its data fit together.

    Raises:
        UserError: the number of classes that the user has set is wrong, or the model does not
            support such data.
    """
    if cfg.INPUT.TILE and data.unlabelled:
        _refuse_tile(cfg, "--unlabelled")
    num_classes = len(data.class_names)
    for key, value in overrides.items():
        is_number = key.endswith(".NUM_CLASSES") and "SEM_SEG" not in key
        if num_classes and is_number and value != str(num_classes):
            raise UserError(f"{key} is {value}, but the data have {num_classes} classes")
    name = cfg.MODEL.META_ARCHITECTURE
    is_evaluated = data.test and name in META_ARCH_REGISTRY
    if is_evaluated and not has_held_out_loss(META_ARCH_REGISTRY.get(name)):
        raise UserError(
            f"{name} has no loss for DATASETS.TEST: leave out --val-images, and use qbheat probe"
        )


def check_records(cfgs: Sequence[CfgNode], data: RunData, *, eval_only: bool) -> None:
    """Reads the records of a run's data sets on the main process, to find errors early.

    With ``DATASETS.CHECK_IMAGES``, also reads the image files of sets that no flag has given. (The
    others are checked when they are opened.)

    Args:
        cfgs: the configs of all stages.
        data: the data of the run.
        eval_only: nothing is trained.

    Raises:
        UserError: a record or an image is invalid.
    """
    if not comm.is_main_process():
        return
    is_detector = find_task(cfgs[-1]) is DETECTION
    names = data.test
    if is_detector and not eval_only:
        names = (*data.train, *data.test)
    for name in names:
        records = DatasetCatalog.get(name)
        if not is_detector:
            continue
        for cfg in cfgs:
            is_only_training_set = data.train == (name,)  # the sets are filtered together
            filters = is_only_training_set and cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS
            errors = find_record_errors(
                name,
                records,
                num_classes=len(data.class_names),
                filter_empty=filters,
                mask_format=cfg.INPUT.MASK_FORMAT if cfg.MODEL.MASK_ON else None,
                longest=min(cfg.INPUT.MAX_SIZE_TRAIN, cfg.INPUT.MAX_SIZE_TEST),
            )
            raise_first(errors)
        if cfgs[-1].DATASETS.CHECK_IMAGES and name not in CUSTOM_SETS:
            raise_first(find_image_errors(records))


def _refuse_tile(cfg: CfgNode, name: str) -> None:
    raise UserError(f"INPUT.TILE {cfg.INPUT.TILE} does not support {name}: use --tile 0")
