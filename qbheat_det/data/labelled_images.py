# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Two sets of labelled images, one to learn classes from and one to ask about, of one meaning."""

from collections.abc import Sequence
from typing import Any

from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.errors import UserError

_SHOWN = 5  # classes that a sentence names

Records = list[dict[str, Any]]
Labelled = tuple[Records, Sequence[str]]
"""Records with "label", and the names of the classes."""


def load_labelled_sets(train: Sequence[str], val: Sequence[str]) -> tuple[Records, Records]:
    """Loads registered sets and gives both the same labels, see ``unite_labels``.

    Args:
        train: names of sets, whose images follow one another.
        val: as ``train``.

    Raises:
        UserError: a set has no labels, or ``unite_labels`` raises.
    """
    return unite_labels(
        [_load(name) for name in train],
        [_load(name) for name in val],
        names=(" and ".join(train), " and ".join(val)),
    )


def unite_labels(
    train: Sequence[Labelled], val: Sequence[Labelled], *, names: tuple[str, str]
) -> tuple[Records, Records]:
    """Returns records with "file_name", "image_id" and "label", by the names of the classes.

    Sets that lack a class count the others differently, so a label alone means nothing.

    Args:
        train: sets to learn from.
        val: sets to ask about.
        names: of both, for the sentence.

    Raises:
        UserError: ``val`` asks about a class that ``train`` does not have.
    """
    known, asked = _named(train), _named(val)
    class_names = sorted({class_name for _, class_name in known})
    if unknown := sorted({class_name for _, class_name in asked} - set(class_names)):
        more = ", …" if len(unknown) > _SHOWN else ""
        raise UserError(
            f"'{names[1]}' has images of {len(unknown)} classes that '{names[0]}' lacks "
            f"({', '.join(unknown[:_SHOWN])}{more}): both must be folders of the same classes"
        )
    labels = {class_name: label for label, class_name in enumerate(class_names)}
    first, second = (
        [
            {"file_name": path, "image_id": i, "label": labels[class_name]}
            for i, (path, class_name) in enumerate(pairs)
        ]
        for pairs in (known, asked)
    )
    return first, second


def _load(name: str) -> Labelled:
    records = DatasetCatalog.get(name)
    class_names = MetadataCatalog.get(name).get("folder_classes")
    if not class_names or any("label" not in record for record in records):
        raise UserError(
            f"the images of dataset '{name}' have no labels: name a set of class folders, such as "
            "imagenet_train, or give folders with --knn-train-folder and --knn-val-folder"
        )
    return records, class_names


def _named(sets: Sequence[Labelled]) -> list[tuple[str, str]]:
    return [
        (record["file_name"], class_names[record["label"]])
        for records, class_names in sets
        for record in records
    ]
