# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Checks the flags that name data, opens their data sets, and joins several of them to one."""

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from qbheat_det.core.errors import UserError
from qbheat_det.data import (
    Account,
    Annotations,
    DataSource,
    Source,
    check_class_map,
    fingerprint_images,
    join_annotations,
    join_class_names,
    note_spellings,
    open_images,
    open_source,
    read_annotations,
)
from qbheat_det.tasks import Task

from .old_detector import check_new_classes
from .run_flags import RunFlags, spell

Role = Literal["train", "val"]

# Flags that set the names of data sets.
_KEYS = {
    "data": "DATASETS.TRAIN",
    "images": "DATASETS.TRAIN",
    "val": "DATASETS.TEST",
    "val_images": "DATASETS.TEST",
    "unlabelled": "DATASETS.UNLABELLED",
}


@dataclass(frozen=True)
class OpenedSource:
    """A source that flags name, with its content.

    Attributes:
        source: the source.
        annotations: its images and boxes; None if the source has no boxes.
        account: what is used and what is left out of the whole data set. If several are joined, it
            is empty.
        members: the sources that are joined; () for one data set.
    """

    source: Source
    annotations: Annotations | None
    account: Account
    members: "tuple[OpenedSource, ...]" = ()

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes of the annotations."""
        return self.annotations.class_names if self.annotations else ()

    @property
    def accounts(self) -> dict[str, Account]:
        """The account of each data set by its path."""
        return {opened.source.path: opened.account for opened in self.members or (self,)}

    def list_paths(self) -> list[str]:
        """Returns the paths of the images of a source with boxes."""
        assert self.annotations
        root = self.annotations.image_root
        return [os.path.join(root, image["file_name"]) for image in self.annotations.images]

    def without_labels(self) -> "OpenedSource":
        """Returns the images alone."""
        return replace(self, source=self.source.without_labels())

    def with_classes(self, classes: Sequence[str]) -> "OpenedSource":
        """Returns the source with its classes set, if its label files do not list them."""
        source = self.source.with_classes(classes)
        if source == self.source or self.class_names == tuple(classes):
            return self
        annotations = read_annotations(source)
        return OpenedSource(source, annotations, annotations.account)

    def with_split(self, file: Path, part: str) -> "OpenedSource":
        """Returns the images that a ``split.json`` lists for a part."""
        return replace(self, source=self.source.with_split(str(file), part))


Sources = Mapping[Role, Sequence[OpenedSource]]
"""The sources of each role."""


def check_flags(flags: RunFlags, task: Task) -> None:
    """Checks that the flags that name data fit together, the overrides and the task.

    Raises:
        UserError: two flags name the same data, or a flag is not for the task.
    """
    for flag, key in _KEYS.items():
        if getattr(flags, flag) and key in flags.opts[::2]:
            raise UserError(f"{key} and {spell(flag)} both name data: choose one")
    _check_folders(flags)
    has_several = len(flags.data_sets) > 1 or len(flags.val_sets) > 1
    if (has_several or flags.class_map) and not task.uses_boxes:
        raise UserError("several --data, several --val and --class-map are for detectors")
    if flags.class_map and not (flags.data or flags.val):
        raise UserError("--class-map renames the classes of --data or --val: name one of them")
    if flags.unlabelled_folders and (flags.eval_only or not task.uses_boxes):
        raise UserError("--unlabelled is for the training of detectors: leave it out")
    if not task.uses_labels:
        return
    names_training_set = flags.data or flags.images or "DATASETS.TRAIN" in flags.overrides
    if (flags.val or flags.val_images) and not (names_training_set or flags.eval_only):
        raise UserError("--val alone evaluates: add --eval-only, or --data to train")
    if flags.images and not flags.data:
        raise UserError(f"--images needs --data, which has {task.learns_from}")
    if flags.val_images and not flags.val:
        raise UserError(f"--val-images needs --val, which has {task.learns_from}")


def _check_folders(flags: RunFlags) -> None:
    """Checks that it is clear which --images and --val-images belong to which data set.

    Raises:
        UserError: a data set is named twice, or there are fewer or more folders than data sets.
    """
    for name, paths, folders in (
        ("data", flags.data_sets, flags.image_folders),
        ("val", flags.val_sets, flags.val_image_folders),
    ):
        flag = spell(name)
        images = "--images" if name == "data" else "--val-images"
        absolute = [os.path.abspath(path) for path in paths]
        for path in paths:
            if absolute.count(os.path.abspath(path)) > 1:
                raise UserError(f"{flag} names '{path}' twice")
        if len(paths) == 1 and len(folders) > 1:
            raise UserError(f"{images} of {flag} is one folder, not {len(folders)}")
        if len(paths) > 1 and folders and len(folders) != len(paths):
            raise UserError(
                f"there are {len(paths)} {flag}, but {len(folders)} {images}: name one folder for "
                f'each {flag}, in the same order, or "" for images near the labels'
            )


def open_sources(flags: RunFlags) -> dict[Role, tuple[OpenedSource, ...]]:
    """Opens the data that flags name, and reads their annotations.

    "train" has the training parts of --data or --images. "val" has --val or --val-images (their
    validation parts if they have some), or else the validation parts of --data.

    Raises:
        UserError: a path has no data, or images are missing.
    """
    _check_folders(flags)
    paths = flags.data_sets
    val_paths = flags.val_sets
    folders = flags.image_folders
    data = _open(paths, folders, likely=())
    if val_paths and val_paths == paths and not flags.val_image_folders:
        val = data
    else:
        is_clear = len(paths) <= 1 or len(paths) == len(val_paths)
        val = _open(val_paths, flags.val_image_folders, likely=folders if is_clear else ())
    sources: dict[Role, tuple[OpenedSource, ...]] = {}
    if data:
        sources["train"] = tuple(_take(one, one.train) for one in data)
    if val:
        sources["val"] = tuple(_take(one, one.val or one.train) for one in val)
    else:
        own = tuple(_take(one, one.val) for one in data if one.val)
        if own:
            sources["val"] = own
    return sources


def _open(
    paths: Sequence[str], folders: Sequence[str], *, likely: Sequence[str]
) -> list[DataSource]:
    """Opens data sets.

    Args:
        paths: their paths; empty for images without labels.
        folders: the folder of images of each data set; empty if none is known.
        likely: folders in which the images are looked up first: that of each data set, one for all
            of them, or none.
    """
    if not paths:
        return [open_images(folders)] if folders else []
    opened = []
    for number, path in enumerate(paths):
        root = folders[number] if folders else ""
        likely_root = ""
        if likely:
            likely_root = likely[number] if len(likely) == len(paths) else likely[0]
        opened.append(open_source(path, root, likely_root=likely_root))
    return opened


def _take(data: DataSource, source: Source) -> OpenedSource:
    return OpenedSource(source, data.annotations.get(source.part), data.account or Account())


def find_unvalidated(flags: RunFlags, sources: Sources) -> tuple[OpenedSource, ...]:
    """Returns the training sets without a validation part, if no flag names validation data."""
    if flags.val or flags.val_images:
        return ()
    validated = {opened.source.path for opened in sources.get("val", ())}
    return tuple(
        opened for opened in sources.get("train", ()) if opened.source.path not in validated
    )


def find_images_of_both_parts(flags: RunFlags, sources: Sources) -> dict[str, frozenset[str]]:
    """Returns the training images that are validation images too, if there are several data sets.

    They are used for validation only, as those of one data set are. Images are compared by the
    content of their files, because copies of an image may have other names in other data sets. A
    note in the account of each data set tells their number. Validation images that a flag names
    are not compared.

    Returns:
        The paths of these images, by the path of their data set.
    """
    is_own_val = not (flags.val or flags.val_images)
    if not is_own_val or len(flags.data_sets) < 2 or "val" not in sources:
        return {}
    val_paths = [path for opened in sources["val"] for path in opened.list_paths()]
    val_prints = frozenset(fingerprint_images(val_paths).values())
    in_both: dict[str, frozenset[str]] = {}
    for opened in sources["train"]:
        prints = fingerprint_images(opened.list_paths())
        paths = frozenset(path for path, print_ in prints.items() if print_ in val_prints)
        if paths:
            in_both[opened.source.path] = paths
            note = (
                f"{len(paths):,} training images of '{opened.source.path}' are validation images "
                "of a data set too, and are used for validation only"
            )
            _add_notes(opened.account, [note])
    return in_both


def join_roles(
    flags: RunFlags,
    sources: Sources,
    of_weights: Sequence[str] = (),
    *,
    kept: Sequence[str] = (),
) -> dict[Role, OpenedSource]:
    """Joins the sources of each role to one. All roles get the same classes.

    These are the classes of the training sets in the order of their first appearance; without
    training sets, those of all sets. If ``of_weights`` has all of them, it is used instead. The
    classes ``kept``, of ``--keep-classes``, come first.

    Raises:
        UserError: the class map does not fit the data, or validation data have another class.
    """
    members = list(itertools.chain.from_iterable(sources.values()))
    class_map = flags.read_class_map()
    every_name = dict.fromkeys(name for opened in members for name in opened.class_names)
    check_class_map(class_map, list(every_name), "--class-map")
    training_sets = sources.get("train", members)
    names_of_sets = [opened.class_names for opened in training_sets]
    class_names = join_class_names(names_of_sets, class_map)
    origin = " + ".join(opened.source.path for opened in training_sets)
    if kept:
        check_new_classes(kept, class_names)
        class_names = list(dict.fromkeys([*kept, *class_names]))
        origin = f"{origin}, with the kept classes"
    _add_notes(members[0].account, note_spellings(class_names, origin))
    if set(class_names) <= set(of_weights):
        class_names = list(of_weights)
    return {role: join_sources(opened, class_names, class_map) for role, opened in sources.items()}


def join_sources(
    members: Sequence[OpenedSource], class_names: Sequence[str], class_map: Mapping[str, str]
) -> OpenedSource:
    """Joins opened sources with boxes to one, see ``join_annotations``.

    Boxes that are not used because another data set has the same image are added to the accounts.
    """
    annotations, dropped = join_annotations(
        [member.annotations for member in members if member.annotations], class_names, class_map
    )
    known = {id(account): set(account.left_out) for account, _ in dropped}
    for account, box in dropped:
        if box not in known[id(account)]:  # both roles may have the same images
            known[id(account)].add(box)
            account.used["box"] -= 1
            account.left_out.append(box)
    _add_notes(members[0].account, annotations.account.notes)
    source = Source.join([member.source for member in members], class_names, class_map)
    return OpenedSource(source, annotations, annotations.account, tuple(members))


def _add_notes(account: Account, notes: Sequence[str]) -> None:
    """Adds notes about several data sets to an account, usually that of the first one."""
    account.notes += [note for note in notes if note not in account.notes]
