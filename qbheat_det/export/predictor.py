# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Predicting on files with an exported model, in place of one built from weights."""

from collections.abc import Callable
from pathlib import Path

from detectron2.structures import Instances

from qbheat_det.core.errors import UserError
from qbheat_det.engine.media import Image, read_bgr
from qbheat_det.engine.predict import Scores

from .metadata import Task
from .runtime import EXPORTED_SUFFIXES, ExportedModel


def is_exported(weights: str) -> bool:
    """Returns whether a path has the suffix of an exported file."""
    return weights.lower().endswith(EXPORTED_SUFFIXES)


class ExportedPredictor:
    """Replaces Detectron2's ``DefaultPredictor``: from a BGR image to its instances."""

    def __init__(self, model: ExportedModel) -> None:
        """
        Raises:
            UserError: the model is not a detector.
        """
        _check_task(model, "detection")
        self._model = model

    def __call__(self, image: Image) -> dict[str, Instances]:
        """From (H, W, 3), uint8, always BGR, to {"instances"}, XYXY in pixels of the image."""
        (found,) = self._model(_as_batch(image, self._model))
        return {"instances": found}


def build_exported_scorer(model: ExportedModel) -> Callable[[Path], Scores]:
    """As ``build_scorer``, with an exported classifier.

    Raises:
        UserError: the model is not a classifier.
    """
    _check_task(model, "classification")
    return lambda path: model(_as_batch(read_bgr(path), model))[0]


def _check_task(model: ExportedModel, task: Task) -> None:
    if model.info.task != task:
        raise UserError(f"'{model.path}' was exported for {model.info.task}, not for {task}")


def _as_batch(image: Image, model: ExportedModel) -> Image:
    pixels = image[:, :, ::-1] if model.info.pixel_format == "RGB" else image
    return pixels[None].copy()  # Pillow's arrays may be read-only, and PyTorch warns of it
