# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Registers the data sets that the flags of ``tools/arguments.py`` name."""

import argparse
import logging
import os
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.checkpoint import class_names_of
from qbheat_det.core.errors import UserError
from qbheat_det.core.text import join_first
from qbheat_det.data import (
    MAPPERS_OF_CLASSES,
    MAPPERS_OF_IMAGES,
    CocoFile,
    check_coco_json,
    check_image_folder,
    check_same_classes,
    list_classes,
    load_classes,
    load_coco_images,
    register_coco_images,
    register_coco_json,
    register_image_folders,
)

from .resume import find_last_checkpoint

logger = logging.getLogger(__name__)
CUSTOM_TRAIN, CUSTOM_VAL = "custom_train", "custom_val"
CUSTOM_IMAGES, CUSTOM_VAL_IMAGES = "custom_images", "custom_val_images"
CUSTOM_KNN_TRAIN, CUSTOM_KNN_VAL = "custom_knn_train", "custom_knn_val"
LABELLED_TRAIN, LABELLED_VAL = "custom_labelled_train", "custom_labelled_val"

# Flag: name of the set, config key, whether subfolders are classes.
_FOLDERS = {
    "image_folder": (CUSTOM_IMAGES, "DATASETS.TRAIN", False),
    "val_image_folder": (CUSTOM_VAL_IMAGES, "DATASETS.TEST", False),
    "train_folder": (LABELLED_TRAIN, "DATASETS.TRAIN", True),
    "val_folder": (LABELLED_VAL, "DATASETS.TEST", True),
    "knn_train_folder": (CUSTOM_KNN_TRAIN, "TEST.KNN.TRAIN", True),
    "knn_val_folder": (CUSTOM_KNN_VAL, "TEST.KNN.VAL", True),
}
CUSTOM_SETS = (CUSTOM_TRAIN, CUSTOM_VAL, *(name for name, _, _ in _FOLDERS.values()))
_JSON = ("train_json", "train_images", "val_json", "val_images")
_EXCLUDES = {
    "image_folder": (*_JSON, "eval_only"),
    "val_image_folder": ("val_json",),
    "train_folder": (*_JSON, "image_folder", "val_image_folder"),
    "val_folder": (*_JSON, "image_folder", "val_image_folder"),
    "knn": ("knn_train_folder", "knn_val_folder"),
}
_REQUIRES = {
    "train_json": ("train_images",),
    "train_images": ("train_json",),
    "val_json": ("val_images",),
    "val_images": ("val_json",),
    "knn_train_folder": ("knn_val_folder",),
    "knn_val_folder": ("knn_train_folder",),
    "knn": ("train_folder", "val_folder"),
}
_OVERLAPS = (
    ("image_folder", "val_image_folder", "the held-out loss"),
    ("train_folder", "val_folder", "the accuracy"),
    ("knn_train_folder", "knn_val_folder", "the nearest-neighbour score"),
)


def use_data_flags(cfg: CfgNode, args: argparse.Namespace) -> None:
    """Registers the data that flags name, and names them in the config, in place.

    Args:
        cfg: not frozen.
        args: the four data flags and, where the tool has them, those for images.

    Raises:
        UserError: flags contradict each other or the config, or data are not sound.
    """
    flags = {**dict.fromkeys((*_FOLDERS, *_EXCLUDES, *_REQUIRES)), **vars(args)}
    keys = args.opts[::2]
    # A config that a run wrote names sets that its flags made, which are not here.
    for key in ("DATASETS.TRAIN", "DATASETS.TEST", "TEST.KNN.TRAIN", "TEST.KNN.VAL"):
        section, last = key.rsplit(".", 1)
        names = (cfg.DATASETS if section == "DATASETS" else cfg.TEST.KNN)[last]
        known = tuple(n for n in names if n not in CUSTOM_SETS or n in DatasetCatalog)
        cfg.merge_from_list([key, known])
    _check_flags(cfg, flags, keys)
    if flags["image_folder"] or flags["train_folder"] or flags["train_json"]:
        # The test sets of a recipe do not belong to custom training images.
        cfg.DATASETS.TEST = cfg.DATASETS.TEST if "DATASETS.TEST" in keys else ()
    for flag, (name, key, labelled) in _FOLDERS.items():
        if folders := _listed(flags[flag]):
            for folder in folders:
                check_image_folder(folder)
            register_image_folders(name, folders, labelled=labelled)
            cfg.merge_from_list([key, (name,)])
    _use_annotation_files(cfg, flags)
    if flags["train_folder"]:
        _check_class_folder(flags["train_folder"])
    if flags["knn"]:
        cfg.TEST.KNN.TRAIN, cfg.TEST.KNN.VAL = (LABELLED_TRAIN,), (LABELLED_VAL,)
    _warn_of_shared_folders(flags)


def use_classes_of_folders(cfg: CfgNode, *, eval_only: bool, resume: bool) -> None:
    """Sets class count and names of the config, in place, and checks that all sets have these.

    They are those of the training images. In evaluation they are those in the file of the weights,
    else of the config, else of ``--train-folder``, else of the images to evaluate on.

    Raises:
        UserError: a set has no labels, or has images of other classes.
    """
    names: list[str] = []
    if eval_only:
        weights = find_last_checkpoint(cfg.OUTPUT_DIR) if resume else cfg.MODEL.WEIGHTS
        names = list((weights and class_names_of(weights)) or cfg.MODEL.CLASS_NAMES)
    trains = not eval_only or LABELLED_TRAIN in cfg.DATASETS.TRAIN
    names = names or list_classes(cfg.DATASETS.TRAIN if trains else cfg.DATASETS.TEST)
    if not names:  # only the nearest-neighbour score of weights without classes is evaluated
        return
    for dataset_name in cfg.DATASETS.TEST:
        load_classes([dataset_name], names)
    cfg.MODEL.CLASS_NAMES = names
    cfg.MODEL.CATEGORY_IDS = list(range(len(names)))
    cfg.MODEL.CLASSIFIER.NUM_CLASSES = len(names)


def register_coco_file(name: str, json_file: str, images: str) -> CocoFile:
    """Registers a COCO-format file with its classes, after checking all of it.

    Raises:
        UserError: the file or the folder of its images is not sound.
    """
    summary = check_coco_json(json_file, images)
    register_coco_json(name, json_file, images)
    ids = {category: index for index, category in enumerate(summary.category_ids)}
    MetadataCatalog.get(name).set(
        thing_classes=list(summary.class_names), thing_dataset_id_to_contiguous_id=ids
    )
    return summary


def _check_flags(cfg: CfgNode, flags: dict[str, Any], keys: list[str]) -> None:
    for flag, others in _EXCLUDES.items():
        if flags[flag] and (clash := [other for other in others if flags[other]]):
            raise UserError(f"{_spell(flag)} does not go with {_spell(*clash)}: choose one")
    for flag, others in _REQUIRES.items():
        if flags[flag] and not all(flags[other] for other in others):
            raise UserError(f"{_spell(flag)} needs {_spell(*others)}")
    own_keys = {flag: (key,) for flag, (_, key, _) in _FOLDERS.items()}
    own_keys |= {"train_json": ("DATASETS.TRAIN",), "val_json": ("DATASETS.TEST",)}
    for flag, owned in {**own_keys, "knn": ("TEST.KNN.TRAIN", "TEST.KNN.VAL")}.items():
        for key in owned:
            if flags[flag] and key in keys:
                raise UserError(f"{key} and {_spell(flag)} both name data: choose one")
    if not (flags["train_folder"] or flags["val_folder"]):
        return
    given = _spell("train_folder" if flags["train_folder"] else "val_folder")
    if cfg.INPUT.DATASET_MAPPER_NAME not in MAPPERS_OF_CLASSES:
        raise UserError(
            f"{given} is for classifiers, but the config's INPUT.DATASET_MAPPER_NAME is "
            f"'{cfg.INPUT.DATASET_MAPPER_NAME}': pre-training takes --image-folder, detectors "
            "--train-json"
        )
    if flags["eval_only"] and not flags["val_folder"] and "DATASETS.TEST" not in keys:
        raise UserError("--eval-only evaluates on --val-folder: add it")
    if not flags["train_folder"] and not flags["eval_only"]:
        raise UserError("--val-folder alone evaluates: add --eval-only, or --train-folder to train")


def _use_annotation_files(cfg: CfgNode, flags: dict[str, Any]) -> None:
    train, val = _JSON[:2], _JSON[2:]
    train_files, val_files = (tuple(flags[flag] for flag in pair) for pair in (train, val))
    if cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_IMAGES:
        for files, name, key in (
            (train_files, CUSTOM_IMAGES, "DATASETS.TRAIN"),
            (val_files, CUSTOM_VAL_IMAGES, "DATASETS.TEST"),
        ):
            if all(files):
                load_coco_images(*files)  # raises any error now
                register_coco_images(name, *files)
                cfg.merge_from_list([key, (name,)])
        return
    if not (flags["train_json"] or flags["val_json"]):
        return
    if not flags["val_json"]:
        raise UserError("training on a custom dataset needs --val-json and --val-images as well")
    if not flags["train_json"] and not flags["eval_only"]:
        raise UserError("--val-json alone evaluates: add --eval-only, or --train-json to train")
    summary = register_coco_file(CUSTOM_VAL, *val_files)
    cfg.DATASETS.TEST = (CUSTOM_VAL,)
    if flags["train_json"]:
        check_same_classes(register_coco_file(CUSTOM_TRAIN, *train_files), summary)
        cfg.DATASETS.TRAIN = (CUSTOM_TRAIN,)


def _check_class_folder(folder: str) -> None:
    names = list_classes([LABELLED_TRAIN])
    if len(names) < 2:
        raise UserError(f"'{folder}' has images of one class, '{names[0]}': a classifier needs two")
    found = {path.name for path in Path(folder).iterdir() if path.is_dir()}
    if empty := sorted(name for name in found - set(names) if not name.startswith(".")):
        logger.warning("Folders of '%s' without images are no classes: %s", folder,
                       join_first(empty))  # fmt: skip


def _warn_of_shared_folders(flags: dict[str, Any]) -> None:
    for train, val, metric in _OVERLAPS:
        pairs = [(os.path.realpath(one), os.path.realpath(other))
                 for one in _listed(flags[train]) for other in _listed(flags[val])]  # fmt: skip
        if any(os.path.commonpath(pair) in pair for pair in pairs):
            logger.warning("%s share images: %s is too good", _spell(train, val), metric)


def _listed(folders: str | list[str] | None) -> list[str]:
    return [folders] if isinstance(folders, str) else list(folders or ())


def _spell(*flags: str) -> str:
    return " and ".join(f"--{flag.replace('_', '-')}" for flag in flags)
