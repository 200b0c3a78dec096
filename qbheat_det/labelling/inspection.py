# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Finds labels that are probably wrong with detectors that were not trained on them.

The images are divided into two halves. A detector with a frozen encoder is trained on each half
and predicts on the other half. ``suspects`` compares the predictions with the labels.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from qbheat_det.api.training import train_afresh
from qbheat_det.checkpoint import find_weights, load_run_config
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import replace_folders, write_atomically
from qbheat_det.data import SeenImages, fingerprint_images
from qbheat_det.data.datasets.splits import choose_val, group_by_rarest_class
from qbheat_det.engine import RunFlags
from qbheat_det.engine.run_flags import FREEZE_ALL
from qbheat_det.export import export_backbone

from .labels import Labels, LabelSuspect, open_labels, stack_boxes
from .suspects import Labelled, Suspect, calibrate, find_suspects

logger = logging.getLogger(__name__)
_RECIPE = "custom/cached_retinanet_lite0_probe.yaml"
_MOBILE_FORMER_RECIPE = "custom/cached_retinanet_285M_probe.yaml"
_WORTH_A_LOOK = 0.1  # probability: ten looks for one error
_FEWEST, _MOST = 20, 200  # number of listed suspects


def inspect_labels(
    data: str,
    output: str | Path,
    *,
    images: str = "",
    encoder: str = "",
    seed: int = 0,
    opts: Sequence[str] = (),
    max_left_out: float | None = None,
) -> tuple[Labels, list[LabelSuspect], list[float]]:
    """Finds probable errors in the labels of a data set.

    Trains a detector on each half of the images, and compares its predictions with the labels of
    the other half.

    Args:
        data: data set with boxes, in any format of ``--data``. Its training part is inspected.
        output: folder for the subfolder ``detectors``, with the runs of the two detectors.
        images: folder of the images, if they are not in the folder of a COCO json.
        encoder: weights or run whose encoder both detectors use; by default EfficientNet-Lite0 with
            ImageNet weights.
        seed: seed of the division into halves and of the training.
        opts: overrides of the training config, as a flat list of keys and values.
        max_left_out: share of images or boxes that may have faults; by default 0.1.

    Returns:
        The labels, the suspects in descending order of probability, and the AP50 of each detector
        in percent.

    Raises:
        UserError: the data have no boxes or fewer than 10 images, the weights are invalid, or
            ``detectors`` has files of others.
    """
    labels = open_labels(data, images, max_left_out)
    folder = Path(output) / "detectors"
    replace_folders(folder)
    if encoder:
        _warn_of_seen_images(labels, encoder)
    predictions, quality = _predict_halves(labels, folder, encoder, seed, opts)
    annotations = labels.list_annotations()
    truth = [stack_boxes(own) for own in annotations]
    suspects = calibrate(find_suspects(truth, predictions), truth, predictions, seed)
    return labels, [_describe(labels, annotations, one) for one in suspects], quality


def _warn_of_seen_images(labels: Labels, encoder: str) -> None:
    """Warns if the encoder was trained on labels that it now inspects."""
    weights = Path(find_weights(encoder))
    seen = SeenImages.read(weights.parent) if weights.is_file() else SeenImages()
    is_frozen = load_run_config(encoder).MODEL.BACKBONE.FREEZE_AT >= FREEZE_ALL
    if is_frozen or not seen.train:
        return
    file = labels.file
    paths = [str(Path(file.image_root, image["file_name"])) for image in file.images]
    shared = seen.train.intersection(fingerprint_images(paths).values())
    if shared:
        logger.warning(
            f"'{encoder}' was trained on {len(shared):,} of the {len(paths):,} images: its encoder "
            "may have learned their wrong labels, so fewer of them are found"
        )


def shortlist(suspects: Sequence[LabelSuspect], most: int | None = None) -> list[LabelSuspect]:
    """Returns the first suspects of a list in descending order of probability, for a person.

    Args:
        suspects: results of ``inspect_labels``.
        most: the number of suspects. By default, those with a probability of at least 10 %, but at
            least 20 and at most 200.
    """
    if most is None:
        probable = sum(one.score >= _WORTH_A_LOOK for one in suspects)
        most = min(max(probable, _FEWEST), _MOST)
    return [*suspects[:most]]


def _predict_halves(
    labels: Labels, folder: Path, encoder: str, seed: int, opts: Sequence[str]
) -> tuple[Labelled, list[float]]:
    """Returns the predictions for each image by the detector of the other half, and both AP50."""
    file = labels.file
    second = choose_val(group_by_rarest_class(file), fraction=0.5, seed=seed)
    halves: tuple[list[str], list[str]] = [], []
    for index, image in enumerate(file.images):
        halves[index in second].append(image["file_name"])
    files = [folder / "half_1.json", folder / "half_2.json"]
    for half, path in zip(halves, files, strict=True):
        lists = file.keep(set(half))
        if not lists["annotations"]:
            raise UserError(f"'{file.origin}': all boxes are in one half of the images")
        write_atomically(path, json.dumps(lists).encode())
    recipe, settings, weights = _choose_recipe(encoder, folder)
    by_image: dict[int, list[dict[str, Any]]] = {image["id"]: [] for image in file.images}
    quality = []
    for train, val in (files, files[::-1]):
        run = folder / f"trained_on_{train.stem}"
        flags = RunFlags(
            config_file=recipe,
            data=str(train),
            val=str(val),
            images=file.image_root,
            val_images=file.image_root,
            weights=weights,
            output=str(run),
            opts=[*settings, "SEED", str(seed), "TEST.EVAL_EPOCHS", "0.0", *opts],
        )
        _, results = train_afresh(flags)
        quality.append(float(np.nan_to_num(results["bbox"]["AP50"])))
        (found,) = run.glob("inference/*/coco_instances_results.json")
        for entry in json.loads(found.read_bytes()):
            by_image[entry["image_id"]].append(entry)
    return [stack_boxes(own) for own in by_image.values()], quality


def _choose_recipe(encoder: str, folder: Path) -> tuple[str, list[str], str]:
    """Returns the config file, its overrides and the weights for detectors on an encoder."""
    if not encoder:
        return _RECIPE, [], ""
    model = load_run_config(encoder).MODEL
    is_fpn = model.BACKBONE.NAME == "build_fpn_backbone"
    name = model.FPN.BOTTOM_UP if is_fpn else model.BACKBONE.NAME
    weights = folder / "encoder.safetensors"  # without the head, which was trained on all labels
    export_backbone(encoder, weights, overwrite=True)
    if name == "MobileFormer":
        variant = ["MODEL.MOBILE_FORMER.VARIANT", model.MOBILE_FORMER.VARIANT]
        return _MOBILE_FORMER_RECIPE, variant, str(weights)
    pixels = ["MODEL.PIXEL_MEAN", str(list(model.PIXEL_MEAN))]
    pixels += ["MODEL.PIXEL_STD", str(list(model.PIXEL_STD))]
    return _RECIPE, ["MODEL.FPN.BOTTOM_UP", name, *pixels], str(weights)


def _describe(
    labels: Labels, annotations: Sequence[Sequence[dict[str, Any]]], one: Suspect
) -> LabelSuspect:
    """Converts a suspect to a ``LabelSuspect``, with the ids and names of the data set."""
    image = labels.file.images[one.image]
    names = dict(zip(labels.file.category_ids, labels.file.class_names, strict=True))
    x0, y0, x1, y1 = one.correction
    found = LabelSuspect(
        kind=one.kind,
        score=round(one.score, 4),
        image_id=image["id"],
        file_name=image["file_name"],
        annotation_id=None,
        category_id=one.label,
        category=names[one.label],
        bbox=(x0, y0, x1 - x0, y1 - y0),
    )
    if one.annotation is None:
        return found
    entry = annotations[one.image][one.annotation]
    category, box = entry["category_id"], tuple(entry["bbox"])
    found = replace(
        found, annotation_id=entry["id"], annotated_category=names[category], annotated_bbox=box
    )
    if one.kind == "class":  # the box is not corrected
        return replace(found, bbox=box)
    return replace(found, category_id=category, category=names[category])
