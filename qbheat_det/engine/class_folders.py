# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Class folders of one's own for classifiers, and what the classes of a run are."""

import argparse
import logging
from pathlib import Path

from detectron2.config import CfgNode

from qbheat_det.checkpoint import class_names_of
from qbheat_det.core.errors import UserError
from qbheat_det.data import (
    MAPPERS_OF_CLASSES,
    check_image_folder,
    list_classes,
    load_classes,
    register_image_folders,
)

from .resume import find_last_checkpoint

logger = logging.getLogger(__name__)
LABELLED_TRAIN, LABELLED_VAL = "custom_labelled_train", "custom_labelled_val"
_SHOWN = 5  # folders that a warning names
_OTHER_DATA = (
    *("image_folder", "val_image_folder"),
    *("train_json", "train_images", "val_json", "val_images"),
)


def use_class_folders(cfg: CfgNode, args: argparse.Namespace) -> bool:
    """Registers the class folders that flags name, and names them in the config, in place.

    Returns:
        Whether flags name any.

    Raises:
        UserError: flags contradict each other or the config, or a folder holds no classes.
    """
    train, val = (getattr(args, flag, None) for flag in ("train_folder", "val_folder"))
    if not (train or val):
        if getattr(args, "knn", False):
            raise UserError("--knn scores --train-folder and --val-folder: give both")
        return False
    _check_flags(cfg, args)
    if val:
        _register(LABELLED_VAL, val)
        cfg.DATASETS.TEST = (LABELLED_VAL,)
    elif "DATASETS.TEST" not in args.opts[::2]:
        # What a recipe evaluates on does not belong to training images of one's own.
        cfg.DATASETS.TEST = ()
    if train:
        _register(LABELLED_TRAIN, train)
        cfg.DATASETS.TRAIN = (LABELLED_TRAIN,)
        _check_classes(train)
    if getattr(args, "knn", False):
        cfg.TEST.KNN.TRAIN, cfg.TEST.KNN.VAL = (LABELLED_TRAIN,), (LABELLED_VAL,)
    return True


def use_classes_of_folders(cfg: CfgNode, *, eval_only: bool, resume: bool) -> None:
    """Sets class count and names of the config, in place, and checks that all sets have these.

    They are those of the training images. In evaluation they are those that the weights were
    trained on, as the file of the weights says, or else the config; where neither does, those of
    ``--train-folder``, or of the images to evaluate on.

    Raises:
        UserError: a set has no labels, or has images of other classes.
    """
    names = _find_known(cfg, resume=resume) if eval_only else []
    trains = not eval_only or LABELLED_TRAIN in cfg.DATASETS.TRAIN
    names = names or list_classes(cfg.DATASETS.TRAIN if trains else cfg.DATASETS.TEST)
    if not names:  # weights of which nothing is known are asked for their neighbours alone
        return
    for dataset_name in cfg.DATASETS.TEST:
        load_classes([dataset_name], names)
    cfg.MODEL.CLASS_NAMES = names
    cfg.MODEL.CATEGORY_IDS = list(range(len(names)))
    cfg.MODEL.CLASSIFIER.NUM_CLASSES = len(names)


def _find_known(cfg: CfgNode, *, resume: bool) -> list[str]:
    """Returns the class names of weights that are to be evaluated, if anything says them."""
    weights = find_last_checkpoint(cfg.OUTPUT_DIR) if resume else cfg.MODEL.WEIGHTS
    return list((weights and class_names_of(weights)) or cfg.MODEL.CLASS_NAMES)


def _check_flags(cfg: CfgNode, args: argparse.Namespace) -> None:
    train, val = args.train_folder, args.val_folder
    given = "--train-folder" if train else "--val-folder"
    others = [flag for flag in _OTHER_DATA if getattr(args, flag, None)]
    if others:
        names = " and ".join(f"--{flag.replace('_', '-')}" for flag in others)
        raise UserError(f"{given} names class folders for a classifier: leave out {names}")
    for key, folder in (("DATASETS.TRAIN", train), ("DATASETS.TEST", val)):
        if folder and key in args.opts[::2]:
            flag = "--train-folder" if key == "DATASETS.TRAIN" else "--val-folder"
            raise UserError(f"{key} and {flag} both name data: choose one")
    if cfg.INPUT.DATASET_MAPPER_NAME not in MAPPERS_OF_CLASSES:
        raise UserError(
            f"{given} is for classifiers, but the config's INPUT.DATASET_MAPPER_NAME is "
            f"'{cfg.INPUT.DATASET_MAPPER_NAME}': choose a config of a classifier (mapper "
            f"{' or '.join(sorted(MAPPERS_OF_CLASSES))}); pre-training takes --image-folder, "
            "detectors --train-json"
        )
    if args.eval_only and not val and "DATASETS.TEST" not in args.opts[::2]:
        raise UserError("--eval-only evaluates on --val-folder: add it")
    if not train and not args.eval_only:
        raise UserError("--val-folder alone evaluates: add --eval-only, or --train-folder to train")
    if not getattr(args, "knn", False):
        return
    if not (train and val):
        raise UserError("--knn scores --train-folder and --val-folder: give both")
    if getattr(args, "knn_train_folder", None) or getattr(args, "knn_val_folder", None):
        raise UserError("--knn and --knn-train-folder both name data: choose one")
    if clash := [key for key in ("TEST.KNN.TRAIN", "TEST.KNN.VAL") if key in args.opts[::2]]:
        raise UserError(f"{' and '.join(clash)} and --knn both name data: choose one")


def _register(name: str, folder: str) -> None:
    check_image_folder(folder)
    register_image_folders(name, [folder], labelled=True)


def _check_classes(folder: str) -> None:
    names = list_classes([LABELLED_TRAIN])
    if len(names) < 2:
        raise UserError(
            f"'{folder}' holds images of one class alone, '{names[0]}', but a classifier needs "
            "two: the folders right below it are the classes"
        )
    found = {path.name for path in Path(folder).iterdir() if path.is_dir()}
    empty = sorted(name for name in found - set(names) if not name.startswith("."))
    if empty:
        more = ", …" if len(empty) > _SHOWN else ""
        logger.warning(
            "%d folders of '%s' hold no image and are no classes: %s",
            len(empty), folder, ", ".join(empty[:_SHOWN]) + more,
        )  # fmt: skip
