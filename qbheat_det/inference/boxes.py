# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Finds boxes in images with any predictor.

The command line, the Python API, the app and the server predict boxes with ``find_boxes``.
"""

import itertools
from collections.abc import Iterable, Iterator

from qbheat_det.core.image_files import find_elongation

from .images import NamedImage, UnreadableImage
from .predictor import DetectorSettings, Predictor
from .results import Detections


def find_boxes(
    predictor: Predictor,
    images: Iterable[NamedImage],
    settings: DetectorSettings,
    *,
    threshold: float = 0.0,
    batch_size: int = 1,
    tile: int | None = None,
) -> Iterator[Detections]:
    """Predicts on images. Yields the detections of each image.

    Args:
        predictor: the detector.
        images: read in batches of ``batch_size``.
        settings: settings of the detector, with the names and ids of the classes.
        threshold: lowest score of a box.
        batch_size: number of images that the detector processes together.
        tile: side of overlapping tiles in pixels; 0 uses whole images only, and None uses
            ``INPUT.TILE``.

    Raises:
        UnreadableImage: an image is too elongated. Errors of ``images`` and of its images are
            raised after the detections of the images before them.
    """
    if tile is None:
        tile = settings.tile
    if tile:
        from .tiles import TiledPredictor  # imports PyTorch

        predictor = TiledPredictor(predictor, tile)
    images = iter(images)
    error: Exception | None = None
    while error is None:
        batch, error = _take(images, batch_size, settings)
        if not batch:
            break
        results = predictor.predict_batch([named_image.image for named_image in batch])
        for named_image, prediction in zip(batch, results, strict=True):
            if threshold:
                prediction = prediction[prediction.scores >= threshold]
            yield Detections(
                prediction=prediction,
                class_names=settings.class_names,
                category_ids=settings.category_ids,
                source=named_image.file or named_image.image,
                file_name=named_image.name,
                frame=named_image.frame,
            )
    if error is not None:
        raise error


def _take(
    images: Iterator[NamedImage], number: int, settings: DetectorSettings
) -> tuple[list[NamedImage], Exception | None]:
    """Takes ``number`` images, or those before an image that cannot be read, and its error."""
    batch: list[NamedImage] = []
    try:
        for image in itertools.islice(images, number):
            check_elongation(image, settings)
            batch.append(image)
    except Exception as error:  # also of the user's generator
        return batch, error
    return batch, None


def check_elongation(image: NamedImage, settings: DetectorSettings) -> None:
    """Raises ``UnreadableImage`` if the resize would reduce the shorter side to zero pixels.

    This happens if the longer side is much longer, because it is resized to at most
    ``INPUT.MAX_SIZE_TEST``.
    """
    reason = find_elongation(image.image.shape[:2], settings.max_size)
    if reason:
        raise UnreadableImage(image.name, reason)
