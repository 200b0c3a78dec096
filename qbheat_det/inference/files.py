# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Predicts on files and writes the results to files, for ``qbheat predict``."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import check_writable, write_atomically
from qbheat_det.core.sharing import collect, is_main_process, share
from qbheat_det.core.text import escape_controls, one_line

from .boxes import find_boxes
from .decoding import DecodingLimits, DecodingProcesses
from .exported import EXPORTED_SUFFIXES, ExportedModel, Scores
from .images import (
    InputFile,
    NamedImage,
    UnreadableImage,
    find_inputs,
    open_video,
)
from .predictor import DetectorSettings, Predictor
from .results import Detections, Format, Predictions, render_annotations

if TYPE_CHECKING:  # an exported file runs without PyTorch
    from .predict import TrainedWeights

T = TypeVar("T")
_NUM_TOP_CLASSES = 5
PREDICTION_LIMITS = DecodingLimits(seconds=60.0)
"""Limits of an image or a frame. A slow disk and a busy machine need more time than a server."""


def predict_files(
    weights: str,
    inputs: Sequence[str],
    *,
    output: Path | None = None,
    json_file: Path | None = None,
    json_format: Format = "coco",
    score_threshold: float = 0.3,
    config_file: str | None = None,
    device: str | None = None,
    fast: bool = False,
    tile: int | None = None,
    opts: Sequence[str] = (),
    limits: DecodingLimits = PREDICTION_LIMITS,
) -> Predictions:
    """Predicts boxes or classes on files and folders, and optionally draws and writes them.

    In a process group, each process predicts on its share of the files. The first process writes
    ``json_file`` and returns all predictions. The others return none.

    Args:
        weights: trained weights (.safetensors, .pth, .pkl, qbheat://NAME) or an exported file.
        inputs: images, videos, and folders, which are searched recursively.
        output: folder for the drawn images and videos.
        json_file: JSON file to write, with all boxes or, for a classifier, each image's classes.
        json_format: format of the boxes in ``json_file``: COCO's results, CVAT or Label Studio.
        score_threshold: lowest score of a box, in [0, 1].
        config_file: config of the model (YAML); by default the one inside or next to the weights.
        device: "cpu" or "cuda"; by default "cuda" if a GPU is available.
        fast: use the fastest equivalent form of the model (``MODEL.DEPLOY``).
        tile: side of overlapping tiles in pixels; 0 for whole images only, None as in training.
        opts: config overrides, a flat list of keys and values.
        limits: limits of an image or a frame. A file that exceeds them is skipped.

    Raises:
        UserError: weights, inputs or arguments are invalid or do not match.
    """
    if json_file:
        check_writable(json_file)
    model = open_weights(weights, config_file, device=device, fast=fast, opts=opts)
    settings = model.settings
    files = find_inputs(inputs, exclude=output)
    if json_format != "coco" and (model.is_classifier or any(file.is_video for file in files)):
        raise UserError(f"the format '{json_format}' is for boxes on images: use coco")
    if model.is_classifier:
        if output or tile is not None or not json_file:
            raise UserError(
                f"'{weights}' is a classifier and finds no boxes: leave out --output and --tile, "
                "and name --json FILE for the classes"
            )
        score = model.build_scorer()
        predictions = classify_images(score, files, settings.class_names, limits=limits)
        if is_main_process():
            write_atomically(json_file, json.dumps(predictions.results).encode())
        return predictions
    predictions = predict_images(
        model.build_predictor(),
        files,
        settings,
        score_threshold=score_threshold,
        output_dir=output,
        tile=tile,
        limits=limits,
    )
    predictions.class_names = settings.class_names
    if json_file and is_main_process():
        if not settings.category_ids:
            print("note: the config lists no MODEL.CATEGORY_IDS, so category ids start from 1")
        content = render_annotations(
            predictions.results,
            predictions.images,
            settings.class_names,
            settings.category_ids,
            json_format,
        )
        write_atomically(json_file, json.dumps(content).encode())
    return predictions


def open_weights(
    weights: str,
    config_file: str | None = None,
    *,
    device: str | None = None,
    fast: bool = False,
    opts: Sequence[str] = (),
) -> "ExportedModel | TrainedWeights":
    """Opens an exported file, or reads the config of trained weights.

    ``predict_files`` describes the arguments. Raises a ``UserError`` if the weights cannot be read,
    or if arguments are given that exported weights do not allow.
    """
    if not weights.lower().endswith(EXPORTED_SUFFIXES):
        overrides = list(opts)
        if fast:
            overrides += ["MODEL.DEPLOY.ENABLED", "True"]
        from qbheat_det.checkpoint import load_run_config
        from qbheat_det.config import warn_of_unread

        from .predict import TrainedWeights

        cfg = load_run_config(weights, config_file, device=device, opts=overrides)
        if is_main_process():
            warn_of_unread([cfg], opts[::2])
        return TrainedWeights(cfg)
    if fast or config_file or opts:
        raise UserError(
            f"'{weights}' is exported with its config: leave out --fast, --config-file and "
            "config overrides"
        )
    return ExportedModel.open(weights, device=device)


def predict_images(
    predictor: Predictor,
    files: Sequence[InputFile],
    settings: DetectorSettings,
    *,
    score_threshold: float,
    output_dir: Path | None = None,
    tile: int | None = None,
    limits: DecodingLimits = PREDICTION_LIMITS,
) -> Predictions:
    """Predicts on images and videos, and draws the results into ``output_dir`` if it is given.

    Unreadable files are skipped, and those that exceed the limits. If an image cannot be drawn, its
    boxes are still in the results. The ids of images and frames start from 1. In a process group,
    each process predicts on its share of the files. The first one returns the predictions on all
    files, the others none.
    """
    pairs = share(list(zip(files, name_outputs(files), strict=True)))
    parts = []
    with DecodingProcesses(1, fork=True) as decoders:
        for file, name in _show_progress(pairs, unit="file", desc="predicting"):
            output = None if output_dir is None else output_dir / name
            open_source = partial(_open_file, file, decoders, limits)
            parts.append(
                _predict_file(predictor, file, open_source, settings, score_threshold, output, tile)
            )
    return Predictions.join(collect(parts))


def _show_progress(items: Sequence[T], **options: str) -> Iterator[T]:
    """Iterates with a progress bar in the first process."""
    return iter(tqdm(items, disable=None if is_main_process() else True, **options))


def _predict_file(
    predictor: Predictor,
    file: InputFile,
    open_source: Callable[[], tuple[Iterator[NamedImage], float]],
    settings: DetectorSettings,
    score_threshold: float,
    output: Path | None,
    tile: int | None,
) -> Predictions:
    """Predicts on one image or video, and draws the results to ``output`` if it is given.

    ``open_source`` returns an iterator over the image or the frames, and the frame rate.
    """
    predictions = Predictions()
    with _skip_unreadable(predictions, file):
        frames, fps = open_source()
        with contextlib.ExitStack() as stack:
            append_frame = None  # writes a frame to the drawn video
            if output is not None and file.is_video:
                append_frame = stack.enter_context(open_video(output, fps))
            for all_detections in find_boxes(predictor, frames, settings, tile=tile):
                scores = all_detections.scores.tolist()
                predictions.best_score = max(predictions.best_score, *scores, 0.0)
                detections = all_detections.select(score_threshold)
                predictions.add(detections, file.path)
                if append_frame is not None:
                    append_frame(detections.draw())
                elif output is not None:
                    _save_drawing(predictions, detections, output, file)
    return predictions


def _save_drawing(
    predictions: Predictions, detections: Detections, output: Path, file: InputFile
) -> None:
    """Writes the drawn image, or records the reason why it cannot be drawn.

    Raises a ``UserError`` if no file can be written at ``output``.
    """
    try:
        detections.save(output)
    except Exception as error:  # of Pillow or OpenCV, for example for very long images
        cause = error.__cause__ if isinstance(error, UserError) else error
        # Pillow's errors about the image have no errno, unlike errors of the folder or the disk.
        is_disk_error = isinstance(cause, OSError) and cause.errno is not None
        if is_disk_error:
            raise
        output.unlink(missing_ok=True)
        predictions.undrawn.append((str(file.path), one_line(cause or error)))


def _open_file(
    file: InputFile, decoders: DecodingProcesses, limits: DecodingLimits
) -> tuple[Iterator[NamedImage], float]:
    """Returns an iterator over the image or the frames, and the frame rate (0 for an image)."""
    if not file.is_video:
        image = decoders.decode(file.path, file.path, limits)
        return iter([NamedImage(image, None, file.name)]), 0.0
    frames, fps, num_frames = decoders.open_video(file.path, limits)
    frames = tqdm(
        frames,
        total=num_frames,
        unit="frame",
        desc=escape_controls(file.name),
        leave=False,
        disable=None,
    )
    named = (NamedImage(frame, None, file.name, index) for index, frame in enumerate(frames))
    return named, fps


@contextlib.contextmanager
def _skip_unreadable(predictions: Predictions, file: InputFile) -> Iterator[None]:
    """Counts the file as predicted, or records the reason if the block cannot read it."""
    try:
        yield
        predictions.num_images += 1
    except UnreadableImage as error:
        predictions.skipped.append((str(file.path), error.reason))


def name_outputs(files: Sequence[InputFile]) -> list[Path]:
    """Returns distinct relative paths of the drawn images and videos.

    JPEG files stay JPEG, other images become PNG, and videos become MP4. If an earlier file has the
    path ``a.png``, the next one gets ``a-2.png``.
    """
    used: set[str] = set()  # in lower case, because some file systems ignore case
    outputs = []
    for file in files:
        if file.is_video:
            suffix = ".mp4"
        elif file.path.suffix.lower() in {".jpg", ".jpeg"}:
            suffix = ".jpg"
        else:
            suffix = ".png"
        path = Path(file.name).with_suffix(suffix)
        stem = path.stem
        count = 1
        while str(path).lower() in used:
            count += 1
            path = path.with_name(f"{stem}-{count}{suffix}")
        used.add(str(path).lower())
        outputs.append(path)
    return outputs


def classify_images(
    score: Callable[[str | Path], Scores],
    files: Sequence[InputFile],
    class_names: Sequence[str],
    *,
    limits: DecodingLimits = PREDICTION_LIMITS,
) -> Predictions:
    """Classifies images. Skips videos, unreadable files, and those that exceed the limits.

    ``score`` returns the class scores (K,) of an image path. The results have the five classes with
    the highest scores. If ``class_names`` is empty, the name of a class is its index. Processes
    share the files as in ``predict_images``.
    """
    parts = []
    with DecodingProcesses(1, fork=True) as decoders:
        for file in _show_progress(share(files), unit="image", desc="classifying"):
            predictions = Predictions()
            parts.append(predictions)
            with _skip_unreadable(predictions, file):
                if file.is_video:
                    raise UnreadableImage(file.path, "a classifier takes images, not videos")
                decoders.check(file.path, limits)
                scores = score(file.path)
                entry = {"file_name": file.name, "classes": _list_classes(scores, class_names)}
                predictions.results.append(entry)
    return Predictions.join(collect(parts))


def _list_classes(scores: Scores, class_names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the names and scores of the classes with the highest scores."""
    classes = []
    for k in np.argsort(-scores, kind="stable")[:_NUM_TOP_CLASSES].tolist():
        name = class_names[k] if class_names else str(k)
        classes.append({"name": name, "score": float(scores[k])})
    return classes
