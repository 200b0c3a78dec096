# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Data: the built-in toy set, annotation files and folders of one's own, and dataset mappers.

Importing this package registers ``qbheat_toy_train`` and ``qbheat_toy_val``, and the sets of
pre-training that ``register_pretraining_sets`` lists.
"""

from .cache_space import check_space, format_bytes, measure_caches
from .cached_views import CachedViews
from .classification_mapper import ClassificationMapper
from .coco_images import load_coco_images, register_coco_images
from .coco_json import CocoSummary, check_coco_json, check_same_classes, register_coco_json
from .decoded_images import DecodedImages, decode_if_small
from .detr_mapper import DetrDatasetMapper, build_detr_crop
from .faults import Fault, raise_first
from .feature_chunk import Stored, View, make_view
from .feature_key import describe_arithmetic, describe_cache, name_cache
from .feature_store import VIEWS_PER_CHUNK, FeatureStore, open_feature_store
from .fixed_views import VIEW_ROW, FixedViews, number_records
from .image_batches import ImageBatches, build_image_batches, with_places
from .image_files import check_image_files, check_some_readable
from .image_folder import (
    IMAGE_SUFFIXES,
    check_image_folder,
    list_images,
    load_image_folders,
    register_image_folders,
)
from .labelled_images import (
    build_class_batches,
    list_classes,
    load_classes,
    load_labelled_sets,
    unite_labels,
)
from .mappers import DATASET_MAPPERS, MAPPERS_OF_CLASSES, MAPPERS_OF_IMAGES, build_mapper
from .pretraining_mapper import PretrainingMapper
from .pretraining_sets import register_pretraining_sets
from .record_checks import check_records
from .seeding import STEP, preserved_randomness, seed_place
from .stream import TrainStream, build_train_stream, cut, fingerprint_records
from .toy import TOY_SETS, ToySpec, get_cache_dir, prepare_toy_set, register_toy_set
from .two_view_mapper import TwoViewMapper

__all__ = [
    "DATASET_MAPPERS",
    "IMAGE_SUFFIXES",
    "MAPPERS_OF_CLASSES",
    "MAPPERS_OF_IMAGES",
    "STEP",
    "TOY_SETS",
    "VIEWS_PER_CHUNK",
    "VIEW_ROW",
    "CachedViews",
    "ClassificationMapper",
    "CocoSummary",
    "DecodedImages",
    "DetrDatasetMapper",
    "Fault",
    "FeatureStore",
    "FixedViews",
    "ImageBatches",
    "PretrainingMapper",
    "Stored",
    "ToySpec",
    "TrainStream",
    "TwoViewMapper",
    "View",
    "build_class_batches",
    "build_detr_crop",
    "build_image_batches",
    "build_mapper",
    "build_train_stream",
    "check_coco_json",
    "check_image_files",
    "check_image_folder",
    "check_records",
    "check_same_classes",
    "check_some_readable",
    "check_space",
    "cut",
    "decode_if_small",
    "describe_arithmetic",
    "describe_cache",
    "fingerprint_records",
    "format_bytes",
    "get_cache_dir",
    "list_classes",
    "list_images",
    "load_classes",
    "load_coco_images",
    "load_image_folders",
    "load_labelled_sets",
    "make_view",
    "measure_caches",
    "name_cache",
    "number_records",
    "open_feature_store",
    "prepare_toy_set",
    "preserved_randomness",
    "raise_first",
    "register_coco_images",
    "register_coco_json",
    "register_image_folders",
    "register_pretraining_sets",
    "register_toy_set",
    "seed_place",
    "unite_labels",
    "with_places",
]

for _name, _spec in TOY_SETS.items():
    register_toy_set(_name, _spec)
register_pretraining_sets()
