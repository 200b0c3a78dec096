# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Predicting on files with an exported model, in the place of one that was built from weights."""

from collections.abc import Sequence
from pathlib import Path

from detectron2.config import CfgNode
from detectron2.structures import Instances

from qbheat_det.checkpoint import load_embedded_config
from qbheat_det.core.errors import UserError
from qbheat_det.engine.classify import TOP_CLASSES, ClassifiedFiles, name_likeliest
from qbheat_det.engine.media import Image, MediaFile, UnreadableMedia, read_bgr

from .exported_model import EXPORTED_SUFFIXES, ExportedModel
from .split_model import ENCODER, HEAD_PREFIX, SplitModel


def is_exported(weights: str) -> bool:
    """Whether a path is called as exported files are, rather than as weights."""
    return weights.lower().endswith(EXPORTED_SUFFIXES)


def open_exported(path: str, *, device: str | None = None) -> ExportedModel:
    """Opens an exported file; a head of a split export together with the encoder beside it.

    Raises:
        UserError: see ``ExportedModel.open`` and ``SplitModel.open``.
    """
    file = Path(path)
    if file.name.startswith(HEAD_PREFIX) and (file.parent / ENCODER).is_file():
        parts = SplitModel.open(file.parent, device=device)
        name = file.stem[len(HEAD_PREFIX) :]
        if name in parts.infos:
            return parts.head(name)
    return ExportedModel.open(file, device=device)


class ExportedPredictor:
    """Stands where Detectron2's ``DefaultPredictor`` does: from a BGR image to its instances."""

    def __init__(self, model: ExportedModel) -> None:
        """
        Args:
            model: of a detector.

        Raises:
            UserError: it finds no boxes.
        """
        if model.info.task != "detection":
            raise UserError(
                f"'{model.path}' is an exported {_KINDS[model.info.task]}, which finds no boxes"
            )
        self._model = model

    def __call__(self, image: Image) -> dict[str, Instances]:
        """
        Args:
            image: (H, W, 3), uint8, BGR, whatever the file takes.

        Returns:
            {"instances"}, boxes in pixels of the image.
        """
        (found,) = self._model(_as_batch(image, self._model))
        return {"instances": found}


def config_of(model: ExportedModel) -> CfgNode:
    """Returns the config that the model was built from, with the classes that the file names.

    Raises:
        UserError: the config inside is not sound.
    """
    cfg = load_embedded_config(model.info.config, f"the config inside '{model.path}'")
    cfg.MODEL.CLASS_NAMES = list(model.info.class_names)
    cfg.MODEL.CATEGORY_IDS = list(model.info.category_ids)
    return cfg


def classify_exported(
    model: ExportedModel, media: Sequence[MediaFile], *, top: int = TOP_CLASSES
) -> ClassifiedFiles:
    """As ``classify_files``, with an exported classifier; videos are skipped.

    Raises:
        UserError: the model is no classifier.
    """
    if model.info.task != "classification":
        raise UserError(
            f"'{model.path}' is an exported {_KINDS[model.info.task]}, which gives no classes "
            "of whole images"
        )
    found = ClassifiedFiles()
    for file in media:
        if file.is_video:
            found.skipped.append((str(file.path), "a classifier takes images, and no videos"))
            continue
        try:
            image = read_bgr(file.path)
        except UnreadableMedia as error:
            found.skipped.append((str(file.path), str(error)))
            continue
        (scores,) = model(_as_batch(image, model))
        likeliest = name_likeliest(scores, model.info.class_names, top)
        found.results.append({"file_name": file.name, "classes": likeliest})
    return found


_KINDS = {"detection": "detector", "classification": "classifier", "features": "backbone"}


def _as_batch(image: Image, model: ExportedModel) -> Image:
    pixels = image[:, :, ::-1] if model.info.pixel_format == "RGB" else image
    return pixels[None].copy()  # what Pillow gave may be read-only, which PyTorch warns of
