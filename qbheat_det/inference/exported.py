# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Runs exported files without the code of their model; ONNX files hold no code of their own."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from detectron2.config import CfgNode
from detectron2.structures import Boxes, Instances

from qbheat_det.checkpoint import load_embedded_config
from qbheat_det.core.errors import UserError
from qbheat_det.core.text import one_line

from .export_info import METADATA_KEY, SHARED_ENCODER_KEY, ExportInfo, Task
from .predict import Scores, group_by_shape, read_bgr
from .video import Image

Images = npt.NDArray[np.uint8]
Outputs = dict[str, npt.NDArray[Any]]
EXPORTED_SUFFIXES = (".onnx",)
ENCODER = "encoder.onnx"
HEAD_PREFIX = "head_"
_PROVIDERS = ["CUDAExecutionProvider", "CPUExecutionProvider"]


class ExportedModel:
    """An exported file at ``path``, opened for inference; ``info`` is its description."""

    def __init__(self, path: Path, info: ExportInfo, run: Callable[[Images], Outputs]) -> None:
        # ``run``: from images (N, H, W, 3), uint8, contiguous, to the outputs by name.
        self.path = path
        self.info = info
        self._run = run

    @classmethod
    def open(cls, path: str | Path, *, device: str | None = None) -> "ExportedModel":
        """Opens ``.onnx`` in onnxruntime.

        A ``head_NAME.onnx`` of a shared-encoder export needs its encoder beside it. ``device`` is
        "cpu" or "cuda", by default the GPU if onnxruntime has one.

        Raises:
            UserError: the file is missing, damaged or not an export, or its runtime is not
                installed or does not have the device.
        """
        if Path(path).suffix.lower() not in EXPORTED_SUFFIXES:
            raise UserError(f"'{path}' is not an exported file: its name must end in .onnx")
        if device not in (None, "cpu", "cuda"):
            raise UserError(f"an exported file runs on the device cpu or cuda, not '{device}'")
        return _open_onnx(Path(path), device)

    def __call__(self, images: Images) -> Any:
        """Runs the model on images (N, H, W, 3), uint8, in ``info.pixel_format``.

        Returns of a detector one ``Instances`` per image, on the CPU, with ``pred_boxes`` (XYXY,
        pixels of the image), ``scores`` and ``pred_classes``, the best first; of a classifier
        scores (N, K); of a backbone its maps and tokens by name. Other images are a ``ValueError``.
        """
        return _format(self.run(images), self.info, images)

    def run(self, images: Images) -> Outputs:
        """As ``__call__``, to the file's own outputs by name; see ``ExportInfo``.

        Raises a ``ValueError`` for images of another shape or type, a ``UserError`` if the program
        fails.
        """
        contiguous = _check_images(images)
        if self.info.image_size not in ((), images.shape[1:3]):
            height, width = self.info.image_size
            raise UserError(f"'{self.path}' takes images of {height} x {width} pixels alone")
        try:
            if not self.info.image_size or len(images) == 1:
                return self._run(contiguous)
            found = [self._run(image[None]) for image in contiguous]
            return {name: np.concatenate([each[name] for each in found]) for name in found[0]}
        except Exception as error:  # a program may raise anything
            raise UserError(
                f"'{self.path}' fails on images {images.shape}: {one_line(error)}"
            ) from error

    def load_config(self) -> CfgNode:
        """Returns the config of the model, with the classes that the file names."""
        cfg = load_embedded_config(self.info.config, f"the config inside '{self.path}'")
        cfg.MODEL.CLASS_NAMES = list(self.info.class_names)
        cfg.MODEL.CATEGORY_IDS = list(self.info.category_ids)
        return cfg


class SharedEncoderModel:
    """A folder of a shared-encoder export: the encoder runs once per batch, then every head.

    ``info`` describes the encoder; ``heads`` are by name the encoder and one head as one model.
    """

    def __init__(self, folder: str | Path, *, device: str | None = None) -> None:
        """Raises a ``UserError`` if a file is damaged or missing, or a head of another encoder."""
        self._encoder, self.info, encoder_hash = _open_session(Path(folder) / ENCODER, device)
        self._sessions: dict[str, Any] = {}
        self.heads: dict[str, ExportedModel] = {}
        for path in sorted(Path(folder).glob(f"{HEAD_PREFIX}*.onnx")):
            session, info, own_hash = _open_session(path, device)
            if not own_hash or own_hash != encoder_hash:
                raise UserError(
                    f"'{path}' was exported with another encoder than the {ENCODER} beside it"
                )
            name = path.stem.removeprefix(HEAD_PREFIX)
            self._sessions[name] = session
            self.heads[name] = ExportedModel(path, info, partial(self._run, session))
        if not self.heads:
            raise UserError(f"'{folder}' has no {HEAD_PREFIX}NAME.onnx beside its {ENCODER}")

    def __call__(self, images: Images) -> dict[str, Any]:
        """Returns by the head's name what ``ExportedModel.__call__`` returns."""
        features = self.encode(_check_images(images))
        return {
            name: _format(_run_session(session, features), self.heads[name].info, images)
            for name, session in self._sessions.items()
        }

    def encode(self, images: Images) -> Outputs:
        """Returns the inputs of the heads: the backbone's outputs by name, and "sizes"."""
        return _run_session(self._encoder, {"images": images})

    def _run(self, session: Any, images: Images) -> Outputs:
        return _run_session(session, self.encode(images))


class ExportedPredictor:
    """Replaces Detectron2's ``DefaultPredictor``: from a BGR image to its instances."""

    def __init__(self, model: ExportedModel) -> None:
        """Raises a ``UserError`` if the model is not a detector."""
        self._run = _on_bgr(model, "detection")

    def __call__(self, image: Image) -> dict[str, Instances]:
        """From (H, W, 3), uint8, always BGR, to {"instances"}, XYXY in pixels of the image."""
        return {"instances": self._run(image[None])[0]}

    def predict_batch(self, images: Sequence[Image]) -> list[Instances]:
        """As ``BatchPredictor``'s: images of one size are one batch."""
        found: list[Any] = [None] * len(images)
        for group in group_by_shape(images):
            batch = self._run(np.stack([images[index] for index in group]))
            for index, instances in zip(group, batch, strict=True):
                found[index] = instances
        return found


def build_exported_scorer(model: ExportedModel) -> Callable[[str | Path], Scores]:
    """As ``build_scorer``, with an exported classifier; a ``UserError`` if it is none."""
    run = _on_bgr(model, "classification")
    return lambda path: run(read_bgr(path)[None])[0]


def _on_bgr(model: ExportedModel, task: Task) -> Callable[[Image], Any]:
    """Returns a model of a task as a function of images (N, H, W, 3), uint8, always BGR."""
    if model.info.task != task:
        raise UserError(f"'{model.path}' was exported for {model.info.task}, not for {task}")
    step = -1 if model.info.pixel_format == "RGB" else 1
    # Pillow's arrays may be read-only, and PyTorch warns of it.
    return lambda images: model(images[..., ::step].copy())


def to_instances(outputs: Outputs, size: tuple[int, int]) -> list[Instances]:
    """Returns a detector's outputs as one ``Instances`` per image, of ``size`` (H, W) in pixels."""
    found = []
    for index, count in enumerate(outputs["counts"].tolist()):
        boxes, scores, labels = (
            torch.from_numpy(outputs[name][index, :count].copy())
            for name in ("boxes", "scores", "labels")
        )
        found.append(Instances(size, pred_boxes=Boxes(boxes), scores=scores, pred_classes=labels))
    return found


def _check_images(images: Images) -> Images:
    is_batch = images.ndim == 4 and images.shape[3] == 3 and images.size > 0
    if not is_batch or images.dtype != np.uint8:
        raise ValueError(
            f"images are (N, H, W, 3) and uint8, not empty; not {images.shape} and {images.dtype}"
        )
    return np.ascontiguousarray(images)


def _format(outputs: Outputs, info: ExportInfo, images: Images) -> Any:
    if info.task == "detection":
        return to_instances(outputs, (images.shape[1], images.shape[2]))
    return outputs["scores"] if info.task == "classification" else outputs


def _open_onnx(path: Path, device: str | None) -> ExportedModel:
    session, info, encoder_hash = _open_session(path, device)
    if encoder_hash:
        if path.name == ENCODER:
            raise UserError(f"'{path}' has no head: name a {HEAD_PREFIX}NAME.onnx beside it")
        heads = SharedEncoderModel(path.parent, device=device).heads
        return heads[path.stem.removeprefix(HEAD_PREFIX)]
    names = [one.name for one in (*session.get_inputs(), *session.get_outputs())]
    if names != ["images", *info.outputs]:
        raise UserError(f"'{path}' does not have the outputs it describes: export it again")
    return ExportedModel(path, info, lambda images: _run_session(session, {"images": images}))


def _open_session(path: Path, device: str | None) -> tuple[Any, ExportInfo, str]:
    """Returns an ``onnxruntime.InferenceSession``, the description, and the encoder's hash."""
    try:
        import onnxruntime
    except ImportError as error:
        raise UserError(f"'{path}' needs onnxruntime: pip install onnxruntime") from error
    wanted = {None: _PROVIDERS, "cpu": _PROVIDERS[1:], "cuda": _PROVIDERS[:1]}[device]
    providers = [name for name in wanted if name in onnxruntime.get_available_providers()]
    if not providers:
        raise UserError("this onnxruntime has no GPU: install onnxruntime-gpu, or use the CPU")
    try:
        session = onnxruntime.InferenceSession(str(path), providers=providers)
    except Exception as error:  # onnxruntime's errors have no common base
        raise _damaged(path, error) from error
    metadata = session.get_modelmeta().custom_metadata_map
    info = ExportInfo.from_json(metadata.get(METADATA_KEY, ""), str(path))
    return session, info, metadata.get(SHARED_ENCODER_KEY, "")


def _run_session(session: Any, values: Outputs) -> Outputs:
    names = [output.name for output in session.get_outputs()]
    inputs = {one.name: values[one.name] for one in session.get_inputs()}
    return dict(zip(names, session.run(names, inputs), strict=True))


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(
        f"'{path}' cannot be opened (missing, truncated or of another kind): {one_line(error)}"
    )
