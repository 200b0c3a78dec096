# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``Encoder``, and the base class that it shares with ``Detector``."""

import numbers
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from detectron2.config import CfgNode
from torch import Tensor, nn

from qbheat_det.checkpoint import local_weights
from qbheat_det.core.errors import UserError
from qbheat_det.core.other_names import names_keywords
from qbheat_det.deployment import DeployedModel
from qbheat_det.inference.exported import ExportedModel
from qbheat_det.inference.images import Image, Picture, is_video, open_images
from qbheat_det.inference.predict import encode

if TYPE_CHECKING:
    from qbheat_det.export import ExportReport


class Trained:
    """Base class of ``Detector`` and ``Encoder``. It has the methods that write files.

    Attributes:
        cfg: config of the model, including ``MODEL.WEIGHTS``.
        model: PyTorch module; None for an exported file.
    """

    cfg: CfgNode
    model: nn.Module | None
    _is_detector = False

    @property
    def weights(self) -> str:
        """The file or address of the weights, which is ``MODEL.WEIGHTS``."""
        return str(self.cfg.MODEL.WEIGHTS)

    @property
    def weights_file(self) -> Path:
        """The local file of the weights. An address is downloaded if necessary."""
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
        if isinstance(self.model, DeployedModel):
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
        if isinstance(self.model, DeployedModel) and not deployed:
            raise UserError(f"'{self.weights}' is deployed: {verb} its weights")


class Encoder(Trained):
    """A trained backbone for images of any size."""

    def __init__(self, model: nn.Module | ExportedModel, cfg: CfgNode) -> None:
        """``model`` is a Detectron2 backbone in evaluation mode, or an exported backbone."""
        self.cfg = cfg
        self.model = None
        self._exported = None
        if isinstance(model, ExportedModel):
            self._exported = model
        else:
            self.model = model

    def __call__(self, images: Picture | Iterable[Picture]) -> dict[str, Tensor]:
        """Returns the outputs by name: feature maps (N, C, H, W) and tokens (N, M, D).

        Images of different sizes are padded at the bottom and right. An exported encoder resizes
        images instead, and needs images of one size.

        Args:
            images: as in ``Detector.predict``, except videos.

        Raises:
            UserError: there are no images, or a file is missing or not an image.
        """
        pictures = list(self._open(images))
        if self._exported is None:
            return encode(self.model, self.cfg, pictures)
        shapes = {picture.shape for picture in pictures}
        if len(shapes) > 1:
            raise UserError("an exported encoder needs images of one size")
        batch = np.stack(pictures)  # (N, H, W, 3)
        if self._exported.info.pixel_format == "BGR":
            batch = batch[..., ::-1]
        outputs = self._exported(batch)
        return {name: torch.from_numpy(value) for name, value in outputs.items()}

    @property
    def coarsest_map(self) -> str:
        """The name of the feature map with the largest stride; the last one if there are several.

        Raises a ``UserError`` if the encoder is exported.
        """
        from qbheat_det.probing import find_feature  # prediction needs no probes

        self._require_weights("use")
        return find_feature(self.model)

    @names_keywords
    def embed(self, images: Picture | Iterable[Picture]) -> Tensor:
        """Returns a vector per image (N, D), the mean of the coarsest feature map, on the CPU.

        Images are opened and processed one by one, so a vector does not depend on the other images,
        and ``images`` may be a generator.

        Args:
            images: as in ``Detector.predict``, except videos.

        Raises:
            UserError: there are no images, or a file is missing or not an image.
        """
        vectors = []
        for image in self._open(images):
            outputs = self(image).values()
            maps = [output for output in outputs if output.dim() == 4]  # (1, C, H, W), not tokens
            coarsest = min(maps, key=lambda output: output.shape[2] * output.shape[3])
            vectors.append(coarsest.mean(dim=(2, 3))[0].cpu())  # (C,)
        return torch.stack(vectors)

    def _open(self, images: Picture | Iterable[Picture]) -> Iterator[Image]:
        """Returns an iterator over RGB images (H, W, 3), uint8. Raises an error for a video."""
        if is_video(images):
            raise UserError(f"'{images}' is a video: pass its frames")
        return (named_image.image for named_image in open_images(images))

    def _find_no_boxes(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises a ``UserError``, because only a ``Detector`` finds boxes."""
        raise UserError(
            f"'{self.weights}' is an encoder and finds no boxes: train a detector on it"
        )

    predict = stream = evaluate = train = deploy = _find_no_boxes
