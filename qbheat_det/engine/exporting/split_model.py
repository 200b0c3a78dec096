# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Running a split export: the encoder once an image, then every head on what it gave."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qbheat_det.core.errors import UserError

from .export_info import METADATA_KEY, SPLIT_KEY, ExportInfo
from .exported_model import ExportedModel, Outputs, open_session, to_instances

ENCODER = "encoder.onnx"
HEAD_PREFIX = "head_"


class ImageSizeError(UserError):
    """Heads that pad differently were given images of a size on which they share no pass."""


class SplitModel:
    """A folder that ``tools/export.py --split`` wrote, opened for inference.

    Attributes:
        folder: of the files.
        info: of the encoder: its outputs, and the pixel format of all.
        infos: what each head's file says of itself, by name.
    """

    def __init__(self, folder: Path, device: str | None = None) -> None:
        """See ``open``."""
        self.folder = folder
        encoder = folder / ENCODER
        if not encoder.is_file():
            raise UserError(f"'{folder}' has no {ENCODER}, as what tools/export.py --split writes")
        self._encoder, self.info, own = _open_part(encoder, device)
        self._multiple_of = int(own["multiple_of"])
        self._heads: dict[str, Any] = {}
        self.infos: dict[str, ExportInfo] = {}
        for path in sorted(folder.glob(f"{HEAD_PREFIX}*.onnx")):
            session, info, split = _open_part(path, device)
            if split["encoder"] != own["encoder"]:
                raise UserError(
                    f"'{path}' was exported with another encoder than '{encoder}': export both "
                    "again in one call of tools/export.py --split"
                )
            name = path.stem[len(HEAD_PREFIX) :]
            self._heads[name], self.infos[name] = session, info
        if not self._heads:
            raise UserError(f"'{folder}' has no {HEAD_PREFIX}NAME.onnx beside its {ENCODER}")

    @staticmethod
    def open(folder: str | Path, *, device: str | None = None) -> "SplitModel":
        """Opens an encoder and all heads beside it.

        Args:
            folder: with ``encoder.onnx`` and ``head_NAME.onnx``.
            device: see ``ExportedModel.open``.

        Raises:
            UserError: a file is missing, damaged, of other origin or of another encoder.
        """
        return SplitModel(Path(folder), device)

    def __call__(self, images: npt.NDArray[np.uint8]) -> dict[str, Any]:
        """Runs the encoder once and every head.

        Args:
            images: see ``ExportedModel.__call__``.

        Returns:
            By the head's name, what ``ExportedModel.__call__`` gives.

        Raises:
            ImageSizeError: the heads share a pass only on images of some sizes, not of this one.
            ValueError: the images have another shape or type.
        """
        features = self.encode(images)
        results: dict[str, Any] = {}
        for name, info in self.infos.items():
            outputs = self.decode(name, features)
            if info.task == "detection":
                results[name] = to_instances(outputs, (images.shape[1], images.shape[2]))
            else:
                results[name] = outputs["scores"] if info.task == "classification" else outputs
        return results

    def encode(self, images: npt.NDArray[np.uint8]) -> Outputs:
        """Returns what the heads read: the backbone's maps and tokens by name, and "sizes".

        Raises:
            ImageSizeError, ValueError: as in ``__call__``.
        """
        if images.ndim != 4 or images.shape[3] != 3 or images.dtype != np.uint8:
            raise ValueError(
                f"images are (N, H, W, 3) and uint8, not {images.shape} and {images.dtype}"
            )
        features = _run(self._encoder, {"images": np.ascontiguousarray(images)})
        resized = features["sizes"][2:]
        if self._multiple_of and (resized % self._multiple_of).any():
            raise ImageSizeError(
                f"these heads pad images differently, and share a pass only where height and "
                f"width after the resize, here {resized[0]} and {resized[1]}, are multiples of "
                f"{self._multiple_of}: cut the images so, or export each head on its own"
            )
        return features

    def decode(self, name: str, features: Outputs) -> Outputs:
        """Returns a head's own outputs by name, see ``ExportInfo``.

        Args:
            name: of the head.
            features: what ``encode`` gave.
        """
        return _run(self._heads[name], features)

    def head(self, name: str) -> ExportedModel:
        """Returns the encoder and one head as one model."""
        return _EncoderAndHead(self, name)


class _EncoderAndHead(ExportedModel):
    def __init__(self, parts: SplitModel, name: str) -> None:
        self._parts, self._name = parts, name
        self.path = parts.folder / f"{HEAD_PREFIX}{name}.onnx"
        self.info = parts.infos[name]

    def _run(self, images: npt.NDArray[np.uint8]) -> Outputs:
        return self._parts.decode(self._name, self._parts.encode(images))


def _open_part(path: Path, device: str | None) -> tuple[Any, ExportInfo, dict[str, Any]]:
    session, metadata = open_session(path, device)
    info = ExportInfo.from_json(metadata.get(METADATA_KEY, ""), str(path))
    try:
        split = json.loads(metadata.get(SPLIT_KEY, ""))
        return session, info, {"encoder": split["encoder"], "multiple_of": split["multiple_of"]}
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"'{path}' is no part of a split export: write it with tools/export.py --split"
        ) from error


def _run(session: Any, given: Outputs) -> Outputs:
    names = [output.name for output in session.get_outputs()]
    taken = {one.name: given[one.name] for one in session.get_inputs()}
    return dict(zip(names, session.run(names, taken), strict=True))
