# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Data sets that are registered with Detectron2: their names, and checks of their records."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.modeling import META_ARCH_REGISTRY
from detectron2.utils import comm

from qbheat_det.core.errors import UserError
from qbheat_det.data import check_image_folder, find_image_errors, find_record_errors, raise_first
from qbheat_det.evaluation import count_most_objects
from qbheat_det.modeling.contracts import ANNOTATED_CLASSES, learns_partial_labels
from qbheat_det.tasks import TASKS, Task

from .run_data import RunData
from .usable_images import get_longest_side

UNLABELLED_SET = "custom_unlabelled"
CUSTOM_SETS = (*(name for task in TASKS for name in task.set_names), UNLABELLED_SET)
"""Names of the data sets that flags give."""

BY_FLAGS = "given_by_flags"
"""Key of the metadata of sets that flags give."""


def list_registered(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the names without those of sets that only the flags of an earlier run have given.

    The user may have registered sets with the same names.
    """
    kept = []
    for name in names:
        is_of_user = name in DatasetCatalog and not MetadataCatalog.get(name).get(BY_FLAGS)
        if name not in CUSTOM_SETS or is_of_user:
            kept.append(name)
    return tuple(kept)


def check_names(data: RunData, *, eval_only: bool) -> None:
    """Checks that the data sets are registered and have files, without reading them."""
    names = data.test
    if not eval_only:
        names = (*data.train, *data.test)
    if not names or not (eval_only or data.train):
        raise UserError(f"the config names no data set: {data.task.data_flags}")
    for name in names:
        _check_name(name, data.task, is_test=name in data.test)


def _check_name(name: str, task: Task, *, is_test: bool) -> None:
    if name not in DatasetCatalog:
        raise UserError(f"there is no data set '{name}': {task.data_flags}, or register it")
    metadata = MetadataCatalog.get(name)
    is_unlabelled = metadata.get("unlabelled")
    if is_unlabelled and task.uses_boxes:
        raise UserError(f"data set '{name}' has no annotations, as a detector needs")
    if is_test and not task.uses_boxes and not is_unlabelled:
        raise UserError(
            f"DATASETS.TEST names '{name}', which has annotations, but {task.name} is evaluated on "
            f"images alone: {task.data_flags}"
        )
    advice = f"set $DETECTRON2_DATASETS, or {task.data_flags}"
    for folder in metadata.get("image_folders", ()):
        try:
            check_image_folder(folder)
        except UserError as error:
            raise UserError(f"data set '{name}': {error}; {advice}") from error
    json_file = metadata.get("json_file")
    if json_file and not os.path.isfile(json_file):
        raise UserError(f"data set '{name}' has no annotations at '{json_file}': {advice}")


def count_objects(data: RunData, names: Sequence[str]) -> int:
    """Returns the largest number of objects in an image; equal on all processes."""
    if not data.task.uses_boxes:
        return 0
    known = {data_set.name: data_set.max_objects for data_set in data.given}
    most = 0
    if comm.is_main_process():
        for name in names:
            if name not in known:
                known[name] = _count_objects_of(name)
            most = max(most, known[name])
    return comm.all_gather(most)[0]


def _count_objects_of(name: str) -> int:
    """Returns the largest number of objects in an image of a registered data set."""
    return count_most_objects(
        {**annotation, "image_id": index}
        for index, record in enumerate(DatasetCatalog.get(name))
        for annotation in record.get("annotations", ())
    )


def check_records(cfgs: Sequence[CfgNode], data: RunData, *, eval_only: bool) -> None:
    """Reads the records of a run's data sets on the main process, to find errors early.

    With ``DATASETS.CHECK_IMAGES``, also reads the image files of sets that no flag has given. (The
    others are checked when they are opened.)

    Args:
        cfgs: the configs of all stages.
        data: the data of the run.
        eval_only: nothing is trained.

    Raises:
        UserError: a record or an image is invalid.
    """
    if not comm.is_main_process():
        return
    is_detector = data.task.uses_boxes
    names = data.test
    if is_detector and not eval_only:
        names = (*data.train, *data.test)
    for name in names:
        records = DatasetCatalog.get(name)
        if not is_detector:
            continue
        if name in data.train and not eval_only:
            _check_partial_labels(cfgs, name, records, num_classes=len(data.class_names))
        for cfg in cfgs:
            is_only_training_set = data.train == (name,)  # the sets are filtered together
            filters = is_only_training_set and cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS
            errors = find_record_errors(
                name,
                records,
                num_classes=len(data.class_names),
                filter_empty=filters,
                mask_format=cfg.INPUT.MASK_FORMAT if cfg.MODEL.MASK_ON else None,
                longest=get_longest_side(cfg),
            )
            raise_first(errors)
        if cfgs[-1].DATASETS.CHECK_IMAGES and name not in CUSTOM_SETS:
            raise_first(find_image_errors(records))


def _check_partial_labels(
    cfgs: Sequence[CfgNode], name: str, records: Sequence[Mapping[str, Any]], *, num_classes: int
) -> None:
    """Refuses images that are annotated for some classes only, if a model cannot learn from them.

    Such a model would learn that the objects without labels are background.
    """
    num_partial = 0
    for record in records:
        annotated = record.get(ANNOTATED_CLASSES)
        if annotated is not None and len(set(annotated)) < num_classes:
            num_partial += 1
    if not num_partial:
        return
    for cfg in cfgs:
        architecture = cfg.MODEL.META_ARCHITECTURE
        if not learns_partial_labels(META_ARCH_REGISTRY.get(architecture)):
            raise UserError(
                f"{num_partial:,} of {len(records):,} images of '{name}' are labelled for some of "
                f"the {num_classes} classes only, from which {architecture} cannot learn: use a "
                "recipe of RetinaNet, FCOS or MF-DETR, or label all classes"
            )
