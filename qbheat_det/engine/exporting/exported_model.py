# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Running an exported file, whatever its format, as one would the model that it came from.

A TorchScript or torch.export file is a program: open those of people you trust. ONNX files hold
no code but ONNX's own operators.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from detectron2.structures import Boxes, Instances

from qbheat_det.errors import UserError

from .export_info import METADATA_FILE, METADATA_KEY, SPLIT_KEY, ExportInfo

Array = npt.NDArray[Any]
Outputs = dict[str, Array]


class ExportedModel(ABC):
    """A file of tools/export.py, opened for inference.

    Attributes:
        path: of the file.
        info: what the file says of itself.
    """

    path: Path
    info: ExportInfo

    @staticmethod
    def open(path: str | Path, *, device: str | None = None) -> "ExportedModel":
        """Opens ``.onnx`` (onnxruntime), ``.ts`` or ``.torchscript``, or ``.pt2`` (torch.export).

        Args:
            path: file.
            device: "cpu" or "cuda"; None takes the GPU where onnxruntime has one. Files of
                PyTorch run where they were exported, on the CPU.

        Raises:
            UserError: there is no such file, its ending is of no format, its runtime is not
                installed or has no such device, or it is damaged or of other origin.
        """
        file = Path(path)
        opener = _OPENERS.get(file.suffix.lower())
        if opener is None:
            raise UserError(f"'{path}' is no exported file: they end in {', '.join(_OPENERS)}")
        if not file.is_file():
            raise UserError(f"exported file '{path}' does not exist")
        return opener(file, device)

    def __call__(self, images: npt.NDArray[np.uint8]) -> Any:
        """
        Args:
            images: (N, H, W, 3), uint8, in ``info.pixel_format``.

        Returns:
            Of a detector one ``Instances`` an image, on the CPU, with ``pred_boxes`` (XYXY,
            pixels of the image), ``scores`` and ``pred_classes``, the best first; of a classifier
            scores (N, K); of a backbone its maps and tokens by name.

        Raises:
            ValueError: the images have another shape or type.
        """
        outputs = self.run(images)
        if self.info.task == "detection":
            return to_instances(outputs, (images.shape[1], images.shape[2]))
        return outputs["scores"] if self.info.task == "classification" else outputs

    def run(self, images: npt.NDArray[np.uint8]) -> Outputs:
        """As ``__call__``, to the file's own outputs by name; see ``ExportInfo``.

        Raises:
            ValueError: the images have another shape or type.
        """
        if images.ndim != 4 or images.shape[3] != 3 or images.dtype != np.uint8:
            raise ValueError(
                f"images are (N, H, W, 3) and uint8, not {images.shape} and {images.dtype}"
            )
        return self._run(np.ascontiguousarray(images))

    @abstractmethod
    def _run(self, images: npt.NDArray[np.uint8]) -> Outputs:
        """As ``run``, of images that are sound."""


def to_instances(outputs: Outputs, size: tuple[int, int]) -> list[Instances]:
    """Brings a detector's outputs, see ``ExportInfo``, into Detectron2's form, one an image.

    Args:
        outputs: by name.
        size: (H, W) of the images, in pixels.
    """
    found = []
    for index, count in enumerate(outputs["counts"].tolist()):
        boxes, scores, labels = (
            torch.from_numpy(outputs[name][index, :count].copy())
            for name in ("boxes", "scores", "labels")
        )
        found.append(Instances(size, pred_boxes=Boxes(boxes), scores=scores, pred_classes=labels))
    return found


class _OnnxModel(ExportedModel):
    def __init__(self, path: Path, device: str | None) -> None:
        self._session, metadata = open_session(path, device)
        if SPLIT_KEY in metadata:
            raise UserError(
                f"'{path}' is one part of an encoder and heads in files of their own: open their "
                "folder with qbheat_det.engine.exporting.split_model.SplitModel"
            )
        self.path = path
        self.info = ExportInfo.from_json(metadata.get(METADATA_KEY, ""), str(path))

    def _run(self, images: npt.NDArray[np.uint8]) -> Outputs:
        names = [output.name for output in self._session.get_outputs()]
        return dict(zip(names, self._session.run(names, {"images": images}), strict=True))


def open_session(path: Path, device: str | None) -> tuple[Any, dict[str, str]]:
    """Opens an ONNX file.

    Args:
        path: of the file.
        device: see ``ExportedModel.open``.

    Returns:
        An ``onnxruntime.InferenceSession``, and the file's ``metadata_props``.

    Raises:
        UserError: onnxruntime is not installed or has no such device, or the file is damaged.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise UserError(
            f"'{path}' needs onnxruntime, which is not installed: pip install onnxruntime"
        ) from error
    wanted = {None: _PROVIDERS, "cpu": _PROVIDERS[1:], "cuda": _PROVIDERS[:1]}[device]
    providers = [name for name in wanted if name in onnxruntime.get_available_providers()]
    if not providers:
        raise UserError(
            "device 'cuda' was asked for, but this onnxruntime knows no GPU: install "
            "onnxruntime-gpu, or use --device cpu"
        )
    try:
        session = onnxruntime.InferenceSession(str(path), providers=providers)
    except Exception as error:  # onnxruntime's errors share no base of their own
        raise _damaged(path, error) from error
    return session, session.get_modelmeta().custom_metadata_map


class _TorchModel(ExportedModel):
    """TorchScript, or a torch.export program."""

    def __init__(self, path: Path, device: str | None) -> None:
        extra = {METADATA_FILE: ""}
        if device == "cuda":  # the devices of what a graph makes itself stand in it
            raise UserError(
                f"'{path}' runs where it was exported, on the CPU: use --device cpu, or export to "
                "ONNX"
            )
        # Registers torchvision's operators, which the program may call by name.
        import torchvision  # noqa: F401

        self._program: Callable[..., Any]
        try:
            if path.suffix.lower() == ".pt2":
                self._program = torch.export.load(str(path), extra_files=extra).module()
            else:
                self._program = torch.jit.load(str(path), "cpu", _extra_files=extra)
        except Exception as error:  # a broken file can raise anything
            raise _damaged(path, error) from error
        text: str | bytes = extra[METADATA_FILE]
        self.path = path
        self.info = ExportInfo.from_json(
            text.decode("utf-8", "replace") if isinstance(text, bytes) else text, str(path)
        )

    @torch.no_grad()
    def _run(self, images: npt.NDArray[np.uint8]) -> Outputs:
        writable = images if images.flags.writeable else images.copy()  # PyTorch warns else
        outputs = self._program(torch.from_numpy(writable))
        return {
            name: output.numpy() for name, output in zip(self.info.outputs, outputs, strict=True)
        }


def _damaged(path: Path, error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return UserError(f"'{path}' cannot be opened; it may be truncated or of another kind: {reason}")


_PROVIDERS = ["CUDAExecutionProvider", "CPUExecutionProvider"]
_OPENERS: dict[str, Callable[[Path, str | None], ExportedModel]] = {
    ".onnx": _OnnxModel,
    ".ts": _TorchModel,
    ".torchscript": _TorchModel,
    ".pt2": _TorchModel,
}
EXPORTED_SUFFIXES = tuple(_OPENERS)
"""Endings of exported files."""
