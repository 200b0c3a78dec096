# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Prediction from files to files, as ``tools/predict.py`` does it."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from detectron2.config import CfgNode
from detectron2.structures import Instances

from qbheat_det.checkpoint import load_run_config
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import check_writable, write_atomically
from qbheat_det.data import MAPPERS_OF_IMAGES
from qbheat_det.deployment import deploy_by_config

from .drawing import draw_instances
from .exported import (
    EXPORTED_SUFFIXES,
    ExportedModel,
    ExportedPredictor,
    build_exported_scorer,
)
from .predict import (
    BatchPredictor,
    Predictions,
    build_predictor,
    build_scorer,
    classify_images,
    find_inputs,
    is_classifier,
    predict_images,
)
from .results import Format, render_annotations
from .tiles import TiledPredictor
from .video import Image


def predict_files(
    weights: str,
    inputs: Sequence[str],
    *,
    output: Path | None = None,
    json_file: Path | None = None,
    json_format: Format = "coco",
    score_threshold: float = 0.3,
    config_file: str | None = None,
    device: str | None = None,
    fast: bool = False,
    tile: int | None = None,
    opts: Sequence[str] = (),
) -> Predictions:
    """Predicts boxes, or with a classifier classes, on image files and folders.

    Args:
        weights: trained weights (.safetensors, .pth, qbheat://NAME) or an exported file.
        inputs: images, and folders that are searched recursively.
        output: folder for the drawn images.
        json_file: is written with boxes, or of a classifier with classes.
        json_format: of boxes, see ``render_annotations``.
        score_threshold: boxes below it are left out, in [0, 1].
        config_file: YAML of the model; by default the one inside the weights, or beside them.
        device: "cpu" or "cuda"; by default cuda where there is a GPU.
        fast: predict with the deployed form of the model, as ``MODEL.DEPLOY`` describes it.
        tile: side in pixels of overlapping tiles that are predicted beside the whole image.
        opts: overrides of the config, ``KEY VALUE``.

    Returns:
        What was found, and the files that were skipped.

    Raises:
        UserError: weights, inputs or arguments do not fit each other.
    """
    if json_file:
        check_writable(json_file)
    exported, cfg = open_weights(weights, config_file, device=device, fast=fast, opts=opts)
    files = find_inputs(inputs, exclude=output)
    if json_format != "coco" and (is_classifier(cfg) or any(file.is_video for file in files)):
        raise UserError(f"the format '{json_format}' is for boxes on images: use coco")
    if is_classifier(cfg):
        if tile is not None:
            raise UserError(f"'{weights}' is a classifier: --tile is for boxes")
        if output or not json_file:
            raise UserError(
                f"'{weights}' is a classifier, which finds no boxes: leave out --output, and name "
                "--json FILE for the classes"
            )
        if exported:
            score, names = build_exported_scorer(exported), exported.info.class_names
        else:
            model, names = build_detector(weights, cfg).model, cfg.MODEL.CLASS_NAMES
            score = build_scorer(model, cfg)
        found = classify_images(score, files, names)
    else:
        predictor = ExportedPredictor(exported) if exported else build_detector(weights, cfg)
        found = predict_images(
            predictor if tile is None else TiledPredictor(predictor, tile),
            files,
            cfg=cfg,
            score_threshold=score_threshold,
            output_dir=output,
            draw=lambda image, instances: _draw(image, instances, cfg.MODEL.CLASS_NAMES),
        )
    content: Any = found.results
    if json_file and not is_classifier(cfg):
        names, ids = cfg.MODEL.CLASS_NAMES, cfg.MODEL.CATEGORY_IDS
        if not ids:
            print("note: the config lists no MODEL.CATEGORY_IDS, so category ids count from 1")
        content = render_annotations(found.results, found.images, names, ids, json_format)
    if json_file:
        write_atomically(json_file, json.dumps(content).encode())
    return found


def open_weights(
    weights: str,
    config_file: str | None,
    *,
    device: str | None,
    fast: bool,
    opts: Sequence[str],
) -> tuple[ExportedModel | None, CfgNode]:
    """Returns the exported model, if the file is one, and the config; for arguments as above."""
    if not weights.lower().endswith(EXPORTED_SUFFIXES):
        wanted = [*opts, *(["MODEL.DEPLOY.ENABLED", "True"] if fast else [])]
        return None, load_run_config(weights, config_file, device=device, opts=wanted)
    if fast or config_file or opts:
        raise UserError(
            f"'{weights}' is exported with its config: leave out --fast, --config-file and "
            "config overrides"
        )
    exported = ExportedModel.open(weights, device=device)
    return exported, exported.load_config()


def build_detector(weights: str, cfg: CfgNode) -> BatchPredictor:
    """Returns a detector or classifier, deployed if ``MODEL.DEPLOY.ENABLED``.

    Raises a ``UserError`` if the weights are of a pre-training, or do not fit the config.
    """
    if cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_IMAGES and not is_classifier(cfg):
        raise UserError(
            f"'{weights}' are weights of pre-training ({cfg.MODEL.META_ARCHITECTURE}), which "
            "predict neither boxes nor classes: train a detector or a classifier on them"
        )
    if not cfg.MODEL.DEPLOY.ENABLED:
        return build_predictor(cfg)
    predictor = build_predictor(cfg, lambda model: deploy_by_config(model, cfg.MODEL.DEPLOY))
    print(predictor.model.report, file=sys.stderr)
    return predictor


def _draw(image: Image, instances: Instances, class_names: Sequence[str]) -> Image:
    """Draws boxes on an image (H, W, 3), BGR."""
    drawn = draw_instances(image[:, :, ::-1], instances, class_names)
    return np.ascontiguousarray(drawn[:, :, ::-1])
