# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Trained models in Python: ``load``, and prediction on files as ``tools/predict.py`` does it."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import torch
from detectron2.config import CfgNode
from detectron2.engine import DefaultPredictor
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from detectron2.structures import ImageList, Instances
from torch import Tensor, nn

from qbheat_det.analysis.box_drawing import draw_instances
from qbheat_det.checkpoint import bare_backbone, load_run_config, read_weights
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import check_writable, write_atomically
from qbheat_det.data import MAPPERS_OF_IMAGES
from qbheat_det.deployment import deploy_by_config
from qbheat_det.engine.predict import (
    Predictions,
    build_predictor,
    build_scorer,
    classify_images,
    find_inputs,
    is_classifier,
    predict_images,
    read_bgr,
)
from qbheat_det.engine.video import Image, UnreadableImage
from qbheat_det.export import (
    EXPORTED_SUFFIXES,
    ExportedModel,
    ExportedPredictor,
    build_exported_scorer,
)
from qbheat_det.model_zoo.api import open_trained
from qbheat_det.model_zoo.index import PREFIX, find_entry
from qbheat_det.modeling.contracts import get_backbone

WEIGHTS_SUFFIXES = (".safetensors", ".pth", *EXPORTED_SUFFIXES)
Picture = str | Path | PIL.Image.Image | Image
"""A file, a PIL image, or an array (H, W, 3) of uint8, RGB."""


@dataclass(frozen=True)
class Detections:
    """What a detector found on one image.

    Attributes:
        image: (H, W, 3) uint8, RGB.
        instances: Detectron2's, on the CPU: ``pred_boxes``, ``scores``, ``pred_classes``.
        class_names: of the model, in the order of its classes.
        category_ids: ids of the classes in the annotations that the model was trained on.
    """

    image: Image
    instances: Instances
    class_names: Sequence[str]
    category_ids: Sequence[int]

    def __len__(self) -> int:
        return len(self.instances)

    @property
    def boxes(self) -> Tensor:
        """(N, 4), XYXY in pixels of the image."""
        boxes: Tensor = self.instances.pred_boxes.tensor
        return boxes

    @property
    def scores(self) -> Tensor:
        """(N,), in [0, 1]."""
        scores: Tensor = self.instances.scores
        return scores

    @property
    def labels(self) -> list[str]:
        """The name of each box's class."""
        return [self.class_names[index] for index in self.instances.pred_classes.tolist()]

    def draw(self) -> Image:
        """Returns the image with boxes, (H, W, 3) uint8, RGB."""
        return draw_instances(self.image, self.instances, self.class_names)

    def save(self, path: str | Path) -> None:
        """Writes the drawn image; its folder is made."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(self.draw()).save(path)

    def to_coco(self, image_id: int = 1) -> list[dict[str, Any]]:
        """Returns a dict for each box in COCO's results format."""
        found: list[dict[str, Any]] = instances_to_coco_json(self.instances, image_id)
        ids = self.category_ids or range(1, 1 + len(self.class_names))
        return [{**box, "category_id": ids[box["category_id"]]} for box in found]


class Detector:
    """A trained detector; ``model`` is its module, or None if it is an exported file."""

    def __init__(self, predict: Callable[[Image], Mapping[str, Instances]], cfg: CfgNode) -> None:
        """``predict`` takes a BGR image (H, W, 3), as Detectron2's ``DefaultPredictor``."""
        self._predict = predict
        self.cfg = cfg
        self.model: nn.Module | None = getattr(predict, "model", None)

    def predict(
        self, images: Picture | list[Picture], threshold: float = 0.3
    ) -> Detections | list[Detections]:
        """Finds objects on an image, or on each of several; ``threshold`` is the least score.

        Raises:
            UserError: a file does not exist or is no image, or the threshold is no score.
        """
        if not 0 <= threshold <= 1:
            raise UserError(f"threshold is {threshold}, expected a score from 0 to 1")
        found = [self._predict_one(image, threshold) for image in _as_list(images)]
        return found if isinstance(images, list | tuple) else found[0]

    def _predict_one(self, picture: Picture, threshold: float) -> Detections:
        image = read_rgb(picture)
        instances = self._predict(np.ascontiguousarray(image[:, :, ::-1]))["instances"].to("cpu")
        instances = instances[instances.scores >= threshold]
        node = self.cfg.MODEL
        return Detections(image, instances, list(node.CLASS_NAMES), list(node.CATEGORY_IDS))


class Encoder:
    """A trained backbone on images of any size; ``model`` is its module."""

    def __init__(self, model: nn.Module, cfg: CfgNode) -> None:
        """``model`` is a Detectron2 backbone in evaluation mode."""
        self.model = model
        self.cfg = cfg

    @torch.inference_mode()
    def __call__(self, images: Picture | list[Picture]) -> dict[str, Tensor]:
        """Returns the outputs by name, maps (N, C, H, W) and tokens (N, M, D).

        Several images are padded to one size; padding counts as image.

        Raises:
            UserError: there are no images, or a file does not exist or is no image.
        """
        if not _as_list(images):
            raise UserError("the list of images is empty")
        node, is_bgr = self.cfg.MODEL, self.cfg.INPUT.FORMAT == "BGR"
        mean, std = (
            torch.tensor(values, device=node.DEVICE).view(-1, 1, 1)
            for values in (node.PIXEL_MEAN, node.PIXEL_STD)
        )
        tensors = []
        for picture in _as_list(images):
            pixels = torch.from_numpy(read_rgb(picture)).to(node.DEVICE).permute(2, 0, 1)
            tensors.append(((pixels.flip(0) if is_bgr else pixels) - mean) / std)
        batch = ImageList.from_tensors(tensors, self.model.size_divisibility)
        outputs: dict[str, Tensor] = self.model(batch.tensor)
        return outputs


def _as_list(images: Picture | list[Picture]) -> list[Picture]:
    return list(images) if isinstance(images, list | tuple) else [images]


def load(
    weights: str | Path, *, device: str | None = None, fast: bool = False
) -> Detector | Encoder:
    """Opens trained weights.

    Args:
        weights: a name in the model zoo, with or without "qbheat://"; a file of weights
            (.safetensors, .pth) with its config inside or beside it; or an exported detector.
        device: "cpu" or "cuda"; by default cuda where there is a GPU.
        fast: whether a detector predicts in its deployed form, see ``deploy``.

    Returns:
        A detector, or of a backbone, a pre-training or a classifier the encoder.

    Raises:
        UserError: there is no such file or entry, or it does not fit its config.
    """
    name = str(weights)
    if not Path(name).exists() and "://" not in name:
        if Path(name).suffix in WEIGHTS_SUFFIXES:
            raise UserError(f"there is no file '{name}'")
        name = f"{PREFIX}{find_entry(name).name}"
    if name.lower().endswith(EXPORTED_SUFFIXES):
        if fast:
            raise UserError(f"'{name}' is exported: fast is for weights")
        exported = ExportedModel.open(name, device=device)
        return Detector(ExportedPredictor(exported), exported.load_config())
    opts = ["MODEL.DEPLOY.ENABLED", "True"] if fast else []
    cfg = load_run_config(name, device=device, opts=opts)
    is_backbone = not bare_backbone(read_weights(name)[0])
    if is_backbone or cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_IMAGES:
        model = open_trained(name, device=device).model
        return Encoder(get_backbone(model) or model, cfg)
    return Detector(_build_predictor(name, cfg), cfg)


def read_rgb(picture: Picture) -> Image:
    """Returns an image as an array (H, W, 3) of uint8, RGB, upright as its EXIF orientation says.

    Raises:
        UserError: a file does not exist or is no image, or an array is not (H, W, 3) of uint8.
    """
    if isinstance(picture, PIL.Image.Image):
        return np.array(PIL.ImageOps.exif_transpose(picture).convert("RGB"))
    if isinstance(picture, str | Path):
        try:
            return np.ascontiguousarray(read_bgr(Path(picture))[:, :, ::-1])
        except UnreadableImage as error:
            raise UserError(f"'{picture}' cannot be read: {error}") from error
    is_array = isinstance(picture, np.ndarray) and picture.dtype == np.uint8
    if not (is_array and picture.ndim == 3 and picture.shape[2] == 3 and picture.size):
        found = getattr(picture, "dtype", type(picture).__name__), getattr(picture, "shape", "")
        raise UserError(f"an image is an array (H, W, 3) of uint8, RGB, not {found}")
    return np.array(picture)


def predict_files(
    weights: str,
    inputs: Sequence[str],
    *,
    output: Path | None = None,
    json_file: Path | None = None,
    score_threshold: float = 0.3,
    config_file: str | None = None,
    device: str | None = None,
    fast: bool = False,
    opts: Sequence[str] = (),
) -> Predictions:
    """Predicts boxes, or with a classifier classes, on image files and folders.

    Args:
        weights: trained weights (.safetensors, .pth, qbheat://NAME) or an exported file.
        inputs: images, and folders that are searched recursively.
        output: folder for the drawn images.
        json_file: is written in COCO's results format, or with classes.
        score_threshold: boxes below it are left out, in [0, 1].
        config_file: YAML of the model; by default the one inside the weights, or beside them.
        device: "cpu" or "cuda"; by default cuda where there is a GPU.
        fast: predict with the deployed form of the model, as ``MODEL.DEPLOY`` describes it.
        opts: overrides of the config, ``KEY VALUE``.

    Returns:
        What was found, and the files that were skipped.

    Raises:
        UserError: weights, inputs or arguments do not fit each other.
    """
    if json_file:
        check_writable(json_file)
    exported = None
    if weights.lower().endswith(EXPORTED_SUFFIXES):
        if fast or config_file or opts:
            raise UserError(
                f"'{weights}' is exported with its config: leave out --fast, --config-file and "
                "config overrides"
            )
        exported = ExportedModel.open(weights, device=device)
        cfg = exported.load_config()
    else:
        wanted = [*opts, *(["MODEL.DEPLOY.ENABLED", "True"] if fast else [])]
        cfg = load_run_config(weights, config_file, device=device, opts=wanted)
    files = find_inputs(inputs, exclude=output)
    if is_classifier(cfg):
        if output or not json_file:
            raise UserError(
                f"'{weights}' is a classifier, which finds no boxes: leave out --output, and name "
                "--json FILE for the classes"
            )
        if exported:
            score, names = build_exported_scorer(exported), exported.info.class_names
        else:
            model, names = _build_predictor(weights, cfg).model, cfg.MODEL.CLASS_NAMES
            score = build_scorer(model, cfg)
        found = classify_images(score, files, names)
    else:
        found = predict_images(
            ExportedPredictor(exported) if exported else _build_predictor(weights, cfg),
            files,
            cfg=cfg,
            score_threshold=score_threshold,
            output_dir=output,
            draw=lambda image, instances: _draw(image, instances, cfg.MODEL.CLASS_NAMES),
        )
        if json_file and not cfg.MODEL.CATEGORY_IDS:
            print("note: the config lists no MODEL.CATEGORY_IDS, so category ids count from 1")
    if json_file:
        content = json.dumps(found.results).encode()
        write_atomically(json_file, lambda stream: stream.write(content))
    return found


def _build_predictor(weights: str, cfg: CfgNode) -> DefaultPredictor:
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
