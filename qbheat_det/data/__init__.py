# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Data: the built-in toy set, annotation files of one's own, and dataset mappers.

Importing this package registers ``qbheat_toy_train`` and ``qbheat_toy_val``.
"""

from .coco_json import CocoSummary, check_coco_json, check_same_classes, register_coco_json
from .detr_mapper import DetrDatasetMapper, build_detr_crop
from .image_files import check_image_files
from .mappers import DATASET_MAPPERS, build_mapper
from .record_checks import check_records
from .seeding import STEP, preserved_randomness, seed_place
from .stream import TrainStream, build_train_stream, cut
from .toy import TOY_SETS, ToySpec, get_cache_dir, prepare_toy_set, register_toy_set

__all__ = [
    "DATASET_MAPPERS",
    "STEP",
    "TOY_SETS",
    "CocoSummary",
    "DetrDatasetMapper",
    "ToySpec",
    "TrainStream",
    "build_detr_crop",
    "build_mapper",
    "build_train_stream",
    "check_coco_json",
    "check_image_files",
    "check_records",
    "check_same_classes",
    "cut",
    "get_cache_dir",
    "prepare_toy_set",
    "preserved_randomness",
    "register_coco_json",
    "register_toy_set",
    "seed_place",
]

for _name, _spec in TOY_SETS.items():
    register_toy_set(_name, _spec)
