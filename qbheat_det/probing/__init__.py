# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Decoder probing: kNN, linear and tran-k classifiers of a frozen backbone's features."""

from .features import FrozenFeatures, cache_features
from .probes import ProbeSettings, check_probes, depth_of, run_probe, width_of
from .run import BackboneProbe, find_feature
from .transformer import TransformerSettings

__all__ = [
    "BackboneProbe", "FrozenFeatures", "ProbeSettings", "TransformerSettings", "cache_features",
    "check_probes", "depth_of", "find_feature", "run_probe", "width_of",
]  # fmt: skip
