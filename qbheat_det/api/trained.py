# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The base class of ``Detector`` and ``Encoder``, and messages for keywords of other libraries."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

from detectron2.config import CfgNode
from torch import nn

from qbheat_det.core.errors import UserError
from qbheat_det.deployment import DeployedModel
from qbheat_det.export import ExportReport, export_model
from qbheat_det.model_zoo.hub import push_to_hub, save_pretrained

P = ParamSpec("P")
R = TypeVar("R")


def names_mistakes(right: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a method: keywords of other libraries raise a ``TypeError`` with the right one.

    Args:
        right: by the mistaken keyword, the argument to use.
    """

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
    """Config, weights and export of a trained model; base class of ``Detector`` and ``Encoder``.

    Attributes:
        cfg: the model's config; ``MODEL.WEIGHTS`` names the weights.
        model: the module; None for an exported file.
    """

    _kind = "detector"

    cfg: CfgNode
    model: nn.Module | None

    @property
    def weights(self) -> str:
        """The file or address, as ``MODEL.WEIGHTS`` takes it."""
        return str(self.cfg.MODEL.WEIGHTS)

    def __repr__(self) -> str:
        node = self.cfg.MODEL
        name = node.BACKBONE.NAME
        is_detector = self._kind == "detector"
        parts = [f"{node.META_ARCHITECTURE} on {name}" if is_detector else name]
        if node.CLASS_NAMES and is_detector:
            shown = ", ".join(node.CLASS_NAMES[:5]) + ", …" * (len(node.CLASS_NAMES) > 5)
            parts.append(f"{len(node.CLASS_NAMES)} classes ({shown})")
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
            output: the file, ``.onnx``.
            images: files and folders to compare on; by default the toy set.
            tolerance: largest difference of scores, and of boxes relative to the image.
            overwrite: replace an existing file.
            image_size: (height, width) in pixels, for a file that takes images of one size.
            int8_images: files and folders to calibrate 8-bit integers on; by default float32.

        Raises:
            UserError: the model cannot be exported, or the file does not agree with PyTorch.
        """
        if self.model is None:
            raise UserError(f"'{self.weights}' is exported already: export the weights")
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
        if self.model is None:
            raise UserError(f"'{self.weights}' is exported: save its weights")
        return save_pretrained(self.cfg, Path(folder), is_detector=self._kind == "detector")

    def push_to_hub(self, repo_id: str, *, private: bool = False, token: str | None = None) -> str:
        """Uploads the files of ``save_pretrained`` to Hugging Face; returns the address.

        Args:
            repo_id: "user/name", created if missing; ``load("hf://user/name")`` opens it.
            private: whether a new repository is private.
            token: access token; None for the token of ``hf auth login`` or ``$HF_TOKEN``.

        Raises:
            UserError: the model is exported, or the hub refuses.
        """
        return push_to_hub(self.save_pretrained, repo_id, private=private, token=token)
