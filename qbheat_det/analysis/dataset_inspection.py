# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Everything that is wrong with the datasets of a config, found without stopping at the first."""

import filecmp
import hashlib
import itertools
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import load_coco_json

from qbheat_det.core.errors import UserError
from qbheat_det.data.datasets.coco import (
    CocoFile,
    check_same_classes,
    quote,
    read_coco_json,
)
from qbheat_det.data.errors import DataError
from qbheat_det.data.image_checks import find_image_errors
from qbheat_det.data.record_checks import find_object_errors, find_record_errors

from .dataset_statistics import DatasetStatistics

Role = Literal["train", "val"]

_TAIL = 4096  # bytes at the end of a file that tell nearly all pictures apart


@dataclass(frozen=True)
class DatasetSource:
    """Where a dataset comes from: an annotation file, or a name that is registered.

    Attributes:
        name: for the reader, or as it is registered with Detectron2.
        role: what the config does with it.
        json_file: annotations in COCO format, or None to load the registered dataset.
        image_root: folder of the images, with ``json_file``.
    """

    name: str
    role: Role
    json_file: str | None = None
    image_root: str | None = None


@dataclass(frozen=True)
class Inspection:
    """What was found in one dataset.

    Attributes:
        source: what was looked at.
        records: those of sound entries, as Detectron2 loads them.
        statistics: figures of ``records``.
        faults: everything that is wrong.
        warnings: what is odd but can be worked with, one sentence each.
        summary: of the annotation file, where there is one that can be read.
    """

    source: DatasetSource
    records: list[dict[str, Any]]
    statistics: DatasetStatistics
    faults: list[DataError]
    warnings: list[str] = field(default_factory=list)
    summary: CocoFile | None = None


def inspect_dataset(
    source: DatasetSource, cfg: CfgNode, *, num_threads: int = 8, progress: bool = False
) -> Inspection:
    """Looks at the annotations, the records and every image file of a dataset.

    Args:
        source: what to look at.
        cfg: ``MODEL.MASK_ON``, ``INPUT.MASK_FORMAT`` and
            ``DATALOADER.FILTER_EMPTY_ANNOTATIONS`` say what training needs.
        num_threads: how many image files are looked at side by side.
        progress: show a bar on stderr where the image files take long.

    Raises:
        UserError: there is no such dataset, annotation file or image folder.
    """
    json_file, image_root = _locate(source)
    content = None
    faults: list[DataError] = []
    if json_file is not None and image_root is not None:
        try:
            content = read_coco_json(json_file, image_root)
        except UserError as error:
            sentence = str(error).removeprefix(f"{json_file}").lstrip(": ")
            faults.append(DataError("annotation file that cannot be used", json_file, sentence))
            return _conclude(source, [], (), faults, None)
        faults += content.errors
        records = _load_sound(json_file, image_root, content)
        class_names: Sequence[str] = content.class_names
    else:
        records = DatasetCatalog.get(source.name)
        class_names = MetadataCatalog.get(source.name).get("thing_classes") or ()
        if not class_names:
            raise UserError(f"the metadata of dataset '{source.name}' has no 'thing_classes'")
    found = find_record_errors(
        source.name,
        records,
        num_classes=len(class_names),
        filter_empty=source.role == "train" and cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS,
        mask_format=cfg.INPUT.MASK_FORMAT if cfg.MODEL.MASK_ON else None,
    )
    if found:
        records = [_without_unsound_objects(record, len(class_names)) for record in records]
    if not faults:
        faults += found
    else:  # that nothing is left after the faults is none of its own
        faults += [fault for fault in found if fault.kind not in ("empty dataset", "no boxes")]
    faults += find_image_errors(records, num_threads=num_threads, progress=progress)
    return _conclude(source, records, class_names, faults, content)


def compare_datasets(inspections: Sequence[Inspection]) -> tuple[list[DataError], list[str]]:
    """Returns faults and warnings of training and evaluation sets taken together.

    Faults are classes that differ, and pictures of a training set that are in an evaluation set
    too, byte for byte and under any name. A set that is named for both is a warning.
    """
    faults: list[DataError] = []
    warnings: list[str] = []
    by_role = {role: [i for i in inspections if i.source.role == role] for role in ("train", "val")}
    for train, val in itertools.product(by_role["train"], by_role["val"]):
        names = f"'{train.source.name}' and '{val.source.name}'"
        if train.summary and val.summary:
            try:
                check_same_classes(train.summary, val.summary)
            except UserError as error:
                faults.append(DataError("classes that differ", names, str(error)))
        warnings += _compare_class_counts(train, val)
        if _is_same_data(train, val):
            warnings.append(f"{names} are the same data, so AP will not tell how it generalises")
        else:
            faults += _find_leaks(train, val)
    return faults, warnings


def _locate(source: DatasetSource) -> tuple[str | None, str | None]:
    """Returns annotation file and image folder, or twice None where only the loader knows."""
    if source.json_file is not None:
        for path, exists in (
            (source.json_file, os.path.isfile),
            (source.image_root, os.path.isdir),
        ):
            if not exists(path or ""):
                raise UserError(f"'{path}' of the {source.role} data does not exist")
        return source.json_file, source.image_root
    if source.name not in DatasetCatalog:
        raise UserError(f"there is no dataset '{source.name}'; give files, or register it before")
    metadata = MetadataCatalog.get(source.name)
    if metadata.get("evaluator_type") != "coco" or not metadata.get("json_file"):
        return None, None
    if metadata.get("drawn_on_first_use"):
        DatasetCatalog.get(source.name)
    for path, exists in (
        (metadata.json_file, os.path.isfile),
        (metadata.image_root, os.path.isdir),
    ):
        if not exists(path):
            raise UserError(
                f"dataset '{source.name}' has nothing at '{path}': set $DETECTRON2_DATASETS"
            )
    return metadata.json_file, metadata.image_root


def _load_sound(json_file: str, image_root: str, content: CocoFile) -> list[dict[str, Any]]:
    """Loads what is sound in an annotation file, by Detectron2's own loader."""
    name = f"qbheat_det inspection of {json_file}"
    parts = {
        "images": content.images,
        "annotations": content.annotations,
        "categories": content.categories,
    }
    if not all(parts[key] for key in ("images", "categories")):
        return []
    try:
        if not content.errors:
            return list(load_coco_json(json_file, image_root, name))
        with tempfile.TemporaryDirectory() as folder:
            sound = Path(folder) / "sound.json"
            sound.write_text(json.dumps(parts), encoding="utf-8")
            return list(load_coco_json(str(sound), image_root, name))
    finally:
        if name in MetadataCatalog:
            MetadataCatalog.remove(name)


def _without_unsound_objects(record: dict[str, Any], num_classes: int) -> dict[str, Any]:
    sound = [
        annotation
        for annotation in record.get("annotations", ())
        if annotation.get("iscrowd", 0)
        or next(find_object_errors(annotation, record, num_classes, None), None) is None
    ]
    return {**record, "annotations": sound}


def _conclude(
    source: DatasetSource,
    records: list[dict[str, Any]],
    class_names: Sequence[str],
    faults: list[DataError],
    content: CocoFile | None,
) -> Inspection:
    return Inspection(
        source=source,
        records=records,
        statistics=DatasetStatistics.from_records(records, class_names),
        faults=faults,
        warnings=list(content.warnings) if content else [],
        summary=content if content else None,
    )


def _is_same_data(train: Inspection, val: Inspection) -> bool:
    if train.summary and val.summary:
        return os.path.realpath(train.summary.json_file) == os.path.realpath(val.summary.json_file)
    return train.source.name == val.source.name


def _compare_class_counts(train: Inspection, val: Inspection) -> list[str]:
    """Says which classes one set has boxes of and the other has not."""
    counts = {
        one.source.name: dict(
            zip(one.statistics.class_names, one.statistics.boxes_per_class.tolist(), strict=True)
        )
        for one in (train, val)
    }
    warnings = []
    for one, other in itertools.permutations(counts):
        missing = [name for name, n in counts[one].items() if n and counts[other].get(name) == 0]
        if missing:
            warnings.append(
                f"'{other}' has no box of {quote(missing)}, of which '{one}' has "
                f"{sum(counts[one][name] for name in missing):,}"
            )
    return warnings


def _find_leaks(train: Inspection, val: Inspection) -> list[DataError]:
    """Compares files of equal size by their last bytes, and those that agree wholly."""
    files: dict[int, list[str]] = defaultdict(list)
    for record in train.records:
        files[_size(record["file_name"])].append(record["file_name"])
    tails: dict[str, bytes] = {}
    faults = []
    for record in val.records:
        path, size = record["file_name"], _size(record["file_name"])
        for other in files[size] if size > 0 else ():
            for one in (path, other):
                if one not in tails:
                    tails[one] = _tail(one)
            if tails[path] == tails[other] and filecmp.cmp(path, other, shallow=False):
                where = f"image {path!r} (image id {record['image_id']}) of '{val.source.name}'"
                reason = f"'{train.source.name}' trains on the same picture, as {other!r}"
                faults.append(DataError("picture in training and evaluation", where, reason))
                break
    return faults


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except (OSError, ValueError):
        return 0


def _tail(path: str) -> bytes:
    with open(path, "rb") as file:
        file.seek(-min(_TAIL, _size(path)), os.SEEK_END)
        return hashlib.blake2b(file.read(), digest_size=16).digest()
