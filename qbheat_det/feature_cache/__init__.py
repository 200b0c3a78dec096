# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Computes the features of a frozen network once for fixed views of each image, and caches them.

- ``use_cached_features`` trains the head of a model on cached features of its frozen encoder.
- ``DistillationTargets`` pre-trains an encoder on cached features of a frozen teacher.
- ``check_cacheable`` rejects configs whose features would change during training.
"""

from .cached_backbone import CachedBackbone
from .distillation_targets import DistillationTargets
from .frozen import CachedFeatures, check_cacheable, use_cached_features

__all__ = [
    "CachedBackbone",
    "CachedFeatures",
    "DistillationTargets",
    "check_cacheable",
    "use_cached_features",
]
