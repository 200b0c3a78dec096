# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``Encoder``, and the base class that it shares with ``Detector``."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

import numpy as np
import torch
from detectron2.config import CfgNode
from torch import Tensor, nn

from qbheat_det.core.errors import UserError
from qbheat_det.deployment import DeployedModel
from qbheat_det.export import ExportReport, export_model
from qbheat_det.inference.encoder import encode
from qbheat_det.inference.exported import ExportedModel
from qbheat_det.inference.images import Image, Picture, is_video, open_images
from qbheat_det.model_zoo.hub import push_to_hub, save_pretrained

P = ParamSpec("P")
R = TypeVar("R")


def names_mistakes(right: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a method: keywords of other libraries raise a ``TypeError`` with the right one."""

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if wrong := next((name for name in kwargs if name in right), None):
                raise TypeError(
                    f"{method.__name__}() has no argument '{wrong}': use {right[wrong]}"
                )
            return method(*args, **kwargs)

        return checked

    return decorate


class Trained:
    """A trained model, which can be exported and shared.

    Attributes:
        cfg: the model's config; ``MODEL.WEIGHTS`` names the weights.
        model: the PyTorch module; None for an exported file.
    """

    cfg: CfgNode
    model: nn.Module | None
    _is_detector = False

    @property
    def weights(self) -> str:
        """The file or address, as ``MODEL.WEIGHTS`` takes it."""
        return str(self.cfg.MODEL.WEIGHTS)

    def __repr__(self) -> str:
        node = self.cfg.MODEL
        parts = [node.BACKBONE.NAME]
        if self._is_detector:
            shown = ", ".join(node.CLASS_NAMES[:5]) + ", …" * (len(node.CLASS_NAMES) > 5)
            parts = [f"{node.META_ARCHITECTURE} on {parts[0]}"]
            parts += [f"{len(node.CLASS_NAMES)} classes ({shown})"] * bool(shown)
        if self.model is not None:
            count = sum(parameter.numel() for parameter in self.model.parameters())
            parts += [f"{count / 1e6:.1f} M parameters", node.DEVICE]
        parts += ["deployed"] * isinstance(self.model, DeployedModel)
        return f"{type(self).__name__}({', '.join([*parts, repr(self.weights)])})"

    @names_mistakes({"format": "the suffix of output: .onnx", "imgsz": "image_size"})
    def export(
        self,
        output: str | Path,
        *,
        images: Sequence[str | Path] = (),
        tolerance: float = 1e-4,
        overwrite: bool = False,
        image_size: Sequence[int] = (),
        int8_images: Sequence[str | Path] = (),
    ) -> ExportReport:
        """Writes an ONNX file and compares it with PyTorch, see docs/export.md.

        Args:
            output: the ``.onnx`` file.
            images: files and folders to compare on; by default the toy set.
            tolerance: largest difference of scores, and of boxes relative to the image.
            overwrite: replace an existing file.
            image_size: (height, width) in pixels, for a file that takes images of one size.
            int8_images: files and folders to calibrate 8-bit integers on; by default float32.

        Raises:
            UserError: the model cannot be exported, or the file does not agree with PyTorch.
        """
        self._require_weights("export")
        return export_model(
            self.cfg,
            Path(output),
            images=[str(path) for path in images],
            tolerance=tolerance,
            overwrite=overwrite,
            image_size=tuple(image_size),
            int8_images=[str(path) for path in int8_images],
        )

    def save_pretrained(self, folder: str | Path) -> Path:
        """Writes ``model.safetensors`` and a model card into a folder, which ``load`` takes.

        Raises:
            UserError: the model is exported, or the folder cannot be written.
        """
        self._require_weights("save")
        return save_pretrained(self.cfg, Path(folder), is_detector=self._is_detector)

    def push_to_hub(self, repo_id: str, *, private: bool = False, token: str | None = None) -> str:
        """Uploads the files of ``save_pretrained`` to Hugging Face, and returns the address.

        Args:
            repo_id: "user/name", created if missing; ``load("hf://user/name")`` opens it.
            private: whether a new repository is private.
            token: access token; None for the token of ``hf auth login`` or ``$HF_TOKEN``.

        Raises:
            UserError: the model is exported, or the hub refuses.
        """
        return push_to_hub(self.save_pretrained, repo_id, private=private, token=token)

    def _require_weights(self, verb: str, *, deployed: bool = True) -> None:
        if self.model is None or (not deployed and isinstance(self.model, DeployedModel)):
            kind = "exported" if self.model is None else "deployed"
            raise UserError(f"'{self.weights}' is {kind}: {verb} its weights")


class Encoder(Trained):
    """A trained backbone for images of any size."""

    def __init__(self, model: nn.Module | ExportedModel, cfg: CfgNode) -> None:
        """``model`` is a Detectron2 backbone in evaluation mode, or an exported one."""
        self._exported = model if isinstance(model, ExportedModel) else None
        self.model = model if isinstance(model, nn.Module) else None
        self.cfg = cfg

    def __call__(self, images: Picture | Sequence[Picture]) -> dict[str, Tensor]:
        """Returns the outputs by name: maps (N, C, H, W) and tokens (N, M, D).

        Several images are padded to one size, at the bottom and right. An exported encoder resizes
        images, and takes several images of one size only.

        Args:
            images: as for ``Detector.predict``, but no video.

        Raises:
            UserError: there are no images, or a file is missing or not an image.
        """
        pictures = list(self._open(images))
        if self._exported is None:
            return encode(self.model, self.cfg, pictures)
        if len({picture.shape for picture in pictures}) > 1:
            raise UserError("an exported encoder takes images of one size")
        step = -1 if self._exported.info.pixel_format == "BGR" else 1
        outputs = self._exported(np.stack(pictures)[..., ::step])
        return {name: torch.from_numpy(value) for name, value in outputs.items()}

    @names_mistakes({"source": "images", "batch": "a list of images"})
    def embed(self, images: Picture | Sequence[Picture]) -> Tensor:
        """Returns one vector per image, (N, D): the mean of its coarsest map.

        Images are not padded, so a vector does not depend on the other images.

        Args:
            images: as for ``Detector.predict``, but no video.

        Raises:
            UserError: there are no images, or a file is missing or not an image.
        """
        vectors = []
        for image in self._open(images):
            maps = [x for x in self(image).values() if x.dim() == 4]
            coarsest = min(maps, key=lambda x: x.shape[2] * x.shape[3])
            vectors.append(coarsest.mean(dim=(2, 3))[0])
        return torch.stack(vectors)

    def _open(self, images: Picture | Sequence[Picture]) -> Iterator[Image]:
        if is_video(images):
            raise UserError(f"'{images}' is a video: give its frames")
        return (each.image for each in open_images(images))

    def _find_no_boxes(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises a ``UserError``: an encoder finds no boxes."""
        raise UserError(
            f"'{self.weights}' is an encoder and finds no boxes: train a detector on it"
        )

    predict = stream = evaluate = train = deploy = _find_no_boxes
