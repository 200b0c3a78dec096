# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Figures: images, the numbers behind them and how to read them; and the functions that draw them.

``FIGURES`` holds those of finished runs, for ``tools/visualize.py`` and ``tools/report.py``;
``TRAINING_FIGURES`` those that the visualization hook draws during training.
``qbheat_det.analysis.load_figures()`` registers both, so that neither this module nor the trainer
imports a figure.
"""

import contextlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import cv2
import numpy as np
import numpy.typing as npt
from detectron2.config import CfgNode
from torch import Tensor, nn

from .files import write_atomically

_SUFFIXES = {"image/svg+xml": ".svg", "image/jpeg": ".jpg", "image/png": ".png"}


class NotApplicable(Exception):
    """A figure does not exist for these runs or this model; nothing is wrong with them."""


@dataclass(frozen=True)
class Image:
    """An encoded image.

    Attributes:
        content: of the file.
        media_type: "image/svg+xml", "image/jpeg" or "image/png".
        alt: describes the image to readers who cannot see it.
        caption: below it.
    """

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

    Attributes:
        name: of its files; letters, digits, hyphens and underscores, like the images' names.
        title: one line.
        explanation: paragraphs of plain text: what is shown, and how to read it.
        images: by name, in the order in which they are shown.
        data: the numbers behind the images, as ``to_json`` takes them.
        table: the few numbers to compare by eye, if any.
        scalars: numbers for the training log, by name.
    """

    name: str
    title: str
    explanation: Sequence[str] = ()
    images: Mapping[str, Image] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    table: Table | None = None
    scalars: Mapping[str, float] = field(default_factory=dict)


class TrainingFigure(Protocol):
    """Draws a figure of a model in training."""

    def __call__(
        self, model: nn.Module, load_images: Callable[[int], list[dict[str, Any]]], cfg: CfgNode
    ) -> Figure:
        """
        Args:
            model: in eval mode, without gradients.
            load_images: returns that many entries of the dataset mapper, always the same ones.
            cfg: of the run.

        Raises:
            NotApplicable: the model has no part that the figure is about.
        """


FIGURES: dict[str, Callable[..., Figure]] = {}
"""By name; called with runs, ``FigureOptions`` and the figure's own keyword arguments."""
TRAINING_FIGURES: dict[str, TrainingFigure] = {}
"""By name."""

_Function = TypeVar("_Function", bound=Callable[..., Figure])


def register_figure(name: str) -> Callable[[_Function], _Function]:
    """Decorates a function that draws a figure of runs, see ``FIGURES``."""

    def register(function: _Function) -> _Function:
        FIGURES[name] = function
        return function

    return register


def register_training_figure(name: str) -> Callable[[_Function], _Function]:
    """Decorates a ``TrainingFigure``."""

    def register(function: _Function) -> _Function:
        TRAINING_FIGURES[name] = function
        return function

    return register


def write_figure(figure: Figure, folder: Path, *, suffix: str = "") -> list[Path]:
    """Writes ``<name><suffix>.json`` and ``<name>_<image><suffix>.<svg, jpg or png>``.

    Each file is written atomically. Images of an earlier figure of the same name and suffix that
    are not written again are removed.

    Args:
        figure: to write.
        folder: made where it is missing.
        suffix: such as the number of training steps.

    Returns:
        The paths, JSON first.

    Raises:
        UserError: a file cannot be written.
    """
    files = {
        f"{figure.name}_{name}{suffix}{_SUFFIXES[image.media_type]}": image.content
        for name, image in figure.images.items()
    }
    content = {
        "name": figure.name,
        "title": figure.title,
        "explanation": list(figure.explanation),
        "data": to_json(figure.data),
        "files": list(files),
    }
    if figure.table is not None:
        content["table"] = {
            "header": list(figure.table.header),
            "rows": [list(row) for row in figure.table.rows],
        }
    text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)
    about = folder / f"{figure.name}{suffix}.json"
    stale = set(_list_images(about)) - set(files)
    write_atomically(about, lambda stream: stream.write(f"{text}\n".encode()))
    _remove(folder / name for name in stale)
    for name, data in files.items():
        write_atomically(folder / name, lambda stream, data=data: stream.write(data))  # type: ignore[misc]
    return [about, *(folder / name for name in files)]


def remove_figure(name: str, folder: Path) -> None:
    """Removes the files that ``write_figure`` wrote for a figure, and no others."""
    about = folder / f"{name}.json"
    if images := _list_images(about):
        _remove([*(folder / image for image in images), about])


def to_json(value: Any) -> Any:
    """Copies nested values as strict JSON.

    Tensors and arrays become lists, complex numbers pairs of real and imaginary part, and numbers
    that are not finite null.

    Raises:
        TypeError: a value is neither a number, a string, an array nor a container of those.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, complex):
        return [to_json(value.real), to_json(value.imag)]
    if isinstance(value, Tensor):
        return to_json(value.detach().cpu().tolist())
    if isinstance(value, np.ndarray | np.generic):
        return to_json(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): to_json(element) for key, element in value.items()}
    if isinstance(value, Sequence | set | frozenset):
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
    # A file of that name may have been edited: nothing else is ever removed.
    return [name for name in names if own.fullmatch(name)]


def _remove(paths: Any) -> None:
    for path in paths:
        with contextlib.suppress(OSError):  # already gone, or not ours to remove
            path.unlink()
