# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Finds labels that are probably wrong with detectors that were not trained on them.

The images are divided into two halves. A detector of each half, on a frozen encoder with cached
features, predicts on the other half. The scores of the three kinds of error have different scales,
so errors of each kind are made in a copy of the labels, and the scores of the errors beside those
of the other labels give the probability of an error.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import isotonic_regression
from torchvision.ops import box_iou

from qbheat_det.checkpoint import load_run_config
from qbheat_det.core.files import write_atomically
from qbheat_det.data.datasets.sources import choose_val, group_by_rarest_class
from qbheat_det.engine import RunFlags
from qbheat_det.export import export_backbone

from .labels import Labels, LabelSuspect, open_labels, stack_boxes
from .simulation import train_afresh
from .suspects import ImageBoxes, Kind, Suspect, find_suspects

_RECIPE = "custom/cached_retinanet_lite0_probe.yaml"
_MOBILE_FORMER_RECIPE = "custom/cached_retinanet_285M_probe.yaml"
_LEAST = 0.01  # probability of a suspect
_ROUNDS, _SHARE = 10, 0.1  # of made errors: repetitions, and share of the boxes of each kind
_PRIOR = 0.02  # assumed share of boxes with an error of each kind
_FOUND_IOU = 0.5  # with which a prediction is of a deleted box
_SHIFT = (0.3, 0.7)  # of the sides of a moved box
Labelled = list[ImageBoxes]
Array = npt.NDArray[np.float64]


def inspect_labels(
    data: str,
    output: str | Path,
    *,
    images: str = "",
    encoder: str = "",
    seed: int = 0,
    opts: Sequence[str] = (),
) -> tuple[Labels, list[LabelSuspect], list[float]]:
    """Finds probable errors in the labels of a data set.

    Args:
        data: data set with boxes, in any format of ``--data``; its training part is inspected.
        output: folder of the two runs.
        images: folder of the images of a COCO json, if they are not beside the file.
        encoder: weights whose encoder the detectors use, such as a run's folder; by default
            EfficientNet-Lite0 with ImageNet weights.
        seed: seed of the division and the training.
        opts: overrides of the training config, keys and values alternating.

    Returns:
        The labels, suspects with the most probable first, and AP50 in percent of both detectors.

    Raises:
        UserError: the data have no boxes or fewer than 10 images, or the weights do not fit.
    """
    labels, folder = open_labels(data, images), Path(output)
    predictions, quality = _predict_halves(labels, folder, encoder, seed, opts)
    truth = [boxes for boxes, _ in labels.list_boxes()]
    suspects = calibrate(find_suspects(truth, predictions), truth, predictions, seed)
    return labels, [_describe(labels, one) for one in suspects], quality


def _predict_halves(
    labels: Labels, folder: Path, encoder: str, seed: int, opts: Sequence[str]
) -> tuple[Labelled, list[float]]:
    """Returns the predictions on each image by the detector of the other half, and both AP50."""
    names = [image["file_name"] for image in labels.file.images]
    second = choose_val(group_by_rarest_class(labels.file), fraction=0.5, seed=seed)
    halves = [{names[i] for i in range(len(names)) if (i in second) == is_second}
              for is_second in (False, True)]  # fmt: skip
    files = [folder / f"half_{number}.json" for number in (1, 2)]
    for half, file in zip(halves, files, strict=True):
        write_atomically(file, json.dumps(labels.file.keep(half)).encode())
    recipe, settings, weights = _choose_recipe(encoder, folder)
    by_image: dict[int, list[dict[str, Any]]] = {image["id"]: [] for image in labels.file.images}
    quality = []
    for train, val in (files, files[::-1]):
        run = folder / f"trained_on_{train.stem}"
        flags = RunFlags(
            config_file=recipe,
            data=str(train),
            val=str(val),
            images=labels.file.image_root,
            val_images=labels.file.image_root,
            weights=weights,
            output=str(run),
            opts=[*settings, "SEED", str(seed), "TEST.EVAL_EPOCHS", "0.0", *opts],
        )
        quality.append(float(np.nan_to_num(train_afresh(flags)["AP50"])))
        (found,) = run.glob("inference/*/coco_instances_results.json")
        for entry in json.loads(found.read_bytes()):
            by_image[entry["image_id"]].append(entry)
    return [stack_boxes(own) for own in by_image.values()], quality


def _choose_recipe(encoder: str, folder: Path) -> tuple[str, list[str], str]:
    """Returns recipe, overrides and weights of detectors on a frozen encoder."""
    if not encoder:
        return _RECIPE, [], ""
    model = load_run_config(encoder).MODEL
    is_fpn = model.BACKBONE.NAME == "build_fpn_backbone"
    name = model.FPN.BOTTOM_UP if is_fpn else model.BACKBONE.NAME
    weights = folder / "encoder.safetensors"  # without the head, which has seen all labels
    export_backbone(encoder, weights, overwrite=True)
    if name == "MobileFormer":
        variant = ["MODEL.MOBILE_FORMER.VARIANT", model.MOBILE_FORMER.VARIANT]
        return _MOBILE_FORMER_RECIPE, variant, str(weights)
    pixels = [text for key in ("PIXEL_MEAN", "PIXEL_STD")
              for text in (f"MODEL.{key}", str(list(model[key])))]  # fmt: skip
    return _RECIPE, ["MODEL.FPN.BOTTOM_UP", name, *pixels], str(weights)


def calibrate(
    suspects: Sequence[Suspect], truth: Labelled, predictions: Labelled, seed: int
) -> list[Suspect]:
    """Replaces scores by probabilities of an error, and returns the most probable first.

    A box is a suspect once, and so is a region without boxes.

    Args:
        suspects: of ``find_suspects``.
        truth: boxes of each image.
        predictions: predictions on each image.
        seed: seed of the errors that are made to measure the scores.
    """
    generator = np.random.default_rng(seed)
    curves = {kind: _fit(kind, truth, predictions, generator) for kind in get_args(Kind)}
    found: dict[tuple[object, ...], Suspect] = {}
    for one in suspects:
        # The score breaks ties between equal probabilities.
        probability = float(np.interp(one.score, *curves[one.kind])) * (1 - 1e-3 * (1 - one.score))
        place = one.annotation if one.annotation is not None else one.box
        known = found.get((one.image, place))
        if probability >= _LEAST and (known is None or known.score < probability):
            found[one.image, place] = replace(one, score=probability)
    return sorted(found.values(), key=lambda one: -one.score)


def _fit(
    kind: Kind, truth: Labelled, predictions: Labelled, generator: np.random.Generator
) -> tuple[Array, Array]:
    """Returns ascending scores of a kind, and the probability of an error at each."""
    scores, is_error = [], []
    for _ in range(_ROUNDS):
        changed, errors = make_errors(kind, truth, generator)
        for one in find_suspects(changed, predictions):
            if one.kind == kind:
                scores.append(one.score)
                is_error.append(_hits(one, errors[one.image], truth[one.image]))
    if not any(is_error):
        return np.array([0.0, 1.0]), np.zeros(2)
    order = np.argsort(scores)
    hit = np.array(is_error, dtype=np.float64)[order]
    weights = np.where(hit > 0, _PRIOR / _SHARE, 1.0)
    return np.array(scores)[order], isotonic_regression(hit, weights=weights).x


def make_errors(
    kind: Kind, truth: Labelled, generator: np.random.Generator
) -> tuple[Labelled, list[set[int]]]:
    """Deletes boxes, moves them or changes their classes in a copy of the labels.

    Returns:
        The changed labels, and for each image the indices of the changed boxes in ``truth``. Boxes
        are deleted from the end of an image's list, so that indices of the others stay.
    """
    classes = np.unique(np.concatenate([one.classes.numpy() for one in truth]))
    changed, errors = [], []
    for boxes, labels, scores in truth:
        own = generator.random(len(boxes)) < _SHARE
        boxes, labels = boxes.clone(), labels.clone()
        for index in np.flatnonzero(own):
            others = classes[classes != int(labels[index])]
            if kind == "class" and len(others):
                labels[index] = int(generator.choice(others))
            elif kind == "location":
                sides = boxes[index, 2:] - boxes[index, :2]
                signs = torch.from_numpy(generator.choice([-1.0, 1.0], 2))
                shift = sides * signs * torch.from_numpy(generator.uniform(*_SHIFT, 2))
                boxes[index] += shift.repeat(2)
        kept = ~own if kind == "missing" else np.ones(len(own), dtype=np.bool_)
        changed.append(ImageBoxes(boxes[kept], labels[kept], scores[kept]))
        errors.append(set(np.flatnonzero(own).tolist()))
    return changed, errors


def _hits(suspect: Suspect, errors: set[int], truth: ImageBoxes) -> bool:
    """Whether a suspect is one of the made errors of its image."""
    if suspect.annotation is not None:
        return suspect.annotation in errors
    deleted = truth.boxes[sorted(errors)]
    box = torch.tensor([suspect.box], dtype=deleted.dtype)
    return bool(len(deleted)) and float(box_iou(box, deleted).max()) >= _FOUND_IOU


def _describe(labels: Labels, one: Suspect) -> LabelSuspect:
    """Returns a suspect with the ids and names of the data set."""
    file, image = labels.file, labels.file.images[one.image]
    names = dict(zip(file.category_ids, file.class_names, strict=True))
    x0, y0, x1, y1 = one.box
    annotation: dict[str, Any] = {}
    if one.annotation is not None:
        own = [entry for entry in file.annotations
               if entry["image_id"] == image["id"] and not entry.get("iscrowd", 0)]  # fmt: skip
        annotation = own[one.annotation]
    # A box of a wrong class stays where it is, and a moved box keeps its class.
    is_class = one.kind == "class"
    category = annotation["category_id"] if one.kind == "location" else one.label
    return LabelSuspect(
        kind=one.kind,
        score=round(one.score, 4),
        image_id=image["id"],
        file_name=image["file_name"],
        annotation_id=annotation.get("id"),
        category_id=category,
        category=names[category],
        bbox=tuple(annotation["bbox"]) if is_class else (x0, y0, x1 - x0, y1 - y0),
        annotated_category=names[annotation["category_id"]] if annotation else None,
        annotated_bbox=tuple(annotation["bbox"]) if annotation else None,
    )
