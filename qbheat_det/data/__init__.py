# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Data sets, mappers, image reading, and the iterator over training batches.

Importing this package registers the built-in sets, see ``register_builtin_sets``.
"""

from .checks import DataError, find_record_errors, join_messages, raise_first
from .datasets import register_builtin_sets
from .datasets.coco_file import CocoFile, check_same_classes
from .datasets.formats import (
    DataSource,
    Source,
    describe_source,
    find_kind,
    open_images,
    open_source,
    origin_of,
    with_classes,
)
from .datasets.image_folder import (
    IMAGE_SUFFIXES,
    check_image_folder,
    list_classes,
    load_class_folders,
    load_classes,
    load_image_folders,
    register_image_folders,
)
from .datasets.sources import (
    SPLIT_FILE,
    forget_annotations,
    read_annotations,
    read_split,
    register_coco_json,
    register_source,
    split_source,
)
from .image_batches import ImageBatches, build_class_batches, build_image_batches
from .images import IMAGE_FORMATS, find_image_errors
from .loader import TrainStream, build_train_stream, cut, fingerprint_records, load_test_set
from .mappers import (
    MAPPERS_OF_CLASSES,
    MAPPERS_OF_IMAGES,
    FixedViews,
    Mapper,
    PretrainingMapper,
    build_detr_crop,
    build_mapper,
    number_records,
)
from .tiles import TiledEvaluator, check_tile, list_tiles, merge_images, merge_tiles
from .unlabelled import StrongViews

__all__ = [
    "IMAGE_FORMATS", "IMAGE_SUFFIXES", "MAPPERS_OF_CLASSES", "MAPPERS_OF_IMAGES", "SPLIT_FILE",
    "CocoFile", "DataError", "DataSource", "FixedViews", "ImageBatches", "Mapper",
    "PretrainingMapper", "Source", "StrongViews", "TiledEvaluator", "TrainStream",
    "build_class_batches", "build_detr_crop", "build_image_batches", "build_mapper",
    "build_train_stream", "check_image_folder", "check_same_classes", "check_tile", "cut",
    "describe_source", "find_image_errors", "find_kind", "find_record_errors",
    "fingerprint_records", "forget_annotations", "join_messages", "list_classes", "list_tiles",
    "load_class_folders", "load_classes", "load_image_folders", "load_test_set", "merge_images",
    "merge_tiles", "number_records", "open_images", "open_source", "origin_of", "raise_first",
    "read_annotations", "read_split", "register_coco_json", "register_image_folders",
    "register_source", "split_source", "with_classes",
]  # fmt: skip

register_builtin_sets()
