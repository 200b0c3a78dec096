# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The parts of a figure (images, table, numbers, explanation), and how its files are written."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
from torch import Tensor

from qbheat_det.core.files import write_atomically

_SUFFIXES = {"image/svg+xml": ".svg", "image/jpeg": ".jpg"}


class NotApplicable(Exception):
    """Raised if a figure does not apply to a run, although the run is valid."""


@dataclass(frozen=True)
class Image:
    """The bytes of an image file, its media type, alternative text (``alt``) and caption.

    A page shows ``wide`` images in its full width, and others side by side.
    """

    content: bytes
    media_type: str
    alt: str
    caption: str = ""
    wide: bool = False

    @classmethod
    def from_rgb(
        cls, image: npt.NDArray[np.uint8], *, alt: str, caption: str = "", wide: bool = True
    ) -> "Image":
        """Encodes RGB pixels (H, W, 3) as JPEG."""
        bgr = np.ascontiguousarray(image[:, :, ::-1])
        _, encoded = cv2.imencode(".jpg", bgr, [cv2.IMWRITE_JPEG_QUALITY, 85])
        return cls(encoded.tobytes(), "image/jpeg", alt, caption, wide)


@dataclass(frozen=True)
class Table:
    """A header and rows of text. The first cell of a row is its name."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Figure:
    """A figure about one run, or one that compares several runs.

    ``name`` and the keys of ``images`` become parts of file names. ``explanation`` is a list of
    paragraphs in plain text. ``data`` has the numbers that the images show. A page about one run
    has ``headline``, the result in one sentence, ``command``, which uses the run, and ``caution``,
    what the result does not tell, at its top.
    """

    name: str
    title: str
    explanation: Sequence[str] = ()
    images: Mapping[str, Image] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    table: Table | None = None
    headline: str = ""
    command: str = ""
    caution: str = ""


def write_figure(figure: Figure, folder: Path) -> list[Path]:
    """Writes ``<name>.json``, and ``<name>_<image>.svg`` or ``.jpg`` for each image.

    Replaces all files of an earlier figure of that name. Returns the paths, JSON first.
    """
    files = {
        f"{figure.name}_{name}{_SUFFIXES[image.media_type]}": image.content
        for name, image in figure.images.items()
    }
    content: dict[str, Any] = {
        "name": figure.name,
        "title": figure.title,
        "explanation": figure.explanation,
        "data": figure.data,
        "files": list(files),
    }
    if figure.table is not None:
        content["table"] = {"header": figure.table.header, "rows": figure.table.rows}
    text = json.dumps(to_json(content), indent=1, allow_nan=False, ensure_ascii=False)
    about = folder / f"{figure.name}.json"
    remove_figure(figure.name, folder)
    write_atomically(about, f"{text}\n".encode())
    paths = [about]
    for name, data in files.items():
        write_atomically(folder / name, data)
        paths.append(folder / name)
    return paths


def remove_figure(name: str, folder: Path) -> None:
    """Removes the files that ``write_figure`` wrote for a figure, and no others."""
    about = folder / f"{name}.json"
    try:
        content = json.loads(about.read_bytes())
        is_figure = content["name"] == name
        files = [str(file) for file in content["files"]]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return
    if not is_figure:
        return
    # The JSON file may have been edited, so only names of images of this figure are accepted.
    pattern = re.compile(rf"{re.escape(name)}_[\w-]+\.(svg|jpg)")
    for file in files:
        if pattern.fullmatch(file):
            (folder / file).unlink(missing_ok=True)
    about.unlink()


def to_json(value: Any) -> Any:
    """Converts nested values, including tensors, arrays and paths, to strict JSON data.

    Complex numbers become [real, imaginary], and non-finite numbers become null. Raises a
    ``TypeError`` for other types.
    """
    if isinstance(value, Tensor | np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, complex):
        value = [value.real, value.imag]
    if value is None or isinstance(value, int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_json(element) for key, element in value.items()}
    if isinstance(value, Sequence):
        return [to_json(element) for element in value]
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"JSON cannot represent a {type(value).__name__}: {value!r}")
