# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Data sets, mappers, image reading, and the iterator over training batches.

Importing this package registers the built-in data sets.
"""

from .checks import DataError, find_record_errors, join_messages, raise_first
from .datasets import register_builtin_sets
from .datasets.account import LEFT_OUT_FILE, Account, join_accounts
from .datasets.annotated import ANNOTATED_IDS, count_annotated, describe_annotated, find_annotated
from .datasets.annotations import Annotations, check_same_classes, note_spellings
from .datasets.fingerprints import fingerprint_images
from .datasets.image_folder import (
    check_image_folder,
    list_classes,
    load_class_folders,
    load_classes,
    load_image_folders,
    register_image_folders,
)
from .datasets.joining import (
    check_class_map,
    join_annotations,
    join_class_names,
    read_class_map,
)
from .datasets.opening import find_format, open_images, open_source
from .datasets.reading import read_annotations
from .datasets.registration import forget_source, register_coco_json, register_source
from .datasets.source import CLASSES, IMAGES, DataSource, Source
from .datasets.splits import (
    SEEN_FILE,
    SPLIT_FILE,
    SeenImages,
    read_split,
    split_source,
)
from .image_batches import ImageBatches
from .images import find_image_errors, match_image_errors
from .loader import TrainStream, build_train_stream, cut, fingerprint_records
from .mappers import (
    FixedViews,
    Mapper,
    PretrainingMapper,
    build_detr_crop,
    build_mapper,
    number_records,
)
from .tiles import TiledEvaluator, check_tile, cut_records, list_tiles, merge_images, merge_tiles
from .unlabelled import StrongViews

__all__ = [
    "ANNOTATED_IDS",
    "CLASSES",
    "IMAGES",
    "LEFT_OUT_FILE",
    "SEEN_FILE",
    "SPLIT_FILE",
    "Account",
    "Annotations",
    "DataError",
    "DataSource",
    "FixedViews",
    "ImageBatches",
    "Mapper",
    "PretrainingMapper",
    "SeenImages",
    "Source",
    "StrongViews",
    "TiledEvaluator",
    "TrainStream",
    "build_detr_crop",
    "build_mapper",
    "build_train_stream",
    "check_class_map",
    "check_image_folder",
    "check_same_classes",
    "check_tile",
    "count_annotated",
    "cut",
    "cut_records",
    "describe_annotated",
    "find_annotated",
    "find_format",
    "find_image_errors",
    "find_record_errors",
    "fingerprint_images",
    "fingerprint_records",
    "forget_source",
    "join_accounts",
    "join_annotations",
    "join_class_names",
    "join_messages",
    "list_classes",
    "list_tiles",
    "load_class_folders",
    "load_classes",
    "load_image_folders",
    "match_image_errors",
    "merge_images",
    "merge_tiles",
    "note_spellings",
    "number_records",
    "open_images",
    "open_source",
    "raise_first",
    "read_annotations",
    "read_class_map",
    "read_split",
    "register_coco_json",
    "register_image_folders",
    "register_source",
    "split_source",
]

register_builtin_sets()
