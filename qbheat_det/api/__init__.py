# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The Python interface to trained models (docs/python.md).

The packages ``labelling`` and ``app`` use it too. For them, it also has functions that find images,
and that draw and write boxes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbheat_det.checkpoint import find_weights
from qbheat_det.core.errors import UserError
from qbheat_det.core.other_names import names_keywords
from qbheat_det.inference.decoding import DecodingLimits, DecodingProcesses, count_decoders
from qbheat_det.inference.drawing import get_class_color
from qbheat_det.inference.embedding import embed_images
from qbheat_det.inference.exported import ExportedPredictor
from qbheat_det.inference.files import PREDICTION_LIMITS, open_weights, predict_files
from qbheat_det.inference.images import Image, UnreadableImage, find_inputs
from qbheat_det.inference.predict import build_detector, is_encoder, is_timm, open_encoder
from qbheat_det.inference.results import (
    DetectedBox,
    Detections,
    Format,
    render_annotations,
    save_annotations,
)
from qbheat_det.probing import LinearProbe, fit_penalised

from .detector import Detector
from .encoder import Encoder

if TYPE_CHECKING:
    from qbheat_det.engine.run_flags import Paths

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
    "find_inputs",
    "find_weights",
    "fit_penalised",
    "get_class_color",
    "load",
    "load_detector",
    "load_encoder",
    "predict_files",
    "render_annotations",
    "save_annotations",
    "train",
]


def load(
    weights: str | Path, *, device: str | None = None, fast: bool = False
) -> Detector | Encoder:
    """Opens trained weights.

    Args:
        weights: one of

            - a name in the model zoo, with or without the prefix "qbheat://",
            - a weights file (.safetensors, .pth) with its config inside or in the same folder,
            - a file of Detectron2's model zoo (.pkl), or its address "detectron2://NAME",
            - the folder of a run. Its best weights are used, or the final ones if there are none,
            - an exported file (.onnx),
            - "timm://NAME" for a timm encoder, or "hf://USER/NAME" for Hugging Face.
        device: "cpu" or "cuda"; by default "cuda" if a GPU is available.
        fast: whether to return a detector in its fastest equivalent form (``Detector.deploy``).

    Returns:
        A ``Detector`` for the weights of a detector. An ``Encoder`` for those of a backbone, a
        pre-training model or a classifier.

    Raises:
        UserError: the file, name or device does not exist, or the file does not fit its config.
    """
    name = find_weights(str(weights))
    if is_timm(name):
        return Encoder(*open_encoder(name, device))
    exported, cfg = open_weights(name, device=device, fast=fast)
    if exported:
        if exported.info.task == "features":
            return Encoder(exported, cfg)
        return Detector(ExportedPredictor(exported), cfg)
    if is_encoder(name, cfg):
        return Encoder(*open_encoder(name, device))
    return Detector(build_detector(cfg), cfg)


@names_keywords
def train(
    data: "Paths",
    *,
    minutes: float | None = None,
    epochs: float | None = None,
    output: str | Path | None = None,
    weights: str | Path = "",
    overrides: Mapping[str, Any] | None = None,
    **flags: Any,
) -> Detector | Encoder:
    """Trains a detector on a data set with the default recipe, like ``qbheat train``, and opens it.

    Args:
        data: data set with boxes, in any format of ``--data``, or several (``RunFlags``); or class
            folders, for a classifier.
        minutes: duration for which epochs and image size are chosen.
        epochs: number of passes over the images; by default that of the recipe.
        output: folder of the run; by default a new folder in ``output/``.
        weights: initial weights, as in ``load``; by default those of the recipe.
        overrides: config keys and values, such as ``{"SOLVER.BASE_LR": 0.005}``.
        flags: fields of ``RunFlags``, such as ``images``, ``val``, ``batch`` and ``config_file``.

    Returns:
        The detector with the best weights of the run; an encoder for a classifier.

    Raises:
        UserError: the data, a flag or an override is invalid, or the folder has a run.
    """
    # Prediction needs no engine.
    from .training import choose_folder, make_flags, plan_run, train_run

    folder = choose_folder(output)
    run_flags = make_flags(
        data,
        folder,
        overrides or {},
        weights=str(weights),
        epochs=epochs,
        minutes=minutes,
        **flags,
    )
    train_run(plan_run(run_flags))
    return load(folder, device=run_flags.device or None)


def load_detector(
    weights: str | Path, *, device: str | None = None, fast: bool = False
) -> Detector:
    """Opens the weights of a detector. ``load`` describes the arguments.

    Raises:
        UserError: the weights cannot be opened, or are those of an encoder or a classifier.
    """
    model = load(weights, device=device, fast=fast)
    if not isinstance(model, Detector):
        raise UserError(f"'{weights}' is an encoder or a classifier, not a detector")
    return model


def load_encoder(weights: str | Path, *, device: str | None = None) -> Encoder:
    """Opens the weights of an encoder. ``load`` describes the arguments.

    Raises:
        UserError: the weights cannot be opened, or are those of a detector or an exported file.
    """
    return Encoder(*open_encoder(find_weights(weights), device))
