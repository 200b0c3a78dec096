# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The Python interface to trained models (docs/python.md).

The packages ``labelling`` and ``app`` use it too. For them, it also has functions that find images,
and that draw and write boxes. Names that need PyTorch are imported when they are first used, so
that an exported file runs without it.
"""

from typing import TYPE_CHECKING

from qbheat_det.core.lazy import import_name
from qbheat_det.inference.decoding import (
    DecodingLimits,
    DecodingProcesses,
    count_decoders,
    end_if_imported_by_child,
)
from qbheat_det.inference.drawing import get_class_color
from qbheat_det.inference.files import PREDICTION_LIMITS, predict_files
from qbheat_det.inference.images import Image, UnreadableImage, find_inputs
from qbheat_det.inference.results import (
    DetectedBox,
    Detections,
    Format,
    render_annotations,
    save_annotations,
)

from .detector import Detector
from .loading import join, load, load_detector, load_encoder, train

if TYPE_CHECKING:
    from qbheat_det.checkpoint import find_weights
    from qbheat_det.inference.embedding import embed_images
    from qbheat_det.probing import LinearProbe, fit_penalised

    from .encoder import Encoder

__all__ = [
    "PREDICTION_LIMITS",
    "DecodingLimits",
    "DecodingProcesses",
    "DetectedBox",
    "Detections",
    "Detector",
    "Encoder",
    "Format",
    "Image",
    "LinearProbe",
    "UnreadableImage",
    "count_decoders",
    "embed_images",
    "end_if_imported_by_child",
    "find_inputs",
    "find_weights",
    "fit_penalised",
    "get_class_color",
    "join",
    "load",
    "load_detector",
    "load_encoder",
    "predict_files",
    "render_annotations",
    "save_annotations",
    "train",
]

_MODULES = {
    "Encoder": "qbheat_det.api.encoder",
    "LinearProbe": "qbheat_det.probing",
    "embed_images": "qbheat_det.inference.embedding",
    "find_weights": "qbheat_det.checkpoint",
    "fit_penalised": "qbheat_det.probing",
}

if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> object:
        return import_name(__name__, name, _MODULES)
