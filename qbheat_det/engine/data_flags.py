# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The data sets that the flags of ``tools/arguments.py`` name."""

import argparse
import logging
import os

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.core.errors import UserError
from qbheat_det.data import (
    MAPPERS_OF_IMAGES,
    CocoFile,
    check_coco_json,
    check_image_folder,
    check_same_classes,
    load_coco_images,
    register_coco_images,
    register_coco_json,
    register_image_folders,
)

from .class_folders import LABELLED_TRAIN, LABELLED_VAL, use_class_folders

logger = logging.getLogger(__name__)
CUSTOM_TRAIN, CUSTOM_VAL = "custom_train", "custom_val"
CUSTOM_IMAGES, CUSTOM_VAL_IMAGES = "custom_images", "custom_val_images"
CUSTOM_KNN_TRAIN, CUSTOM_KNN_VAL = "custom_knn_train", "custom_knn_val"
CUSTOM_SETS = (
    *(CUSTOM_TRAIN, CUSTOM_VAL),
    *(CUSTOM_IMAGES, CUSTOM_VAL_IMAGES),
    *(CUSTOM_KNN_TRAIN, CUSTOM_KNN_VAL),
    *(LABELLED_TRAIN, LABELLED_VAL),
)


def use_data_flags(cfg: CfgNode, args: argparse.Namespace) -> None:
    """Registers the data that flags name, and names them in the config, in place.

    Args:
        cfg: not frozen.
        args: the four data flags and, where the tool has them, those for images.

    Raises:
        UserError: flags contradict each other or the config, or data are not sound.
    """
    _forget_flags_of_another_run(cfg)
    if use_class_folders(cfg, args):
        pass
    elif getattr(args, "image_folder", None):
        _use_image_folders(cfg, args)
    else:
        _use_annotation_files(cfg, args)
    if getattr(args, "val_image_folder", None):
        _use_val_image_folders(cfg, args)
    _use_knn_folders(cfg, args)
    _warn_of_shared_folders(args)


def _forget_flags_of_another_run(cfg: CfgNode) -> None:
    """A config that a run wrote names sets that its flags made, which are not here."""
    for node, key in ((cfg.DATASETS, "TRAIN"), (cfg.DATASETS, "TEST"),
                      (cfg.TEST.KNN, "TRAIN"), (cfg.TEST.KNN, "VAL")):  # fmt: skip
        node[key] = tuple(
            name for name in node[key] if name not in CUSTOM_SETS or name in DatasetCatalog
        )


def _use_image_folders(cfg: CfgNode, args: argparse.Namespace) -> None:
    others = ("train_json", "train_images", "val_json", "val_images", "eval_only")
    if clash := [f"--{flag.replace('_', '-')}" for flag in others if getattr(args, flag)]:
        raise UserError(f"--image-folder trains on images alone: leave out {' and '.join(clash)}")
    if "DATASETS.TRAIN" in args.opts[::2]:
        raise UserError("DATASETS.TRAIN and --image-folder both name data: choose one")
    for folder in args.image_folder:
        check_image_folder(folder)
    register_image_folders(CUSTOM_IMAGES, args.image_folder)
    cfg.DATASETS.TRAIN = (CUSTOM_IMAGES,)
    _forget_test_sets(cfg, args)


def _use_annotation_files(cfg: CfgNode, args: argparse.Namespace) -> None:
    pairs = {
        "train": (args.train_json, args.train_images),
        "val": (args.val_json, args.val_images),
    }
    for split, (json_file, images) in pairs.items():
        if bool(json_file) != bool(images):
            raise UserError(f"--{split}-json and --{split}-images go together")
    if not any(json_file for json_file, _ in pairs.values()):
        return
    if cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_IMAGES:
        if args.train_json:
            cfg.DATASETS.TRAIN = (_use_coco_images(CUSTOM_IMAGES, *pairs["train"]),)
            _forget_test_sets(cfg, args)
        if args.val_json:
            cfg.DATASETS.TEST = (_use_coco_images(CUSTOM_VAL_IMAGES, *pairs["val"]),)
        return
    if not args.val_json:
        raise UserError("training on your own data needs --val-json and --val-images as well")
    if not args.train_json and not args.eval_only:
        raise UserError("--val-json alone evaluates: add --eval-only, or --train-json to train")
    val = register_coco_file(CUSTOM_VAL, args.val_json, args.val_images)
    cfg.DATASETS.TEST = (CUSTOM_VAL,)
    if args.train_json:
        check_same_classes(
            register_coco_file(CUSTOM_TRAIN, args.train_json, args.train_images), val
        )
        cfg.DATASETS.TRAIN = (CUSTOM_TRAIN,)


def _use_val_image_folders(cfg: CfgNode, args: argparse.Namespace) -> None:
    if args.val_json or "DATASETS.TEST" in args.opts[::2]:
        other = "--val-json" if args.val_json else "DATASETS.TEST"
        raise UserError(f"{other} and --val-image-folder both name data: choose one")
    for folder in args.val_image_folder:
        check_image_folder(folder)
    register_image_folders(CUSTOM_VAL_IMAGES, args.val_image_folder)
    cfg.DATASETS.TEST = (CUSTOM_VAL_IMAGES,)


def _use_knn_folders(cfg: CfgNode, args: argparse.Namespace) -> None:
    flags = {CUSTOM_KNN_TRAIN: "knn_train_folder", CUSTOM_KNN_VAL: "knn_val_folder"}
    given = {name: getattr(args, flag, None) for name, flag in flags.items()}
    folders: dict[str, str] = {name: folder for name, folder in given.items() if folder}
    if not folders:
        return
    if len(folders) < len(flags):
        raise UserError("--knn-train-folder and --knn-val-folder go together")
    if clash := [key for key in ("TEST.KNN.TRAIN", "TEST.KNN.VAL") if key in args.opts[::2]]:
        raise UserError(f"{' and '.join(clash)} and --knn-… both name data: choose one")
    for name, folder in folders.items():
        check_image_folder(folder)
        register_image_folders(name, [folder], labelled=True)
    cfg.TEST.KNN.TRAIN, cfg.TEST.KNN.VAL = (CUSTOM_KNN_TRAIN,), (CUSTOM_KNN_VAL,)


def _warn_of_shared_folders(args: argparse.Namespace) -> None:
    for learn, judge, what in (
        ("image_folder", "val_image_folder", "the held-out loss"),
        ("train_folder", "val_folder", "the accuracy"),
        ("knn_train_folder", "knn_val_folder", "the nearest-neighbour score"),
    ):
        learned, judged = (
            [os.path.realpath(folder) for folder in _listed(getattr(args, name, None))]
            for name in (learn, judge)
        )
        if any(os.path.commonpath([one, other]) in (one, other)
               for one in learned for other in judged):  # fmt: skip
            logger.warning(
                "--%s and --%s share images: %s will be better than it is on others",
                learn.replace("_", "-"), judge.replace("_", "-"), what,
            )  # fmt: skip


def _listed(folders: str | list[str] | None) -> list[str]:
    return [folders] if isinstance(folders, str) else list(folders or ())


def _forget_test_sets(cfg: CfgNode, args: argparse.Namespace) -> None:
    """What a recipe evaluates on does not belong to training images of one's own."""
    if "DATASETS.TEST" not in args.opts[::2]:
        cfg.DATASETS.TEST = ()


def _use_coco_images(name: str, json_file: str, images: str) -> str:
    load_coco_images(json_file, images)  # raises what is wrong now
    register_coco_images(name, json_file, images)
    return name


def register_coco_file(name: str, json_file: str, images: str) -> CocoFile:
    """Registers a COCO-format file with its classes, after a look at all of it.

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
