# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What the page does: models, checks of uploads, boxes, and pictures of what an encoder sees.

The models are those of the command line and of the zoo, and no others.

Uploads are checked before a decoder sees them: images are of four formats, and videos begin as
their container does. Other formats can run programs (EPS) or name files to read (playlists).
"""

import contextlib
import functools
import json
import time
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps

from qbheat_det.analysis import load_figures
from qbheat_det.analysis.run import FigureOptions, Kind, Run
from qbheat_det.api import Detections, Detector, load
from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import NotApplicable
from qbheat_det.inference.video import (
    VIDEO_SUFFIXES,
    Image,
    UnreadableImage,
    open_video,
    read_video,
)
from qbheat_det.model_zoo.api import get_address
from qbheat_det.model_zoo.index import find_entry, list_entries

MAX_FILES, MAX_BYTES, MAX_PIXELS, MAX_FRAMES = 20, 50 * 2**20, 50_000_000, 300
LOWEST_SCORE = 0.05
"""Boxes below it are never shown; the slider filters what is above without predicting again."""
IMAGE_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
_FORMATS = ("BMP", "JPEG", "PNG", "WEBP")
_SHOWN_FRAMES = 6  # of a video, in the gallery
_ENCODER_CAPTIONS = {
    "attention_to_former_1": "**Where each token looks:** the brighter, the more attention a place "
    "of the image gets; 1 is what it would get if all got the same. Tokens alike look alike.",
    "attention_to_mobile_1": "**Which tokens each place reads:** the brighter, the more of its "
    "attention goes to the token; the shares of all tokens add up to 1.",
    "reconstructions_grid_1": "**What a part tells of the rest:** the model sees only what is not "
    "grey, and predicts what is.",
}
"""Of this page, by figure and image; those of a report speak of its several images and runs."""
_VIDEO_STARTS = {
    ".mp4": (4, b"ftyp"),
    ".mov": (4, b"ftyp"),
    ".avi": (0, b"RIFF"),
    ".mkv": (0, b"\x1a\x45\xdf\xa3"),
    ".webm": (0, b"\x1a\x45\xdf\xa3"),
}


@dataclass(frozen=True)
class Found:
    """What a detector found in one upload: an entry for each image, or frame of a video."""

    name: str
    detections: Sequence[Detections]
    fps: float = 0.0  # 0 for an image


def open_image(path: Path) -> Image:
    """Reads an uploaded image: (H, W, 3), RGB, upright.

    Raises ``UnreadableImage`` if it is none of the allowed formats, too large, or broken.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)
            image = PIL.Image.open(path, formats=_FORMATS)
        with image:
            if image.width * image.height > MAX_PIXELS:
                raise UnreadableImage(f"more than {MAX_PIXELS // 10**6} million pixels")
            return np.array(PIL.ImageOps.exif_transpose(image).convert("RGB"))
    except PIL.UnidentifiedImageError as error:
        raise UnreadableImage("not an image") from error
    except UnreadableImage:
        raise
    except Exception as error:  # what a broken file raises depends on its format's decoder
        raise UnreadableImage("a broken image") from error


def open_frames(path: Path) -> tuple[Iterator[Image], float]:
    """Opens an uploaded video: its first ``MAX_FRAMES`` frames, RGB, and frames per second.

    Raises ``UnreadableImage`` for other content than its suffix says, or too large frames.
    """
    start, expected = _VIDEO_STARTS[path.suffix.lower()]
    with path.open("rb") as stream:
        if not stream.read(16)[start:].startswith(expected):
            raise UnreadableImage("not a video")
    frames, fps, _ = read_video(path)

    def convert() -> Iterator[Image]:
        for frame in islice(frames, MAX_FRAMES):
            if frame.shape[0] * frame.shape[1] > MAX_PIXELS // 5:
                raise UnreadableImage("frames too large")
            yield np.ascontiguousarray(frame[:, :, ::-1])

    return convert(), fps


def detect(detector: Detector, paths: Sequence[Path]) -> tuple[list[Found], list[str]]:
    """Predicts on uploads; returns what was found, and a sentence for each that was left out."""
    found, skipped = [], [f"`{p.name}`: more than {MAX_FILES} files" for p in paths[MAX_FILES:]]
    for path in paths[:MAX_FILES]:
        try:
            if path.suffix.lower() in VIDEO_SUFFIXES:
                frames, fps = open_frames(path)
                results = [_predict(detector, frame) for frame in frames]
            elif path.suffix.lower() in IMAGE_SUFFIXES:
                fps, results = 0.0, [_predict(detector, open_image(path))]
            else:
                raise UnreadableImage("neither an image nor a video")
            found.append(Found(path.name, results, fps))
        except (UnreadableImage, UserError) as error:
            skipped.append(f"`{path.name}`: {error}")
    return found, skipped


def _predict(detector: Detector, image: Image) -> Detections:
    found = detector.predict(image, threshold=LOWEST_SCORE)
    assert isinstance(found, Detections)
    return found


def select(detections: Detections, threshold: float, classes: Sequence[str]) -> Detections:
    """Returns the boxes at or above a score, of some classes; of all where none is named."""
    keep = [
        score >= threshold and (not classes or label in classes)
        for score, label in zip(detections.scores.tolist(), detections.labels, strict=True)
    ]
    return replace(detections, instances=detections.instances[np.flatnonzero(keep)])


def render(
    found: Sequence[Found], folder: Path, *, threshold: float, classes: Sequence[str]
) -> tuple[list[tuple[str, str]], list[list[Any]], str]:
    """Draws the boxes of what ``detect`` found, and writes them into a folder.

    Those of at least the score ``threshold`` and of ``classes``; of all where none are named.
    Returns drawn images with captions; rows of the table; the archive with ``boxes.json`` in COCO's
    results format and the drawn files.
    """
    gallery, rows, boxes, files = [], [], [], []
    image_id = 0
    for index, one in enumerate(found, start=1):
        stem = f"{index}-{Path(one.name).stem}"
        video, step = folder / f"{stem}.mp4", max(1, -(-len(one.detections) // _SHOWN_FRAMES))
        with open_video(video, one.fps) if one.fps else contextlib.nullcontext() as append:
            for frame, every in enumerate(one.detections):
                image_id += 1
                shown = select(every, threshold, classes)
                drawn = shown.draw()
                place = {"file_name": one.name, **({"frame": frame} if one.fps else {})}
                boxes += [{**box, **place} for box in shown.to_coco(image_id)]
                rows += [
                    [one.name, frame if one.fps else "", label, round(score, 3), *map(round, box)]
                    for label, score, box in zip(
                        shown.labels, shown.scores.tolist(), shown.boxes.tolist(), strict=True
                    )
                ]
                if append is not None:
                    append(np.ascontiguousarray(drawn[:, :, ::-1]))
                if frame % step == 0:
                    files.append(folder / f"{stem}{f'-{frame}' if one.fps else ''}.jpg")
                    PIL.Image.fromarray(drawn).save(files[-1], quality=92)
                    at = f", frame {frame}" if one.fps else ""
                    gallery.append((str(files[-1]), f"{one.name}{at}: {len(shown)} boxes"))
        files += [video] if one.fps else []
    archive = folder / "qbheat.zip"
    with zipfile.ZipFile(archive, "w") as stream:
        stream.writestr("boxes.json", json.dumps(boxes))
        for file in files:
            stream.write(file, file.name)
    return gallery, rows, str(archive)


def draw_encoder(run: Run, path: Path, folder: Path) -> list[tuple[str, str]]:
    """Draws attention and reconstructions of an upload; returns images and their captions.

    Raises a ``UserError`` if the file is no image, or the model has nothing to draw.
    """
    images = folder / "input"
    images.mkdir()
    try:
        PIL.Image.fromarray(open_image(path)).save(images / "image.png")
    except UnreadableImage as error:
        raise UserError(f"`{path.name}`: {error}") from error
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
    """Removes what is below a folder and has not changed for ``age`` seconds."""
    limit, old = time.time() - age, []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_ctime <= limit:  # not mtime, which copies take from their source
                old.append(path)
    for path in sorted(old, reverse=True):  # files before the folder that they lie in
        with contextlib.suppress(OSError):  # a folder with files that are younger
            path.rmdir() if path.is_dir() else path.unlink()


_KINDS: dict[str, Kind] = {"detection": "detector", "pretraining": "pretraining"}  # by task


class Models:
    """The models of the page, opened when first used; the last two of each kind are kept.

    ``kinds`` is by label, the user's own models first.
    """

    def __init__(self, weights: Sequence[str] = (), *, device: str | None = None) -> None:
        """Takes files, folders of runs or names in the zoo, beside all of the zoo's entries.

        Raises a ``UserError`` if one does not exist. ``device`` None takes the GPU if there is one.
        """
        self.kinds: dict[str, Kind] = {}
        self._places: dict[str, str] = {}
        self._device = device
        for name in weights:
            if Path(name).exists():
                run = Run.open(name)
                self._add(run.label, str(run.weights), run.kind)
            else:
                self._add_entry(name)
        # QB-Heat first: only it reconstructs. Of timm's encoders there is nothing to draw.
        for entry in sorted(list_entries(), key=lambda entry: "qb_heat" not in entry.config):
            if entry.distribution is None:
                self._add_entry(entry.name)
        self.open_detector = functools.lru_cache(maxsize=2)(self._open_detector)
        self.open_run = functools.lru_cache(maxsize=2)(self._open_run)

    def list_detectors(self) -> list[str]:
        """Returns the labels of the models that find boxes."""
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
