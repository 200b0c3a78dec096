# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Prepares the data sets of a run: the step between what the flags name and a ``RunData``.

``open_sources`` (``opened_sources.py``) opens what the flags name. Read ``prepare_data`` from top
to bottom. It leaves out what cannot be used (``usable_images.py``), joins several data sets, holds
out validation images (``held_out.py``), and registers the sets with Detectron2, which reads them by
their names.
"""

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.checkpoint import class_names_of
from qbheat_det.core.errors import UserError
from qbheat_det.data import (
    SeenImages,
    check_same_classes,
    count_annotated,
    list_classes,
    load_classes,
    open_images,
    register_source,
)
from qbheat_det.evaluation import count_most_objects
from qbheat_det.tasks import Task, find_task, find_task_of_data

from .held_out import hold_out
from .opened_sources import OpenedSource, Role, Sources, find_unvalidated, join_roles
from .registered_sets import BY_FLAGS, UNLABELLED_SET, check_names, count_objects, list_registered
from .run_data import DataSet, Draft, RunData, Split
from .run_flags import RunFlags
from .seen_images import compare_images, read_seen, warn_of_replaced_images
from .usable_images import leave_out_of_sources


def prepare_data(flags: RunFlags, sources: Sources, drafts: Sequence[Draft]) -> RunData:
    """Checks and registers the data sets of a run.

    Args:
        flags: flags of the run.
        sources: what the flags name, see ``open_sources``.
        drafts: the stages. The first one has the weights from which the run starts, and decides
            about faults and held-out images. The last one names the sets that no flag gives.

    Raises:
        UserError: the data do not fit the task, classes differ, or too many images or boxes have
            faults (``DATASETS.MAX_LEFT_OUT``).
    """
    first = drafts[0]
    last = drafts[-1]
    task = find_task(last.cfg)
    _check_task(flags, sources, task)
    seen = SeenImages()
    if task.uses_labels:
        seen = read_seen(first.cfg)
    unvalidated = find_unvalidated(flags, sources)
    chosen = _choose_roles(flags, sources, unvalidated)
    used = _choose_images(flags, chosen, drafts, task)
    used, split = hold_out(flags, sources, used, unvalidated, drafts, seen)

    given: dict[Role, DataSet] = {}
    for role, opened in used.items():
        given[role] = _register(opened, task.set_names[role == "val"], split)
    _check_classes(first.cfg, flags, used, given, task)
    unlabelled = list_registered(last.cfg.DATASETS.UNLABELLED)
    if flags.unlabelled_folders:
        register_source(UNLABELLED_SET, open_images(flags.unlabelled_folders).train)
        unlabelled = (UNLABELLED_SET,)
    train, test = _choose_names(last.cfg, flags, given)
    data = RunData(
        task,
        train=train,
        test=test,
        unlabelled=unlabelled,
        given=tuple(given.values()),
        split=None if flags.eval_only else split,
    )
    check_names(data, eval_only=flags.eval_only)
    if not task.uses_labels:
        return data

    names, ids = _find_classes(last, data, eval_only=flags.eval_only)
    seen_after, shared = compare_images(given, seen, first.cfg.MODEL.WEIGHTS)
    if seen_after and first.start.continues:
        warn_of_replaced_images(SeenImages.read(first.start.folder), seen_after)
    return replace(
        data,
        class_names=names,
        category_ids=ids,
        max_objects_train=0 if flags.eval_only else count_objects(data, data.train),
        max_objects_test=count_objects(data, data.test),
        seen=None if flags.eval_only else seen_after,
        shared=shared,
    )


def _check_task(flags: RunFlags, sources: Sources, task: Task) -> None:
    """Checks that the data that the flags name are for a task."""
    given = {os.path.abspath(path): path for path in (*flags.data_sets, *flags.val_sets)}
    for opened in itertools.chain.from_iterable(sources.values()):
        if not task.fits(opened.source):
            path = given.get(opened.source.path, opened.source.path)
            kind = find_task_of_data(opened.source).learns_from
            raise UserError(f"'{path}' has {kind}, but {task.learns_from} are needed here")


def _choose_roles(
    flags: RunFlags, sources: Sources, unvalidated: Sequence[OpenedSource]
) -> dict[Role, Sequence[OpenedSource]]:
    """Returns the sources that a run uses. An evaluation uses all of them as validation data.

    ``unvalidated`` are the training sets without a validation part, of which an evaluation uses the
    training part.
    """
    used = dict(sources)
    if "DATASETS.TEST" in flags.overrides:
        used.pop("val", None)
    if not flags.eval_only:
        return used
    evaluated = [*used.get("val", ()), *unvalidated] or used.get("train", ())
    return {"val": evaluated} if evaluated else {}


def _choose_images(
    flags: RunFlags, sources: Sources, drafts: Sequence[Draft], task: Task
) -> dict[Role, OpenedSource]:
    """Returns one source for each role, with the images that can be used and the run's classes."""
    cfg = drafts[0].cfg
    if task.uses_boxes and _needs_joining(cfg, flags, sources):
        return _join_roles(flags, sources, drafts)
    used = {role: opened for role, (opened,) in sources.items()}
    if not task.uses_labels:
        used = {role: opened.without_labels() for role, opened in used.items()}
    elif task.uses_boxes:
        used = _choose_classes(cfg, flags, used)
    leave_out_of_sources(list(used.values()), drafts)
    return used


def _needs_joining(cfg: CfgNode, flags: RunFlags, sources: Sources) -> bool:
    """Returns whether images may have some of the model's classes annotated only.

    This is so for several data sets, for one with other names of classes, for ``--keep-classes``,
    and for the evaluation of a model on data with some of its classes. Joining also brings the
    classes into the model's order: after ``--keep-classes``, few data sets have this order.
    """
    if flags.keep_classes or flags.class_map or any(len(opened) > 1 for opened in sources.values()):
        return True
    if not flags.eval_only or "val" not in sources:
        return False
    (opened,) = sources["val"]
    of_weights = _find_classes_of_weights(cfg, flags)
    is_part = set(opened.class_names) <= set(of_weights)
    is_other = tuple(opened.class_names) != of_weights
    return is_part and is_other and opened.source.lists_classes


def _find_classes_of_weights(cfg: CfgNode, flags: RunFlags) -> tuple[str, ...]:
    """Returns the classes of ``MODEL.WEIGHTS`` in an evaluation; () if they are unknown."""
    if flags.eval_only and not flags.resume and cfg.MODEL.WEIGHTS:
        return class_names_of(cfg.MODEL.WEIGHTS)
    return ()


def _join_roles(
    flags: RunFlags, sources: Sources, drafts: Sequence[Draft]
) -> dict[Role, OpenedSource]:
    """Joins the sources of each role to one, see ``join_roles``.

    Images that cannot be used are left out first, so that no data set has too many of them.
    """
    leave_out_of_sources(list(itertools.chain.from_iterable(sources.values())), drafts)
    cfg = drafts[0].cfg
    return join_roles(
        flags,
        sources,
        _find_classes_of_weights(cfg, flags),
        kept=drafts[-1].kept_classes,
    )


def _choose_classes(
    cfg: CfgNode, flags: RunFlags, sources: dict[Role, OpenedSource]
) -> dict[Role, OpenedSource]:
    """Sets the classes of sources whose label files do not list them.

    In evaluation, these are the classes of the weights. In training, both sets have the classes of
    the training set, or those of the validation set if they include all of the training set.
    """
    classes: Sequence[str] = _find_classes_of_weights(cfg, flags)
    if not classes and len(sources) == 2:
        of_train = sources["train"].class_names
        of_val = sources["val"].class_names
        classes = of_train
        if set(of_train) <= set(of_val):
            classes = of_val
    return {role: opened.with_classes(classes) for role, opened in sources.items()}


def _register(opened: OpenedSource, name: str, split: Split | None) -> DataSet:
    """Registers a source, or its part of a split, as a data set."""
    source = opened.source
    keep = None
    if split is not None and source.split_part:
        keep = frozenset(split[source.split_part])
        if opened.annotations is not None:
            keep = opened.annotations.find_names(keep)
    register_source(name, source, annotations=opened.annotations, keep=keep)
    num_images = opened.account.used["image"]
    paths: list[str] = []
    broken: Sequence[str] = ()
    max_objects = 0
    num_annotated: dict[str, int] = {}
    if opened.annotations is not None:
        lists = opened.annotations.keep(keep)
        root = opened.annotations.image_root
        paths = [os.path.join(root, image["file_name"]) for image in lists["images"]]
        num_images = len(paths)
        broken = opened.annotations.broken
        max_objects = count_most_objects(lists["annotations"])
        if source.labelled:
            num_annotated = count_annotated(lists)
    elif source.labelled:
        paths = [record["file_name"] for record in DatasetCatalog.get(name)]
        num_images = len(paths)
    metadata = MetadataCatalog.get(name)
    metadata.set(**{BY_FLAGS: True})
    return DataSet(
        name,
        source,
        opened.accounts,
        num_images,
        paths,
        broken,
        max_objects,
        num_annotated,
        load=DatasetCatalog[name],
        metadata=dict(metadata.as_dict()),
    )


def _check_classes(
    cfg: CfgNode,
    flags: RunFlags,
    sources: Mapping[Role, OpenedSource],
    given: Mapping[Role, DataSet],
    task: Task,
) -> None:
    """Checks that both sets have the same classes, and that there are two class folders."""
    annotations = [opened.annotations for opened in sources.values() if opened.annotations]
    if task.uses_boxes and len(annotations) == 2:
        check_same_classes(*annotations)
    if task.uses_class_folders:
        for data_set in given.values():
            for account in data_set.accounts.values():
                account.check(cfg.DATASETS.MAX_LEFT_OUT)
        if "train" in given:
            names = list_classes([given["train"].name])
            if len(names) < 2:
                raise UserError(f"'{flags.data_sets[0]}' has images of one class, '{names[0]}'")


def _choose_names(
    cfg: CfgNode, flags: RunFlags, given: Mapping[Role, DataSet]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the names of the training sets and of the test sets."""
    train = list_registered(cfg.DATASETS.TRAIN)
    test = list_registered(cfg.DATASETS.TEST)
    if "train" in given:
        train = (given["train"].name,)
        if "DATASETS.TEST" not in flags.overrides:
            test = ()  # a recipe's test sets do not fit custom training images
    if "val" in given:
        test = (given["val"].name,)
    return train, test


def _find_classes(
    draft: Draft, data: RunData, *, eval_only: bool
) -> tuple[Sequence[str], Sequence[int]]:
    """Returns the names of the classes, and their ids in the annotations."""
    if data.task.uses_class_folders:
        names = _find_folder_classes(draft, data, eval_only=eval_only)
        return names, range(len(names))
    name = data.test[0] if eval_only else data.train[0]
    metadata = MetadataCatalog.get(name)
    if not metadata.get("thing_classes"):
        DatasetCatalog.get(name)  # Detectron2 reads the names from the COCO file
    names = metadata.get("thing_classes")
    if not names:
        raise UserError(f"the metadata of data set '{name}' has no 'thing_classes'")
    indices = metadata.get("thing_dataset_id_to_contiguous_id") or {}
    ids = sorted(indices, key=indices.__getitem__) or range(len(names))
    return names, ids


def _find_folder_classes(draft: Draft, data: RunData, *, eval_only: bool) -> list[str]:
    """Returns the class names of class folders, and checks that all test sets have them.

    Training uses the classes of the training images. Evaluation uses the classes that the weights
    record, or else those of the config, or else those of the test images.
    """
    names: list[str] = []
    if eval_only:
        weights = draft.cfg.MODEL.WEIGHTS
        if draft.start.continues:
            weights = str(draft.start.folder / draft.start.checkpoint)
        names = list(draft.cfg.MODEL.CLASS_NAMES)
        if weights:
            names = list(class_names_of(weights)) or names
    if not names:
        names = list_classes(data.test if eval_only else data.train)
    for name in data.test:
        load_classes([name], names)
    return names
