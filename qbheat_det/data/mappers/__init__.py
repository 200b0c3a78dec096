# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Dataset mappers: from a record of a data set to what a model takes."""

from .classification import ClassificationMapper
from .detr import DetrDatasetMapper, build_detr_crop
from .fixed_views import VIEW_ROW, FixedViews, Mapper, choose_view, number_records
from .pretraining import PretrainingMapper
from .registry import (
    DATASET_MAPPERS,
    MAPPERS_OF_CLASSES,
    MAPPERS_OF_IMAGES,
    NamingMapper,
    build_mapper,
)
from .two_views import TwoViewMapper

__all__ = [
    "DATASET_MAPPERS",
    "MAPPERS_OF_CLASSES",
    "MAPPERS_OF_IMAGES",
    "VIEW_ROW",
    "ClassificationMapper",
    "DetrDatasetMapper",
    "FixedViews",
    "Mapper",
    "NamingMapper",
    "PretrainingMapper",
    "TwoViewMapper",
    "build_detr_crop",
    "build_mapper",
    "choose_view",
    "number_records",
]
