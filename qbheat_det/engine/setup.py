# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What stands between a command line and a trainer: data, classes, folders, seeds."""

import argparse
import contextlib
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.engine import default_setup
from detectron2.modeling import META_ARCH_REGISTRY
from detectron2.utils import comm
from detectron2.utils.logger import setup_logger

from qbheat_det.checkpoint import check_weights_file, class_names_of, load_run_config
from qbheat_det.config import load_config
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically
from qbheat_det.data import (
    MAPPERS_OF_CLASSES,
    MAPPERS_OF_IMAGES,
    check_image_files,
    check_image_folder,
    check_records,
    check_some_readable,
)
from qbheat_det.modeling.contracts import has_held_out_loss

from .cache_refusals import check_cacheable
from .class_folders import use_classes_of_folders
from .data_flags import use_data_flags
from .knn_look import check_neighbours, names_neighbours
from .resuming import check_verbs, holds_run

_GIVE_YOUR_OWN = "give your own data with --train-json, --train-images, --val-json and --val-images"
_GIVE_FOLDERS = "give folders of images with --image-folder and --val-image-folder"
_GIVE_CLASSES = "give class folders with --train-folder and --val-folder"
_FORMATS = ("RGB", "BGR", "L", "YUV-BT.601")


def build_config(args: argparse.Namespace) -> CfgNode:
    """Turns the arguments of ``tools/train_net.py`` into a frozen config; writes nothing.

    Args:
        args: ``config_file``, ``opts``, ``eval_only``, ``resume``, the four data flags and, where
            the tool has them, those for images.

    Raises:
        UserError: the config or the data is not sound.
    """
    cfg = _load(args)
    _check_numbers(cfg)
    check_verbs(cfg, args)
    if cfg.MODEL.CACHE_FEATURES.ENABLED and not args.eval_only:
        check_cacheable(cfg)
    _choose_device(cfg, asked_for="MODEL.DEVICE" in args.opts[::2])
    if cfg.SEED < 0 and not (args.resume and holds_run(cfg.OUTPUT_DIR)):
        # Drawn once for all processes, and written down.
        cfg.SEED = comm.shared_random_seed()
    if cfg.MODEL.WEIGHTS:  # before anything is written
        check_weights_file(cfg.MODEL.WEIGHTS)
    use_data_flags(cfg, args)
    used = _check_datasets(cfg, eval_only=args.eval_only)
    labelled = [name for name in used if not MetadataCatalog.get(name).get("unlabelled")]
    if cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_CLASSES:
        use_classes_of_folders(cfg, eval_only=args.eval_only, resume=args.resume)
        _check_overrides(cfg, args)
    elif labelled:
        use_classes_of(cfg, labelled[0])
        _check_overrides(cfg, args)
    if args.eval_only and cfg.MODEL.WEIGHTS:
        _check_classes_of_weights(cfg)
    if comm.is_main_process():
        for name in labelled:
            _check_content(cfg, name)
        for name in (name for name in cfg.DATASETS.TEST if name not in labelled):
            file_names = [record["file_name"] for record in DatasetCatalog.get(name)]
            check_some_readable(f"dataset '{name}'", file_names)
    cfg.freeze()
    return cfg


def _check_numbers(cfg: CfgNode) -> None:
    at_least = {
        "SOLVER.ACCUMULATE": (cfg.SOLVER.ACCUMULATE, 1),
        "SOLVER.LOG_PERIOD": (cfg.SOLVER.LOG_PERIOD, 1),
        "SOLVER.CHECKPOINTS_KEPT": (cfg.SOLVER.CHECKPOINTS_KEPT, 0),
        "SOLVER.WEIGHT_DECAY": (cfg.SOLVER.WEIGHT_DECAY, 0),
        "DATALOADER.NUM_WORKERS": (cfg.DATALOADER.NUM_WORKERS, 0),
    }
    for key, (value, least) in at_least.items():
        if value < least:
            raise UserError(f"{key} must be at least {least}, but is {value}")
    sizes = cfg.INPUT.MIN_SIZE_TRAIN
    if not sizes or min(sizes) < 1:
        raise UserError(f"INPUT.MIN_SIZE_TRAIN must name lengths in pixels, but is {sizes}")
    if cfg.INPUT.FORMAT not in _FORMATS:
        raise UserError(f"INPUT.FORMAT is '{cfg.INPUT.FORMAT}', but must be one of {_FORMATS}")
    if cfg.TEST.PRECISE_BN.ENABLED:
        raise UserError(
            "TEST.PRECISE_BN is not supported, since a resumed run would not repeat it: "
            "re-estimate the statistics of finished weights instead (tools/export_backbone.py)"
        )


def _load(args: argparse.Namespace) -> CfgNode:
    cfg = load_config(args.config_file or None, args.opts)
    if args.eval_only and cfg.MODEL.WEIGHTS and not args.config_file:
        return load_run_config(cfg.MODEL.WEIGHTS, opts=args.opts)  # trained weights bring theirs
    return cfg


def setup(cfg: CfgNode, args: argparse.Namespace) -> None:
    """Detectron2's ``default_setup``: folder, logger, environment, seed.

    What it writes to ``config.yaml`` is taken back: that file belongs to the weights beside it,
    and is written when training begins.

    Raises:
        UserError: ``OUTPUT_DIR`` cannot be written to.
    """
    try:
        os.makedirs(cfg.OUTPUT_DIR, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"OUTPUT_DIR '{cfg.OUTPUT_DIR}' cannot be made: {error.strerror}"
        ) from error
    if not os.access(cfg.OUTPUT_DIR, os.W_OK):
        raise UserError(f"OUTPUT_DIR '{cfg.OUTPUT_DIR}' cannot be written to")
    if shutil.disk_usage(cfg.OUTPUT_DIR).free < 2**20:
        raise UserError(f"the disk of OUTPUT_DIR '{cfg.OUTPUT_DIR}' is full")
    with _kept(Path(cfg.OUTPUT_DIR) / "config.yaml"):
        default_setup(cfg, args)
    setup_logger(cfg.OUTPUT_DIR, distributed_rank=comm.get_rank(), name="qbheat_det")
    leave_out_noise()


def leave_out_noise() -> None:
    """Keeps Detectron2 from logging what is said elsewhere, or is no news."""
    # The sentence of a person's mistake is printed at the end; Detectron2's loop would put a
    # traceback before it.
    logging.getLogger("detectron2.engine.train_loop").addFilter(_is_no_mistake)
    # Ids with holes are the normal case here, and handled.
    logging.getLogger("detectron2.data.datasets.coco").addFilter(_is_not_about_ids)


def use_classes_of(cfg: CfgNode, dataset_name: str) -> None:
    """Sets class count, names and ids of the config to those of a registered dataset.

    Raises:
        UserError: nothing is known of the dataset's classes.
    """
    metadata = MetadataCatalog.get(dataset_name)
    if not metadata.get("thing_classes"):
        DatasetCatalog.get(dataset_name)  # Detectron2 learns the names of COCO files by reading
    names = metadata.get("thing_classes")
    if not names:
        raise UserError(f"the metadata of dataset '{dataset_name}' has no 'thing_classes'")
    contiguous = metadata.get("thing_dataset_id_to_contiguous_id") or {}
    cfg.MODEL.CLASS_NAMES = list(names)
    cfg.MODEL.CATEGORY_IDS = sorted(contiguous, key=contiguous.__getitem__) or list(
        range(len(names))
    )
    model = cfg.MODEL
    for node in (model.MF_DETR, model.RETINANET, model.FCOS, model.ROI_HEADS):
        node.NUM_CLASSES = len(names)


@contextlib.contextmanager
def _kept(path: Path) -> Iterator[None]:
    before = path.read_bytes() if path.is_file() else None
    try:
        yield
    finally:
        if comm.is_main_process() and before is None:
            path.unlink(missing_ok=True)
        elif comm.is_main_process() and before is not None:
            write_atomically(path, lambda stream: stream.write(before))


def _is_no_mistake(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], UserError))


def _is_not_about_ids(record: logging.LogRecord) -> bool:
    return "Category ids in annotations" not in str(record.msg)


def _check_content(cfg: CfgNode, name: str) -> None:
    """Checks what can be known of a dataset before training: its records and image files."""
    records = DatasetCatalog.get(name)
    check_records(
        name,
        records,
        num_classes=len(cfg.MODEL.CLASS_NAMES),
        # Of several sets, one may be without boxes: Detectron2 filters them together.
        filter_empty=[name] == list(cfg.DATASETS.TRAIN) and cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS,
        mask_format=cfg.INPUT.MASK_FORMAT if cfg.MODEL.MASK_ON else None,
    )
    if cfg.DATASETS.CHECK_IMAGES:
        check_image_files(records, progress=True)


def _check_overrides(cfg: CfgNode, args: argparse.Namespace) -> None:
    """Refuses on the command line what the data decide, where it says something else."""
    given = dict(zip(args.opts[::2], args.opts[1::2], strict=True))
    if args.val_json and (
        clash := [key for key in ("DATASETS.TRAIN", "DATASETS.TEST") if key in given]
    ):
        raise UserError(f"{' and '.join(clash)} and the four data flags both name data: choose one")
    num_classes = len(cfg.MODEL.CLASS_NAMES)
    for key, value in given.items():
        if key.endswith(".NUM_CLASSES") and value != str(num_classes) and "SEM_SEG" not in key:
            raise UserError(
                f"{key} {value} on the command line, but the data have {num_classes} classes: "
                "leave it out, the count comes from the data"
            )


def _choose_device(cfg: CfgNode, *, asked_for: bool) -> None:
    try:
        torch.device(cfg.MODEL.DEVICE)
    except RuntimeError:
        raise UserError(f"MODEL.DEVICE is '{cfg.MODEL.DEVICE}', but must be cpu or cuda") from None
    if torch.cuda.is_available() or not cfg.MODEL.DEVICE.startswith("cuda"):
        return
    if asked_for:
        raise UserError(f"MODEL.DEVICE is '{cfg.MODEL.DEVICE}', but PyTorch sees no GPU: use cpu")
    cfg.MODEL.DEVICE = "cpu"


def _check_datasets(cfg: CfgNode, *, eval_only: bool) -> list[str]:
    """Returns the names of the sets to train or evaluate on, looked at as far as costs nothing."""
    mapper, test = cfg.INPUT.DATASET_MAPPER_NAME, list(cfg.DATASETS.TEST)
    used = test if eval_only else [*cfg.DATASETS.TRAIN, *test]
    knn = [*cfg.TEST.KNN.TRAIN, *cfg.TEST.KNN.VAL]
    if not (used or (eval_only and knn)) or not (eval_only or cfg.DATASETS.TRAIN):
        raise UserError(f"the config names no dataset; {_hint(mapper)}")
    for name in [*used, *knn]:
        _check_dataset(name, mapper=mapper)
    for name in test:
        if mapper in MAPPERS_OF_IMAGES and not MetadataCatalog.get(name).get("unlabelled"):
            raise UserError(
                f"DATASETS.TEST names '{name}', a dataset with annotations, but mapper '{mapper}' "
                f"is evaluated on images alone: {_hint(mapper)}, or name such a set"
            )
    if test:
        _check_held_out(cfg.MODEL.META_ARCHITECTURE)
    if names_neighbours(cfg) and comm.is_main_process():
        check_neighbours(cfg)
    return used


def _check_held_out(model: str) -> None:
    known = model in META_ARCH_REGISTRY  # else the sentence comes where it is built
    if known and not has_held_out_loss(META_ARCH_REGISTRY.get(model)):
        raise UserError(
            f"{model} has no loss of an image by itself, so held-out images cannot be evaluated: "
            "leave out --val-image-folder and DATASETS.TEST; --knn-train-folder and "
            "--knn-val-folder tell what it learns"
        )


def _hint(mapper: str) -> str:
    if mapper in MAPPERS_OF_CLASSES:
        return _GIVE_CLASSES
    return _GIVE_FOLDERS if mapper in MAPPERS_OF_IMAGES else _GIVE_YOUR_OWN


def _check_dataset(name: str, *, mapper: str) -> None:
    if name not in DatasetCatalog:
        raise UserError(f"there is no dataset '{name}'; {_hint(mapper)}, or register it before")
    metadata = MetadataCatalog.get(name)
    if metadata.get("unlabelled") and mapper not in MAPPERS_OF_IMAGES:
        raise UserError(
            f"dataset '{name}' has no annotations, but INPUT.DATASET_MAPPER_NAME '{mapper}' needs "
            "them: choose a config of pre-training or of a classifier (mapper "
            f"{' or '.join(sorted(MAPPERS_OF_IMAGES))}), or a dataset with annotations"
        )
    for folder in metadata.get("image_folders", ()):
        try:
            check_image_folder(folder)
        except UserError as error:
            raise UserError(
                f"dataset '{name}' cannot be used: {error}; set $DETECTRON2_DATASETS, or "
                + _hint(mapper)
            ) from error
    json_file = None if metadata.get("drawn_on_first_use") else metadata.get("json_file")
    if json_file and not os.path.isfile(json_file):
        raise UserError(
            f"dataset '{name}' has no annotations at '{json_file}': set $DETECTRON2_DATASETS "
            f"(`python tools/doctor.py` shows what is looked for), or {_GIVE_YOUR_OWN}"
        )


def _check_classes_of_weights(cfg: CfgNode) -> None:
    """Compares the data's class names with those that the weights were trained on, if known."""
    trained = class_names_of(cfg.MODEL.WEIGHTS)
    if trained and list(trained) != list(cfg.MODEL.CLASS_NAMES):
        raise UserError(
            f"'{cfg.MODEL.WEIGHTS}' was trained on the classes {list(trained)}, but the data to "
            f"evaluate on have {list(cfg.MODEL.CLASS_NAMES)}: another name or order is another AP"
        )
