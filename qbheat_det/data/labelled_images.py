# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Sets of labelled images whose labels mean the same, as the names of their classes say."""

from collections.abc import Mapping, Sequence
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.core.errors import UserError

from .image_batches import ImageBatches
from .mappers import build_mapper

_SHOWN = 5  # classes that a sentence names

Records = list[dict[str, Any]]
Labelled = tuple[Records, Sequence[str]]
"""Records with "label", and the names of the classes."""


def list_classes(sets: Sequence[str]) -> list[str]:
    """Returns the names of all classes that registered sets have images of, in their order.

    Raises:
        UserError: a set has no labels, or cannot be listed.
    """
    return sorted({class_name for name in sets for _, class_name in _named([_load(name)])})


def load_classes(sets: Sequence[str], class_names: Sequence[str]) -> Records:
    """Returns the records of registered sets, one after another, "label" counting in a list.

    Args:
        sets: names of sets; "image_id" is the number of an image among all of them.
        class_names: what labels stand for.

    Raises:
        UserError: a set has no labels, or images of a class that is not in the list.
    """
    pairs = _named([_load(name) for name in sets])
    labels = {class_name: label for label, class_name in enumerate(class_names)}
    if unknown := sorted({class_name for _, class_name in pairs} - labels.keys()):
        raise UserError(
            f"'{' and '.join(sets)}' has images of {len(unknown)} classes that the classifier does "
            f"not know ({_shown(unknown)}): it knows the {len(labels)} classes "
            f"{_shown(list(class_names))}"
        )
    return _label(pairs, labels)


def build_class_batches(cfg: CfgNode, dataset_name: str) -> ImageBatches:
    """Builds the batches of a registered set, labelled as ``MODEL.CLASS_NAMES`` says.

    Raises:
        UserError: see ``load_classes``.
    """
    return ImageBatches(
        load_classes([dataset_name], cfg.MODEL.CLASS_NAMES),
        mapper=build_mapper(cfg, is_train=False),
        num_workers=cfg.DATALOADER.NUM_WORKERS,
    )


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
        UserError: ``val`` asks about a class that ``train`` does not have, or there is one class.
    """
    known, asked = _named(train), _named(val)
    class_names = sorted({class_name for _, class_name in known})
    if unknown := sorted({class_name for _, class_name in asked} - set(class_names)):
        raise UserError(
            f"'{names[1]}' has images of {len(unknown)} classes that '{names[0]}' lacks "
            f"({_shown(unknown)}): both must be folders of the same classes"
        )
    if len(class_names) < 2:
        raise UserError(
            f"'{names[0]}' holds images of one class alone, '{class_names[0]}', so that every "
            "answer is right: the folders right below it are the classes"
        )
    labels = {class_name: label for label, class_name in enumerate(class_names)}
    return _label(known, labels), _label(asked, labels)


def _label(pairs: Sequence[tuple[str, str]], labels: Mapping[str, int]) -> Records:
    return [
        {"file_name": path, "image_id": i, "label": labels[class_name]}
        for i, (path, class_name) in enumerate(pairs)
    ]


def _shown(names: Sequence[str]) -> str:
    return ", ".join([*names[:_SHOWN], *(["…"] if len(names) > _SHOWN else [])])


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


def _named(sets: Sequence[Labelled]) -> list[tuple[str, str]]:
    return [
        (record["file_name"], class_names[record["label"]])
        for records, class_names in sets
        for record in records
    ]
