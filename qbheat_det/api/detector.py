# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``Detector``, which predicts with a trained detector, evaluates it and trains it further."""

import copy
import numbers
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, overload

import PIL.Image

from qbheat_det.core.errors import UserError
from qbheat_det.core.other_names import NamesAttributes, names_keywords
from qbheat_det.inference.boxes import check_elongation, find_boxes
from qbheat_det.inference.exported import ExportedModel
from qbheat_det.inference.images import (
    Image,
    NamedImage,
    Picture,
    is_collection,
    is_video,
    open_images,
)
from qbheat_det.inference.predictor import DetectorSettings, Predictor
from qbheat_det.inference.results import Detections

from .trained import Trained

if TYPE_CHECKING:  # an exported file runs without PyTorch
    from detectron2.config import CfgNode
    from torch import Tensor

    from qbheat_det.analysis.run import Run
    from qbheat_det.engine.run_flags import Paths
    from qbheat_det.inference.predict import BatchPredictor


class Detector(NamesAttributes, Trained):
    """A trained detector."""

    _is_detector = True

    def __init__(
        self, predictor: "BatchPredictor | ExportedModel", cfg: "CfgNode | None" = None
    ) -> None:
        """
        Args:
            predictor: a predictor in PyTorch, or an exported detector.
            cfg: config of the predictor's model, including ``MODEL.WEIGHTS``; None for an exported
                detector.
        """
        self._predictor: Predictor
        if isinstance(predictor, ExportedModel):
            super().__init__(None, exported=predictor)
            self._predictor = predictor.build_predictor()
            self._settings = predictor.settings
            return
        assert cfg is not None
        super().__init__(cfg, model=predictor.model)
        self._predictor = predictor
        self._settings = DetectorSettings.from_config(cfg)

    @property
    def class_names(self) -> list[str]:
        """Class names, in the order of the class indices."""
        return list(self._settings.class_names)

    @overload
    def predict(  # type: ignore[overload-overlap]  # an array is also an iterable
        self,
        images: "PIL.Image.Image | Image | Tensor",
        *,
        threshold: float = ...,
        batch_size: int = ...,
        tile: int | None = ...,
    ) -> Detections: ...
    @overload
    def predict(  # type: ignore[overload-overlap]  # a str is also a sequence
        self,
        images: str | Path,
        *,
        threshold: float = ...,
        batch_size: int = ...,
        tile: int | None = ...,
    ) -> Detections | Any: ...
    @overload
    def predict(
        self,
        images: Iterable[Picture],
        *,
        threshold: float = ...,
        batch_size: int = ...,
        tile: int | None = ...,
    ) -> list[Detections]: ...

    @names_keywords
    def predict(
        self, images: Any, *, threshold: float = 0.3, batch_size: int = 8, tile: int | None = None
    ) -> Any:
        """Detects objects in images or videos. ``detector(images)`` is equivalent.

        Args:
            images: one image, an iterable of images, a folder, a glob pattern such as
                "photos/*.jpg", or a video. An image is a file, a PIL image, an RGB array (H, W, 3)
                of uint8, or an RGB tensor (3, H, W) of uint8 or of floats in [0, 1].
            threshold: score in [0, 1]. Boxes with a lower score are left out.
            batch_size: number of images that the model processes together.
            tile: side of overlapping square tiles in pixels. If set, the detector also predicts on
                each tile, which finds small objects in large images. By default, the ``INPUT.TILE``
                of the training is used. 0 predicts on whole images only.

        Returns:
            ``Detections`` for one image, a list of ``Detections`` for several images, or an
            iterator of ``Detections`` over the frames of a video. Type checkers treat every path as
            one image. ``stream`` returns an iterator for all inputs.

        Raises:
            UserError: a file is missing or not an image, or an argument is out of range.
        """
        detections = self.stream(images, threshold=threshold, batch_size=batch_size, tile=tile)
        if is_video(images):
            return detections
        if is_collection(images):
            return list(detections)
        return next(detections)

    __call__ = predict

    def stream(
        self,
        images: Picture | Iterable[Picture],
        *,
        threshold: float = 0.3,
        batch_size: int = 8,
        tile: int | None = None,
    ) -> Iterator[Detections]:
        """Yields the ``Detections`` of one image after the other.

        Unlike ``predict``, it also does so for iterables and folders. It reads ``batch_size``
        images at a time, in order, so ``images`` may be a generator without end. ``predict``
        describes the arguments and errors.
        """
        if not isinstance(threshold, numbers.Real) or not 0 <= threshold <= 1:
            raise UserError(f"threshold is {threshold!r}, expected a score from 0 to 1")
        if not isinstance(batch_size, numbers.Integral) or batch_size < 1:
            raise UserError(f"batch_size is {batch_size!r}, expected a whole number above 0")
        return find_boxes(
            self._predictor,
            open_images(images),
            self._settings,
            threshold=threshold,
            batch_size=batch_size,
            tile=tile,
        )

    def check_image(self, image: Image, name: str) -> None:
        """Raises ``UnreadableImage`` if an RGB image (H, W, 3) is too elongated to be resized.

        ``name`` names the image in the message.
        """
        check_elongation(NamedImage(image, None, name), self._settings)

    def deploy(self, *, precision: str = "float32") -> "Detector":
        """Returns a copy with the model in its fastest equivalent form on this device.

        Args:
            precision: "float32" or "bfloat16". bfloat16 changes the results slightly.

        Raises:
            UserError: an argument is invalid, or the detector is already exported or deployed.
        """
        from qbheat_det.deployment import deploy

        self._require_weights("deploy")
        predictor: Any = copy.copy(self._predictor)
        predictor.model = deploy(predictor.model, precision=precision)
        return Detector(predictor, self.cfg)

    @names_keywords
    def evaluate(
        self, data: "Paths", *, images: "Paths" = "", tile: int | None = None
    ) -> dict[str, float]:
        """Returns COCO's box metrics on a data set, like ``qbheat evaluate``.

        Args:
            data: data set with boxes, in any format of ``--data``, or several. If it has a
                validation part, only this part is used. If it has some of the detector's classes
                only, detections of the others are ignored.
            images: folder of the images, if they are not in the folder of a COCO json; one for each
                data set.
            tile: side of tiles in pixels, as in ``predict``. Boxes of an image's tiles are merged
                before AP is computed.

        Raises:
            UserError: the data are invalid, their classes differ from the detector's classes, or
                the detector is exported or deployed.
        """
        from qbheat_det.engine import RunFlags, assemble_evaluation, evaluate

        self._require_weights("evaluate", deployed=False)
        with tempfile.TemporaryDirectory(prefix="qbheat_evaluate_") as folder:
            flags = RunFlags(
                data=data,
                images=images or (),
                weights=self.weights,
                output=folder,
                eval_only=True,
                tile=tile,
                opts=["MODEL.DEVICE", self.cfg.MODEL.DEVICE],
            )
            return evaluate(assemble_evaluation(flags).cfg)["bbox"]

    @names_keywords
    def train(
        self,
        data: "Paths",
        *,
        epochs: float | None = None,
        minutes: float | None = None,
        output: str | Path | None = None,
        overrides: Mapping[str, Any] | None = None,
        **flags: Any,
    ) -> "Run":
        """Fine-tunes the detector on a data set, and replaces its weights by the trained ones.

        Args:
            data: data set with boxes, in any format of ``--data``, or several (``RunFlags``). The
                detector gets the classes of the data. Classes with the same name keep their
                weights. With the flag ``keep_classes=True``, it keeps all of its classes.
            epochs: number of passes over the images; by default 20, if ``minutes`` is not given.
            minutes: duration for which epochs and image size are chosen.
            output: folder of the run; by default a new folder in ``output/``.
            overrides: config keys and values, such as ``{"SOLVER.BASE_LR": 0.005}``.
            flags: fields of ``RunFlags``, such as ``images``, ``val`` and ``batch``.

        Returns:
            The run, with its ``folder``, ``metrics`` and ``weights``. ``qbheat_det.analysis`` draws
            its figures.

        Raises:
            UserError: the data or an override is invalid, or the detector is exported or deployed.
        """
        # Prediction needs neither the engine nor the analysis.
        from qbheat_det.analysis.run import Run
        from qbheat_det.checkpoint import load_run_config
        from qbheat_det.inference.predict import build_predictor

        from .training import check_overrides, choose_folder, make_flags, plan_run, train_run

        self._require_weights("train", deployed=False)
        if "weights" in flags:
            raise UserError(
                f"train() continues from the detector's own weights: leave out weights, or use "
                f"qbheat_det.load({str(flags['weights'])!r}).train(…)"
            )
        folder = choose_folder(output)
        values: dict[str, Any] = {
            "MODEL.DEVICE": self.cfg.MODEL.DEVICE,
            "MODEL.DEPLOY.ENABLED": False,
        }
        if epochs is None and minutes is None:
            values["SOLVER.EPOCHS"] = 20
        if overrides:
            check_overrides(overrides)
            values |= overrides
        run_flags = make_flags(
            data, folder, values, weights=self.weights, epochs=epochs, minutes=minutes, **flags
        )
        train_run(plan_run(run_flags))
        run = Run.open(folder, device=self.cfg.MODEL.DEVICE)
        cfg = load_run_config(str(run.path), device=self.cfg.MODEL.DEVICE)
        predictor = build_predictor(cfg)
        self._predictor = predictor
        self._settings = DetectorSettings.from_config(cfg)
        self._cfg = cfg
        self.model = predictor.model
        return run

    def embed(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises a ``UserError``, because only an ``Encoder`` computes vectors."""
        raise UserError(f"'{self.weights}' is a detector, not an encoder, and has no embeddings")
