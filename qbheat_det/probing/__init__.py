# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Decoder probing: kNN, linear and tran-k classifiers of a frozen backbone's features."""

from .batch_norm import read_whole_images, recalibrate_bn, training_records
from .features import FrozenFeatures, cache_features, split_by_class
from .probes import (
    PROBES,
    ProbeSettings,
    check_probes,
    depth_of,
    fit_linear_probe,
    run_probe,
    width_of,
)
from .run import BackboneProbe, find_feature, load_backbone
from .transformer import TransformerSettings, fit_transformer_probe

__all__ = [
    "PROBES",
    "BackboneProbe",
    "FrozenFeatures",
    "ProbeSettings",
    "TransformerSettings",
    "cache_features",
    "check_probes",
    "depth_of",
    "find_feature",
    "fit_linear_probe",
    "fit_transformer_probe",
    "load_backbone",
    "read_whole_images",
    "recalibrate_bn",
    "run_probe",
    "split_by_class",
    "training_records",
    "width_of",
]
