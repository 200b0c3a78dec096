# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Decoder probing: kNN, linear and tran-k classifiers of a frozen backbone's features."""

from .backbones import find_feature, load_backbone
from .batch_norm import read_whole_images, recalibrate_bn, training_records
from .features import FrozenFeatures, cache_features, split_by_class
from .linear import L2_GRID, LinearProbe, fit_linear_probe, fit_penalised
from .probes import (
    PROBES,
    ProbeSettings,
    check_probes,
    depth_of,
    run_probe,
    spread_widths,
    width_of,
)
from .results import ProbeResults, ProbeRow
from .run import BackboneProbe
from .transformer import TransformerProbe, TransformerSettings, Whitening, fit_transformer_probe

__all__ = [
    "L2_GRID",
    "PROBES",
    "BackboneProbe",
    "FrozenFeatures",
    "LinearProbe",
    "ProbeResults",
    "ProbeRow",
    "ProbeSettings",
    "TransformerProbe",
    "TransformerSettings",
    "Whitening",
    "cache_features",
    "check_probes",
    "depth_of",
    "find_feature",
    "fit_linear_probe",
    "fit_penalised",
    "fit_transformer_probe",
    "load_backbone",
    "read_whole_images",
    "recalibrate_bn",
    "run_probe",
    "split_by_class",
    "spread_widths",
    "training_records",
    "width_of",
]
