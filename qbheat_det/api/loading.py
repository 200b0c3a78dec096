# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``load``, which opens trained weights, ``train`` and ``join``. Exported files need no PyTorch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbheat_det.core.errors import UserError
from qbheat_det.core.other_names import names_keywords
from qbheat_det.inference.exported import EXPORTED_SUFFIXES, ExportedModel
from qbheat_det.inference.files import open_weights

from .detector import Detector

if TYPE_CHECKING:
    from qbheat_det.engine.run_flags import Paths

    from .encoder import Encoder


def load(
    weights: str | Path, *, device: str | None = None, fast: bool = False
) -> "Detector | Encoder":
    """Opens trained weights.

    Args:
        weights: one of

            - a name in the model zoo, with or without the prefix "qbheat://",
            - a weights file (.safetensors, .pth) with its config inside or in the same folder,
            - a file of Detectron2's model zoo (.pkl), or its address "detectron2://NAME",
            - the folder of a run. Its best weights are used, or the final ones if there are none,
            - an exported file (.onnx),
            - "timm://NAME" for a timm encoder, or "hf://USER/NAME" for Hugging Face.
        device: "cpu" or "cuda"; by default "cuda" if a GPU is available.
        fast: whether to return a detector in its fastest equivalent form (``Detector.deploy``).

    Returns:
        A ``Detector`` for the weights of a detector. An ``Encoder`` for those of a backbone, a
        pre-training model or a classifier.

    Raises:
        UserError: the file, name or device does not exist, or the file does not fit its config.
    """
    name = str(weights)
    if name.lower().endswith(EXPORTED_SUFFIXES):
        return _load_exported(name, device=device, fast=fast)
    # The other weights need PyTorch.
    from qbheat_det.checkpoint import find_weights
    from qbheat_det.inference.predict import (
        TrainedWeights,
        build_detector,
        is_encoder,
        is_timm,
        open_encoder,
    )

    from .encoder import Encoder

    name = find_weights(name)
    if is_timm(name):
        return Encoder(*open_encoder(name, device))
    model = open_weights(name, device=device, fast=fast)
    assert isinstance(model, TrainedWeights)
    if is_encoder(name, model.cfg):
        return Encoder(*open_encoder(name, device))
    return Detector(build_detector(model.cfg), model.cfg)


def _load_exported(name: str, *, device: str | None, fast: bool) -> "Detector | Encoder":
    """Opens an exported file. A detector imports neither PyTorch nor Detectron2."""
    exported = open_weights(name, device=device, fast=fast)
    assert isinstance(exported, ExportedModel)
    if exported.info.task != "features":
        return Detector(exported)
    from .encoder import Encoder

    return Encoder(exported)


@names_keywords
def train(
    data: "Paths",
    *,
    minutes: float | None = None,
    epochs: float | None = None,
    output: str | Path | None = None,
    weights: str | Path = "",
    overrides: Mapping[str, Any] | None = None,
    **flags: Any,
) -> "Detector | Encoder":
    """Trains a detector on a data set with the default recipe, like ``qbheat train``, and opens it.

    Args:
        data: data set with boxes, in any format of ``--data``, or several (``RunFlags``); or class
            folders, for a classifier.
        minutes: duration for which epochs and image size are chosen.
        epochs: number of passes over the images; by default that of the recipe.
        output: folder of the run; by default a new folder in ``output/``.
        weights: initial weights, as in ``load``; by default those of the recipe.
        overrides: config keys and values, such as ``{"SOLVER.BASE_LR": 0.005}``.
        flags: fields of ``RunFlags``, such as ``images``, ``val``, ``batch`` and ``config_file``.

    Returns:
        The detector with the best weights of the run; an encoder for a classifier.

    Raises:
        UserError: the data, a flag or an override is invalid, or the folder has a run.
    """
    # Prediction needs no engine.
    from .training import choose_folder, make_flags, plan_run, train_run

    folder = choose_folder(output)
    run_flags = make_flags(
        data,
        folder,
        overrides or {},
        weights=str(weights),
        epochs=epochs,
        minutes=minutes,
        **flags,
    )
    train_run(plan_run(run_flags))
    return load(folder, device=run_flags.device or None)


def join(weights: Sequence[str | Path], output: str | Path, *, overwrite: bool = False) -> Detector:
    """Joins detectors of one frozen encoder, like ``qbheat join``, and opens the result.

    Nothing is trained. The joined detector finds what each of the detectors finds alone.

    Args:
        weights: at least two detectors, as in ``load``. If two of them have a class of the same
            name, the first one finds it.
        output: the new ``.safetensors`` file.
        overwrite: whether to replace ``output`` if it exists.

    Raises:
        UserError: there are not two detectors, their encoders or images differ, or a file cannot be
            read or written.
    """
    from qbheat_det.checkpoint import join_detectors

    if isinstance(weights, str | Path):
        raise UserError(f"weights must be a list of detectors, not {str(weights)!r}")
    join_detectors([str(name) for name in weights], Path(output), overwrite=overwrite)
    return load_detector(output)


def load_detector(
    weights: str | Path, *, device: str | None = None, fast: bool = False
) -> Detector:
    """Opens the weights of a detector. ``load`` describes the arguments.

    Raises:
        UserError: the weights cannot be opened, or are those of an encoder or a classifier.
    """
    model = load(weights, device=device, fast=fast)
    if not isinstance(model, Detector):
        raise UserError(f"'{weights}' is an encoder or a classifier, not a detector")
    return model


def load_encoder(weights: str | Path, *, device: str | None = None) -> "Encoder":
    """Opens the weights of an encoder. ``load`` describes the arguments.

    Raises:
        UserError: the weights cannot be opened, or are those of a detector or an exported file.
    """
    from qbheat_det.checkpoint import find_weights
    from qbheat_det.inference.predict import open_encoder

    from .encoder import Encoder

    return Encoder(*open_encoder(find_weights(weights), device))
