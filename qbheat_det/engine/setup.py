# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Builds and checks a config from command-line arguments, and prepares ``OUTPUT_DIR``."""

import argparse
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.modeling import META_ARCH_REGISTRY
from detectron2.utils import comm
from detectron2.utils.collect_env import collect_env_info
from detectron2.utils.env import seed_all_rng

from qbheat_det.checkpoint import check_weights_file, choose_device
from qbheat_det.config import Rules, at_least, check_values, dump_config, one_of
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import check_writable
from qbheat_det.data import (
    LEFT_OUT_FILE,
    MAPPERS_OF_CLASSES,
    MAPPERS_OF_IMAGES,
    check_image_folder,
    check_tile,
    find_image_errors,
    find_record_errors,
    raise_first,
)
from qbheat_det.feature_cache import check_cacheable
from qbheat_det.modeling.contracts import has_held_out_loss

from .data_sources import (
    CUSTOM_SETS,
    list_accounts,
    use_classes_of_folders,
    use_data_flags,
    write_data_files,
)
from .detection_limits import fit_detection_limits
from .logs import filter_detectron2_logs, open_log
from .mean_teacher import use_mean_teacher
from .resume import check_start, name_last_checkpoint
from .run_flags import RunFlags
from .step import PRECISIONS

logger = logging.getLogger(__name__)
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


def build_config(args: argparse.Namespace | RunFlags) -> CfgNode:
    """Builds and freezes the config of a run, and checks config and data. Writes no files.

    Args:
        args: arguments of ``tools/train_net.py``, or the same flags from Python.

    Raises:
        UserError: a key or the data are invalid.
    """
    filter_detectron2_logs()
    args = RunFlags.read(args)
    cfg, given = args.load_config(), args.overrides
    check_values(cfg, _RULES)
    _check_tile(cfg, args)
    check_start(cfg, args)
    if cfg.MODEL.CACHE_FEATURES.ENABLED and not args.eval_only:
        check_cacheable(cfg)
    needs_gpu = cfg.MODEL.DEVICE.startswith("cuda") and not torch.cuda.is_available()
    falls_back = needs_gpu and "MODEL.DEVICE" not in given
    cfg.MODEL.DEVICE = "cpu" if falls_back else choose_device(cfg.MODEL.DEVICE)
    if cfg.MODEL.WEIGHTS:
        check_weights_file(cfg.MODEL.WEIGHTS)
    use_data_flags(cfg, args)  # before a seed is drawn, so that the split does not depend on it
    if cfg.SEED < 0 and not (args.resume and name_last_checkpoint(Path(cfg.OUTPUT_DIR))):
        cfg.SEED = comm.shared_random_seed()  # equal on all processes, and recorded
    if not args.eval_only:
        use_mean_teacher(cfg, given)
    used = _check_datasets(cfg, eval_only=args.eval_only)
    labelled = [name for name in used if not MetadataCatalog.get(name).get("unlabelled")]
    if cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_CLASSES:
        use_classes_of_folders(cfg, eval_only=args.eval_only, resume=args.resume)
    elif labelled:
        use_classes_of(cfg, labelled[0])
    num_classes = len(cfg.MODEL.CLASS_NAMES)
    for key, value in given.items() if num_classes else ():
        if key.endswith(".NUM_CLASSES") and value != str(num_classes) and "SEM_SEG" not in key:
            raise UserError(f"{key} is {value}, but the data have {num_classes} classes")
    fit_detection_limits(cfg, given, eval_only=args.eval_only)
    if comm.is_main_process():
        _check_content(cfg, used, labelled)
    cfg.freeze()
    return cfg


def setup(cfg: CfgNode, args: argparse.Namespace | RunFlags) -> None:
    """Prepares the output folder, logs and random seed, like Detectron2's ``default_setup``.

    Writes the files of ``write_data_files``. ``Trainer.train`` writes ``config.yaml``.

    Raises:
        UserError: the folder is not writable.
    """
    folder, rank = Path(cfg.OUTPUT_DIR), comm.get_rank()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"OUTPUT_DIR '{folder}': {error.strerror}") from error
    check_writable(folder / "config.yaml")
    open_log(folder, rank=rank)
    if not rank:
        write_data_files(cfg)
    if not args.eval_only:
        logger.info(f"Output goes to '{folder}', with all messages in log.txt")
    _log_data(cfg)
    logger.debug(f"Process {rank} of {comm.get_world_size()}, started with {args}")
    logger.debug(f"Environment:\n{collect_env_info()}")
    logger.debug(f"Config:\n{dump_config(cfg)}")
    seed_all_rng(None if cfg.SEED < 0 else cfg.SEED + rank)
    if not args.eval_only:
        torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK
        if precision := cfg.get("FLOAT32_PRECISION", ""):  # missing in Detectron2 0.6
            torch.set_float32_matmul_precision(precision)


def _log_data(cfg: CfgNode) -> None:
    """Logs the formats and sizes of the data sets given by flags, and what is left out."""
    found = []
    for name in (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST):
        if source := MetadataCatalog.get(name).get("source"):
            found.append((source.title, f"{len(DatasetCatalog.get(name)):,}"))
    if not found:
        return
    formats = " and ".join(dict.fromkeys(title for title, _ in found))
    sizes = " + ".join(size for _, size in found)
    classes = f", {len(cfg.MODEL.CLASS_NAMES)} classes" if cfg.MODEL.CLASS_NAMES else ""
    logger.info(f"Data: {formats}, {sizes} images{classes}")
    for account in list_accounts(cfg):
        has_faults = bool(account.faults)
        listed = f" (see '{Path(cfg.OUTPUT_DIR) / LEFT_OUT_FILE}')" if account.left_out else ""
        level = logging.WARNING if has_faults else logging.INFO
        logger.log(level, f"Used: {account.summarize()}{listed}")
        for note in account.notes:
            logger.info(f"Note: {note}")


def _check_tile(cfg: CfgNode, flags: RunFlags) -> None:
    """Raises a ``UserError`` if ``INPUT.TILE`` is invalid, or a feature does not support it."""
    check_tile(cfg.INPUT.TILE)
    refused = {
        "MODEL.MASK_ON": cfg.MODEL.MASK_ON,
        "MODEL.KEYPOINT_ON": cfg.MODEL.KEYPOINT_ON,
        "MODEL.LOAD_PROPOSALS": cfg.MODEL.LOAD_PROPOSALS,
        "--unlabelled": bool(flags.unlabelled or cfg.DATASETS.UNLABELLED),
    }
    for name in (name for name, is_on in refused.items() if cfg.INPUT.TILE and is_on):
        raise UserError(f"INPUT.TILE {cfg.INPUT.TILE} does not support {name}: use --tile 0")


def use_classes_of(cfg: CfgNode, dataset_name: str) -> None:
    """Copies the number, names and ids of classes of a registered data set to the config."""
    metadata = MetadataCatalog.get(dataset_name)
    if not metadata.get("thing_classes"):
        DatasetCatalog.get(dataset_name)  # Detectron2 reads the names from the COCO file
    names = metadata.get("thing_classes")
    if not names:
        raise UserError(f"the metadata of data set '{dataset_name}' has no 'thing_classes'")
    ids = metadata.get("thing_dataset_id_to_contiguous_id") or {}
    cfg.MODEL.CLASS_NAMES = list(names)
    cfg.MODEL.CATEGORY_IDS = sorted(ids, key=ids.__getitem__) or list(range(len(names)))
    model = cfg.MODEL
    for node in (model.MF_DETR, model.RETINANET, model.FCOS, model.ROI_HEADS):
        node.NUM_CLASSES = len(names)


def _check_datasets(cfg: CfgNode, *, eval_only: bool) -> list[str]:
    """Checks the data sets without reading them; returns the names of those that are used."""
    mapper, test = cfg.INPUT.DATASET_MAPPER_NAME, list(cfg.DATASETS.TEST)
    used = test if eval_only else [*cfg.DATASETS.TRAIN, *test]
    if not used or not (eval_only or cfg.DATASETS.TRAIN):
        raise UserError(f"the config names no data set: {_suggest_flags(mapper)}")
    for name in used:
        _check_dataset(name, mapper=mapper, is_test=name in test)
    name = cfg.MODEL.META_ARCHITECTURE
    if test and name in META_ARCH_REGISTRY and not has_held_out_loss(META_ARCH_REGISTRY.get(name)):
        raise UserError(
            f"{name} has no loss for DATASETS.TEST: leave out --val-images, and use qbheat probe"
        )
    return used


def _check_dataset(name: str, *, mapper: str, is_test: bool) -> None:
    hint = _suggest_flags(mapper)
    if name not in DatasetCatalog:
        raise UserError(f"there is no data set '{name}': {hint}, or register it")
    metadata = MetadataCatalog.get(name)
    unlabelled, on_images = metadata.get("unlabelled"), mapper in MAPPERS_OF_IMAGES
    if unlabelled and not on_images:
        raise UserError(f"data set '{name}' has no annotations, as mapper '{mapper}' needs")
    if is_test and on_images and not unlabelled:
        raise UserError(
            f"DATASETS.TEST names '{name}', which has annotations, but mapper '{mapper}' is "
            f"evaluated on images alone: {hint}"
        )
    advice = f"set $DETECTRON2_DATASETS, or {hint}"
    for folder in metadata.get("image_folders", ()):
        try:
            check_image_folder(folder)
        except UserError as error:
            raise UserError(f"data set '{name}': {error}; {advice}") from error
    json_file = metadata.get("json_file")
    if json_file and not os.path.isfile(json_file):
        raise UserError(f"data set '{name}' has no annotations at '{json_file}': {advice}")


def _check_content(cfg: CfgNode, used: Sequence[str], labelled: Sequence[str]) -> None:
    """Reads records and, with ``DATASETS.CHECK_IMAGES``, image files, to find errors early."""
    for name in used:
        if name not in (*labelled, *cfg.DATASETS.TEST, *CUSTOM_SETS):
            continue  # a large folder is listed only once, when training starts
        records = DatasetCatalog.get(name)
        if name in labelled:
            _check_records(cfg, name, records)


def _check_records(cfg: CfgNode, name: str, records: Sequence[dict[str, Any]]) -> None:
    is_only_training_set = [name] == list(cfg.DATASETS.TRAIN)  # sets are filtered together
    raise_first(
        find_record_errors(
            name,
            records,
            num_classes=len(cfg.MODEL.CLASS_NAMES),
            filter_empty=is_only_training_set and cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS,
            mask_format=cfg.INPUT.MASK_FORMAT if cfg.MODEL.MASK_ON else None,
            longest=min(cfg.INPUT.MAX_SIZE_TRAIN, cfg.INPUT.MAX_SIZE_TEST),
        )
    )
    if cfg.DATASETS.CHECK_IMAGES and name not in CUSTOM_SETS:  # these are checked already
        raise_first(find_image_errors(records))


def _suggest_flags(mapper: str) -> str:
    if mapper in MAPPERS_OF_IMAGES and mapper not in MAPPERS_OF_CLASSES:
        return "name folders of images with --images and --val-images"
    what = "class folders" if mapper in MAPPERS_OF_CLASSES else "annotations"
    return f"name {what} with --data and --val"
