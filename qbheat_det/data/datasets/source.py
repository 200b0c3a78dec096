# Copyright (c) qbheat_det contributors. Apache-2.0.
"""How to read a data set: a ``Source`` for each part, and a ``DataSource`` for both."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qbheat_det.core.files import parse_record

from .account import Account
from .annotations import Annotations
from .formats import FORMATS

CLASSES = "classes"
"""Name of the format of class folders, which has no boxes."""
IMAGES = "images"
"""Name of the format of images without labels."""
JOINED = "joined"
"""Name of the format of several data sets with boxes."""
_TITLES = {CLASSES: "class folders", IMAGES: "image folders"}


@dataclass(frozen=True)
class Source:
    """How to read a part of a data set. It is saved as JSON with each run.

    Attributes:
        format: a key of ``FORMATS``, "classes" (class folders), "images" (no labels) or "joined".
        path: file or folder of the data set, as it was given.
        part: "train", "val", or "all" if the data set has no parts.
        image_root: folder of the images of a label file; "" for the folder of the file.
        folders: folders of images, if the format is "classes" or "images".
        labelled: whether to read the boxes or classes.
        classes: names of the classes, if the label files do not list them; () for the classes of
            the boxes.
        joined: the sources of several data sets that are joined; () for one data set. ``format`` is
            then "joined", and ``classes`` has the joined classes.
        renamed: pairs of a class name in the data sets and its name in ``classes``.
        split_file: path of a ``split.json`` that lists the images to use; "" to use all images.
        split_part: the list in this file, "train" or "val".
    """

    format: str
    path: str
    part: str = "all"
    image_root: str = ""
    folders: tuple[str, ...] = ()
    labelled: bool = True
    classes: tuple[str, ...] = ()
    joined: "tuple[Source, ...]" = ()
    renamed: tuple[tuple[str, str], ...] = ()
    split_file: str = ""
    split_part: str = ""

    @property
    def title(self) -> str:
        """Name of the format for users, such as "YOLO"."""
        if self.joined:
            return " and ".join(dict.fromkeys(source.title for source in self.joined))
        if self.has_boxes:
            return FORMATS[self.format].title
        return _TITLES[self.format]

    @property
    def has_boxes(self) -> bool:
        """Whether the format has boxes."""
        return self.format in FORMATS or bool(self.joined)

    @property
    def lists_classes(self) -> bool:
        """Whether the classes are known without the boxes."""
        return bool(self.joined) or (self.has_boxes and FORMATS[self.format].lists_classes)

    @classmethod
    def join(
        cls, sources: "Sequence[Source]", classes: Sequence[str], class_map: Mapping[str, str]
    ) -> "Source":
        """Returns the source of several data sets with boxes, see ``join_annotations``."""
        return cls(
            JOINED,
            " + ".join(source.path for source in sources),
            classes=tuple(classes),
            joined=tuple(sources),
            renamed=tuple(class_map.items()),
        )

    def without_labels(self) -> "Source":
        """Returns the source of the images alone."""
        return dataclasses.replace(self, labelled=False)

    def with_classes(self, classes: Sequence[str]) -> "Source":
        """Returns the source with these classes, or itself if its label files list the classes."""
        if not classes or not self.has_boxes or self.lists_classes:
            return self
        return dataclasses.replace(self, classes=tuple(classes))

    def with_split(self, file: str, part: str) -> "Source":
        """Returns the source of the images that a ``split.json`` lists for a part."""
        return dataclasses.replace(self, split_file=file, split_part=part)

    def to_json(self) -> dict[str, Any]:
        """Returns the attributes that differ from their defaults, for ``run.json``."""
        content: dict[str, Any] = {}
        for attribute in dataclasses.fields(self):
            value = getattr(self, attribute.name)
            if value != attribute.default:
                content[attribute.name] = list(value) if isinstance(value, tuple) else value
        if self.joined:
            content["joined"] = [source.to_json() for source in self.joined]
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any], place: str) -> "Source":
        """Reads an entry of ``run.json``. Raises a ``UserError`` if it is invalid."""
        return parse_record(cls, dict(content), place)


@dataclass(frozen=True)
class DataSource:
    """An opened data set.

    Attributes:
        train: source of the training images.
        val: source of the validation images; None if the data set has no such part.
        annotations: maps the names of the parts to their images and boxes; empty if the data set
            has no boxes.
        account: what is used and what is left out of both parts; None if it is unknown.
    """

    train: Source
    val: Source | None = None
    annotations: Mapping[str, Annotations] = field(default_factory=dict, repr=False)
    account: Account | None = field(default=None, repr=False)

    @property
    def format(self) -> str:
        """A key of ``FORMATS``, "classes" or "images"."""
        return self.train.format

    @property
    def has_boxes(self) -> bool:
        """Whether the data set has boxes."""
        return self.train.has_boxes
