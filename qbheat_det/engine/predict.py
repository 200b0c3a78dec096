# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Prediction on images and videos with trained weights: boxes, or classes of images."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from detectron2.config import CfgNode
from detectron2.engine import DefaultPredictor
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from detectron2.structures import Instances
from torch import nn
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.checkpoint import ExactCheckpointer
from qbheat_det.data import MAPPERS_OF_CLASSES, build_mapper
from qbheat_det.engine.media import (
    Image,
    MediaFile,
    UnreadableMedia,
    name_outputs,
    open_video,
    read_bgr,
    read_video,
    write_image,
)

_TOP_CLASSES = 5
Scores = npt.NDArray[np.floating[Any]]


@dataclass
class Predictions:
    """What a model found on files.

    Attributes:
        results: for each box "image_id", "file_name", "category_id", "bbox" (XYWH, pixels of the
            upright input image) and "score"; "segmentation" (RLE) where the model predicts masks;
            "frame" (from 0) in videos, where each frame has an image id of its own. Of a
            classifier, for each image "file_name" and "classes": the likeliest first, each with
            "name" and "score" in [0, 1].
        num_images: images that were predicted on.
        num_frames: frames of videos that were.
        skipped: path of each file that was not, and the reason.
    """

    results: list[dict[str, Any]] = field(default_factory=list)
    num_images: int = 0
    num_frames: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)

    @contextlib.contextmanager
    def skip_unreadable(self, file: MediaFile) -> Iterator[None]:
        """Notes why a file cannot be read, instead of raising ``UnreadableMedia``."""
        try:
            yield
        except UnreadableMedia as error:
            self.skipped.append((str(file.path), str(error)))


def build_predictor(
    cfg: CfgNode, prepare: Callable[[nn.Module], nn.Module] | None = None
) -> DefaultPredictor:
    """Returns Detectron2's predictor, its model holding exactly the tensors of the weights file.

    Args:
        cfg: as of ``load_run_config``.
        prepare: from the model with its weights to the one that predicts, such as its deployed
            form.

    Raises:
        UserError: the weights cannot be read, or do not fit the model of the config.
    """
    unloaded = cfg.clone()
    unloaded.defrost()
    unloaded.MODEL.WEIGHTS = ""
    unloaded.MODEL.DEPLOY.ENABLED = False  # the weights come first
    predictor = DefaultPredictor(unloaded)
    checkpointer = ExactCheckpointer(predictor.model, class_names=cfg.MODEL.CLASS_NAMES)
    checkpointer.load(cfg.MODEL.WEIGHTS)
    if prepare is not None:
        predictor.model = prepare(predictor.model)
    return predictor


def get_category_id(cfg: CfgNode, class_index: int) -> int:
    """Returns the annotation file's id of a contiguous class, or ``class_index + 1`` if unknown."""
    return int(cfg.MODEL.CATEGORY_IDS[class_index]) if cfg.MODEL.CATEGORY_IDS else class_index + 1


def predict_media(
    predictor: Callable[[Image], Mapping[str, Instances]],
    media: Sequence[MediaFile],
    *,
    cfg: CfgNode,
    score_threshold: float,
    output_dir: Path | None,
    draw: Callable[[Image, Instances], Image],
) -> Predictions:
    """Predicts on files and draws the boxes; files that cannot be read are skipped.

    Args:
        predictor: a ``DefaultPredictor``, or another function from a (H, W, 3) BGR image,
            whatever ``cfg.INPUT.FORMAT`` is, to {"instances"}.
        media: as of ``find_media``; images and frames are numbered from 1.
        cfg: ``MODEL.CATEGORY_IDS`` and ``INPUT.MAX_SIZE_TEST`` are read.
        score_threshold: boxes below it are neither drawn nor returned.
        output_dir: folder for the drawn images; nothing is drawn if None.
        draw: from a BGR image and its instances to the drawn image, also BGR.
    """
    found = Predictions()
    image_ids = itertools.count(1)

    def predict(image: Image, **origin: object) -> Instances:
        instances = predictor(image)["instances"].to("cpu")
        instances = instances[instances.scores >= score_threshold]
        for box in instances_to_coco_json(instances, next(image_ids)):
            category_id = get_category_id(cfg, box["category_id"])
            found.results.append({**box, **origin, "category_id": category_id})
        return instances

    def predict_image(file: MediaFile, output: Path | None) -> None:
        image = read_bgr(file.path)
        short, long = sorted(image.shape[:2])
        if short * cfg.INPUT.MAX_SIZE_TEST < long:
            raise UnreadableMedia(f"{long} x {short} pixels is too elongated to be resized")
        instances = predict(image, file_name=file.name)
        found.num_images += 1
        if output is not None:
            write_image(output, draw(image, instances))

    def predict_video(file: MediaFile, output: Path | None) -> None:
        frames, fps, count = read_video(file.path)
        bar = tqdm(frames, total=count, unit="frame", desc=file.name, leave=False)
        with contextlib.nullcontext() if output is None else open_video(output, fps) as append:
            for index, frame in enumerate(bar):
                instances = predict(frame, file_name=file.name, frame=index)
                found.num_frames += 1
                if append is not None:
                    append(draw(frame, instances))

    pairs = zip(media, name_outputs(media), strict=True)
    for file, name in tqdm(pairs, total=len(media), unit="file", desc="predicting"):
        with found.skip_unreadable(file):
            output = output_dir and output_dir / name
            predict_video(file, output) if file.is_video else predict_image(file, output)
    return found


def is_classifier(cfg: CfgNode) -> bool:
    """Whether the config is that of a classifier of images."""
    return cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_CLASSES


def classify_media(
    score: Callable[[Path], Scores], media: Iterable[MediaFile], class_names: Sequence[str]
) -> Predictions:
    """Classifies images; videos and images that cannot be read are skipped.

    Args:
        score: from an image's path to the scores (K,) of its classes, such as ``build_scorer``'s.
        media: as of ``find_media``.
        class_names: of the K classes; where there are none, their numbers replace them.
    """
    found = Predictions()
    for file in tqdm(list(media), unit="image", desc="classifying"):
        with found.skip_unreadable(file):
            if file.is_video:
                raise UnreadableMedia("a classifier takes images, not videos")
            scores = score(file.path)
            classes = [
                {"name": class_names[k] if class_names else str(k), "score": float(scores[k])}
                for k in np.argsort(-scores, kind="stable")[:_TOP_CLASSES].tolist()
            ]
            found.results.append({"file_name": file.name, "classes": classes})
            found.num_images += 1
    return found


def build_scorer(model: nn.Module, cfg: CfgNode) -> Callable[[Path], Scores]:
    """Returns a function from an image's path to its scores (K,), as in evaluation.

    Args:
        model: a classifier in evaluation mode, with its weights.
        cfg: of the model.
    """
    mapper = build_mapper(cfg, is_train=False)

    @torch.no_grad()
    def score(path: Path) -> Scores:
        entry = mapper({"file_name": str(path), "image_id": 0})
        if not isinstance(entry, dict):
            raise UnreadableMedia("not an image" if entry is None else entry.reason)
        scores: Scores = model([entry])[0]["scores"].float().cpu().numpy()
        return scores

    return score
