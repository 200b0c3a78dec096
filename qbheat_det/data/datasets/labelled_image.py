# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The result of every reader: an image, its boxes, and what could not be read."""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from qbheat_det.core.text import one_line
from qbheat_det.data.checks import short
from qbheat_det.data.images import Size

from .account import LeftOut

MARGIN = 1.5
"""Pixels by which the rounded boxes of some tools reach beyond their image."""

XYWH = tuple[float, float, float, float]

BROKEN = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)
"""Exceptions that the content of a foreign file raises while it is read."""


class NoBoxError(ValueError):
    """A shape that cannot have a box, such as a point. To leave it out is no fault."""


class Box(NamedTuple):
    """A box and its class.

    Attributes:
        place: location in the label file, for messages.
        name: class name.
        xywh: left, top, width and height, in pixels or in shares of the image's sides.
        is_relative: whether ``xywh`` are shares of the sides.
        is_crowd: whether the box marks a region that training and evaluation ignore.
        category: index in the list of classes; None if the class is known by its name only.
        fields: other COCO fields, such as "segmentation".
    """

    place: str
    name: str
    xywh: XYWH
    is_relative: bool = False
    is_crowd: bool = False
    category: int | None = None
    fields: Mapping[str, Any] = {}


@dataclass(slots=True)
class LabelledImage:
    """An image and its boxes, or the reason why it cannot be used.

    Attributes:
        place: location of the image's entry in the label file, for messages.
        name: name, path or URL of the image in the label file; "" if ``file`` is already known.
        file: path of the image file; "" until ``name`` is located.
        label_file: path of the file that has the labels of this image only; "" if there is none.
        entry_file: path of the file that names this image among others; "" if there is none.
        size: (width, height) in pixels if the label file has them.
        boxes: boxes that could be read; empty for an image without objects.
        left_out: boxes that could not be read.
        reason: why the image is left out; None if it is used.
        id: id in a COCO file.
        fields: other COCO fields of the image.
    """

    place: str
    name: str = ""
    file: str = ""
    label_file: str = ""
    entry_file: str = ""
    size: Size | None = None
    boxes: list[Box] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    reason: LeftOut | None = None
    id: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def reading(self, place: str) -> Iterator[str]:
        """Leaves out the box at ``place`` if its content raises an exception. Yields ``place``."""
        try:
            yield place
        except NoBoxError as error:
            self.left_out.append(LeftOut("without a box", place, str(error), "box", is_fault=False))
        except BROKEN as error:
            self.leave_out_box(place, describe(error))

    def leave_out_box(self, place: str, reason: str, kind: str = "that cannot be read") -> None:
        """Leaves out the box at ``place``."""
        self.left_out.append(LeftOut(kind, place, reason, "box"))

    def leave_out(self, kind: str, reason: str, *, is_fault: bool = True) -> None:
        """Leaves out the image."""
        self.reason = LeftOut(kind, self.place, reason, "image", is_fault)

    def miss(self, reason: str) -> None:
        """Records that there is no such image file."""
        self.reason = LeftOut("that label files name", self.place, reason, "missing image")

    def add(
        self,
        place: str,
        name: object,
        points: Iterable[Iterable[Any]],
        *,
        is_relative: bool = False,
        is_box: bool = False,
        is_crowd: bool = False,
        category: int | None = None,
    ) -> None:
        """Adds an object of class ``name`` with the bounding box of points (n, 2), see ``Box``.

        With ``is_box``, the points must be the top left and the bottom right corner. Raises a
        ``ValueError`` if the points are invalid or the class is missing.
        """
        points = [list(point) for point in points]
        try:
            xs = [float(x) for x, _ in points]
            ys = [float(y) for _, y in points]
        except (TypeError, ValueError, OverflowError):
            xs = []
            ys = []
        if not xs or not all(map(math.isfinite, (*xs, *ys))):
            raise ValueError(f"its coordinates must be numbers, but are {short(points)}")
        if is_box and (xs[0] > xs[1] or ys[0] > ys[1]):
            raise ValueError(
                f"its right or bottom edge is before the left or top one: {short(points)}"
            )
        if name is None or not str(name).strip():
            raise ValueError("it has no class")
        left = min(xs)
        top = min(ys)
        xywh = (left, top, max(xs) - left, max(ys) - top)
        self.boxes.append(Box(place, str(name).strip(), xywh, is_relative, is_crowd, category))


def corners(x: float, y: float, width: float, height: float) -> list[tuple[float, float]]:
    """Returns the top left and the bottom right corner of a box."""
    return [(x, y), (x + width, y + height)]


def enclose_ellipse(
    x: float, y: float, rx: float, ry: float, degrees: float = 0.0
) -> list[tuple[float, float]]:
    """Returns the corners of the box around an ellipse, which is rotated around its centre."""
    turn = math.radians(degrees)
    half_width = math.hypot(rx * math.cos(turn), ry * math.sin(turn))
    half_height = math.hypot(rx * math.sin(turn), ry * math.cos(turn))
    return [(x - half_width, y - half_height), (x + half_width, y + half_height)]


def rotate(
    points: Iterable[tuple[float, float]], degrees: float, around: tuple[float, float]
) -> list[tuple[float, float]]:
    """Rotates points clockwise around a point (in images, y points down)."""
    turn = math.radians(degrees)
    cosine = math.cos(turn)
    sine = math.sin(turn)
    x0, y0 = around
    rotated = []
    for x, y in points:
        rotated_x = x0 + (x - x0) * cosine - (y - y0) * sine
        rotated_y = y0 + (x - x0) * sine + (y - y0) * cosine
        rotated.append((rotated_x, rotated_y))
    return rotated


def rotate_box(
    left: float,
    top: float,
    right: float,
    bottom: float,
    degrees: float,
    around: tuple[float, float],
) -> list[tuple[float, float]]:
    """Returns the four corners of a box that is rotated clockwise around a point."""
    return rotate([(left, top), (right, top), (right, bottom), (left, bottom)], degrees, around)


def describe(error: Exception) -> str:
    """Returns the reason in an exception that the content of a file raised."""
    if isinstance(error, KeyError):
        return f"it has no {error}"
    if isinstance(error, IndexError | TypeError | AttributeError):
        return f"its content is incomplete or of a wrong type ({one_line(error)})"
    return one_line(error)
