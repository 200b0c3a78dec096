# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The functions behind the page: models, checks of uploads, boxes, and figures of an encoder.

Uploads are checked before a decoder opens them: images have one of four formats, and videos begin
like their container. Other formats can run programs (EPS) or name files to read (playlists).
"""

import contextlib
import functools
import json
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import PIL.Image

from qbheat_det.analysis import load_figures
from qbheat_det.analysis.run import FigureOptions, Kind, Run
from qbheat_det.api import Detections, Detector, load
from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import NotApplicable
from qbheat_det.inference.images import (
    VIDEO_SUFFIXES,
    Image,
    UnreadableImage,
    decode_image,
    open_frames,
    open_video,
)
from qbheat_det.inference.results import Predictions
from qbheat_det.model_zoo.index import find_entry, get_address, list_entries

MAX_FILES, MAX_BYTES, MAX_PIXELS, MAX_FRAMES = 20, 50 * 2**20, 50_000_000, 300
LOWEST_SCORE = 0.05
"""Lowest score that the slider can show; it filters boxes without predicting again."""
IMAGE_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
FORMATS = ("BMP", "JPEG", "PNG", "WEBP")
_SHOWN_FRAMES = 6  # of a video, in the gallery
_ENCODER_CAPTIONS = {
    "attention_to_former_1": "**Where each token looks:** bright places get more attention. The "
    "value is 1 where attention is even.",
    "attention_to_mobile_1": "**Which tokens each place reads:** bright places read more from the "
    "token. The shares of all tokens add up to 1.",
    "reconstructions_grid_1": "**What a part tells of the rest:** the model does not see the grey "
    "part, and predicts it.",
}
"""By figure and image; a report has other captions, for several images and runs."""
_VIDEO_STARTS = {
    ".mp4": (4, b"ftyp"),
    ".mov": (4, b"ftyp"),
    ".avi": (0, b"RIFF"),
    ".mkv": (0, b"\x1a\x45\xdf\xa3"),
    ".webm": (0, b"\x1a\x45\xdf\xa3"),
}


@dataclass(frozen=True)
class Found:
    """The detections in one upload: one entry for an image, or one per frame of a video."""

    name: str
    detections: Sequence[Detections]
    fps: float = 0.0  # 0 for an image


def open_image(path: Path) -> Image:
    """Reads an uploaded image (H, W, 3), RGB, upright; raises ``UnreadableImage``."""
    with path.open("rb") as file:
        return decode_image(file, path, formats=FORMATS, max_pixels=MAX_PIXELS)


def read_upload(path: Path) -> tuple[Iterator[Image], float]:
    """Returns the image of an upload, or the first frames of a video, and frames per second or 0.

    Raises ``UnreadableImage`` if the file is neither, or its content differs from its suffix.
    """
    suffix = path.suffix.lower()
    if suffix in IMAGE_SUFFIXES:
        return iter([open_image(path)]), 0.0
    if suffix not in VIDEO_SUFFIXES:
        raise UnreadableImage(path, "neither an image nor a video")
    start, expected = _VIDEO_STARTS[suffix]
    with path.open("rb") as stream:
        if not stream.read(16)[start:].startswith(expected):
            raise UnreadableImage(path, "not a video")
    frames, fps, _ = open_frames(path, path.name)

    def check() -> Iterator[Image]:
        for frame in islice(frames, MAX_FRAMES):
            if frame.image.shape[0] * frame.image.shape[1] > MAX_PIXELS // 5:
                raise UnreadableImage(path, "frames too large")
            yield frame.image

    return check(), fps


def detect(detector: Detector, paths: Sequence[Path]) -> tuple[list[Found], list[str]]:
    """Predicts on uploads; returns the results, and a message for each file that is left out."""
    found, skipped = [], [f"`{p.name}`: more than {MAX_FILES} files" for p in paths[MAX_FILES:]]
    for path in paths[:MAX_FILES]:
        try:
            images, fps = read_upload(path)
            results = [
                replace(
                    detector.predict(image, threshold=LOWEST_SCORE),
                    file_name=path.name,
                    frame=index if fps else None,
                )
                for index, image in enumerate(images)
            ]
            found.append(Found(path.name, results, fps))
        except UserError as error:
            reason = error.reason if isinstance(error, UnreadableImage) else error
            skipped.append(f"`{path.name}`: {reason}")
    return found, skipped


def render(
    found: Sequence[Found], folder: Path, *, threshold: float, classes: Sequence[str]
) -> tuple[list[tuple[str, str]], list[list[Any]], str]:
    """Draws the boxes with at least a score, of some classes or else of all, into a folder.

    Returns:
        Drawn images with captions; rows of the table of boxes; an archive with ``boxes.json`` in
        COCO's results format and the drawn files.
    """
    gallery, rows, files, every = [], [], [], Predictions()
    for index, one in enumerate(found, start=1):
        stem = f"{index}-{Path(one.name).stem}"
        video, step = folder / f"{stem}.mp4", max(1, -(-len(one.detections) // _SHOWN_FRAMES))
        with open_video(video, one.fps) if one.fps else contextlib.nullcontext() as append:
            for number, detections in enumerate(one.detections):
                shown = detections.select(threshold, classes)
                every.add(shown)
                frame = number if one.fps else ""
                rows += [
                    [one.name, frame, box.class_name, round(box.score, 3), *map(round, box.xyxy)]
                    for box in shown
                ]
                drawn = shown.draw()
                if append is not None:
                    append(drawn)
                if number % step == 0:
                    files.append(folder / f"{stem}{f'-{number}' if one.fps else ''}.jpg")
                    PIL.Image.fromarray(drawn).save(files[-1], quality=92)
                    at = f", frame {number}" if one.fps else ""
                    gallery.append((str(files[-1]), f"{one.name}{at}: {len(shown)} boxes"))
        files += [video] if one.fps else []
    archive = folder / "qbheat.zip"
    with zipfile.ZipFile(archive, "w") as stream:
        stream.writestr("boxes.json", json.dumps(every.results))
        for file in files:
            stream.write(file, file.name)
    return gallery, rows, str(archive)


def draw_encoder(run: Run, path: Path, folder: Path) -> list[tuple[str, str]]:
    """Draws attention and reconstructions of an upload; returns images and their captions."""
    images = folder / "input"
    images.mkdir()
    try:
        PIL.Image.fromarray(open_image(path)).save(images / "image.png")
    except UnreadableImage as error:
        raise UserError(f"`{path.name}`: {error.reason}") from error
    gallery, figures = [], load_figures()
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
    """Removes files and folders below a folder that have not changed for ``age`` seconds."""
    limit, old = time.time() - age, []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_ctime <= limit:  # not mtime, which copies take from their source
                old.append(path)
    for path in sorted(old, reverse=True):  # files before their folder
        with contextlib.suppress(OSError):  # a folder with younger files
            path.rmdir() if path.is_dir() else path.unlink()


_KINDS: dict[str, Kind] = {"detection": "detector", "pretraining": "pretraining"}  # by task


class Models:
    """The models of the command line and of the zoo; the page opens no others.

    ``kinds`` is by label, the user's own models first. A model is opened at its first use, and the
    last two of each kind stay open.
    """

    def __init__(self, weights: Sequence[str] = (), *, device: str | None = None) -> None:
        """``weights`` are files, folders of runs or names in the zoo; see ``serve``."""
        self.kinds: dict[str, Kind] = {}
        self._places: dict[str, str] = {}
        self._device = device
        for name in weights:
            if Path(name).exists():
                run = Run.open(name)
                self._add(run.label, str(run.weights), run.kind)
            else:
                self._add_entry(name)
        # QB-Heat first, because only it reconstructs. No figure shows timm's encoders.
        for entry in sorted(list_entries(), key=lambda entry: "qb_heat" not in entry.config):
            if entry.distribution is None:
                self._add_entry(entry.name)
        self.open_detector = functools.lru_cache(maxsize=2)(self._open_detector)
        self.open_run = functools.lru_cache(maxsize=2)(self._open_run)

    def list_detectors(self) -> list[str]:
        """Returns the labels of the detectors."""
        return [label for label, kind in self.kinds.items() if kind == "detector"]

    def _add_entry(self, name: str) -> None:
        entry = find_entry(name)
        self._add(entry.name, get_address(entry.name), _KINDS.get(entry.task, "classifier"))

    def _add(self, label: str, place: str, kind: Kind) -> None:
        self.kinds.setdefault(label, kind)
        self._places.setdefault(label, place)

    def _open_detector(self, label: str) -> Detector:
        detector = load(self._places[label], device=self._device)
        assert isinstance(detector, Detector)
        return detector

    def _open_run(self, label: str) -> Run:
        return Run.open(self._places[label], label=label, device=self._device)
