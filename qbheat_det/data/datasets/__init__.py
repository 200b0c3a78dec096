# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Annotation formats, image folders, and the built-in data sets."""

import os
from pathlib import Path

from detectron2.data import MetadataCatalog

from .image_folder import register_image_folders
from .registration import register_coco_images, register_coco_json

CELLS = Path(__file__).parent / "cells"


def register_builtin_sets() -> None:
    """Registers the data sets below. Their files are read when they are first loaded.

    ``cells_sample_train``, ``cells_sample_val``: 48 and 40 microscope images with boxes of three
        kinds of blood cells, which are included in the package.
    ``coco_2017_train_images``, ``coco_2017_val_images``: images of COCO 2017 without annotations,
        and likewise ``cells_sample_train_images`` and ``cells_sample_val_images``.
    ``imagenet_train``, ``imagenet_val``: images with class labels in
        ``$DETECTRON2_DATASETS/imagenet/{train,val}``.
    """
    # Detectron2's root folder of data sets.
    root = Path(os.environ.get("DETECTRON2_DATASETS", "datasets")).expanduser()
    for split in ("train", "val"):
        register_coco_json(f"cells_sample_{split}", CELLS / f"{split}.json", CELLS)
        for name in (f"cells_sample_{split}", f"coco_2017_{split}"):
            files = MetadataCatalog.get(name)
            register_coco_images(f"{name}_images", files.json_file, files.image_root)
        folder = root / "imagenet" / split
        register_image_folders(f"imagenet_{split}", [folder], labelled=True)
