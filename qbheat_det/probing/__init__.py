# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Probes of a frozen backbone, on features that are worked out once."""

from .features import FrozenFeatures, cache_features
from .linear_probe import L2_GRID, LinearProbe, Standardisation, fit_linear_probe, fit_penalised
from .probes import (
    PROBES,
    ProbeSettings,
    check_probes,
    depth_of,
    run_probe,
    spread_widths,
    width_of,
)
from .splits import split_by_class
from .transformer_probe import (
    FittedTransformer,
    TransformerProbe,
    TransformerSettings,
    fit_transformer_probe,
)
from .whitening import Whitening

__all__ = [
    "L2_GRID",
    "PROBES",
    "FittedTransformer",
    "FrozenFeatures",
    "LinearProbe",
    "ProbeSettings",
    "Standardisation",
    "TransformerProbe",
    "TransformerSettings",
    "Whitening",
    "cache_features",
    "check_probes",
    "depth_of",
    "fit_linear_probe",
    "fit_penalised",
    "fit_transformer_probe",
    "run_probe",
    "split_by_class",
    "spread_widths",
    "width_of",
]
