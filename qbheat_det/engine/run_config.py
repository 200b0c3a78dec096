# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The config of a stage: read from flags, checked, and completed with what the data determine."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling import META_ARCH_REGISTRY
from detectron2.utils import comm

from qbheat_det.checkpoint import (
    check_weights_file,
    choose_device,
    holds_encoder,
    load_run_config,
)
from qbheat_det.config import (
    NETWORK_KEYS,
    Rules,
    at_least,
    check_values,
    get_cfg,
    get_value,
    load_config,
    one_of,
    with_values,
)
from qbheat_det.core.errors import UserError
from qbheat_det.data import IMAGES, Source, check_tile, find_format
from qbheat_det.feature_cache import check_cacheable
from qbheat_det.modeling.contracts import SupportsUnlabelled, has_held_out_loss, is_trainable
from qbheat_det.tasks import Task, find_task, find_task_of_data

from .detection_limits import fit_detection_limits
from .run_data import Draft, RunData
from .run_flags import RunFlags
from .run_record import FIRST_STAGE_FOLDER, find_first_device
from .step import PRECISIONS

_MIN_IMAGE_SIZE = 32  # smallest --image-size in pixels
_FROZEN = 5  # lowest FREEZE_AT of recipes with a frozen backbone
# Beginnings of the keys whose overrides both stages share. All others are for the second stage.
_SHARED = (
    "DATALOADER.",
    "DATASETS.",
    "FLOAT32_PRECISION",
    "INPUT.FORMAT",
    "INPUT.TILE",
    "MODEL.",
    "SEED",
    "SOLVER.AMP.",
)
_NOT_SHARED = (
    "DATASETS.UNLABELLED",
    "MODEL.BACKBONE.FREEZE_AT",
    "MODEL.CACHE_FEATURES.ENABLED",
    "MODEL.SEMI.",
)


_RULES: Rules = {
    "SOLVER.ACCUMULATE": at_least(1),
    "SOLVER.LARGEST_BATCH": at_least(0),
    "SOLVER.LOG_PERIOD": at_least(1),
    "SOLVER.CHECKPOINTS_KEPT": at_least(0),
    "SOLVER.WEIGHT_DECAY": at_least(0),
    "SOLVER.AMP.PRECISION": one_of(*PRECISIONS),
    "SOLVER.EMA.DECAY": (lambda value: 0 <= value < 1, "a factor in [0, 1)"),
    "DATASETS.MAX_LEFT_OUT": (lambda value: 0 <= value <= 1, "a share in [0, 1]"),
    "DATASETS.VAL_FRACTION": (lambda value: 0 <= value < 1, "a share in [0, 1)"),
    "DATALOADER.NUM_WORKERS": at_least(0),
    "DATALOADER.SIZE_GROUPING": at_least(0),
    "MODEL.KEEP_CLASSES.WEIGHT": at_least(0),
    "MODEL.KEEP_CLASSES.MIN_SCORE": (lambda value: 0 <= value <= 1, "a score in [0, 1]"),
    "MODEL.KEEP_CLASSES.FEATURE_WEIGHT": at_least(0),
    "INPUT.FORMAT": one_of("RGB", "BGR", "L", "YUV-BT.601"),
    "INPUT.MIN_SIZE_TRAIN": (lambda value: value and min(value) >= 1, "lengths in pixels"),
    "TEST.PATIENCE": (lambda value: 0 <= value <= 1, "a share in [0, 1]"),
    "TEST.PRECISE_BN.ENABLED": (
        lambda value: not value,
        "False: use qbheat export --backbone --recalibrate-bn N",
    ),
}


def read_config(flags: RunFlags) -> CfgNode:
    """Reads the config that the flags name or imply, without the values that depend on the data.

    It is ``--config-file`` or the recipe of ``--size``, or else the config inside ``--weights``, or
    else the default recipe of the task of the data. With ``--freeze``, it is the first stage of
    this config, if there is one: it trains the same model on cached features of the frozen encoder.

    Raises:
        UserError: the config is invalid, the weights are for another task than the data, or
            ``--size`` is given for data without boxes.
    """
    overrides = flags.overrides
    opts = as_opts(overrides)
    weights = overrides.get("MODEL.WEIGHTS", "")
    if flags.config_file:
        cfg = load_config(flags.config_file, opts)
    elif flags.size:
        cfg = load_config(choose_recipe(flags), opts)
    elif flags.eval_only:
        cfg = load_run_config(weights, opts=opts) if weights else load_config(None, opts)
    elif weights:
        cfg = _read_config_of_weights(weights, overrides, find_task_of_flags(flags))
    else:
        cfg = load_config(choose_recipe(flags), opts)
    if flags.freeze and cfg.SOLVER.FIRST_STAGE and not flags.eval_only:
        sizes: dict[str, Any] = {}
        is_of_weights = bool(weights) and not (flags.config_file or flags.size)
        if is_of_weights and not holds_encoder(weights):
            # The encoder was trained with the detector's image sizes, and both can be joined.
            sizes = {key: get_value(cfg, key) for key in find_task(cfg).size_keys}
        cfg = with_values(_load_first_stage(cfg, overrides), sizes)
    if flags.image_size is None:
        return cfg
    return with_values(cfg, _find_size_values(cfg, flags))


def choose_recipe(flags: RunFlags) -> str:
    """Returns the name of the shipped config for the data: that of ``--size``, or the default.

    On a GPU, detectors have another default than on a CPU, unless ``--freeze`` needs a recipe with
    a first stage. A resumed run keeps its own.

    Raises:
        UserError: ``--size`` is given for data without boxes, or the flags name no training data.
    """
    task = find_task_of_flags(flags)
    if flags.size and not task.sizes:
        raise UserError(f"--size is for detectors, but the data are {task.learns_from}")
    if flags.size:
        return task.sizes[flags.size]
    is_on_gpu = _starts_on_gpu(flags.overrides, resume=flags.resume)
    if task.sizes and is_on_gpu and not flags.freeze:
        return next(iter(task.sizes.values()))
    return task.recipe


def _starts_on_gpu(overrides: Mapping[str, str], *, resume: bool) -> bool:
    """Whether a run starts on a GPU or, if it is resumed, has started on one."""
    device = overrides.get("MODEL.DEVICE", "")
    if resume and "OUTPUT_DIR" in overrides:
        device = find_first_device(Path(overrides["OUTPUT_DIR"])) or device
    if not device:
        return torch.cuda.is_available()
    return device.startswith("cuda")


def find_task_of_flags(flags: RunFlags) -> Task:
    """Returns the task of the data that the flags name, without reading the annotations.

    Raises:
        UserError: the flags name no training data, or a path has no data set.
    """
    if flags.data_sets:
        path = flags.data_sets[0]
        return find_task_of_data(Source(find_format(path), path))
    if flags.images:
        return find_task_of_data(Source(IMAGES, flags.image_folders[0]))
    raise UserError("name what to train on: --data SRC, or --images DIR for pre-training")


def _read_config_of_weights(weights: str, overrides: Mapping[str, str], task: Task) -> CfgNode:
    """Reads the config inside weights, which must be for ``task``."""
    cfg = load_run_config(weights, opts=as_opts(overrides))
    if find_task(cfg) is not task:
        raise UserError(
            f"'{weights}' are weights of a model for {find_task(cfg).learns_from}, but the data "
            f"are {task.learns_from}: name a recipe with --config-file, such as {task.recipe}"
        )
    if "OUTPUT_DIR" not in overrides:  # the folder of the weights' run is in use
        cfg.OUTPUT_DIR = get_cfg().OUTPUT_DIR
    return cfg


def as_opts(overrides: Mapping[str, str]) -> list[str]:
    """Returns overrides as alternating keys and values."""
    return [word for pair in overrides.items() for word in pair]


def _find_size_values(cfg: CfgNode, flags: RunFlags) -> dict[str, Any]:
    """Returns the values of ``--image-size``, by config key."""
    task = find_task(cfg)
    size = flags.image_size or 0
    for key in task.size_keys:
        if key in flags.overrides:
            raise UserError(f"--image-size and {key} both set the image size: leave one out")
    if size < _MIN_IMAGE_SIZE:
        raise UserError(f"--image-size is {size}, but must be at least {_MIN_IMAGE_SIZE}")
    return task.get_size_values(cfg, size, eval_only=flags.eval_only)


def read_first_stage(cfg: CfgNode, overrides: Mapping[str, str]) -> CfgNode | None:
    """Reads the config of a run's first stage, or returns None if the run has none.

    Both stages have the same data, device and model. If ``--weights`` names an encoder, both use
    it. There is no first stage if the command freezes the backbone or names weights of a detector.

    Raises:
        UserError: the first stage's config is invalid, is for another model, or has a first stage.
    """
    if not cfg.SOLVER.FIRST_STAGE or cfg.MODEL.BACKBONE.FREEZE_AT >= _FROZEN:
        return None
    weights = overrides.get("MODEL.WEIGHTS")
    if weights is not None and not (weights and holds_encoder(weights)):
        return None
    first_overrides = {
        **list_shared_overrides(overrides),
        "OUTPUT_DIR": str(Path(cfg.OUTPUT_DIR, FIRST_STAGE_FOLDER)),
    }
    return _load_first_stage(cfg, first_overrides)


def _load_first_stage(cfg: CfgNode, overrides: Mapping[str, str]) -> CfgNode:
    """Loads ``SOLVER.FIRST_STAGE``, a config for the task and the model of ``cfg``.

    Raises:
        UserError: the first stage's config is invalid, is for another model, or has a first stage.
    """
    name = f"SOLVER.FIRST_STAGE '{cfg.SOLVER.FIRST_STAGE}'"
    try:
        first = load_config(cfg.SOLVER.FIRST_STAGE, as_opts(overrides))
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    if first.SOLVER.FIRST_STAGE:
        raise UserError(f"{name} has a SOLVER.FIRST_STAGE itself, but a run has two stages at most")
    if find_task(first) is not find_task(cfg):
        raise UserError(
            f"{name} trains on {find_task(first).learns_from}, but the run on "
            f"{find_task(cfg).learns_from}"
        )
    for key in NETWORK_KEYS:
        if get_value(first, key) != get_value(cfg, key):
            raise UserError(
                f"{name} has {key} {get_value(first, key)}, but the run has {get_value(cfg, key)}"
            )
    return first


def check_trainable(cfg: CfgNode) -> None:
    """Checks that the config's model can be trained. Raises a ``UserError`` otherwise."""
    name = cfg.MODEL.META_ARCHITECTURE
    if name in META_ARCH_REGISTRY and not is_trainable(META_ARCH_REGISTRY.get(name)):
        raise UserError(
            f"{name} cannot be trained: train a detector of the new classes with --freeze, from "
            "the weights of one of the joined detectors, and add it with qbheat join"
        )


def list_shared_overrides(overrides: Mapping[str, str]) -> dict[str, str]:
    """Returns the overrides that both stages of a run have."""
    return {
        key: value
        for key, value in overrides.items()
        if key.startswith(_SHARED) and not key.startswith(_NOT_SHARED)
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


def complete_config(draft: Draft, data: RunData, *, eval_only: bool = False) -> CfgNode:
    """Returns a frozen config with all values that depend on the data and the device.

    Args:
        draft: what is known about the stage without its data.
        data: data of the stage.
        eval_only: nothing is trained.

    Raises:
        UserError: config and data do not fit together.
    """
    overrides = draft.overrides
    cfg = with_values(
        draft.cfg,
        {
            "MODEL.DEVICE": _find_device(draft.cfg, overrides),
            "DATASETS.TRAIN": data.train,
            "DATASETS.TEST": data.test,
            "DATASETS.UNLABELLED": data.unlabelled,
            **data.task.get_class_values(data.class_names, data.category_ids),
        },
    )
    if not eval_only:
        cfg = with_values(cfg, {"MODEL.KEEP_CLASSES.NUM": len(draft.kept_classes)})
    _check_fit(cfg, data, overrides)
    values: dict[str, Any] = fit_detection_limits(
        cfg,
        overrides,
        max_objects_train=data.max_objects_train,
        max_objects_test=data.max_objects_test,
    )
    if data.unlabelled and not eval_only:
        values |= _find_mean_teacher_values(cfg, overrides)
    if cfg.SEED < 0 and not draft.start.continues:  # else, the seed is that of the checkpoint
        values |= {"SEED": comm.shared_random_seed()}  # equal on all processes, and recorded
    cfg = with_values(cfg, values)
    cfg.freeze()
    return cfg


def _find_device(cfg: CfgNode, overrides: Mapping[str, str]) -> str:
    """Returns ``MODEL.DEVICE``, or "cpu" if a recipe names a GPU and there is none.

    Raises:
        UserError: the user has named a device that does not exist.
    """
    needs_gpu = cfg.MODEL.DEVICE.startswith("cuda") and not torch.cuda.is_available()
    if needs_gpu and "MODEL.DEVICE" not in overrides:
        return "cpu"
    return choose_device(cfg.MODEL.DEVICE)


def _check_fit(cfg: CfgNode, data: RunData, overrides: Mapping[str, str]) -> None:
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


def _find_mean_teacher_values(cfg: CfgNode, overrides: Mapping[str, str]) -> dict[str, bool]:
    """Returns the config values that unlabelled images need: ``SOLVER.EMA`` is enabled."""
    name = cfg.MODEL.META_ARCHITECTURE
    if not issubclass(META_ARCH_REGISTRY.get(name), SupportsUnlabelled):
        raise UserError(f"{name} cannot learn from --unlabelled: use RetinaNet or FCOS")
    if overrides.get("SOLVER.EMA.ENABLED", "True") != "True":
        raise UserError(
            "--unlabelled needs SOLVER.EMA.ENABLED True: the average is the mean teacher"
        )
    return {"SOLVER.EMA.ENABLED": True}


def _refuse_tile(cfg: CfgNode, name: str) -> None:
    raise UserError(f"INPUT.TILE {cfg.INPUT.TILE} does not support {name}: use --tile 0")
