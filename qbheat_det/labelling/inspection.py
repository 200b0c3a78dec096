# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Finds labels that are probably wrong with models that were not trained on them.

The images are divided into two halves. A detector with a frozen encoder is trained on each half
and predicts on the other half. ``appearance`` judges boxes by the features of the same encoder.
``suspects`` compares both with the labels.
"""

import json
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchvision.ops import box_iou

from qbheat_det.api import Detector, Encoder, load, load_encoder
from qbheat_det.api.training import train_afresh
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import refuse_second_command, replace_folders, write_atomically
from qbheat_det.data import SeenImages, fingerprint_images
from qbheat_det.data.datasets.splits import choose_val, group_by_rarest_class
from qbheat_det.engine import RunFlags
from qbheat_det.engine.run_flags import FREEZE_ALL

from .appearance import encode_files, judge_boxes
from .labels import ImageBoxes, Labels, LabelSuspect, open_labels, stack_boxes
from .suspects import Labelled, Suspect, find_suspects

logger = logging.getLogger(__name__)
_RECIPE = "custom/cached_retinanet_lite0_probe.yaml"
_MOBILE_FORMER_RECIPE = "custom/cached_retinanet_285M_probe.yaml"
_ENCODER = "timm/tf_efficientnet_lite0"  # of this recipe
# Half of the recipe's steps and views, so 300 images take less than five CPU minutes.
_SCHEDULE = ("SOLVER.EPOCHS", "10.0", "SOLVER.MIN_ITER", "160", "INPUT.FIXED_VIEWS.COUNT", "2")
_MIN_PROBABILITY = 0.1  # of listed suspects: a person looks at ten suspects to find an error
_MIN_LISTED = 20
_MAX_LISTED = 200
_SAME_IOU = 0.5  # smallest IoU of two boxes of one object


@dataclass(frozen=True)
class Recipe:
    """How to train the two detectors: config file, overrides of its keys, and initial weights.

    ``encoder`` names the weights of the encoder.
    """

    config_file: str = _RECIPE
    opts: Sequence[str] = ()
    weights: str = ""
    encoder: str = _ENCODER


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
    the other half. Also compares the encoder's features of each box with those of other images.

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
        The labels, the suspects in descending order of probability, and the AP50 in percent of each
        of the two detectors on the other half.

    Raises:
        UserError: the data have no boxes or fewer than 10 images, the weights are invalid, or
            ``detectors`` has other files, or ``output`` is in use by another process.
    """
    labels = open_labels(data, images, max_left_out)
    folder = Path(output) / "detectors"
    with refuse_second_command(output):
        replace_folders(folder)
        recipe = choose_recipe(labels, encoder, folder)
        predictions, ap50 = predict_halves(labels, folder, recipe, seed, opts)
    paths = [Path(labels.file.image_root, image["file_name"]) for image in labels.file.images]
    encoded = encode_files(load_encoder(recipe.encoder), paths)
    readable = [index for index, image in enumerate(encoded) if image is not None]
    annotations = labels.list_annotations()
    truth = [stack_boxes(annotations[index]) for index in readable]
    every_unannotated = labels.find_unannotated()
    unannotated = [every_unannotated[index] for index in readable]
    predictions = drop_unannotated([predictions[index] for index in readable], truth, unannotated)
    category_ids = labels.file.category_ids
    maps = [image for image in encoded if image is not None]
    judgements = judge_boxes(maps, truth, predictions, category_ids, seed)
    suspects = find_suspects(truth, predictions, judgements, category_ids, seed=seed)
    described = []
    for suspect in suspects:
        if suspect.kind == "missing" and suspect.label in unannotated[suspect.image]:
            continue
        located = replace(suspect, image=readable[suspect.image])
        described.append(describe_suspect(labels, annotations, located))
    return labels, described, ap50


def drop_unannotated(
    predictions: Labelled, truth: Labelled, unannotated: Sequence[Collection[int]]
) -> list[ImageBoxes]:
    """Drops predictions that may show objects which were not to be labelled.

    Args:
        predictions: predicted boxes of each image.
        truth: annotated boxes of each image.
        unannotated: ids of the classes that are not annotated in each image. Their predictions are
            kept only where they overlap an annotated box with an IoU of at least 0.5.
    """
    kept = []
    for predicted, annotated, classes in zip(predictions, truth, unannotated, strict=True):
        is_kept = ~torch.isin(predicted.classes, torch.tensor(sorted(classes), dtype=torch.long))
        if len(annotated.boxes):
            is_kept |= box_iou(predicted.boxes, annotated.boxes).amax(dim=1) >= _SAME_IOU
        kept.append(ImageBoxes(*(values[is_kept] for values in predicted)))
    return kept


def warn_of_seen_images(labels: Labels, trained: Detector | Encoder) -> None:
    """Logs a warning if the encoder of a model was trained on the labels to inspect."""
    weights = Path(trained.weights)
    was_frozen = trained.cfg.MODEL.BACKBONE.FREEZE_AT >= FREEZE_ALL
    if was_frozen or not weights.is_file():
        return
    seen = SeenImages.read(weights.parent)
    if not seen.train:
        return
    file = labels.file
    paths = [str(Path(file.image_root, image["file_name"])) for image in file.images]
    shared = seen.train.intersection(fingerprint_images(paths).values())
    if shared:
        logger.warning(
            f"'{weights}' was trained on {len(shared):,} of the {len(paths):,} images: its encoder "
            "may have learned their wrong labels, so fewer of them are found"
        )


def shortlist(suspects: Sequence[LabelSuspect], most: int | None = None) -> list[LabelSuspect]:
    """Returns the most probable suspects, which a person should check.

    Args:
        suspects: results of ``inspect_labels``, in descending order of probability.
        most: the number of suspects. By default, those with a probability of at least 10 %, but at
            least 20 and at most 200.
    """
    if most is None:
        num_probable = sum(suspect.score >= _MIN_PROBABILITY for suspect in suspects)
        most = min(max(num_probable, _MIN_LISTED), _MAX_LISTED)
    return list(suspects[:most])


def choose_recipe(labels: Labels, encoder: str, folder: Path) -> Recipe:
    """Returns the recipe of detectors with a frozen encoder.

    ``encoder`` is a weights file or a run, whose encoder is written into ``folder`` without the
    head. If it is "", the recipe has the default encoder.
    """
    if not encoder:
        return Recipe()
    trained = load(encoder, device="cpu")
    warn_of_seen_images(labels, trained)
    model = trained.cfg.MODEL
    name = model.BACKBONE.NAME
    if name == "build_fpn_backbone":
        name = model.FPN.BOTTOM_UP
    # A head that was trained on the labels would repeat their errors.
    weights = folder / "encoder.safetensors"
    trained.export_backbone(weights, overwrite=True)
    if name == "MobileFormer":
        variant = ["MODEL.MOBILE_FORMER.VARIANT", model.MOBILE_FORMER.VARIANT]
        return Recipe(_MOBILE_FORMER_RECIPE, variant, str(weights), str(weights))
    opts = ["MODEL.FPN.BOTTOM_UP", name]
    opts += ["MODEL.PIXEL_MEAN", str(list(model.PIXEL_MEAN))]
    opts += ["MODEL.PIXEL_STD", str(list(model.PIXEL_STD))]
    return Recipe(_RECIPE, opts, str(weights), str(weights))


def predict_halves(
    labels: Labels, folder: Path, recipe: Recipe, seed: int, opts: Sequence[str]
) -> tuple[list[ImageBoxes], list[float]]:
    """Trains a detector on each half of the images, and predicts on the other half.

    Returns the predictions for each image, and the AP50 in percent of each detector.
    """
    file = labels.file
    in_second_half = choose_val(group_by_rarest_class(file), fraction=0.5, seed=seed)
    first_half = set()  # file names
    second_half = set()
    for index, image in enumerate(file.images):
        if index in in_second_half:
            second_half.add(image["file_name"])
        else:
            first_half.add(image["file_name"])
    files = [folder / "half_1.json", folder / "half_2.json"]
    for half, path in zip((first_half, second_half), files, strict=True):
        content = file.keep(half)
        if not content["annotations"]:
            raise UserError(f"'{file.origin}': all boxes are in one half of the images")
        write_atomically(path, json.dumps(content).encode())
    by_image: dict[int, list[dict[str, Any]]] = {image["id"]: [] for image in file.images}
    ap50 = []
    fixed = ["SEED", str(seed), "TEST.EVAL_EPOCHS", "0.0"]
    for train, val in (files, files[::-1]):
        run = folder / f"trained_on_{train.stem}"
        flags = RunFlags(
            config_file=recipe.config_file,
            data=str(train),
            val=str(val),
            images=file.image_root,
            val_images=file.image_root,
            weights=recipe.weights,
            output=str(run),
            opts=[*recipe.opts, *_SCHEDULE, *fixed, *opts],
        )
        _, results = train_afresh(flags)
        ap50.append(float(np.nan_to_num(results["bbox"]["AP50"])))  # nan without detections
        (results_file,) = run.glob("inference/*/coco_instances_results.json")
        for entry in json.loads(results_file.read_bytes()):
            by_image[entry["image_id"]].append(entry)
    return [stack_boxes(entries) for entries in by_image.values()], ap50


def describe_suspect(
    labels: Labels, annotations: Sequence[Sequence[dict[str, Any]]], suspect: Suspect
) -> LabelSuspect:
    """Converts a suspect to a ``LabelSuspect``, with the ids and names of the data set.

    ``annotations`` are those of each image, in the order of ``Labels.list_annotations``.
    """
    image = labels.file.images[suspect.image]
    class_names = dict(zip(labels.file.category_ids, labels.file.class_names, strict=True))
    x0, y0, x1, y1 = suspect.box
    described = LabelSuspect(
        kind=suspect.kind,
        score=round(suspect.score, 4),
        image_id=image["id"],
        file_name=image["file_name"],
        annotation_id=None,
        category_id=suspect.label,
        category=class_names[suspect.label],
        bbox=(x0, y0, x1 - x0, y1 - y0),
    )
    if suspect.annotation is None:  # a missing box
        return described
    entry = annotations[suspect.image][suspect.annotation]
    annotated_bbox = tuple(entry["bbox"])
    described = replace(
        described,
        annotation_id=entry["id"],
        annotated_category=class_names[entry["category_id"]],
        annotated_bbox=annotated_bbox,
    )
    if suspect.kind == "location":
        return described
    return replace(described, bbox=annotated_bbox)  # the same numbers as in the labels
