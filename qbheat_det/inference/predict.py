# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Prediction on images and videos with trained weights: boxes, or classes of images."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import PIL.Image
import torch
from detectron2.config import CfgNode
from detectron2.data.detection_utils import _apply_exif_orientation, convert_PIL_to_numpy
from detectron2.engine import DefaultPredictor
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from detectron2.structures import Instances
from detectron2.utils.file_io import PathManager
from torch import nn
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.checkpoint import ExactCheckpointer, refuse_encoder
from qbheat_det.config import with_values
from qbheat_det.core.errors import UserError
from qbheat_det.core.text import one_line
from qbheat_det.data import IMAGE_FORMATS, IMAGE_SUFFIXES, MAPPERS_OF_CLASSES, build_mapper

from .video import VIDEO_SUFFIXES, Image, UnreadableImage, open_video, read_video

_TOP_CLASSES = 5
Scores = npt.NDArray[np.floating[Any]]


class InputFile(NamedTuple):
    """A file to predict on.

    ``name`` is the path below the input folder with forward slashes, or the file's own name.
    """

    path: Path
    name: str

    @property
    def is_video(self) -> bool:
        """Whether its suffix is that of a video."""
        return self.path.suffix.lower() in VIDEO_SUFFIXES


@dataclass
class Predictions:
    """What a model found on files.

    Attributes:
        results: for each box "image_id", "file_name", "category_id", "bbox" (XYWH, pixels of the
            upright input image) and "score"; "segmentation" (RLE) where the model predicts masks;
            "frame" (from 0) in videos, where each frame has an image id of its own. Of a
            classifier, for each image "file_name" and "classes": the likeliest first, each with
            "name" and "score" in [0, 1].
        images: of a detector, each image and frame as COCO has it, with "id", "file_name",
            "height" and "width" in pixels, "frame" in videos.
        num_images: images and videos that were predicted on.
        best_score: the highest of all boxes, also of those below the threshold.
        skipped: path of each file that was not, and the reason.
    """

    results: list[dict[str, Any]] = field(default_factory=list)
    images: list[dict[str, Any]] = field(default_factory=list)
    num_images: int = 0
    best_score: float = 0.0
    skipped: list[tuple[str, str]] = field(default_factory=list)

    @contextlib.contextmanager
    def skip_unreadable(self, file: InputFile) -> Iterator[None]:
        """Counts a file, or notes why it cannot be read instead of raising ``UnreadableImage``."""
        try:
            yield
            self.num_images += 1
        except UnreadableImage as error:
            self.skipped.append((str(file.path), str(error)))


def find_inputs(inputs: Sequence[str], exclude: Path | None = None) -> list[InputFile]:
    """Lists the files named by ``inputs`` and the images and videos in its folders, recursively.

    Files are taken whatever their suffix; the folder ``exclude`` is left out, so that earlier
    results are not taken for inputs. Raises a ``UserError`` if an input does not exist, or there is
    nothing.
    """
    own, suffixes = exclude and exclude.resolve(), IMAGE_SUFFIXES | VIDEO_SUFFIXES
    found: dict[Path, InputFile] = {}  # keyed by real path: a file named twice counts once
    for name in inputs:
        root = Path(name)
        if root.is_file():
            found.setdefault(root.resolve(), InputFile(root, root.name))
        elif root.is_dir():
            for path in sorted(p for p in root.rglob("*") if p.suffix.lower() in suffixes):
                is_broken = not path.exists()  # a link to nothing, or to itself
                real = path if is_broken else path.resolve()
                if (path.is_file() or is_broken) and not (own and real.is_relative_to(own)):
                    found.setdefault(real, InputFile(path, path.relative_to(root).as_posix()))
        else:
            raise UserError(f"input '{name}' does not exist (config overrides go last)")
    if not found:
        raise UserError(f"no images or videos in {', '.join(inputs)}")
    return list(found.values())


def name_outputs(files: Sequence[InputFile]) -> list[Path]:
    """Returns distinct relative paths of the drawn images and videos.

    JPEG stays JPEG, other images become PNG, videos MP4. After ``a.png``, ``a.bmp`` is ``a-2.png``.
    """
    taken: set[str] = set()
    outputs = []
    for file in files:
        suffix = ".jpg" if file.path.suffix.lower() in {".jpg", ".jpeg"} else ".png"
        wanted = Path(file.name).with_suffix(".mp4" if file.is_video else suffix)
        path, count = wanted, 1
        while str(path).lower() in taken:  # some file systems do not tell a.png from A.png
            count += 1
            path = wanted.with_name(f"{wanted.stem}-{count}{wanted.suffix}")
        taken.add(str(path).lower())
        outputs.append(path)
    return outputs


def read_bgr(path: str | Path) -> Image:
    """Reads an image of Detectron2's path manager, upright by its EXIF orientation: (H, W, 3), BGR.

    Raises ``UnreadableImage`` if it cannot be decoded, a ``UserError`` if its shard cannot be had.
    """
    try:
        with (
            PathManager.open(str(path), "rb") as file,
            PIL.Image.open(file, formats=IMAGE_FORMATS) as opened,
        ):
            is_16_bit = opened.mode.startswith("I")
            # As Detectron2's read_image, which would open files of any format.
            image: Image = convert_PIL_to_numpy(_apply_exif_orientation(opened), "BGR")
    except (MemoryError, UserError):
        raise
    except PIL.UnidentifiedImageError as error:
        raise UnreadableImage("not an image") from error
    except Exception as error:  # what a broken file raises depends on its format's decoder
        raise UnreadableImage(one_line(error)) from error
    if is_16_bit:  # Pillow turns all values above 255 into white
        raise UnreadableImage("16 bits of grey: convert it to 8 first")
    return image


def write_image(path: Path, image: Image) -> None:
    """Writes a (H, W, 3) BGR image, or raises a ``UserError``; its folder is made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(image[:, :, ::-1]).save(path, quality=92)
    except OSError as error:
        raise UserError(f"cannot write '{path}': {error.strerror or error}") from error


def group_by_shape(images: Sequence[Any]) -> list[list[int]]:
    """Returns the indices of arrays or tensors in groups of one shape."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, image in enumerate(images):
        groups.setdefault(tuple(image.shape), []).append(index)
    return list(groups.values())


class Predictor(Protocol):
    """What finds boxes: Detectron2's predictor, or an exported file."""

    def predict_batch(self, images: Sequence[Image]) -> list[Instances]:
        """From BGR images (H, W, 3) of any sizes to instances on the CPU."""


class BatchPredictor(DefaultPredictor):
    """Detectron2's predictor, which also takes several images at once."""

    def predict_batch(self, images: Sequence[Image]) -> list[Instances]:
        """Predicts on images (H, W, 3), BGR, of any sizes; returns instances on the CPU.

        Those that are resized to one size go through the model together, and so without padding:
        results are those of one by one, to the tolerance of floats.
        """
        inputs = []
        for image in images:
            resized = self.aug.get_transform(image).apply_image(image)
            resized = resized[:, :, ::-1] if self.input_format == "RGB" else resized
            pixels = torch.from_numpy(resized.astype("float32").transpose(2, 0, 1))
            height, width = image.shape[:2]
            inputs.append({"image": pixels, "height": height, "width": width})
        found: list[Any] = [None] * len(inputs)
        for group in group_by_shape([entry["image"] for entry in inputs]):
            with torch.no_grad():
                outputs = self.model([inputs[index] for index in group])
            for index, output in zip(group, outputs, strict=True):
                found[index] = output["instances"].to("cpu")
        return found


def check_elongation(image: Image, cfg: CfgNode) -> None:
    """Raises ``UnreadableImage`` if resizing would leave no row of an elongated image (H, W, 3)."""
    short, long = sorted(image.shape[:2])
    if short * cfg.INPUT.MAX_SIZE_TEST < long:
        raise UnreadableImage(f"{long} x {short} pixels is too elongated to be resized")


def build_predictor(
    cfg: CfgNode, prepare: Callable[[nn.Module], nn.Module] | None = None
) -> BatchPredictor:
    """Returns Detectron2's predictor, its model holding exactly the tensors of the weights file.

    ``prepare`` goes from the model with its weights to the one that predicts, such as its deployed
    form. Raises a ``UserError`` if the weights cannot be read, or do not fit the model of the
    config.
    """
    refuse_encoder(cfg.MODEL.WEIGHTS)
    # The weights come first.
    unloaded = with_values(cfg, {"MODEL.WEIGHTS": "", "MODEL.DEPLOY.ENABLED": False})
    predictor = BatchPredictor(unloaded)
    checkpointer = ExactCheckpointer(predictor.model, class_names=cfg.MODEL.CLASS_NAMES)
    checkpointer.load(cfg.MODEL.WEIGHTS)
    if prepare is not None:
        predictor.model = prepare(predictor.model)
    return predictor


def get_category_id(cfg: CfgNode, class_index: int) -> int:
    """Returns the annotation file's id of a contiguous class, or ``class_index + 1`` if unknown."""
    return int(cfg.MODEL.CATEGORY_IDS[class_index]) if cfg.MODEL.CATEGORY_IDS else class_index + 1


def predict_images(
    predictor: Callable[[Image], Mapping[str, Instances]],
    files: Sequence[InputFile],
    *,
    cfg: CfgNode,
    score_threshold: float,
    output_dir: Path | None,
    draw: Callable[[Image, Instances], Image],
) -> Predictions:
    """Predicts on files and draws the boxes; files that cannot be read are skipped.

    Args:
        predictor: from a BGR image (H, W, 3), whatever ``cfg.INPUT.FORMAT``, to {"instances"}.
        files: as of ``find_inputs``; images and frames are numbered from 1.
        cfg: ``MODEL.CATEGORY_IDS`` and ``INPUT.MAX_SIZE_TEST`` are read.
        score_threshold: boxes below it are neither drawn nor returned.
        output_dir: folder for the drawn images; nothing is drawn if None.
        draw: from a BGR image and its instances to the drawn image, also BGR.
    """
    found = Predictions()
    image_ids = itertools.count(1)

    def predict(image: Image, **origin: object) -> Instances:
        instances = predictor(image)["instances"].to("cpu")
        found.best_score = max(found.best_score, *instances.scores.tolist(), 0.0)
        instances = instances[instances.scores >= score_threshold]
        image_id, (height, width) = next(image_ids), image.shape[:2]
        found.images.append({"id": image_id, **origin, "height": height, "width": width})
        for box in instances_to_coco_json(instances, image_id):
            category_id = get_category_id(cfg, box["category_id"])
            found.results.append({**box, **origin, "category_id": category_id})
        return instances

    def predict_image(file: InputFile, output: Path | None) -> None:
        image = read_bgr(file.path)
        check_elongation(image, cfg)
        instances = predict(image, file_name=file.name)
        if output is not None:
            write_image(output, draw(image, instances))

    def predict_video(file: InputFile, output: Path | None) -> None:
        frames, fps, count = read_video(file.path)
        bar = tqdm(frames, total=count, unit="frame", desc=file.name, leave=False, disable=None)
        with contextlib.nullcontext() if output is None else open_video(output, fps) as append:
            for index, frame in enumerate(bar):
                instances = predict(frame, file_name=file.name, frame=index)
                if append is not None:
                    append(draw(frame, instances))

    pairs = zip(files, name_outputs(files), strict=True)
    for file, name in tqdm(pairs, total=len(files), unit="file", desc="predicting", disable=None):
        with found.skip_unreadable(file):
            output = output_dir and output_dir / name
            predict_video(file, output) if file.is_video else predict_image(file, output)
    return found


def is_classifier(cfg: CfgNode) -> bool:
    """Whether the config is that of a classifier of images."""
    return cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_CLASSES


def classify_images(
    score: Callable[[str | Path], Scores], files: Sequence[InputFile], class_names: Sequence[str]
) -> Predictions:
    """Classifies images; files that cannot be read are skipped.

    ``score`` goes from an image's path to the scores (K,) of its classes, such as
    ``build_scorer``'s. Without ``class_names``, numbers replace them.
    """
    found = Predictions()
    for file in tqdm(files, unit="image", desc="classifying", disable=None):
        with found.skip_unreadable(file):
            if file.is_video:
                raise UnreadableImage("a classifier takes images, not videos")
            classes = find_likeliest(score(file.path), class_names)
            found.results.append({"file_name": file.name, "classes": classes})
    return found


def find_likeliest(scores: Scores, class_names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns "name" and "score" of the five likeliest of the classes, from scores (K,)."""
    return [
        {"name": class_names[k] if class_names else str(k), "score": float(scores[k])}
        for k in np.argsort(-scores, kind="stable")[:_TOP_CLASSES].tolist()
    ]


def build_scorer(model: nn.Module, cfg: CfgNode) -> Callable[[str | Path], Scores]:
    """Returns a function from an image's path to its scores (K,), as in evaluation."""
    mapper = build_mapper(cfg, is_train=False)

    @torch.no_grad()
    def score(path: str | Path) -> Scores:
        entry = mapper({"file_name": str(path), "image_id": 0})
        if not isinstance(entry, dict):
            raise UnreadableImage("not an image" if entry is None else entry.reason)
        scores: Scores = model([entry])[0]["scores"].float().cpu().numpy()
        return scores

    return score
