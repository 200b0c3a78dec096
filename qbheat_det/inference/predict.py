# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Opens trained weights, and runs detectors, classifiers and backbones on images.

The command line, the Python API, the app and the server predict boxes with ``find_boxes``.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from detectron2.config import CfgNode
from detectron2.engine import DefaultPredictor
from detectron2.structures import ImageList, Instances
from torch import Tensor, nn

from qbheat_det.checkpoint import (
    ExactCheckpointer,
    SafeCheckpointer,
    choose_device,
    holds_backbone_alone,
    info_of,
    load_run_config,
    local_weights,
)
from qbheat_det.config import get_cfg, with_values
from qbheat_det.core.errors import UserError
from qbheat_det.data import (
    build_mapper,
    check_tile,
    list_tiles,
    merge_tiles,
)
from qbheat_det.data.checks import find_elongation
from qbheat_det.deployment import deploy_by_config
from qbheat_det.fast import optimize
from qbheat_det.model_zoo.sources import open_trained
from qbheat_det.modeling.backbone.fpn import build_bare_backbone
from qbheat_det.modeling.backbone.timm_backbone import list_outputs
from qbheat_det.modeling.contracts import get_backbone, normalise_pixels
from qbheat_det.tasks import CLASSIFICATION, DETECTION, PRETRAINING, find_task

from .exported import EXPORTED_SUFFIXES
from .images import Image, NamedImage, UnreadableImage, run_by_shape
from .results import Detections

Scores = npt.NDArray[np.floating[Any]]
_TILES_PER_BATCH = 8
_TIMM = "timm://"  # addresses of timm's weights begin with this prefix


class Predictor(Protocol):
    """The interface of detectors in PyTorch, exported detectors, and tiled prediction."""

    def predict_batch(self, images: Sequence[Image]) -> list[Instances]:
        """Predicts on RGB images (H, W, 3) of any sizes.

        Returns one ``Instances`` per image on the CPU, with boxes in pixels of the image.
        """


class BatchPredictor(DefaultPredictor):
    """Detectron2's predictor, which can also process several images at once."""

    def predict_batch(self, images: Sequence[Image]) -> list[Instances]:
        """Predicts on RGB images (H, W, 3) of any sizes. Returns instances on the CPU.

        Only images with the same size after resizing form a batch, so no padding is needed. The
        results are the same as for single images, up to rounding.
        """
        inputs: list[dict[str, Any]] = []
        for image in images:
            resized = self.aug.get_transform(image).apply_image(image)
            if self.input_format == "BGR":
                resized = resized[:, :, ::-1]
            pixels = torch.from_numpy(resized.astype("float32").transpose(2, 0, 1))
            height, width = image.shape[:2]
            inputs.append({"image": pixels, "height": height, "width": width})
        with torch.no_grad():
            outputs = run_by_shape(inputs, self.model, lambda entry: entry["image"].shape)
        return [output["instances"].to("cpu") for output in outputs]


def build_predictor(cfg: CfgNode) -> BatchPredictor:
    """Builds a predictor and loads ``MODEL.WEIGHTS``, which must fit the model exactly.

    Raises a ``UserError`` if the weights cannot be read or do not match the model.
    """
    info = info_of(cfg.MODEL.WEIGHTS)
    has_classes = info is None or bool(info.class_names)  # without ``info``, the file may have them
    if not has_classes and holds_backbone_alone(cfg.MODEL.WEIGHTS):
        raise UserError(
            f"'{cfg.MODEL.WEIGHTS}' is an encoder, which predicts neither boxes nor classes: train "
            "a detector or a classifier on it, or write it with qbheat export --backbone"
        )
    unloaded = with_values(cfg, {"MODEL.WEIGHTS": "", "MODEL.DEPLOY.ENABLED": False})
    predictor = BatchPredictor(unloaded)
    checkpointer = ExactCheckpointer(predictor.model, class_names=cfg.MODEL.CLASS_NAMES)
    checkpointer.load(cfg.MODEL.WEIGHTS)
    return predictor


def build_detector(cfg: CfgNode) -> BatchPredictor:
    """Builds a detector or classifier in the fastest form for its device.

    If ``MODEL.DEPLOY.ENABLED``, this is the deployed form. Raises a ``UserError`` if the weights
    are of a pre-training model, or do not fit the config.
    """
    if find_task(cfg) is PRETRAINING:
        raise UserError(
            f"'{cfg.MODEL.WEIGHTS}' are weights of pre-training ({cfg.MODEL.META_ARCHITECTURE}), "
            "which predict neither boxes nor classes: train a detector or a classifier on them"
        )
    predictor = build_predictor(cfg)
    if cfg.MODEL.DEPLOY.ENABLED:
        predictor.model = deploy_by_config(predictor.model, cfg.MODEL.DEPLOY)
    elif cfg.MODEL.DEVICE == "cpu":
        optimize(predictor.model, "cpu_inference")
    return predictor


def find_boxes(
    predictor: Predictor,
    images: Iterable[NamedImage],
    cfg: CfgNode,
    *,
    threshold: float = 0.0,
    batch_size: int = 1,
    tile: int | None = None,
) -> Iterator[Detections]:
    """Predicts on images. Yields the detections of each image.

    Args:
        predictor: the detector.
        images: read in batches of ``batch_size``.
        cfg: config of the detector, which has the names and ids of the classes.
        threshold: lowest score of a box.
        batch_size: number of images that the detector processes together.
        tile: side of overlapping tiles in pixels; 0 uses whole images only, and None uses
            ``INPUT.TILE``.

    Raises:
        UnreadableImage: an image is too elongated. Errors of ``images`` and of its images are
            raised after the detections of the images before them.
    """
    class_names = list(cfg.MODEL.CLASS_NAMES)
    category_ids = list(cfg.MODEL.CATEGORY_IDS)
    if tile is None:
        tile = cfg.INPUT.TILE
    if tile:
        predictor = TiledPredictor(predictor, tile)
    images = iter(images)
    error: Exception | None = None
    while error is None:
        batch, error = _take(images, batch_size, cfg)
        if not batch:
            break
        results = predictor.predict_batch([named_image.image for named_image in batch])
        for named_image, instances in zip(batch, results, strict=True):
            if threshold:
                instances = instances[instances.scores >= threshold]
            yield Detections(
                instances=instances,
                class_names=class_names,
                category_ids=category_ids,
                source=named_image.file or named_image.image,
                file_name=named_image.name,
                frame=named_image.frame,
            )
    if error is not None:
        raise error


def _take(
    images: Iterator[NamedImage], number: int, cfg: CfgNode
) -> tuple[list[NamedImage], Exception | None]:
    """Takes ``number`` images, or those before an image that cannot be read, and its error."""
    batch: list[NamedImage] = []
    try:
        for image in itertools.islice(images, number):
            check_elongation(image, cfg)
            batch.append(image)
    except Exception as error:  # also of the user's generator
        return batch, error
    return batch, None


def check_elongation(image: NamedImage, cfg: CfgNode) -> None:
    """Raises ``UnreadableImage`` if the resize would reduce the shorter side to zero pixels.

    This happens if the longer side is much longer, because it is resized to at most
    ``INPUT.MAX_SIZE_TEST``.
    """
    reason = find_elongation(image.image.shape[:2], cfg.INPUT.MAX_SIZE_TEST)
    if reason:
        raise UnreadableImage(image.name, reason)


def is_classifier(cfg: CfgNode) -> bool:
    """Returns whether the model of a config is an image classifier."""
    return find_task(cfg) is CLASSIFICATION


def build_scorer(model: nn.Module, cfg: CfgNode) -> Callable[[str | Path], Scores]:
    """Returns a function that maps an image path to class scores (K,).

    ``model`` is a classifier, and the evaluation mapper of ``cfg`` reads the image.
    """
    mapper = build_mapper(cfg, is_train=False)

    @torch.no_grad()
    def score(path: str | Path) -> Scores:
        entry = mapper({"file_name": str(path), "image_id": 0})
        if entry is None:
            raise UnreadableImage(path, "not an image")
        if not isinstance(entry, dict):  # a ``DataError``
            raise UnreadableImage(path, entry.reason)
        return model([entry])[0]["scores"].float().cpu().numpy()

    return score


class TiledPredictor:
    """Predicts on overlapping square tiles and on the whole image, and merges the boxes.

    The slicers of supervision and SAHI are not used because they predict tiles one by one.
    """

    def __init__(self, predictor: Predictor, tile: int) -> None:
        """``tile`` is the side of a tile in pixels. Raises a ``UserError`` if it is below 32."""
        check_tile(tile)
        self._predictor = predictor
        self._tile = tile

    def predict_batch(self, images: Sequence[Image]) -> list[Instances]:
        """Predicts on RGB images (H, W, 3) of any sizes. Returns instances on the CPU."""
        return [self._predict(image) for image in images]

    def _predict(self, image: Image) -> Instances:
        """Predicts on one image (H, W, 3) and its tiles."""
        (whole,) = self._predictor.predict_batch([image])
        image_height, image_width = image.shape[:2]
        rectangles = list_tiles(image_height, image_width, self._tile)  # (x, y, width, height)
        results: list[Instances] = []  # of the tiles
        for start in range(0, len(rectangles), _TILES_PER_BATCH):
            tiles = []
            for x, y, width, height in rectangles[start : start + _TILES_PER_BATCH]:
                tiles.append(np.ascontiguousarray(image[y : y + height, x : x + width]))
            results += self._predictor.predict_batch(tiles)
        return merge_tiles(whole, zip(rectangles, results, strict=True))


def open_encoder(name: str, device: str | None = None) -> tuple[nn.Module, CfgNode]:
    """Opens the backbone of a pre-trained model, a classifier, an encoder file or a timm model.

    Args:
        name: a file or an address, as ``find_weights`` returns it.
        device: "cpu" or "cuda"; by default "cuda" if a GPU is available.

    Raises:
        UserError: ``name`` is a detector or an exported file, or the weights do not fit their
            config.
    """
    if is_timm(name):
        return _open_timm(name, device)
    refused = UserError(f"'{name}' is a detector or an exported file, not an encoder")
    if name.lower().endswith(EXPORTED_SUFFIXES):
        raise refused
    cfg = load_run_config(name, device=device)
    if not is_encoder(name, cfg):
        raise refused
    model = open_trained(name, device=device).model
    return get_backbone(model) or model, cfg  # a bare backbone has no backbone in it


def is_encoder(name: str, cfg: CfgNode) -> bool:
    """Returns whether weights are of a backbone, a pre-training model or a classifier.

    ``cfg`` is their config.
    """
    return holds_backbone_alone(name) or find_task(cfg) is not DETECTION


def is_timm(name: str) -> bool:
    """Returns whether weights are of a timm model. Such weights have no config."""
    return name.startswith(_TIMM)


def _open_timm(address: str, device: str | None) -> tuple[nn.Module, CfgNode]:
    """Returns a timm model that outputs all feature maps, and its config with pixel statistics."""
    model_name = address.removeprefix(_TIMM).partition(".")[0]
    info = info_of(local_weights(address))
    cfg: CfgNode = get_cfg()
    cfg.MODEL.DEVICE = choose_device(device)
    cfg.MODEL.WEIGHTS = address
    cfg.MODEL.BACKBONE.NAME = f"timm:{model_name}"
    cfg.MODEL.TIMM.OUT_FEATURES = list_outputs(model_name)
    if info is not None:
        cfg.INPUT.FORMAT = info.pixel_format
        cfg.MODEL.PIXEL_MEAN = list(info.pixel_mean)
        cfg.MODEL.PIXEL_STD = list(info.pixel_std)
    model = build_bare_backbone(cfg).to(cfg.MODEL.DEVICE)
    SafeCheckpointer(model).load(address)  # leaves out the classifier
    return model.eval(), cfg


@torch.inference_mode()
def encode(model: Any, cfg: CfgNode, images: Sequence[Image]) -> dict[str, Tensor]:
    """Normalizes RGB images (H, W, 3), uint8, pads them to one size, and runs a backbone on them.

    Returns the backbone's outputs by name: feature maps (N, C, H', W') and tokens (N, M, D).
    """
    tensors = []
    for image in images:
        pixels = torch.from_numpy(image).to(cfg.MODEL.DEVICE).permute(2, 0, 1)  # (3, H, W)
        if cfg.INPUT.FORMAT == "BGR":
            pixels = pixels.flip(0)
        tensors.append(normalise_pixels(pixels, cfg.MODEL.PIXEL_MEAN, cfg.MODEL.PIXEL_STD))
    batch = ImageList.from_tensors(tensors, model.size_divisibility).tensor
    return model(batch)
