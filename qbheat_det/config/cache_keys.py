# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Keys of views that are drawn once, and of features that a frozen encoder computes once of each.

docs/caching.md has what they are good for and what is exact.
"""

from detectron2.config import CfgNode


def add_cache_keys(cfg: CfgNode) -> None:
    """Adds ``INPUT.FIXED_VIEWS`` and ``MODEL.CACHE_FEATURES`` to a config, in place."""
    cfg.INPUT.FIXED_VIEWS = CfgNode()
    # Augmented views of each training image, drawn once; each visit shows one of them. 0: every
    # visit is augmented anew.
    cfg.INPUT.FIXED_VIEWS.COUNT = 0
    # Of the views alone, so that runs of another SEED see the same ones, and share a cache.
    cfg.INPUT.FIXED_VIEWS.SEED = 0

    cfg.MODEL.CACHE_FEATURES = CfgNode()
    # Encode every view once, before training, and train the head on what is on the disk. The
    # backbone must be frozen to its end.
    cfg.MODEL.CACHE_FEATURES.ENABLED = False
    cfg.MODEL.CACHE_FEATURES.DTYPE = "float16"  # "float16", "bfloat16" or "float32"
    # Folder of all caches; empty: "feature_cache" in the cache directory of the package.
    cfg.MODEL.CACHE_FEATURES.FOLDER = ""
