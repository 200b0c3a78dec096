# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The names of the data sets that pre-training can use without registering anything."""

import functools
import os
from pathlib import Path

from detectron2.data import MetadataCatalog

from .coco_images import register_coco_images
from .image_folder import register_image_folders
from .toy import TOY_SETS, prepare_toy_set

_COCO_SETS = ("coco_2017_train", "coco_2017_val")


def register_pretraining_sets() -> None:
    """Registers these sets; nothing is listed or drawn before one is first loaded.

    ``imagenet_train``, ``imagenet_val``: the class folders in
        ``$DETECTRON2_DATASETS/imagenet/{train,val}``, with labels.
    ``coco_2017_train_images``, ``coco_2017_val_images``: the images of Detectron2's sets.
    ``qbheat_toy_train_images``, ``qbheat_toy_val_images``: the images of the toy set.
    """
    # As Detectron2 finds the data sets that it knows.
    root = Path(os.environ.get("DETECTRON2_DATASETS", "datasets")).expanduser()
    for split in ("train", "val"):
        folder = root / "imagenet" / split
        register_image_folders(f"imagenet_{split}", [folder], labelled=True)
    for name in _COCO_SETS:
        metadata = MetadataCatalog.get(name)
        register_coco_images(f"{name}_images", metadata.json_file, metadata.image_root)
    for name, spec in TOY_SETS.items():
        metadata = MetadataCatalog.get(name)
        register_coco_images(
            f"{name}_images",
            metadata.json_file,
            metadata.image_root,
            prepare=functools.partial(prepare_toy_set, spec, Path(metadata.json_file).parents[1]),
        )
