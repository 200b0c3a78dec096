# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Running an exported file, whatever its format, as one would the model that it came from.

Opening a TorchScript or torch.export file is like starting a script: open those of people you
trust. ONNX files hold no code but ONNX's own operators.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from detectron2.structures import Boxes, Instances

from qbheat_det.core.errors import UserError

from .export_info import METADATA_KEY, SPLIT_KEY, ExportInfo
from .torch_programs import open_program

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
        if device not in (None, "cpu", "cuda"):
            raise UserError(f"an exported file runs on the device cpu or cuda, not '{device}'")
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
            ValueError: the images have another shape or type, or no pixel.
            UserError: the program inside does not run on them, or gives other outputs than it says.
        """
        outputs = self.run(images)
        if self.info.task == "detection":
            return to_instances(outputs, (images.shape[1], images.shape[2]))
        return outputs["scores"] if self.info.task == "classification" else outputs

    def run(self, images: npt.NDArray[np.uint8]) -> Outputs:
        """As ``__call__``, to the file's own outputs by name; see ``ExportInfo``.

        Raises:
            ValueError, UserError: as in ``__call__``.
        """
        check_images(images)
        return self._run(np.ascontiguousarray(images))

    @abstractmethod
    def _run(self, images: npt.NDArray[np.uint8]) -> Outputs:
        """As ``run``, of images that are sound."""


def check_images(images: npt.NDArray[np.uint8]) -> None:
    """
    Raises:
        ValueError: they are not (N, H, W, 3) and uint8, or there is no pixel.
    """
    is_batch = images.ndim == 4 and images.shape[3] == 3 and images.size > 0
    if not is_batch or images.dtype != np.uint8:
        raise ValueError(
            "images are (N, H, W, 3) and uint8, with N, H and W of 1 or more, not "
            f"{images.shape} and {images.dtype}"
        )


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
                f"'{path}' is one part of an encoder and heads in files of their own: name "
                f"'{path.parent / 'head_NAME.onnx'}' with encoder.onnx beside it, or open the "
                "folder with qbheat_det.engine.exporting.split_model.SplitModel"
            )
        self.path = path
        self.info = ExportInfo.from_json(metadata.get(METADATA_KEY, ""), str(path))
        taken = [one.name for one in self._session.get_inputs()]
        given = [one.name for one in self._session.get_outputs()]
        if taken != ["images"] or given != list(self.info.outputs):
            raise UserError(
                f"'{path}' takes {taken} and gives {given}, where it says that it takes ['images'] "
                f"and gives {list(self.info.outputs)}: export the weights again"
            )

    def _run(self, images: npt.NDArray[np.uint8]) -> Outputs:
        names = list(self.info.outputs)
        try:
            return dict(zip(names, self._session.run(names, {"images": images}), strict=True))
        except Exception as error:  # onnxruntime's errors share no base of their own
            raise _unfit(self.path, images, error) from error


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
        if device == "cuda":  # the devices of what a graph makes itself stand in it
            raise UserError(
                f"'{path}' runs where it was exported, on the CPU: use --device cpu, or export to "
                "ONNX"
            )
        try:
            self._program, description = open_program(path)
        except Exception as error:  # a broken file can raise anything
            raise _damaged(path, error) from error
        self.path = path
        self.info = ExportInfo.from_json(description, str(path))

    @torch.no_grad()
    def _run(self, images: npt.NDArray[np.uint8]) -> Outputs:
        writable = images if images.flags.writeable else images.copy()  # PyTorch warns else
        try:
            outputs = self._program(torch.from_numpy(writable))
            arrays = [output.numpy() for output in outputs]
            return dict(zip(self.info.outputs, arrays, strict=True))
        except Exception as error:  # a program may raise anything
            raise _unfit(self.path, images, error) from error


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(
        f"'{path}' cannot be opened; it may be truncated or of another kind: {_shorten(error)}"
    )


def _unfit(path: Path, images: npt.NDArray[np.uint8], error: Exception) -> UserError:
    return UserError(
        f"'{path}' does not give what it says of images {images.shape}: {_shorten(error)}"
    )


def _shorten(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


_PROVIDERS = ["CUDAExecutionProvider", "CPUExecutionProvider"]
_OPENERS: dict[str, Callable[[Path, str | None], ExportedModel]] = {
    ".onnx": _OnnxModel,
    ".ts": _TorchModel,
    ".torchscript": _TorchModel,
    ".pt2": _TorchModel,
}
EXPORTED_SUFFIXES = tuple(_OPENERS)
"""Endings of exported files."""
