# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Decoder probing: kNN, linear and tran-k classifiers on the features of a frozen backbone."""

from .features import FrozenFeatures, cache_features, find_feature
from .probes import LinearProbe, fit_penalised
from .run import BackboneProbe, check_probes

__all__ = [
    "BackboneProbe",
    "FrozenFeatures",
    "LinearProbe",
    "cache_features",
    "check_probes",
    "find_feature",
    "fit_penalised",
]
