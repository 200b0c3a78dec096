# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The images that a model has seen: warns if validation images are among the training images."""

import logging
from collections.abc import Mapping
from pathlib import Path

from detectron2.config import CfgNode
from detectron2.utils import comm

from qbheat_det.checkpoint import class_names_of
from qbheat_det.data import SEEN_FILE, SeenImages, fingerprint_images

from .opened_sources import Role
from .run_data import DataSet

logger = logging.getLogger(__name__)

_MAX_FINGERPRINTS = 300_000  # images that are remembered in ``seen_images.json``


def read_seen(cfg: CfgNode) -> SeenImages:
    """Returns the images that ``MODEL.WEIGHTS`` were trained on and evaluated with.

    Warns if the weights are those of a detector or classifier, and nothing tells its images.
    """
    weights = Path(cfg.MODEL.WEIGHTS)
    if not weights.is_file():
        return SeenImages()
    seen = SeenImages.read(weights.parent)
    is_unknown = not (seen.train or seen.val)
    if is_unknown and weights.suffix == ".safetensors" and class_names_of(str(weights)):
        logger.warning(
            f"'{weights}' is a trained model without '{SEEN_FILE}' beside it: if it was trained on "
            "some of the validation images, the results do not measure generalization"
        )
    return seen


def compare_images(
    given: Mapping[Role, DataSet], seen: SeenImages, weights: str
) -> tuple[SeenImages | None, str]:
    """Returns the images that a run will have seen, and a sentence about those on both sides.

    The main process compares the contents of the files. Warns of validation images that are
    training images, of this run or of the run that trained ``weights``.
    """
    if not given or not comm.is_main_process():
        return None, ""
    num_images = sum(len(data_set.paths) for data_set in given.values())
    if num_images > _MAX_FINGERPRINTS:
        logger.info("There are too many images to remember them for later runs")
        return None, ""
    prints = {
        role: frozenset(fingerprint_images(data_set.paths).values())
        for role, data_set in given.items()
    }
    train = prints.get("train", frozenset())
    val = prints.get("val", frozenset())
    shared = {
        "training images": val & train,
        f"training images of '{weights}'": val & seen.train - train,
    }
    counts = [
        f"{len(images):,} of {len(val):,} validation images are {kind}"
        for kind, images in shared.items()
        if images
    ]
    text = " and ".join(counts)
    if text:
        logger.warning(f"{text}: the results do not measure generalization")
    if "train" not in given:
        return None, text
    return seen.extend(train, val), text


def warn_of_replaced_images(before: SeenImages, now: SeenImages) -> None:
    """Warns if a resumed run has images whose files had other contents at its last start."""
    known = before.train | before.val
    current = now.train | now.val
    replaced = current - known
    if known and replaced:
        logger.warning(
            f"{len(replaced):,} of {len(current):,} images have other contents than at the last "
            "start of this run, although their names and boxes are the same"
        )
