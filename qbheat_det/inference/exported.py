# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Runs exported ONNX files, and describes their inputs and outputs.

Imports neither PyTorch nor Detectron2, so that the first prediction takes less than a second.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import yaml

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import parse_record
from qbheat_det.core.text import one_line
from qbheat_det.core.yaml_text import load_yaml

from .array_instances import ArrayInstances
from .images import Image, read_rgb, run_by_shape
from .predictor import DetectorSettings

if TYPE_CHECKING:  # a file runs without Detectron2
    from detectron2.config import CfgNode

Images = npt.NDArray[np.uint8]
"""(N, H, W, 3)."""
Scores = npt.NDArray[np.floating[Any]]
Outputs = dict[str, npt.NDArray[Any]]
"""The arrays that onnxruntime returns, by output name."""
EXPORTED_SUFFIXES = (".onnx",)
ENCODER = "encoder.onnx"
HEAD_PREFIX = "head_"
_PROVIDERS = {  # onnxruntime's names by device; the first available one is used
    None: ["CUDAExecutionProvider", "CPUExecutionProvider"],
    "cuda": ["CUDAExecutionProvider"],
    "cpu": ["CPUExecutionProvider"],
}
Task = Literal["detection", "classification", "features"]
METADATA_KEY = "qbheat_det"
"""Key of ``ExportInfo`` (as JSON) in ONNX's ``metadata_props``."""
SHARED_ENCODER_KEY = f"{METADATA_KEY}_shared_encoder"
"""Key of the encoder's hash in ``metadata_props``. Files of a shared-encoder export have it."""
TASK_OUTPUTS: dict[Task, tuple[str, ...]] = {
    "detection": ("boxes", "scores", "labels", "counts"),
    "classification": ("scores",),
}
"""Output names of each task. For "features", these are the names of the backbone's outputs."""
_FORMAT = 1
# Detectron2's and our default values, for a config without these keys.
_INPUT_DEFAULTS = {"TILE": 0, "MAX_SIZE_TEST": 1333}


@dataclass(frozen=True)
class ExportInfo:
    """Describes the inputs and outputs of an exported file. The file stores it as metadata.

    The input "images" is (N, H, W, 3), uint8, with channels in the order of ``pixel_format``. If
    ``image_size`` is set, the input is a single image of this size. Otherwise, N, H and W are free.
    The ONNX graph resizes, normalizes and pads the images. Its outputs depend on ``task``:

    - "detection": "boxes" (N, R, 4), XYXY in pixels of the input image, "scores" (N, R) in [0, 1],
      in descending order, "labels" (N, R), from 0, and "counts" (N,). The first ``counts[n]`` of
      the R rows of image n are detections. The remaining rows are padding.
    - "classification": "scores" (N, K), which sum to one for each image.
    - "features": the backbone's feature maps (N, C, H', W') and tokens (N, M, D), by name.
    """

    task: Task
    outputs: tuple[str, ...]  # names, in the order of the ONNX graph
    pixel_format: Literal["RGB", "BGR"]
    class_names: tuple[str, ...] = ()  # in the order of the labels; empty if unknown
    category_ids: tuple[int, ...] = ()  # id of each label in the training annotations
    image_size: tuple[int, ...] = ()  # (H, W) of the input image; empty if any size
    score_threshold: float = 0.0  # the graph leaves out detections with this score or less
    model: str = ""  # name of the meta-architecture
    config: str = ""  # the whole config as YAML
    version: str = ""  # version of the package at export

    def to_json(self) -> str:
        """Returns the fields as JSON, for ``from_json``."""
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str, where: str) -> "ExportInfo":
        """Parses and checks JSON of ``to_json``, which may be from an untrusted file.

        Raises a ``UserError``, which names the file ``where``, if the JSON is invalid.
        """
        try:
            content = json.loads(text)
            if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
                raise ValueError
            info = parse_record(cls, content, f"'{where}'")
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"'{where}' has no valid description of its outputs: export the weights again"
            ) from error
        has_fixed_outputs = info.task in TASK_OUTPUTS
        if has_fixed_outputs and info.outputs != TASK_OUTPUTS[info.task]:
            raise UserError(f"'{where}' does not have the outputs of its task: export it again")
        if len(info.image_size) not in (0, 2):
            raise UserError(f"'{where}': 'image_size' has {len(info.image_size)} numbers, not 2")
        num_names = len(info.class_names)
        num_ids = len(info.category_ids)
        has_both = info.task == "detection" and num_names and num_ids
        if has_both and num_names != num_ids:
            raise UserError(f"'{where}' has {num_names} class names, but {num_ids} category ids")
        return info


class ExportedModel:
    """An exported file, opened for inference.

    Attributes:
        path: the ``.onnx`` file.
        info: the description of its inputs and outputs.
    """

    def __init__(self, path: Path, info: ExportInfo, run: Callable[[Images], Outputs]) -> None:
        """``run`` maps images to the outputs that ``info`` describes."""
        self.path = path
        self.info = info
        self._run = run

    @classmethod
    def open(cls, path: str | Path, *, device: str | None = None) -> "ExportedModel":
        """Opens an ``.onnx`` file in onnxruntime.

        Args:
            path: the file. A ``head_NAME.onnx`` of a shared-encoder export needs the encoder's
                file in the same folder.
            device: "cpu" or "cuda"; by default "cuda" if onnxruntime supports it.

        Raises:
            UserError: the file is missing, damaged or not an export, or onnxruntime is not
                installed or does not support the device.
        """
        if Path(path).suffix.lower() not in EXPORTED_SUFFIXES:
            raise UserError(f"'{path}' is not an exported file: its name must end in .onnx")
        if device not in (None, "cpu", "cuda"):
            raise UserError(f"an exported file runs on the device cpu or cuda, not '{device}'")
        path = Path(path)
        session, info, encoder_hash = _open_session(path, device)
        is_part = bool(encoder_hash)  # the encoder or a head of a shared-encoder export
        if is_part:
            if path.name == ENCODER:
                raise UserError(f"'{path}' has no head: use a {HEAD_PREFIX}NAME.onnx in its folder")
            heads = SharedEncoderModel(path.parent, device=device).heads
            return heads[path.stem.removeprefix(HEAD_PREFIX)]
        names = [value.name for value in (*session.get_inputs(), *session.get_outputs())]
        if names != ["images", *info.outputs]:
            raise UserError(f"'{path}' does not have the outputs it describes: export it again")

        def run(images: Images) -> Outputs:
            return _run_session(session, {"images": images})

        return cls(path, info, run)

    def __call__(self, images: Images) -> Any:
        """Runs the model on images (N, H, W, 3), uint8, in ``info.pixel_format``.

        Returns:
            For a detector, one ``ArrayInstances`` per image, in descending order of scores.
            For a classifier, scores (N, K). For a backbone, feature maps and tokens by name.

        Raises:
            ValueError: the images have a wrong shape or type.
            UserError: the images are not of size ``info.image_size``, or onnxruntime fails.
        """
        return _format(self.run(images), self.info, images, self.path)

    def run(self, images: Images) -> Outputs:
        """Runs the model on images (N, H, W, 3). Returns the outputs that ``ExportInfo`` describes.

        Raises the errors of ``__call__``.
        """
        contiguous = _check_images(images)
        has_fixed_size = bool(self.info.image_size)
        if has_fixed_size and images.shape[1:3] != self.info.image_size:
            height, width = self.info.image_size
            raise UserError(f"'{self.path}' takes images of {height} x {width} pixels only")
        try:
            if not has_fixed_size or len(images) == 1:
                return self._run(contiguous)
            # A graph of fixed size takes a single image.
            outputs = [self._run(image[None]) for image in contiguous]
            return {
                name: np.concatenate([output[name] for output in outputs]) for name in outputs[0]
            }
        except Exception as error:  # onnxruntime's errors have no common base class
            raise UserError(
                f"'{self.path}' fails on images {images.shape}: {one_line(error)}"
            ) from error

    @property
    def is_classifier(self) -> bool:
        """Whether the file is an image classifier."""
        return self.info.task == "classification"

    @cached_property
    def settings(self) -> DetectorSettings:
        """What prediction needs of the config in the file. Raises a ``UserError`` if it is wrong.

        ``load_config`` returns the whole config, and imports Detectron2.
        """
        where = f"the config inside '{self.path}'"
        try:
            content = load_yaml(self.info.config)
        except yaml.YAMLError as error:
            raise UserError(f"{where} is not plain YAML: {one_line(error)}") from error
        node = content.get("INPUT") if isinstance(content, dict) else None
        values = _INPUT_DEFAULTS | node if isinstance(node, dict) else _INPUT_DEFAULTS
        for key in _INPUT_DEFAULTS:
            if type(values[key]) is not int or values[key] < 0:
                raise UserError(f"{where}: INPUT.{key} is {values[key]!r:.60}, not a number")
        if not values["MAX_SIZE_TEST"]:
            raise UserError(f"{where}: INPUT.MAX_SIZE_TEST is 0, not the length of a side")
        return DetectorSettings(
            class_names=list(self.info.class_names),
            category_ids=list(self.info.category_ids),
            tile=values["TILE"],
            max_size=values["MAX_SIZE_TEST"],
        )

    def build_predictor(self) -> "ExportedPredictor":
        """Returns the predictor of a detector. Raises a ``UserError`` for another model."""
        return ExportedPredictor(self)

    def build_scorer(self) -> Callable[[str | Path], Scores]:
        """Returns a function from an image's path to its class scores (K,).

        Raises a ``UserError`` if the model is not a classifier.
        """
        run = _take_rgb(self, "classification")

        def score(path: str | Path) -> Scores:
            batch = read_rgb(path)[None]  # (1, H, W, 3)
            scores: Scores = run(batch)  # (1, K)
            return scores[0]

        return score

    def load_config(self) -> "CfgNode":
        """Returns the config in the file. ``MODEL.WEIGHTS`` is set to the path of the file."""
        from qbheat_det.checkpoint import load_embedded_config

        cfg = load_embedded_config(self.info.config, f"the config inside '{self.path}'")
        cfg.MODEL.WEIGHTS = str(self.path)
        cfg.MODEL.CLASS_NAMES = list(self.info.class_names)
        cfg.MODEL.CATEGORY_IDS = list(self.info.category_ids)
        return cfg


class SharedEncoderModel:
    """The models of a shared-encoder export. The encoder runs once per batch, then each head.

    Attributes:
        info: inputs and outputs of the encoder.
        heads: maps each head's name to a model that runs the encoder and this head.
    """

    def __init__(self, folder: str | Path, *, device: str | None = None) -> None:
        """Raises a ``UserError`` if a file is damaged or missing, or the encoders do not match."""
        self._encoder, self.info, encoder_hash = _open_session(Path(folder) / ENCODER, device)
        self._sessions: dict[str, Any] = {}
        self.heads: dict[str, ExportedModel] = {}
        for path in sorted(Path(folder).glob(f"{HEAD_PREFIX}*.onnx")):
            session, info, expected_hash = _open_session(path, device)
            if not expected_hash or expected_hash != encoder_hash:
                raise UserError(
                    f"'{path}' was exported with another encoder than the {ENCODER} in its folder"
                )
            name = path.stem.removeprefix(HEAD_PREFIX)
            self._sessions[name] = session
            self.heads[name] = ExportedModel(path, info, partial(self._run, session))
        if not self.heads:
            raise UserError(f"'{folder}' has an {ENCODER}, but no {HEAD_PREFIX}NAME.onnx")

    def __call__(self, images: Images) -> dict[str, Any]:
        """Runs the encoder and all heads on images (N, H, W, 3), uint8.

        Returns the results of each head by its name, in the form of ``ExportedModel.__call__``.
        """
        features = self.encode(_check_images(images))
        results = {}
        for name, session in self._sessions.items():
            outputs = _run_session(session, features)
            head = self.heads[name]
            results[name] = _format(outputs, head.info, images, head.path)
        return results

    def encode(self, images: Images) -> Outputs:
        """Returns the inputs of the heads by name: the backbone's outputs, and the image sizes."""
        return _run_session(self._encoder, {"images": images})

    def _run(self, session: Any, images: Images) -> Outputs:
        return _run_session(session, self.encode(images))


class ExportedPredictor:
    """Finds boxes with an exported detector. Has the interface of ``predict.Predictor``."""

    def __init__(self, model: ExportedModel) -> None:
        """Raises a ``UserError`` if the model is not a detector."""
        self._run = _take_rgb(model, "detection")

    def predict_batch(self, images: Sequence[Image]) -> list[ArrayInstances]:
        """Predicts on images (H, W, 3), RGB. Images of equal size form one batch."""

        def run(group: list[Image]) -> list[ArrayInstances]:
            detections: list[ArrayInstances] = self._run(np.stack(group))
            return detections

        return run_by_shape(images, run, lambda image: image.shape)


def _take_rgb(model: ExportedModel, task: Task) -> Callable[[Image], Any]:
    """Returns a function that runs the model on RGB images (N, H, W, 3), uint8.

    Raises a ``UserError`` if the model was exported for another task.
    """
    if model.info.task != task:
        raise UserError(f"'{model.path}' was exported for {model.info.task}, not for {task}")
    if model.info.pixel_format == "RGB":
        return model

    def run(images: Image) -> Any:
        return model(images[..., ::-1])  # to BGR

    return run


def split_detections(outputs: Outputs, size: tuple[int, int]) -> list[ArrayInstances]:
    """Splits a detector's outputs into the boxes of each image. Images are of ``size`` (H, W)."""
    results = []
    # The first ``count`` rows of an image are detections. The remaining rows are padding.
    for index, count in enumerate(outputs["counts"].tolist()):
        results.append(
            ArrayInstances(
                size,
                outputs["boxes"][index, :count].copy(),
                outputs["scores"][index, :count].copy(),
                outputs["labels"][index, :count].copy(),
            )
        )
    return results


def _find_fault(outputs: Outputs, info: ExportInfo, num_images: int) -> str | None:
    """Returns what is wrong with the outputs for N images, or None."""
    if not all(isinstance(output, np.ndarray) for output in outputs.values()):
        return "has outputs that are not tensors"
    if info.task == "detection":
        return _find_fault_of_boxes(outputs, info, num_images)
    if info.task == "classification":
        scores = outputs["scores"]
        num_classes = len(info.class_names) or (scores.shape or (0,))[-1]
        if scores.shape != (num_images, num_classes) or scores.dtype.kind != "f":
            return f"has scores {scores.shape}, but describes {num_classes} classes"
        if not np.isfinite(scores).all():
            return "returns scores that are not finite"
    return None


def _find_fault_of_boxes(outputs: Outputs, info: ExportInfo, num_images: int) -> str | None:
    """Returns what is wrong with a detector's outputs for N images, or None."""
    boxes = outputs["boxes"]
    scores = outputs["scores"]
    labels = outputs["labels"]
    counts = outputs["counts"]
    rows = scores.shape[1] if scores.ndim == 2 else 0
    shapes = [boxes.shape, scores.shape, labels.shape, counts.shape]
    if shapes != [(num_images, rows, 4), (num_images, rows), (num_images, rows), (num_images,)]:
        return f"has outputs of the wrong shapes {', '.join(map(str, shapes))}"
    kinds = boxes.dtype.kind + scores.dtype.kind + labels.dtype.kind + counts.dtype.kind
    if kinds != "ffii":  # floats and integers
        return "has outputs of wrong types"
    if not np.all((counts >= 0) & (counts <= rows)):
        return f"counts {counts.min()} to {counts.max()} detections, but has {rows} rows"
    is_detection = np.arange(rows) < counts[:, None]  # (N, R); the remaining rows are padding
    if not np.isfinite(boxes[is_detection]).all() or not np.isfinite(scores[is_detection]).all():
        return "returns boxes or scores that are not finite"
    num_classes = len(info.class_names) or len(info.category_ids) or math.inf
    found = labels[is_detection]
    if not np.all((found >= 0) & (found < num_classes)):
        return f"returns the classes {found.min()} to {found.max()}, but describes {num_classes}"
    return None


def _check_images(images: Images) -> Images:
    """Returns the images as a contiguous array, or raises a ``ValueError``."""
    is_batch = images.ndim == 4 and images.shape[3] == 3 and images.size > 0
    if not is_batch or images.dtype != np.uint8:
        raise ValueError(
            f"images must be (N, H, W, 3), uint8 and not empty, not {images.shape}, {images.dtype}"
        )
    return np.ascontiguousarray(images)


def _format(outputs: Outputs, info: ExportInfo, images: Images, path: Path) -> Any:
    """Converts raw outputs for ``images`` to the results of ``ExportedModel.__call__``.

    Raises a ``UserError``, which names the file ``path``, if they are not as ``info`` describes.
    """
    fault = _find_fault(outputs, info, len(images))
    if fault:
        raise UserError(f"'{path}' {fault}: export the weights again")
    if info.task == "detection":
        return split_detections(outputs, (images.shape[1], images.shape[2]))
    if info.task == "classification":
        return outputs["scores"]
    return outputs


def _open_session(path: Path, device: str | None) -> tuple[Any, ExportInfo, str]:
    """Opens a file in onnxruntime.

    Returns the ``InferenceSession``, the description in the file, and the encoder's hash if the
    file is part of a shared-encoder export, or else "". Raises a ``UserError`` if this fails.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise UserError(f"'{path}' needs onnxruntime: pip install onnxruntime") from error
    allowed = _PROVIDERS[device]
    providers = [name for name in allowed if name in onnxruntime.get_available_providers()]
    if not providers:
        raise UserError("this onnxruntime has no GPU: install onnxruntime-gpu, or use the CPU")
    try:
        session = onnxruntime.InferenceSession(str(path), providers=providers)
        metadata = session.get_modelmeta().custom_metadata_map
    except Exception as error:  # onnxruntime's errors have no common base class
        raise UserError(
            f"'{path}' cannot be opened (missing, truncated or not ONNX): {one_line(error)}"
        ) from error
    info = ExportInfo.from_json(metadata.get(METADATA_KEY, ""), str(path))
    return session, info, metadata.get(SHARED_ENCODER_KEY, "")


def _run_session(session: Any, values: Outputs) -> Outputs:
    """Runs an ``InferenceSession`` on those of the ``values`` that it has as inputs."""
    names = [output.name for output in session.get_outputs()]
    inputs = {node.name: values[node.name] for node in session.get_inputs()}
    arrays = session.run(names, inputs)
    return dict(zip(names, arrays, strict=True))
