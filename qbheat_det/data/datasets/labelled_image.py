# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The result of every reader: an image, its boxes, and what could not be read."""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from qbheat_det.core.errors import UserError
from qbheat_det.core.image_files import Size
from qbheat_det.core.text import one_line
from qbheat_det.data.checks import short

from .account import LeftOut

MARGIN = 1.5
"""Pixels by which the rounded boxes of some tools reach beyond their image."""

XYWH = tuple[float, float, float, float]


class NoBoxError(ValueError):
    """A shape without a bounding box, such as a point. It is left out, which is no fault."""


class Box(NamedTuple):
    """A labelled box.

    Attributes:
        location: file and line or entry of the box, for messages.
        class_name: name of its class.
        xywh: left edge, top edge, width and height, in pixels or in fractions of the image's sides.
        is_relative: whether ``xywh`` are fractions of the image's sides.
        is_crowd: whether the box marks a region that training and evaluation ignore.
        class_index: index in the list of classes; None if the label file only names the class.
        fields: the annotation's other COCO fields, such as "segmentation".
    """

    location: str
    class_name: str
    xywh: XYWH
    is_relative: bool = False
    is_crowd: bool = False
    class_index: int | None = None
    fields: Mapping[str, Any] = {}


@dataclass(slots=True)
class LabelledImage:
    """An image and its boxes, or the reason why it cannot be used.

    Attributes:
        location: file and line or entry that names the image, for messages.
        name: name, path or URL of the image in the label file; "" if ``file`` is already known.
        file: path of the image file; "" until ``name`` is located.
        label_file: path of the file with the labels of only this image; "" if there is none.
        entry_file: path of the file that lists this and other images; "" if there is none.
        size: (width, height) in pixels if the label file has them.
        boxes: boxes that could be read; empty for an image without objects.
        left_out_boxes: boxes that could not be read, with the reasons.
        exclusion: why the image is left out; None if it is used.
        id: id in a COCO file.
        fields: the image's other COCO fields.
    """

    location: str
    name: str = ""
    file: str = ""
    label_file: str = ""
    entry_file: str = ""
    size: Size | None = None
    boxes: list[Box] = field(default_factory=list)
    left_out_boxes: list[LeftOut] = field(default_factory=list)
    exclusion: LeftOut | None = None
    id: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def skip_invalid_box(self, location: str) -> Iterator[str]:
        """Context for reading a box: if the box is invalid, it is left out, and reading goes on.

        All exceptions but a ``UserError`` are caught. They add the box at ``location`` to
        ``left_out_boxes``, with the exception's message as the reason. Yields ``location``.
        """
        try:
            yield location
        except NoBoxError as error:
            self.left_out_boxes.append(
                LeftOut(
                    kind="without a box",
                    where=location,
                    reason=str(error),
                    item="box",
                    is_fault=False,
                )
            )
        except UserError:
            raise
        except Exception as error:
            self.leave_out_box(location, describe(error))

    def leave_out_box(self, location: str, reason: str, kind: str = "that cannot be read") -> None:
        """Adds the box at ``location`` to ``left_out_boxes``."""
        self.left_out_boxes.append(LeftOut(kind=kind, where=location, reason=reason, item="box"))

    def leave_out(self, kind: str, reason: str, *, is_fault: bool = True) -> None:
        """Sets ``exclusion``, so that the image is not used."""
        self.exclusion = LeftOut(
            kind=kind, where=self.location, reason=reason, item="image", is_fault=is_fault
        )

    def mark_missing(self, reason: str) -> None:
        """Sets ``exclusion`` to say that the image file does not exist."""
        self.exclusion = LeftOut(
            kind="that label files name", where=self.location, reason=reason, item="missing image"
        )

    def add_box(
        self,
        location: str,
        class_name: object,
        points: Iterable[Iterable[Any]],
        *,
        is_relative: bool = False,
        is_box: bool = False,
        is_crowd: bool = False,
        class_index: int | None = None,
    ) -> None:
        """Appends the bounding box of points to ``boxes``.

        Args:
            location: file and line or entry of the box, for messages.
            class_name: name of the class, which is converted to a string.
            points: (x, y) of one point or more, as numbers or texts.
            is_relative: whether the points are in fractions of the image's sides, not in pixels.
            is_box: whether the points are the top left and the bottom right corner of a box.
            is_crowd: whether training and evaluation ignore the box.
            class_index: index in the list of classes, if the label file has it.

        Raises:
            ValueError: a coordinate is no finite number, the corners of a box are swapped, or the
                class is missing.
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
        if class_name is None or not str(class_name).strip():
            raise ValueError("it has no class")
        left = min(xs)
        top = min(ys)
        xywh = (left, top, max(xs) - left, max(ys) - top)
        self.boxes.append(
            Box(
                location=location,
                class_name=str(class_name).strip(),
                xywh=xywh,
                is_relative=is_relative,
                is_crowd=is_crowd,
                class_index=class_index,
            )
        )


def corners(x: float, y: float, width: float, height: float) -> list[tuple[float, float]]:
    """Returns the top left and the bottom right corner of a box."""
    return [(x, y), (x + width, y + height)]


def enclose_ellipse(
    x: float, y: float, rx: float, ry: float, degrees: float = 0.0
) -> list[tuple[float, float]]:
    """Returns the top left and the bottom right corner of the bounding box of an ellipse.

    (x, y) is the centre of the ellipse, and ``rx`` and ``ry`` are its half axes. The ellipse is
    rotated around its centre.
    """
    turn = math.radians(degrees)
    half_width = math.hypot(rx * math.cos(turn), ry * math.sin(turn))
    half_height = math.hypot(rx * math.sin(turn), ry * math.cos(turn))
    return [(x - half_width, y - half_height), (x + half_width, y + half_height)]


def rotate(
    points: Iterable[tuple[float, float]], degrees: float, around: tuple[float, float]
) -> list[tuple[float, float]]:
    """Rotates points (x, y) clockwise around the point ``around``. The y-axis points down."""
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
    """Rotates a box clockwise around the point ``around``, and returns its four corners (x, y)."""
    return rotate([(left, top), (right, top), (right, bottom), (left, bottom)], degrees, around)


def describe(error: Exception) -> str:
    """Converts an exception in reading a label file to a reason that users understand."""
    if isinstance(error, KeyError):
        return f"it has no {error}"
    if isinstance(error, IndexError | TypeError | AttributeError):
        return f"its content is incomplete or of a wrong type ({one_line(error)})"
    return one_line(error)
