# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``Trained``, the base class of ``Detector`` and ``Encoder``."""

import numbers
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qbheat_det.core.errors import UserError
from qbheat_det.core.other_names import names_keywords
from qbheat_det.inference.exported import ExportedModel

if TYPE_CHECKING:  # an exported file runs without PyTorch
    from detectron2.config import CfgNode
    from torch import nn

    from qbheat_det.export import ExportReport


class Trained:
    """Base class of ``Detector`` and ``Encoder``. It has the methods that write files.

    Attributes:
        model: PyTorch module; None for an exported file.
    """

    _is_detector = False

    def __init__(
        self,
        cfg: "CfgNode | None",
        *,
        model: "nn.Module | None" = None,
        exported: ExportedModel | None = None,
    ) -> None:
        """Takes a PyTorch module and its config, or an exported file, which contains its config."""
        self._cfg = cfg
        self.model = model
        self._exported = exported

    @property
    def cfg(self) -> "CfgNode":
        """The config of the model, including ``MODEL.WEIGHTS``.

        That of an exported file is read when it is first asked for, which imports Detectron2.
        """
        if self._cfg is None:
            assert self._exported is not None
            self._cfg = self._exported.load_config()
        return self._cfg

    @property
    def weights(self) -> str:
        """The file or address of the weights, which is ``MODEL.WEIGHTS``."""
        if self._exported is not None:
            return str(self._exported.path)
        return str(self.cfg.MODEL.WEIGHTS)

    @property
    def weights_file(self) -> Path:
        """The local file of the weights. An address is downloaded if necessary."""
        if self._exported is not None:
            return self._exported.path
        from qbheat_det.checkpoint import local_weights

        return Path(local_weights(self.weights))

    def __repr__(self) -> str:
        node = self.cfg.MODEL
        parts = []
        if self._is_detector:
            parts.append(f"{node.META_ARCHITECTURE} on {node.BACKBONE.NAME}")
            num_classes = len(node.CLASS_NAMES)
            if num_classes:
                names = list(node.CLASS_NAMES[:5])
                if num_classes > 5:
                    names.append("…")
                parts.append(f"{num_classes} classes ({', '.join(names)})")
        else:
            parts.append(node.BACKBONE.NAME)
        if self.model is not None:
            num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
            parts.append(f"{num_parameters / 1e6:.1f} M parameters")
            parts.append(node.DEVICE)
        if self._is_deployed():
            parts.append("deployed")
        parts.append(repr(self.weights))
        return f"{type(self).__name__}({', '.join(parts)})"

    @names_keywords
    def export(
        self,
        output: str | Path,
        *,
        images: Sequence[str | Path] = (),
        tolerance: float = 1e-4,
        overwrite: bool = False,
        image_size: Sequence[int] = (),
        int8_images: Sequence[str | Path] = (),
    ) -> "ExportReport":
        """Writes an ONNX file and compares its outputs with PyTorch (docs/export.md).

        Args:
            output: the ``.onnx`` file to write.
            images: files and folders to compare on; by default, images of blood cells in the
                package.
            tolerance: largest allowed difference of scores, and of boxes relative to the image
                size.
            overwrite: replace an existing file.
            image_size: (height, width) in pixels, to restrict the file to images of this size.
            int8_images: files and folders for the calibration of an int8 model. If empty, the model
                is float32.

        Raises:
            UserError: an argument has a wrong type, the model cannot be exported, or its outputs
                differ from PyTorch.
        """
        from qbheat_det.export import export_model  # takes long to import

        self._require_weights("export")
        if not isinstance(output, str | Path):
            raise UserError(f"output must be the path of a file, not {output!r}")
        for name, paths in (("images", images), ("int8_images", int8_images)):
            if isinstance(paths, str | Path) or not isinstance(paths, Sequence):
                raise UserError(f"{name} must be a list of files and folders, not {paths!r}")
        if not isinstance(image_size, Sequence):
            raise UserError(f"image_size must be (height, width), not {image_size!r}")
        if not isinstance(tolerance, numbers.Real):
            raise UserError(f"tolerance must be a number, not {tolerance!r}")
        return export_model(
            self.cfg,
            Path(output),
            images=[str(path) for path in images],
            tolerance=tolerance,
            overwrite=overwrite,
            image_size=tuple(image_size),
            int8_images=[str(path) for path in int8_images],
        )

    def export_backbone(self, output: str | Path, *, overwrite: bool = False) -> None:
        """Writes the bare backbone as weights (.safetensors), to use as ``MODEL.WEIGHTS``.

        Raises:
            UserError: the model is exported, or the file exists or cannot be written.
        """
        from qbheat_det.export import export_backbone  # takes long to import

        self._require_weights("export")
        export_backbone(self.weights, Path(output), overwrite=overwrite)

    def _require_weights(self, verb: str, *, deployed: bool = True) -> None:
        """Raises a ``UserError`` if the model is exported, or deployed unless this is allowed.

        ``verb`` is what the user wanted to do with the model.
        """
        if self.model is None:
            raise UserError(f"'{self.weights}' is exported: {verb} its weights")
        if self._is_deployed() and not deployed:
            raise UserError(f"'{self.weights}' is deployed: {verb} its weights")

    def _is_deployed(self) -> bool:
        """Returns whether ``deploy`` has returned the model."""
        if self.model is None:
            return False
        from qbheat_det.deployment import DeployedModel

        return isinstance(self.model, DeployedModel)
