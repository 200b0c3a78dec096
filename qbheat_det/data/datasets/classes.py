# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Labels of several sets of class folders, brought to one numbering by the names of the classes.

Sets that lack a class number the others differently, so a label alone means nothing.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import join_first

Records = list[dict[str, Any]]
Labelled = tuple[Records, Sequence[str]]
"""Records with "label", and the names of the classes."""

_SHOWN = 5  # classes that a message names


def list_classes(sets: Sequence[str]) -> list[str]:
    """Returns the sorted names of all classes that registered sets have images of.

    Raises:
        UserError: a set has no labels, or cannot be listed.
    """
    return sorted({class_name for _, class_name in _pair(map(_load, sets))})


def load_classes(sets: Sequence[str], class_names: Sequence[str]) -> Records:
    """Returns the records of registered sets, one after another, with "label" as in a list.

    Args:
        sets: names of sets; "image_id" is the number of an image among all of them.
        class_names: of label 0, 1, 2, …

    Raises:
        UserError: a set has no labels, or images of a class that is not in the list.
    """
    return _label(_pair(map(_load, sets)), class_names, " and ".join(sets), "the classifier")


def load_labelled_sets(train: Sequence[str], val: Sequence[str]) -> tuple[Records, Records]:
    """Loads registered sets and gives both the same labels, see ``unite_labels``.

    Args:
        train: names of sets, whose images follow one another.
        val: as ``train``.

    Raises:
        UserError: a set has no labels, or ``unite_labels`` raises.
    """
    names = " and ".join(train), " and ".join(val)
    return unite_labels([*map(_load, train)], [*map(_load, val)], names=names)


def unite_labels(
    train: Sequence[Labelled], val: Sequence[Labelled], *, names: tuple[str, str]
) -> tuple[Records, Records]:
    """Returns records with "file_name", "image_id" and "label", by the names of the classes.

    Args:
        train: sets to learn from.
        val: sets to classify.
        names: of both, for the message.

    Raises:
        UserError: ``val`` has a class that ``train`` does not have, or there is one class.
    """
    known = _pair(train)
    class_names = sorted({class_name for _, class_name in known})
    if len(class_names) < 2:
        raise UserError(
            f"'{names[0]}' holds images of one class alone, '{class_names[0]}', so that every "
            "answer is right: the folders right below it are the classes"
        )
    knower = f"'{names[0]}'"
    return _label(known, class_names, names[0], knower), _label(
        _pair(val), class_names, names[1], knower
    )


def _label(
    pairs: Sequence[tuple[str, str]], class_names: Sequence[str], name: str, knower: str
) -> Records:
    labels = {class_name: label for label, class_name in enumerate(class_names)}
    if unknown := sorted({class_name for _, class_name in pairs} - labels.keys()):
        raise UserError(
            f"'{name}' has images of {len(unknown)} classes that {knower} does not know "
            f"({join_first(unknown, _SHOWN)}): it knows the {len(labels)} classes "
            f"{join_first(class_names, _SHOWN)}"
        )
    return [
        {"file_name": path, "image_id": i, "label": labels[class_name]}
        for i, (path, class_name) in enumerate(pairs)
    ]


def _load(name: str) -> Labelled:
    records = DatasetCatalog.get(name)
    class_names = MetadataCatalog.get(name).get("folder_classes")
    if not class_names or any("label" not in record for record in records):
        raise UserError(
            f"the images of dataset '{name}' have no labels: name a set of class folders, such as "
            "imagenet_train, or give class folders of your own (to train and evaluate a classifier "
            "--train-folder and --val-folder, for nearest neighbours --knn-train-folder and "
            "--knn-val-folder)"
        )
    return records, class_names


def _pair(sets: Iterable[Labelled]) -> list[tuple[str, str]]:
    return [
        (record["file_name"], class_names[record["label"]])
        for records, class_names in sets
        for record in records
    ]
