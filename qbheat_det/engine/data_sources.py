# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Custom data sets: registered from the flags of ``tools/arguments.py``, or from ``run.json``.

And the same few images of a set each time, to look at.

A source of a set has ``json_file`` and ``image_root``, or ``image_folders``; and ``labelled``,
whether boxes or the names of folders are read. The sources of a run are recorded in ``run.json``.
"""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.checkpoint import class_names_of
from qbheat_det.core.errors import UserError
from qbheat_det.data import (
    MAPPERS_OF_CLASSES,
    MAPPERS_OF_IMAGES,
    CocoFile,
    build_mapper,
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

Source = dict[str, Any]
_MAX_TRIED = 10  # consecutive images that cannot be read before a position is left out

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
# Flags: name of the set with boxes, of the set of images alone, config key.
_FILES = {
    ("train_json", "train_images"): (CUSTOM_TRAIN, CUSTOM_IMAGES, "DATASETS.TRAIN"),
    ("val_json", "val_images"): (CUSTOM_VAL, CUSTOM_VAL_IMAGES, "DATASETS.TEST"),
}
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
    data, knn = cfg.DATASETS, cfg.TEST.KNN
    for node, key in ((data, "TRAIN"), (data, "TEST"), (knn, "TRAIN"), (knn, "VAL")):
        node[key] = tuple(n for n in node[key] if n not in CUSTOM_SETS or n in DatasetCatalog)
    _check_flags(cfg, flags, keys)
    if flags["image_folder"] or flags["train_folder"] or flags["train_json"]:
        # The test sets of a recipe do not belong to custom training images.
        data.TEST = data.TEST if "DATASETS.TEST" in keys else ()
    for flag, (name, key, labelled) in _FOLDERS.items():
        if given := flags[flag]:
            folders = [given] if isinstance(given, str) else given
            _register(name, {"image_folders": folders, "labelled": labelled})
            cfg.merge_from_list([key, (name,)])
    _use_annotation_files(cfg, flags)
    if flags["train_folder"] and len(names := list_classes([LABELLED_TRAIN])) < 2:
        raise UserError(f"'{flags['train_folder']}' has images of one class, '{names[0]}'")
    if flags["knn"]:
        knn.TRAIN, knn.VAL = (LABELLED_TRAIN,), (LABELLED_VAL,)


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


def find_sources(cfg: CfgNode) -> dict[str, Source]:
    """Returns the sources of the sets that flags named, by the set's name.

    Args:
        cfg: ``DATASETS.TRAIN``, ``DATASETS.TEST`` and ``TEST.KNN`` are read.
    """
    knn = cfg.TEST.KNN
    used = (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST, *knn.TRAIN, *knn.VAL)
    return {name: MetadataCatalog.get(name).source for name in used if name in CUSTOM_SETS}


def register_source(name: str, source: Source) -> None:
    """Registers a set under a name that is free to choose, unless it is registered already.

    Raises:
        UserError: a file or folder is missing or broken.
    """
    if name not in DatasetCatalog:
        _register(name, source)


class SpreadEntries(list[dict[str, Any]]):
    """Mapped images, and in ``unreadable`` the names of the files that could not be read."""

    def __init__(self) -> None:
        super().__init__()
        self.unreadable: list[str] = []


def read_spread(
    records: Sequence[Mapping[str, Any]], mapper: Callable[[dict[str, Any]], Any], number: int
) -> SpreadEntries:
    """Returns mapped images, spread evenly over the records; all if there are fewer.

    Args:
        records: of a data set.
        mapper: from a copy of a record to what the model takes.
        number: of images.

    An image that cannot be read, for which the mapper raises a ``UserError`` or returns something
    else than a dict, is replaced by the next that can.
    """
    number = min(number, len(records))
    entries = SpreadEntries()
    end = 0
    for index in range(number):
        start = max(end, index * len(records) // number)
        for end in range(start + 1, min(start + _MAX_TRIED, len(records)) + 1):
            try:
                entry = mapper(dict(records[end - 1]))
            except UserError:
                entry = None
            if isinstance(entry, dict):
                entries.append(entry)
                break
            entries.unreadable.append(str(records[end - 1]["file_name"]))
    return entries


def load_fixed_images(cfg: CfgNode, number: int) -> list[dict[str, Any]]:
    """Returns images of the first test set, or of the first training set, mapped as in inference.

    Args:
        cfg: names the sets and the mapper.
        number: the most images to return; the same ones each time.

    Raises:
        UserError: no image can be read.
    """
    name = (*cfg.DATASETS.TEST, *cfg.DATASETS.TRAIN)[0]
    images = read_spread(DatasetCatalog.get(name), build_mapper(cfg, is_train=False), number)
    if not images:
        raise UserError(f"no image of the data set '{name}' can be read")
    return list(images)


def _register(name: str, source: Source) -> CocoFile | None:
    """Checks and registers a set; returns what is in a file with boxes."""
    metadata, summary = MetadataCatalog.get(name), None
    if "image_folders" in source:
        for folder in source["image_folders"]:
            check_image_folder(folder)
        register_image_folders(name, source["image_folders"], labelled=source["labelled"])
    else:
        files = source["json_file"], source["image_root"]
        if source["labelled"]:
            summary = check_coco_json(*files)
            register_coco_json(name, *files)
            ids = {category: index for index, category in enumerate(summary.category_ids)}
            metadata.thing_classes = list(summary.class_names)
            metadata.thing_dataset_id_to_contiguous_id = ids
        else:
            load_coco_images(*files)  # raises any error now
            register_coco_images(name, *files)
    paths = {key: _make_absolute(source[key]) for key in source.keys() - {"labelled"}}
    metadata.source = {**paths, "labelled": source["labelled"]}
    return summary


def _make_absolute(paths: Any) -> Any:
    return [*map(os.path.abspath, paths)] if isinstance(paths, list) else os.path.abspath(paths)


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
    is_unlabelled = cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_IMAGES
    if not is_unlabelled and flags["train_json"] and not flags["val_json"]:
        raise UserError("training on a custom dataset needs --val-json and --val-images as well")
    if not is_unlabelled and flags["val_json"] and not (flags["train_json"] or flags["eval_only"]):
        raise UserError("--val-json alone evaluates: add --eval-only, or --train-json to train")
    summaries: list[CocoFile] = []
    for (json_file, images), (with_boxes, alone, key) in _FILES.items():
        if flags[json_file]:
            name = alone if is_unlabelled else with_boxes
            source = {"json_file": flags[json_file], "image_root": flags[images]}
            if summary := _register(name, {**source, "labelled": not is_unlabelled}):
                summaries.append(summary)
            cfg.merge_from_list([key, (name,)])
    if len(summaries) == 2:
        check_same_classes(*summaries)


def _spell(*flags: str) -> str:
    return " and ".join(f"--{flag.replace('_', '-')}" for flag in flags)
