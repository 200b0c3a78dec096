# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Annotation formats, image folders, and the built-in data sets."""

import functools
import os
from pathlib import Path

from detectron2.data import DatasetCatalog, MetadataCatalog

from .image_folder import register_image_folders
from .sources import register_coco_images, register_coco_json
from .toy import TOY_SETS, prepare_toy_set, register_toy_set

CELLS = Path(__file__).parent / "cells"


def register_builtin_sets() -> None:
    """Registers the data sets below. Their files are read or generated when they are first loaded.

    ``qbheat_toy_train``, ``qbheat_toy_val``: the toy set, with boxes and masks.
    ``qbheat_toy_train_images``, ``qbheat_toy_val_images``: images of the toy set, for pre-training.
    ``cells_sample_train``, ``cells_sample_val``: 48 and 40 microscope images with boxes of three
        kinds of blood cells, which are included in the package.
    ``coco_2017_train_images``, ``coco_2017_val_images``: images of COCO 2017 without annotations.
    ``imagenet_train``, ``imagenet_val``: images with class labels in
        ``$DETECTRON2_DATASETS/imagenet/{train,val}``.
    """
    for name, spec in TOY_SETS.items():
        if name not in DatasetCatalog:
            register_toy_set(name, spec)
        files = MetadataCatalog.get(name)
        prepare = functools.partial(prepare_toy_set, spec, Path(files.json_file).parents[1])
        register_coco_images(f"{name}_images", files.json_file, files.image_root, prepare=prepare)
    for split in ("train", "val"):
        name, file = f"cells_sample_{split}", CELLS / f"{split}.json"
        register_coco_json(name, file, CELLS)
    # Detectron2's root folder of data sets.
    root = Path(os.environ.get("DETECTRON2_DATASETS", "datasets")).expanduser()
    for split in ("train", "val"):
        files = MetadataCatalog.get(f"coco_2017_{split}")
        register_coco_images(f"coco_2017_{split}_images", files.json_file, files.image_root)
        folder = root / "imagenet" / split
        register_image_folders(f"imagenet_{split}", [folder], labelled=True)
