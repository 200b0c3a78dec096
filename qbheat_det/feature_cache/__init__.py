# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Features of frozen networks, computed once for fixed views of each image and read from the disk.

- ``use_cached_features`` trains a head on the outputs of its frozen encoder;
- ``TeacherFeatures`` pre-trains an encoder on the features of a frozen teacher;
- ``check_cacheable`` refuses a config whose features change while it trains.
"""

from .backbone import CachedBackbone
from .frozen import CachedFeatures, check_cacheable, check_frozen, use_cached_features
from .teacher import TeacherFeatures

__all__ = [
    "CachedBackbone", "CachedFeatures", "TeacherFeatures", "check_cacheable", "check_frozen",
    "use_cached_features",
]  # fmt: skip
