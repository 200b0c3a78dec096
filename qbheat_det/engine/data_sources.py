# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Registers the data sets given by flags, and holds out validation images."""

import json
import logging
import os
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.checkpoint import class_names_of
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically
from qbheat_det.data import (
    SPLIT_FILE,
    DataSource,
    Source,
    check_same_classes,
    forget_annotations,
    list_classes,
    load_classes,
    open_images,
    open_source,
    read_annotations,
    read_split,
    register_source,
    split_source,
    with_classes,
)

from .resume import name_last_checkpoint
from .run_flags import FIRST_STAGE_WEIGHTS, RunFlags, find_job

logger = logging.getLogger(__name__)

# Names of the training and validation set, by job.
_SETS = {
    "boxes": ("custom_train", "custom_val"),
    "images": ("custom_images", "custom_val_images"),
    "classes": ("custom_labelled_train", "custom_labelled_val"),
}
_UNLABELLED = "custom_unlabelled"
# Config keys that flags set.
_KEYS = {
    "data": "DATASETS.TRAIN",
    "images": "DATASETS.TRAIN",
    "val": "DATASETS.TEST",
    "val_images": "DATASETS.TEST",
    "unlabelled": "DATASETS.UNLABELLED",
}
CUSTOM_SETS = (*(name for pair in _SETS.values() for name in pair), _UNLABELLED)


def use_data_flags(cfg: CfgNode, flags: RunFlags) -> None:
    """Registers the data sets given by flags, and sets their names in the config, in place.

    Raises:
        UserError: flags contradict each other or the config, or the data are invalid.
    """
    # The config of an earlier run may name data sets that only its flags registered. Drop them.
    data, job = cfg.DATASETS, find_job(cfg)
    for key in ("TRAIN", "TEST", "UNLABELLED"):
        data[key] = tuple(n for n in data[key] if n not in CUSTOM_SETS or n in DatasetCatalog)
    _check_flags(flags, job)
    names = dict(zip(("train", "val"), _SETS[job], strict=True))
    forget_annotations()
    sources, split = _find_sources(cfg, flags, job)
    if "train" in sources:
        data.TRAIN = (names["train"],)
    if "val" in sources:
        data.TEST = (names["val"],)
    elif "train" in sources and "DATASETS.TEST" not in flags.overrides:
        data.TEST = ()  # a recipe's test sets do not fit custom training images
    try:
        _register_sources(cfg, flags, {names[role]: sources[role] for role in sources}, split)
    finally:
        forget_annotations()
    if split and not flags.eval_only:
        MetadataCatalog.get(names["val"]).split = split
    if job == "classes" and "train" in sources and len(only := list_classes(data.TRAIN)) < 2:
        raise UserError(f"'{flags.data}' has images of one class, '{only[0]}'")
    if flags.unlabelled:
        folders = list(map(os.path.abspath, flags.unlabelled))
        register_source(_UNLABELLED, {"image_folders": folders, "labelled": False})
        data.UNLABELLED = (_UNLABELLED,)


def _register_sources(
    cfg: CfgNode, flags: RunFlags, sources: dict[str, Source], split: dict[str, Any] | None
) -> None:
    """Registers sources by name, training set first, and checks that they have equal classes."""
    weights = cfg.MODEL.WEIGHTS if flags.eval_only and not flags.resume else ""
    classes = list(class_names_of(weights)) if weights else []
    if not (classes or split) and find_job(cfg) == "boxes" and len(sources) == 2:
        given, wanted = (read_annotations(source).class_names for source in sources.values())
        if set(given) <= set(wanted):  # no image of the other classes has been labelled so far
            classes = list(wanted)
    train = None
    for name, source in sources.items():
        if not split:
            source = with_classes(source, classes)
        found = register_source(name, source, split=split)
        if found and train:
            check_same_classes(train, found)
        if train := found:
            classes = list(found.class_names)


def write_split(cfg: CfgNode) -> None:
    """Writes ``OUTPUT_DIR/split.json`` if some of the training images are held out."""
    for name in cfg.DATASETS.TEST:
        if split := MetadataCatalog.get(name).get("split"):
            path = Path(cfg.OUTPUT_DIR) / SPLIT_FILE
            write_atomically(path, (json.dumps(split, indent=1) + "\n").encode())
            logger.info(f"{len(split['val']):,} images are held out for evaluation, see '{path}'")


def _find_sources(
    cfg: CfgNode, flags: RunFlags, job: str
) -> tuple[dict[str, Source], dict[str, Any] | None]:
    """Returns a dict of sources ("train", "val"), and the split if both are parts of one source."""
    sources, names_test = open_flags(flags, job), "DATASETS.TEST" in flags.overrides
    is_whole = set(sources) == {"train"}  # without a validation part
    if names_test:
        sources.pop("val", None)
    split = None
    if flags.eval_only:
        whole = sources.get("val") or sources.get("train")
        sources = {"val": whole} if whole else {}
        if is_whole:
            sources["val"], split = _find_held_out(cfg, flags, sources["val"])
    elif is_whole and job != "images" and cfg.DATASETS.VAL_FRACTION and not names_test:
        split = _split(cfg, flags, sources["train"])
        file = os.path.abspath(Path(cfg.OUTPUT_DIR) / SPLIT_FILE)
        sources = {
            part: {**sources["train"], "split": {"file": file, "part": part}}
            for part in ("train", "val")
        }
    if job == "images":
        sources = {role: {**source, "labelled": False} for role, source in sources.items()}
    return sources, split


def open_flags(flags: RunFlags, job: str) -> dict[str, Source]:
    """Returns the sources that flags name, by role.

    "train" is the training part of --data or --images. "val" is --val or --val-images (its
    validation part if it has one), or else the validation part of --data.

    Raises:
        UserError: a path has no data for ``job`` (see ``find_job``), or images are missing.
    """
    opened: list[DataSource | None] = []
    pairs = ((flags.data, list(flags.images)), (flags.val, list(flags.val_images)))
    for path, images in pairs:
        if path:
            root, likely = "".join(images), "".join(flags.images)
            source = open_source(path, root, likely_root=likely)
            opened.append(source)
            if job != "images" and (source.kind == "classes") != (job == "classes"):
                kinds = ("boxes", "class folders")
                found, wanted = kinds if job == "classes" else reversed(kinds)
                raise UserError(f"'{path}' has {found}, but {wanted} are needed here")
        elif images:
            if job != "images":
                flag, needed = ("--val-images", "--val") if opened else ("--images", "--data")
                raise UserError(f"{flag} needs {needed}, which has the {job}")
            opened.append(open_images(images))
        else:
            opened.append(None)
    train, val = opened
    by_role = {
        "train": train and train.train,
        "val": (val.val or val.train) if val else train and train.val,
    }
    return {role: source for role, source in by_role.items() if source}


def _split(cfg: CfgNode, flags: RunFlags, source: Source) -> dict[str, Any]:
    """Returns the split of a resumed run or of the run's first stage, or makes a new one."""
    folder, first = Path(cfg.OUTPUT_DIR), Path(cfg.OUTPUT_DIR) / FIRST_STAGE_WEIGHTS
    files = [folder / SPLIT_FILE] if flags.resume else []
    files += [first.with_name(SPLIT_FILE)] if cfg.MODEL.WEIGHTS == str(first) else []
    for file in filter(Path.is_file, files):
        return read_split(file)
    split = split_source(source, fraction=cfg.DATASETS.VAL_FRACTION, seed=max(cfg.SEED, 0))
    return {"data": os.path.abspath(str(flags.data)), **split}


def _find_held_out(
    cfg: CfgNode, flags: RunFlags, whole: Source
) -> tuple[Source, dict[str, Any] | None]:
    """Returns the source to evaluate on, and its split.

    The source is the part that was held out in the training of the weights. If nothing was held
    out, it is the whole source, and the split is None.
    """
    folder = Path(cfg.OUTPUT_DIR if flags.resume else cfg.MODEL.WEIGHTS).absolute()
    file = (folder if flags.resume else folder.parent) / SPLIT_FILE
    if not file.is_file():
        return whole, None
    split = read_split(file)
    if split.get("data") != os.path.abspath(str(flags.data)):
        return whole, None
    logger.info(f"Evaluating on the {len(split['val']):,} images that '{file}' holds out")
    return {**whole, "split": {"file": str(file), "part": "val"}}, split


def _check_flags(flags: RunFlags, job: str) -> None:
    """Checks that the flags do not contradict each other or ``opts``, without reading data."""
    keys, given = flags.overrides, vars(flags)
    for flag, key in _KEYS.items():
        if given[flag] and key in keys:
            raise UserError(f"{key} and {_spell(flag)} both name data: choose one")
    for images, source in (("images", "data"), ("val_images", "val")):
        if given[source] and (count := len(given[images])) > 1:
            raise UserError(f"{_spell(images)} of {_spell(source)} is one folder, not {count}")
    if flags.unlabelled and (flags.eval_only or job != "boxes"):
        raise UserError("--unlabelled is for the training of detectors: leave it out")
    trains = flags.data or flags.images or "DATASETS.TRAIN" in keys or flags.eval_only
    if (flags.val or flags.val_images) and not trains and job != "images":
        raise UserError("--val alone evaluates: add --eval-only, or --data to train")


def use_classes_of_folders(cfg: CfgNode, *, eval_only: bool, resume: bool) -> None:
    """Sets the number and names of classes in place, and checks that all test sets have them.

    Training uses the classes of the training images. Evaluation uses the classes that the weights
    record, or else those of the config, or else those of the test images.

    Raises:
        UserError: a set has no labels, or has different classes.
    """
    names: list[str] = []
    if eval_only:
        last = name_last_checkpoint(Path(cfg.OUTPUT_DIR)) if resume else ""
        weights = str(Path(cfg.OUTPUT_DIR) / last) if last else cfg.MODEL.WEIGHTS
        names = list((weights and class_names_of(weights)) or cfg.MODEL.CLASS_NAMES)
    names = names or list_classes(cfg.DATASETS.TEST if eval_only else cfg.DATASETS.TRAIN)
    for dataset_name in cfg.DATASETS.TEST:
        load_classes([dataset_name], names)
    cfg.MODEL.CLASS_NAMES = names
    cfg.MODEL.CATEGORY_IDS = list(range(len(names)))
    cfg.MODEL.CLASSIFIER.NUM_CLASSES = len(names)


def _spell(flag: str) -> str:
    return f"--{flag.replace('_', '-')}"
