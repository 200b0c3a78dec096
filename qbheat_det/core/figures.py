# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Figures (images, numbers and an explanation) and the registries of the functions that draw them.

``qbheat_det.analysis.load_figures()`` fills both registries, so that the trainer imports no figure.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import cv2
import numpy as np
import numpy.typing as npt
from torch import Tensor

from .files import write_atomically

_SUFFIXES = {"image/svg+xml": ".svg", "image/jpeg": ".jpg", "image/png": ".png"}


class NotApplicable(Exception):
    """A figure does not exist for these runs or this model; nothing is wrong with them."""


@dataclass(frozen=True)
class Image:
    """An encoded image: content of the file, media type, and text for readers who cannot see it."""

    content: bytes
    media_type: str
    alt: str
    caption: str = ""

    @classmethod
    def from_rgb(
        cls, image: npt.NDArray[np.uint8], *, alt: str, caption: str = "", quality: int = 90
    ) -> "Image":
        """Encodes RGB pixels (H, W, 3) as JPEG of that quality, in [0, 100]."""
        bgr = np.ascontiguousarray(image[:, :, ::-1])
        _, encoded = cv2.imencode(".jpg", bgr, [cv2.IMWRITE_JPEG_QUALITY, quality])
        return cls(encoded.tobytes(), "image/jpeg", alt, caption)


@dataclass(frozen=True)
class Table:
    """Rows of text below a header; the first column names the row."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Figure:
    """One result, of one run or of several side by side.

    ``name`` and the images' names are parts of file names; ``explanation`` has paragraphs of plain
    text, ``data`` the numbers behind the images, ``scalars`` numbers for the training log.
    """

    name: str
    title: str
    explanation: Sequence[str] = ()
    images: Mapping[str, Image] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    table: Table | None = None
    scalars: Mapping[str, float] = field(default_factory=dict)


FIGURES: dict[str, Callable[..., Figure]] = {}
"""By name; called with runs, ``FigureOptions`` and the figure's own keyword arguments."""
TRAINING_FIGURES: dict[str, Callable[..., Figure]] = {}
"""By name; called with the model in eval mode and without gradients, a function from a number to
as many mapped images (always the same), and the config. They may raise ``NotApplicable``."""

_Function = TypeVar("_Function", bound=Callable[..., Figure])


def register_figure(name: str, *, training: bool = False) -> Callable[[_Function], _Function]:
    """Decorates a function that draws a figure, in place of an earlier one of its name.

    With ``training`` it goes to ``TRAINING_FIGURES`` instead of ``FIGURES``.
    """

    def register(function: _Function) -> _Function:
        (TRAINING_FIGURES if training else FIGURES)[name] = function
        return function

    return register


def write_figure(figure: Figure, folder: Path, *, suffix: str = "") -> list[Path]:
    """Writes ``<name><suffix>.json`` and ``<name>_<image><suffix>.<svg, jpg or png>``.

    Returns the paths, JSON first; stale images of an earlier figure of that name are removed.
    """
    files = {
        f"{figure.name}_{name}{suffix}{_SUFFIXES[image.media_type]}": image.content
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
    about = folder / f"{figure.name}{suffix}.json"
    stale = set(_list_images(about)) - set(files)
    for name, data in {about.name: f"{text}\n".encode(), **files}.items():
        write_atomically(folder / name, data)
    for name in stale:
        (folder / name).unlink(missing_ok=True)
    return [about, *(folder / name for name in files)]


def remove_figure(name: str, folder: Path) -> None:
    """Removes the files that ``write_figure`` wrote for a figure, and no others."""
    about = folder / f"{name}.json"
    if images := _list_images(about):
        for path in [*(folder / image for image in images), about]:
            path.unlink(missing_ok=True)


def to_json(value: Any) -> Any:
    """Copies nested values as strict JSON: complex numbers as pairs, those not finite as null."""
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
    raise TypeError(f"JSON cannot hold a {type(value).__name__}: {value!r}")


def _list_images(about: Path) -> list[str]:
    """Returns the images that the JSON of an earlier figure names; none if it is not ours."""
    try:
        content = json.loads(about.read_bytes())
        names = [str(name) for name in content["files"]]
        own = re.compile(rf"{re.escape(content['name'])}_[\w-]+\.(svg|jpg|png)")
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return []
    return [name for name in names if own.fullmatch(name)]  # the file may have been edited
