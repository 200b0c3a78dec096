# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Holds out training images for validation, if the data have no validation images."""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qbheat_det.core.errors import UserError
from qbheat_det.data import SPLIT_FILE, SeenImages, fingerprint_images, read_split, split_source
from qbheat_det.tasks import Task, find_task

from .opened_sources import (
    OpenedSource,
    Role,
    Sources,
    find_images_of_both_parts,
    join_sources,
)
from .run_data import Draft, Split
from .run_flags import RunFlags
from .run_record import FIRST_STAGE_FOLDER

logger = logging.getLogger(__name__)


def hold_out(
    flags: RunFlags,
    sources: Sources,
    used: dict[Role, OpenedSource],
    unvalidated: Sequence[OpenedSource],
    drafts: Sequence[Draft],
    seen: SeenImages,
) -> tuple[dict[Role, OpenedSource], Split | None]:
    """Divides training data into training and validation images where this is needed.

    A share of each data set without a validation part is held out. Images that are in the training
    part of one data set and the validation part of another are for validation only. An evaluation
    uses the images that the training of its weights has held out.

    Args:
        flags: flags of the run.
        sources: what the flags name, see ``open_sources``.
        used: the training data and the validation data of the run.
        unvalidated: the training sets without a validation part.
        drafts: the stages of the run.
        seen: images that the initial weights have seen, which keep their side.

    Returns:
        The data of the run, and the content of its ``split.json``; None if nothing is divided.

    Raises:
        UserError: there are too few images.
    """
    first = drafts[0]
    task = find_task(drafts[-1].cfg)
    if not flags.eval_only and not _holds_out(first, flags, task):
        unvalidated = ()
    in_both: Mapping[str, frozenset[str]] = {}
    if task.uses_boxes and "DATASETS.TEST" not in flags.overrides:
        in_both = find_images_of_both_parts(flags, sources)
    # The data sets whose training part has images of both sides.
    divided = list(unvalidated)
    for opened in sources.get("train", ()):
        is_divided = any(opened is one for one in unvalidated)
        if opened.source.path in in_both and not is_divided:
            divided.append(opened)
    if not divided:
        return used, None
    if flags.eval_only:
        return _use_split_of_weights(first, flags, used, divided)
    folder = Path(drafts[-1].cfg.OUTPUT_DIR)
    left_out = frozenset().union(*in_both.values())
    split = _read_or_make_split(first, folder, flags, used, unvalidated, seen, left_out)
    return _divide(used, divided, (folder / SPLIT_FILE).absolute()), split


def _holds_out(draft: Draft, flags: RunFlags, task: Task) -> bool:
    """Returns whether a run without validation data holds out a share of its training images."""
    if not task.uses_labels or "DATASETS.TEST" in flags.overrides:
        return False
    return bool(draft.cfg.DATASETS.VAL_FRACTION)


def _find_split_of_weights(draft: Draft, flags: RunFlags) -> Path | None:
    """Returns the ``split.json`` of the training of the weights, if it divides ``--data``."""
    folder = Path(draft.cfg.MODEL.WEIGHTS).parent
    if draft.start.resume:
        folder = draft.start.folder
    file = folder.absolute() / SPLIT_FILE
    if not file.is_file():
        return None
    divided = read_split(file).get("data")
    if isinstance(divided, str):
        divided = [divided]
    paths = _list_paths(flags)
    if not paths or not set(paths) <= set(divided or ()):
        return None
    return file


def _list_paths(flags: RunFlags) -> list[str]:
    """Returns the absolute paths of --data."""
    return [os.path.abspath(path) for path in flags.data_sets]


def _use_split_of_weights(
    draft: Draft,
    flags: RunFlags,
    used: dict[Role, OpenedSource],
    divided: Sequence[OpenedSource],
) -> tuple[dict[Role, OpenedSource], Split | None]:
    """Evaluates only images that the training of the weights held out, if it divided --data.

    ``divided`` are the data sets that it divided. Returns the sources and the split; the same
    sources and None if there is no such split.
    """
    split_file = _find_split_of_weights(draft, flags)
    if split_file is None:
        return used, None
    split = read_split(split_file)
    logger.info(f"Evaluating on images of the {len(split['val']):,} that '{split_file}' holds out")
    return {"val": _add_members(used["val"], divided).with_split(split_file, "val")}, split


def _add_members(joined: OpenedSource, added: Sequence[OpenedSource]) -> OpenedSource:
    """Joins more data sets to several that are joined, unless they are among these."""
    known = {opened.source for opened in joined.members}
    new = [opened for opened in added if opened.source not in known]
    if not joined.members or not new:
        return joined
    members = (*joined.members, *new)
    return join_sources(members, joined.class_names, dict(joined.source.renamed))


def _divide(
    used: Mapping[Role, OpenedSource], divided: Sequence[OpenedSource], split_file: Path
) -> dict[Role, OpenedSource]:
    """Returns the training and the validation images of a split.

    Args:
        used: the training data, and validation data if some of several data sets have them.
        divided: the data sets whose training parts have images of both sides.
        split_file: path of the ``split.json`` with the paths or names of all images.
    """
    train = used["train"]
    evaluated = train
    if "val" in used:
        evaluated = _add_members(used["val"], divided)
    return {
        "train": train.with_split(split_file, "train"),
        "val": evaluated.with_split(split_file, "val"),
    }


def _read_or_make_split(
    draft: Draft,
    folder: Path,
    flags: RunFlags,
    used: Mapping[Role, OpenedSource],
    unvalidated: Sequence[OpenedSource],
    seen: SeenImages,
    in_both: frozenset[str],
) -> Split:
    """Returns the split of a resumed run, or makes a new one.

    Images that are in a data set with a validation part stay in their part.

    Args:
        draft: first stage of the run.
        folder: ``OUTPUT_DIR`` of the run.
        flags: flags of the run.
        used: the training data, and validation data if some of several data sets have them.
        unvalidated: the data sets of which a share is held out.
        seen: images that the initial weights have seen, which keep their side.
        in_both: paths of training images that are in a validation part too.
    """
    if draft.start.resume:
        for file in (folder / SPLIT_FILE, folder / FIRST_STAGE_FOLDER / SPLIT_FILE):
            if file.is_file():
                return read_split(file)
    opened = used["train"]
    own_val: list[str] = []
    if "val" in used:
        divided = {member.source.path for member in unvalidated}
        own = [member for member in opened.members if member.source.path not in divided]
        own_train = [path for member in own for path in member.list_paths()]
        own_val = used["val"].list_paths()
        seen = seen.extend(
            fingerprint_images(own_train).values(), fingerprint_images(own_val).values()
        )
    if not unvalidated:
        split: dict[str, Any] = {"train": opened.list_paths(), "val": []}
    else:
        split = split_source(
            opened.source,
            opened.annotations,
            fraction=draft.cfg.DATASETS.VAL_FRACTION,
            seen=seen,
            has_val=bool(own_val),
        )
    train = [path for path in split["train"] if path not in in_both]
    held_out = [path for path in split["val"] if path not in in_both]
    if not train:
        raise UserError(
            "all training images of --data are validation images of another data set: name the "
            "validation images with --val"
        )
    paths = _list_paths(flags)
    data = paths[0] if len(paths) == 1 else paths
    num_held_out = len(held_out)  # without the images of validation parts
    sides = {"train": train, "val": [*held_out, *own_val]}
    return {"data": data, "num_held_out": num_held_out, **split, **sides}
