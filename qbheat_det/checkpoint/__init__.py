# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reads weights without running code, matches them with a model, and writes checkpoints."""

from .checkpointer import ExactCheckpointer, SafeCheckpointer
from .convert import TimmWeights
from .joining import JoinedFile, join_detectors
from .matching import bare_backbone, fit_weights
from .report import check_exact
from .run_config import (
    choose_device,
    holds_backbone_alone,
    holds_encoder,
    load_embedded_config,
    load_run_config,
)
from .weights_file import (
    BEST_WEIGHTS,
    LAST_WEIGHTS,
    WeightsInfo,
    check_weights_file,
    class_names_of,
    find_run_weights,
    find_weights,
    info_of,
    local_weights,
    read_weights,
    save_weights,
)

__all__ = [
    "BEST_WEIGHTS",
    "LAST_WEIGHTS",
    "ExactCheckpointer",
    "JoinedFile",
    "SafeCheckpointer",
    "TimmWeights",
    "WeightsInfo",
    "bare_backbone",
    "check_exact",
    "check_weights_file",
    "choose_device",
    "class_names_of",
    "find_run_weights",
    "find_weights",
    "fit_weights",
    "holds_backbone_alone",
    "holds_encoder",
    "info_of",
    "join_detectors",
    "load_embedded_config",
    "load_run_config",
    "local_weights",
    "read_weights",
    "save_weights",
]
