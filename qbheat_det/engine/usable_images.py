# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Leaves out images that cannot be used: with broken files, or far too long and narrow."""

import math
import os
from collections.abc import Sequence

from detectron2.config import CfgNode
from detectron2.utils import comm

from qbheat_det.core.image_files import find_elongation
from qbheat_det.data import Annotations, DataError, match_image_errors

from .opened_sources import OpenedSource
from .run_data import Draft


def leave_out_of_sources(sources: Sequence[OpenedSource], drafts: Sequence[Draft]) -> None:
    """Leaves out images of sources with boxes that cannot be used.

    A resumed run leaves out the same images as at its start. Images that have broken since then are
    replaced in training.

    Raises:
        UserError: more than ``DATASETS.MAX_LEFT_OUT`` of the images or boxes have faults.
    """
    start = drafts[0].start
    settings = drafts[0].cfg.DATASETS
    longest = min(get_longest_side(draft.cfg) for draft in drafts)
    checked: list[Annotations] = []  # both roles may have the same annotations
    for opened in sources:
        annotations = opened.annotations
        if annotations is None or any(annotations is other for other in checked):
            continue
        checked.append(annotations)
        if not opened.source.labelled:
            annotations.account.check(settings.MAX_LEFT_OUT, images_only=True)
            continue
        annotations.check()
        if start.continues:
            _leave_out_again(annotations, start.left_out)
        else:
            leave_out_images(annotations, longest, check_files=settings.CHECK_IMAGES)
        annotations.account.check(settings.MAX_LEFT_OUT)


def get_longest_side(cfg: CfgNode) -> float:
    """Returns the longest side of resized images in pixels; infinity if they are not resized."""
    return min(cfg.INPUT.MAX_SIZE_TRAIN, cfg.INPUT.MAX_SIZE_TEST) or math.inf


def _leave_out_again(annotations: Annotations, paths: Sequence[str]) -> None:
    """Leaves out the images at ``paths``, which the run has left out at its start."""
    names = {image["file_name"] for image in annotations.images}
    errors = {}
    for path in paths:
        name = os.path.relpath(path, annotations.image_root)
        if name in names:
            reason = "the run has left it out at its start"
            errors[name] = DataError("unreadable image", path, reason)
    annotations.leave_out(errors)


def leave_out_images(annotations: Annotations, longest: float, *, check_files: bool) -> None:
    """Leaves out images that cannot be used.

    Args:
        annotations: the images and boxes, which are changed.
        longest: longest side of resized images in pixels. An image is left out if its shorter side
            would be resized to zero pixels.
        check_files: whether to leave out images whose files are broken.
    """
    if annotations.problem:  # images without labels have no sizes
        return
    errors = {}
    for image in annotations.images:
        reason = find_elongation((image["height"], image["width"]), longest)
        if reason:
            name = image["file_name"]
            errors[name] = DataError("elongated image", f"image '{name}'", reason)
    if check_files:
        errors |= _find_broken(annotations)
    annotations.leave_out(errors)


def _find_broken(annotations: Annotations) -> dict[str, DataError]:
    """Returns the errors in the files of images, by name. The main process reads the files."""
    errors: dict[str, DataError] = {}
    if comm.is_main_process():
        names = {}
        records = []
        for image in annotations.images:
            path = os.path.join(annotations.image_root, image["file_name"])
            names[path] = image["file_name"]
            records.append({"file_name": path, "width": image["width"], "height": image["height"]})
        errors = {names[path]: error for path, error in match_image_errors(records).items()}
    return dict(comm.all_gather(errors)[0])
