# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``Detector`` and ``Encoder``: trained weights as objects that are called with images."""

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, TypeVar, overload

import numpy as np
import PIL.Image
import torch
from detectron2.config import CfgNode
from torch import Tensor, nn

from qbheat_det.analysis.run import Run
from qbheat_det.checkpoint import load_run_config
from qbheat_det.core.errors import UserError
from qbheat_det.deployment import DeployedModel, deploy
from qbheat_det.export import ExportReport, export_model
from qbheat_det.inference.encoder import encode
from qbheat_det.inference.exported import ExportedModel
from qbheat_det.inference.pictures import (
    NamedImage,
    Picture,
    is_collection,
    is_video,
    open_images,
)
from qbheat_det.inference.predict import Predictor, build_predictor, check_elongation
from qbheat_det.inference.results import Detections
from qbheat_det.inference.video import Image, UnreadableImage
from qbheat_det.model_zoo.hub import HUB_PREFIX, push_to_hub, save_pretrained

from .training import train_detector

T = TypeVar("T")
Opened = TypeVar("Opened", bound="Trained")


class Trained:
    """What detectors and encoders share: the config, the weights it names, and ways to pass on."""

    cfg: CfgNode
    model: nn.Module | None
    _load: ClassVar[Callable[..., "Trained"]]  # ``load`` itself, which knows both classes

    @property
    def weights(self) -> str:
        """The file or address, as ``MODEL.WEIGHTS`` takes it."""
        return str(self.cfg.MODEL.WEIGHTS)

    def __repr__(self) -> str:
        node = self.cfg.MODEL
        name = node.BACKBONE.NAME
        parts = [name if isinstance(self, Encoder) else f"{node.META_ARCHITECTURE} on {name}"]
        if node.CLASS_NAMES and not isinstance(self, Encoder):
            shown = ", ".join(node.CLASS_NAMES[:5]) + ", …" * (len(node.CLASS_NAMES) > 5)
            parts.append(f"{len(node.CLASS_NAMES)} classes ({shown})")
        if self.model is not None:
            count = sum(parameter.numel() for parameter in self.model.parameters())
            parts += [f"{count / 1e6:.1f} M parameters", node.DEVICE]
        parts += ["deployed"] * isinstance(self.model, DeployedModel)
        return f"{type(self).__name__}({', '.join([*parts, repr(self.weights)])})"

    @classmethod
    def from_pretrained(
        cls: type[Opened], name: str | Path, *, revision: str | None = None, **options: Any
    ) -> Opened:
        """Opens what ``save_pretrained`` or ``push_to_hub`` wrote; ``load`` opens all else too.

        Args:
            name: a folder, or "user/name" of Hugging Face.
            revision: a branch, tag or commit of the repository.
            options: of ``load``, such as ``device``.

        Raises:
            UserError: there is no such repository or file, or it holds the other kind.
        """
        if revision or not Path(name).is_dir():
            name = f"{HUB_PREFIX}{name}" + (f"@{revision}" if revision else "")
        found = cls._load(name, **options)
        if not isinstance(found, cls):
            kind = type(found).__name__
            raise UserError(f"'{name}' is no {cls.__name__}: open it by {kind}.from_pretrained")
        return found

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
        """Writes an ONNX file, and compares it with PyTorch, see docs/export.md.

        Args:
            output: the file, ``.onnx``.
            images: files and folders to compare on; by default the toy set.
            tolerance: largest difference of scores, and of boxes relative to the image.
            overwrite: whether the file may exist.
            image_size: (height, width) in pixels, if the file will get images of one size alone.
            int8_images: files and folders to calibrate 8-bit integers on; by default float32.

        Raises:
            UserError: it cannot be exported, or does not agree with PyTorch.
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
        return save_pretrained(self.cfg, Path(folder), is_detector=isinstance(self, Detector))

    def push_to_hub(self, repo_id: str, *, private: bool = False, token: str | None = None) -> str:
        """Uploads what ``save_pretrained`` writes to Hugging Face; returns the address.

        Args:
            repo_id: "user/name", made if there is none; ``load("hf://user/name")`` opens it.
            private: whether a new repository is private.
            token: None for that of ``hf auth login`` or ``$HF_TOKEN``.

        Raises:
            UserError: the model is exported, or the hub refuses.
        """
        return push_to_hub(self.save_pretrained, repo_id, private=private, token=token)


class Detector(Trained):
    """A trained detector; ``model`` is its module, or None if it is an exported file."""

    def __init__(self, predictor: Predictor, cfg: CfgNode) -> None:
        """``cfg`` is the model's own; its ``MODEL.WEIGHTS`` names the weights."""
        self._predictor = predictor
        self.cfg = cfg
        self.model = getattr(predictor, "model", None)

    @property
    def class_names(self) -> list[str]:
        """The classes, in the order of their indices."""
        return list(self.cfg.MODEL.CLASS_NAMES)

    @overload
    def predict(
        self,
        images: PIL.Image.Image | Image | Tensor,
        *,
        threshold: float = ...,
        batch_size: int = ...,
    ) -> Detections: ...
    @overload
    def predict(
        self, images: Sequence[Picture], *, threshold: float = ..., batch_size: int = ...
    ) -> list[Detections]: ...
    @overload
    def predict(
        self, images: str | Path, *, threshold: float = ..., batch_size: int = ...
    ) -> Any: ...

    def predict(self, images: Any, *, threshold: float = 0.3, batch_size: int = 8) -> Any:
        """Finds objects.

        Args:
            images: one image (a file, an address http(s)://…, a PIL image, an array (H, W, 3) of
                uint8, a tensor (3, H, W) of uint8 or of floats in [0, 1]; RGB), a list of them, a
                folder, a pattern such as "photos/*.jpg", or a video.
            threshold: the least score.
            batch_size: images of one size that go through the model together.

        Returns:
            ``Detections`` of one image; a list of them of several; of a video an iterator, frame
            by frame.

        Raises:
            UserError: a file does not exist or is no image, or the threshold is no score.
        """
        found = self.stream(images, threshold=threshold, batch_size=batch_size)
        if is_video(images):
            return found
        return list(found) if is_collection(images) else next(found)

    def stream(
        self, images: Picture | Sequence[Picture], *, threshold: float = 0.3, batch_size: int = 8
    ) -> Iterator[Detections]:
        """As ``predict``, one after another, with few images in memory; raises alike."""
        if not 0 <= threshold <= 1:
            raise UserError(f"threshold is {threshold}, expected a score from 0 to 1")
        if batch_size < 1:
            raise UserError(f"batch_size is {batch_size}, expected at least 1")
        opened = open_images(images)
        return (one for batch in _cut(opened, batch_size) for one in self._find(batch, threshold))

    def _find(self, batch: Sequence[NamedImage], threshold: float) -> Iterator[Detections]:
        for each in batch:
            try:
                check_elongation(each.image, self.cfg)
            except UnreadableImage as error:
                raise UserError(f"'{each.name}': {error}") from error
        bgr = [np.ascontiguousarray(each.image[:, :, ::-1]) for each in batch]
        ids = list(self.cfg.MODEL.CATEGORY_IDS)
        for each, found in zip(batch, self._predictor.predict_batch(bgr), strict=True):
            kept = found[found.scores >= threshold]
            source = each.image if each.file is None else each.file
            yield Detections(kept, self.class_names, ids, source, each.name, each.frame)

    def deploy(
        self,
        *,
        precision: str = "float32",
        compile: str = "auto",
        image_sizes: Sequence[Sequence[int]] = (),
    ) -> "Detector":
        """Returns this detector in its fastest equal form on its device, see ``deploy``.

        Args:
            precision: "float32", or "bfloat16", which is not equal.
            compile: "auto", or "off".
            image_sizes: (height, width) in pixels, as the model gets them, to compile for.

        Raises:
            UserError: an argument is not valid, or the detector is exported or deployed already.
        """
        if self.model is None:
            raise UserError(f"'{self.weights}' is exported: deploy its weights")
        predictor: Any = copy.copy(self._predictor)
        predictor.model = deploy(
            self.model, precision=precision, compile=compile, image_sizes=image_sizes
        )
        return Detector(predictor, self.cfg)

    def train(
        self,
        data: str | Path,
        *,
        epochs: float = 20,
        output: str | Path | None = None,
        overrides: dict[str, Any] | None = None,
        **flags: Any,
    ) -> Run:
        """Trains on from these weights, and holds the trained ones afterwards.

        Args:
            data: a COCO json, a dataset folder, a YOLO ``data.yaml`` or a Pascal VOC folder. Its
                classes replace the detector's; those of one name keep their weights.
            epochs: passes over the images.
            output: the run's folder; by default a new one below ``output/``.
            overrides: config keys and values, such as ``{"SOLVER.BASE_LR": 0.005}``.
            flags: of ``RunFlags``, such as ``images``, ``val`` and ``val_images``.

        Returns:
            The run: ``folder``, ``metrics``, ``weights``, and figures by ``analysis``.

        Raises:
            UserError: the data or an override are not valid, or the detector is exported.
        """
        if self.model is None or isinstance(self.model, DeployedModel):
            raise UserError(f"'{self.weights}' is exported or deployed: train its weights")
        run = train_detector(
            self.cfg, str(data), epochs=epochs, output=output, overrides=overrides or {}, **flags
        )
        self.cfg = load_run_config(str(run.path), device=self.cfg.MODEL.DEVICE)
        self._predictor = build_predictor(self.cfg)
        self.model = self._predictor.model
        return run


class Encoder(Trained):
    """A trained backbone on images of any size; ``model`` is its module."""

    def __init__(self, model: nn.Module | ExportedModel, cfg: CfgNode) -> None:
        """``model`` is a Detectron2 backbone in evaluation mode, or an exported one."""
        self._exported = model if isinstance(model, ExportedModel) else None
        self.model = model if isinstance(model, nn.Module) else None
        self.cfg = cfg

    def __call__(self, images: Picture | Sequence[Picture]) -> dict[str, Tensor]:
        """Returns the outputs by name, maps (N, C, H, W) and tokens (N, M, D).

        Several images are padded to one size; padding counts as image. An exported encoder resizes
        them first, and takes several of one size only.

        Raises:
            UserError: there are no images, or a file does not exist or is no image.
        """
        if is_video(images):
            raise UserError(f"'{images}' is a video: give its frames")
        pictures = [each.image for each in open_images(images)]
        if self._exported is not None:
            return self._run_exported(pictures)
        return encode(self.model, self.cfg, pictures)

    def _run_exported(self, pictures: Sequence[Image]) -> dict[str, Tensor]:
        assert self._exported is not None
        if len({picture.shape for picture in pictures}) > 1:
            raise UserError("an exported encoder takes images of one size")
        step = -1 if self._exported.info.pixel_format == "BGR" else 1
        outputs = self._exported(np.stack(pictures)[..., ::step])
        return {name: torch.from_numpy(value) for name, value in outputs.items()}


def _cut(items: Iterator[T], size: int) -> Iterator[list[T]]:
    while batch := list(islice(items, size)):
        yield batch
