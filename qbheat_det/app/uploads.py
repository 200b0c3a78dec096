# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The functions behind the page: opening models, checking uploads, detection, encoder figures.

Uploads are checked before they are decoded. Only four image formats are accepted, because decoding
other formats can run programs. For example, EPS files run Ghostscript.
"""

import contextlib
import functools
import json
import time
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import PIL.Image

from qbheat_det.analysis import load_figures
from qbheat_det.analysis.figures import NotApplicable
from qbheat_det.analysis.run import FigureOptions, Run
from qbheat_det.api import (
    DecodingLimits,
    DecodingProcesses,
    Detections,
    Detector,
    Image,
    UnreadableImage,
    load_detector,
)
from qbheat_det.core.errors import UserError
from qbheat_det.model_zoo.index import find_entry, get_address, list_entries
from qbheat_det.tasks import DETECTION

MAX_FILES = 20
MAX_BYTES = 50 * 2**20
MAX_PIXELS = 50_000_000
LOWEST_SCORE = 0.05
"""Lowest value of the score slider, which filters the boxes without predicting again."""
IMAGE_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
FORMATS = ("BMP", "JPEG", "PNG", "WEBP")
_ENCODER_CAPTIONS = {
    "attention_to_former_1": "**Where each token looks:** bright areas get more attention. The "
    "value is 1 where attention is uniform.",
    "attention_to_mobile_1": "**Which tokens each place reads:** bright locations read more "
    "from the token. The shares of all tokens add up to 1.",
    "reconstructions_grid_1": "**What a part tells of the rest:** the model does not see the gray "
    "part of the image, and predicts it from the rest.",
}
"""Captions in Markdown, by the name of the image file. Reports have other captions."""


def open_image(path: Path) -> Image:
    """Reads an upload as an upright RGB image (H, W, 3), or raises ``UnreadableImage``."""
    limits = DecodingLimits(FORMATS, MAX_PIXELS)
    return _get_decoders().decode(path.read_bytes(), path, limits)


@functools.cache
def _get_decoders() -> DecodingProcesses:
    return DecodingProcesses(1)  # the page runs one job after the other


def detect(detector: Detector, paths: Sequence[Path]) -> tuple[list[Detections], list[str]]:
    """Predicts on uploads. Returns the results, and a message for each file that was skipped."""
    results = []
    skipped = [f"`{path.name}`: more than {MAX_FILES} files" for path in paths[MAX_FILES:]]
    for path in paths[:MAX_FILES]:
        try:
            detections = detector.predict(open_image(path), threshold=LOWEST_SCORE)
        except UnreadableImage as error:
            skipped.append(f"`{path.name}`: {error.reason}")
        except UserError as error:
            skipped.append(f"`{path.name}`: {error}")
        else:
            results.append(replace(detections, file_name=path.name))
    return results, skipped


def render(
    results: Sequence[Detections], folder: Path, *, threshold: float, classes: Sequence[str]
) -> tuple[list[tuple[str, str]], list[list[Any]], str]:
    """Draws the boxes whose score is at least ``threshold``, and writes the images into a folder.

    ``classes`` selects the classes to draw. If it is empty, all classes are drawn.

    Returns:
        (image path, caption) of each drawn image; the rows of the table of boxes, with file name,
        class, score and corners; and the path of an archive with the drawn images and
        ``boxes.json`` in COCO's results format.
    """
    gallery = []
    rows: list[list[Any]] = []
    boxes: list[dict[str, Any]] = []
    for number, detections in enumerate(results, start=1):
        name = detections.file_name
        shown = detections.select(threshold, classes)
        for box in shown:
            corners = [round(edge) for edge in box.xyxy]
            rows.append([name, box.class_name, round(box.score, 3), *corners])
        boxes += [{**box, "file_name": name} for box in shown.to_coco(number)]
        file = folder / f"{number}-{Path(name).stem}.jpg"
        PIL.Image.fromarray(shown.draw()).save(file, quality=92)
        gallery.append((str(file), f"{name}: {len(shown)} boxes"))
    archive = folder / "qbheat.zip"
    with zipfile.ZipFile(archive, "w") as stream:
        stream.writestr("boxes.json", json.dumps(boxes))
        for path, _ in gallery:
            stream.write(path, Path(path).name)
    return gallery, rows, str(archive)


def draw_encoder(run: Run, path: Path, folder: Path) -> list[tuple[str, str]]:
    """Draws attention and reconstructions of an upload into ``folder``.

    Leaves out a figure that does not apply to the model. Returns (path, caption) of each image.
    Raises ``UserError`` if the upload is not an image, or if no figure applies.
    """
    images = folder / "input"
    images.mkdir()
    try:
        PIL.Image.fromarray(open_image(path)).save(images / "image.png")
    except UnreadableImage as error:
        raise UserError(f"`{path.name}`: {error.reason}") from error
    gallery = []
    figures = load_figures()
    for name in ("attention", "reconstructions"):
        try:
            figure = figures[name]([run], FigureOptions(images=images, num_images=1))
        except NotApplicable:
            continue
        for key, image in figure.images.items():
            file = folder / f"{name}_{key}.jpg"
            file.write_bytes(image.content)
            gallery.append((str(file), _ENCODER_CAPTIONS[file.stem]))
    if not gallery:
        raise UserError(f"{run.label} has neither tokens that attend nor a decoder to pixels")
    return gallery


def remove_old_files(folder: Path, age: float) -> None:
    """Removes all files and subfolders that have not changed for ``age`` seconds."""
    latest_change = time.time() - age
    old = []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            # Not ``st_mtime``: a copy may keep the modification time of the original.
            if path.lstat().st_ctime <= latest_change:
                old.append(path)
    for path in sorted(old, reverse=True):  # files before their folder
        with contextlib.suppress(OSError):  # a folder may have newer files
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink()


class Models:
    """The models that the page offers: those on the command line and those in the model zoo.

    ``open_detector`` and ``open_run`` open a model by its display name. The two detectors and the
    two runs that were used last stay open.

    Attributes:
        tasks: the task of each model by its display name, with the user's models first.
        weights: the path or address of each model's weights by its display name.
    """

    def __init__(self, weights: Sequence[str] = (), *, device: str | None = None) -> None:
        """``weights`` are files, folders of runs or model zoo names."""
        self.tasks: dict[str, str] = {}
        self.weights: dict[str, str] = {}
        self._device = device
        for name in weights:
            if Path(name).exists():
                run = Run.open(name)
                self._add(run.label, str(run.weights), run.task.name)
            else:
                self._add_entry(name)
        # QB-Heat comes first, because only QB-Heat has reconstructions. timm's encoders are left
        # out, because no figure can show them.
        for entry in sorted(list_entries(), key=lambda entry: "qb_heat" not in entry.config):
            if entry.distribution is None:
                self._add_entry(entry.name)
        self.open_detector = functools.lru_cache(maxsize=2)(self._open_detector)
        self.open_run = functools.lru_cache(maxsize=2)(self._open_run)

    def list_detectors(self) -> list[str]:
        """Returns the display names of the detectors."""
        return [label for label, task in self.tasks.items() if task == DETECTION.name]

    def _add_entry(self, name: str) -> None:
        entry = find_entry(name)
        self._add(entry.name, get_address(entry.name), entry.task)

    def _add(self, label: str, weights: str, task: str) -> None:
        self.tasks.setdefault(label, task)
        self.weights.setdefault(label, weights)

    def _open_detector(self, label: str) -> Detector:
        return load_detector(self.weights[label], device=self._device)

    def _open_run(self, label: str) -> Run:
        return Run.open(self.weights[label], label=label, device=self._device)
