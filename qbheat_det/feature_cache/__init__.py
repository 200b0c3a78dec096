# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Computes a frozen network's features once, for fixed views of each image, and reads them back.

- ``use_cached_features`` trains a head on features of its own frozen encoder.
- ``TeacherFeatures`` pre-trains an encoder on features of a frozen teacher.
- ``check_cacheable`` refuses configs whose features change during training.
"""

from .encoder import CachedBackbone
from .frozen import CachedFeatures, check_cacheable, use_cached_features
from .teacher import TeacherFeatures

__all__ = [
    "CachedBackbone", "CachedFeatures", "TeacherFeatures", "check_cacheable",
    "use_cached_features",
]  # fmt: skip
