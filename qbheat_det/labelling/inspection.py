# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Finds labels that are probably wrong with detectors that were not trained on them.

The images are divided into two halves. A detector with a frozen encoder is trained on each half
and predicts on the other half. Missing boxes, misplaced boxes and wrong classes are scored as in
"ObjectLab: Automated Diagnosis of Mislabeled Images in Object Detection Data", arXiv:2309.00832,
with two differences. First, predictions are weighted by their score instead of thresholded at 0.95,
because a detector trained on a few hundred images is rarely that certain. Second, a missing object
must not overlap an annotated box of any class, so that a wrong class is not reported twice.

The three scores have different scales. To convert them to probabilities, artificial errors of each
kind are added to a copy of the labels. Their scores are compared with those of unchanged labels.

Notation: an image has G annotated and P predicted boxes, XYXY in pixels.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import isotonic_regression
from torch import Tensor
from torchvision.ops import box_iou

from qbheat_det.checkpoint import load_run_config
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import replace_folders, write_atomically
from qbheat_det.data.datasets.sources import choose_val, group_by_rarest_class
from qbheat_det.engine import RunFlags, train_afresh
from qbheat_det.export import export_backbone

from .labels import ImageBoxes, Kind, Labels, LabelSuspect, open_labels, stack_boxes

_RECIPE = "custom/cached_retinanet_lite0_probe.yaml"
_MOBILE_FORMER_RECIPE = "custom/cached_retinanet_285M_probe.yaml"
_LEAST = 0.01  # smallest probability of a suspect
_ROUNDS, _SHARE = 10, 0.1  # artificial errors: repetitions, and share of boxes
_PRIOR = 0.02  # assumed share of boxes with an error of each kind
_FOUND_IOU = 0.5  # smallest IoU of a prediction and the deleted box that it finds
_SHIFT = (0.3, 0.7)  # shift of a moved box, relative to its sides
_IOU_WEIGHT = 0.9  # weight of the IoU in ``similarity``
_MIN_IOU = 0.1  # smallest IoU of a misplaced annotation and the prediction of its object
Labelled = list[ImageBoxes]
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Suspect:
    """A probable error.

    Attributes:
        kind: "missing" (an object without a box), "location" (a misplaced box) or "class".
        image: index of the image.
        score: score in [0, 1]. Errors with higher scores are more probable.
        annotation: index of the box among the annotations of the image; None if ``kind`` is
            "missing".
        box, label: box (XYXY in pixels) and class of the prediction that contradicts the labels.
    """

    kind: Kind
    image: int
    score: float
    annotation: int | None
    box: tuple[float, float, float, float]
    label: int


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

    Returns:
        The labels, the suspects in descending order of probability, and the AP50 of each detector
        in percent.

    Raises:
        UserError: the data have no boxes or fewer than 10 images, the weights are invalid, or
            ``detectors`` has files of others.
    """
    labels, folder = open_labels(data, images), Path(output) / "detectors"
    replace_folders(folder)
    predictions, quality = _predict_halves(labels, folder, encoder, seed, opts)
    annotations = labels.list_annotations()
    truth = [stack_boxes(own) for own in annotations]
    suspects = calibrate(find_suspects(truth, predictions), truth, predictions, seed)
    return labels, [_describe(labels, annotations, one) for one in suspects], quality


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
            raise UserError(f"'{file.json_file}': all boxes are in one half of the images")
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


def calibrate(
    suspects: Sequence[Suspect], truth: Labelled, predictions: Labelled, seed: int
) -> list[Suspect]:
    """Replaces scores by probabilities of an error, and sorts by descending probability.

    For each annotated or missing box, only the most probable kind of error is kept. Suspects with
    probabilities below 1 % are left out.

    Args:
        suspects: results of ``find_suspects``.
        truth: annotated boxes of each image.
        predictions: predicted boxes of each image.
        seed: seed of the artificial errors.
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
    """Returns the scores of a kind in ascending order, and the probability of an error at each."""
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
    """Adds artificial errors of a kind to a copy of the labels.

    Returns the changed labels, and for each image the indices in ``truth`` of the deleted, moved or
    relabelled boxes.
    """
    classes = np.unique(np.concatenate([one.classes.numpy() for one in truth]))
    changed, errors = [], []
    for boxes, labels, scores in truth:
        own = generator.random(len(boxes)) < _SHARE
        own &= kind != "class" or len(classes) > 1
        boxes, labels = boxes.clone(), labels.clone()
        for index in np.flatnonzero(own):
            if kind == "class":
                labels[index] = int(generator.choice(classes[classes != int(labels[index])]))
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
    """Returns whether a suspect is one of the artificial errors of its image."""
    if suspect.annotation is not None:
        return suspect.annotation in errors
    deleted = truth.boxes[sorted(errors)]
    box = torch.tensor([suspect.box], dtype=deleted.dtype)
    return bool(len(deleted)) and float(box_iou(box, deleted).max()) >= _FOUND_IOU


def _describe(
    labels: Labels, annotations: Sequence[Sequence[dict[str, Any]]], one: Suspect
) -> LabelSuspect:
    """Converts a suspect to a ``LabelSuspect``, with the ids and names of the data set."""
    image = labels.file.images[one.image]
    names = dict(zip(labels.file.category_ids, labels.file.class_names, strict=True))
    x0, y0, x1, y1 = one.box
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


def find_suspects(annotations: Labelled, predictions: Labelled) -> list[Suspect]:
    """Returns the suspects of all images, in descending order of scores."""
    found: list[Suspect] = []
    for image, (truth, seen) in enumerate(zip(annotations, predictions, strict=True)):
        found += _compare(image, truth, seen)
    return sorted(found, key=lambda suspect: -suspect.score)


def _compare(image: int, truth: ImageBoxes, seen: ImageBoxes) -> Iterator[Suspect]:
    """Yields the suspects of one image, with at most one of each kind per box."""
    if not len(seen.boxes):
        return
    like = similarity(truth.boxes, seen.boxes)  # (G, P)
    overlaps = box_iou(truth.boxes, seen.boxes)
    is_same = truth.classes[:, None] == seen.classes

    def suspect(kind: Kind, score: Tensor, prediction: int, annotation: int | None) -> Suspect:
        x0, y0, x1, y1 = seen.boxes[prediction].tolist()
        label = int(seen.classes[prediction])
        return Suspect(kind, image, float(score), annotation, (x0, y0, x1, y1), label)

    # The best prediction of an annotated object belongs to it, so it does not show a missing box.
    support = seen.scores * like * (overlaps >= _MIN_IOU)
    claimed = set(support.argmax(1)[support.amax(1) > 0].tolist()) if len(like) else set()
    covered = like.amax(0) if len(like) else torch.zeros(len(seen.boxes))
    for prediction, score in enumerate(seen.scores * (1 - covered)):
        if prediction not in claimed:
            yield suspect("missing", score, prediction, None)
    for index in range(len(truth.boxes)):
        agreeing = torch.where(is_same[index], seen.scores * like[index], 0.0)
        best = int(agreeing.argmax())
        if is_same[index, best] and overlaps[index, best] >= _MIN_IOU:
            score = seen.scores[best] * (1 - like[index, best])
            yield suspect("location", score, best, index)
        differing = torch.where(is_same[index], 0.0, seen.scores * like[index])
        worst = int(differing.argmax())
        if differing[worst] > agreeing[best]:
            yield suspect("class", differing[worst] - agreeing[best], worst, index)


def similarity(first: Tensor, second: Tensor) -> Tensor:
    """Returns the similarity (n, m) of boxes in [0, 1], from their IoU and their center distance.

    The center distance is divided by the diagonal of the smallest box that encloses both boxes.
    """
    if not (len(first) and len(second)):
        return torch.zeros(len(first), len(second))
    first_centres, second_centres = ((box[:, :2] + box[:, 2:]) / 2 for box in (first, second))
    low = torch.minimum(first[:, None, :2], second[:, :2])
    high = torch.maximum(first[:, None, 2:], second[:, 2:])
    diagonal = (high - low).norm(dim=-1).clamp(min=1e-6)
    distance = torch.cdist(first_centres, second_centres) / diagonal
    return _IOU_WEIGHT * box_iou(first, second) + (1 - _IOU_WEIGHT) * (1 - distance)
