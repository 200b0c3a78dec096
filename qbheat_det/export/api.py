# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Exports a model to one file, kept only if it gives PyTorch's results; and a bare backbone."""

import dataclasses
import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog
from torch import Tensor, nn

from qbheat_det.checkpoint import (
    WeightsInfo,
    bare_backbone,
    check_exact,
    fit_weights,
    load_run_config,
    read_weights,
    save_weights,
)
from qbheat_det.config import with_values
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import check_writable, write_atomically
from qbheat_det.data import load_image_folders
from qbheat_det.inference.export_info import METADATA_KEY
from qbheat_det.inference.exported import EXPORTED_SUFFIXES, ExportedModel, Images
from qbheat_det.inference.predict import build_predictor, find_inputs, read_bgr
from qbheat_det.inference.video import UnreadableImage
from qbheat_det.modeling.backbone.fpn import build_bare_backbone
from qbheat_det.probing.features import read_whole_images, recalibrate_bn, training_records

from .agreement import ExportReport, build_reference, fit_image, measure_agreement
from .formats import quantize_onnx, write_onnx
from .graph import build_exportable, trace_images
from .heads import suppress_operator

TOLERANCE = 1e-4
ON_CPU = {"MODEL.DEVICE": "cpu"}
"""Of configs: graphs hold the device that they are traced on."""
_TOY_SET = "qbheat_toy_val"
_NUM_IMAGES = 8
_NUM_CALIBRATION = 32
_INT8_TOLERANCE = 0.02  # detections of INT8 are matched within ten times this
logger = logging.getLogger(__name__)


def export_model(
    cfg: CfgNode,
    output: Path,
    *,
    images: Sequence[str] = (),
    tolerance: float = TOLERANCE,
    overwrite: bool = False,
    image_size: tuple[int, ...] = (),
    int8_images: Sequence[str] = (),
) -> ExportReport:
    """Writes a model with its weights to a file, and compares the two.

    Args:
        cfg: of the weights, see ``load_run_config``.
        output: ``.onnx``.
        images: files and folders to compare on; by default the toy set.
        tolerance: see ``Agreement.holds``.
        overwrite: whether ``output`` may exist.
        image_size: (H, W) in pixels of all images that the file will get, one at a time; by
            default it takes images of any size and number.
        int8_images: files and folders to calibrate 8-bit integers on (ONNX). The file agrees before
            it is quantised; the report is of what it gives then.

    Raises:
        UserError: the model or the weights cannot be exported, or the file does not agree with
            PyTorch; nothing is written then.
    """
    _check_output(output, EXPORTED_SUFFIXES, overwrite=overwrite)
    if int8_images and output.suffix.lower() != ".onnx":
        raise UserError(f"--int8-images needs ONNX: --output '{output}' must end in .onnx")
    cfg = with_values(cfg, ON_CPU)
    examples, source = read_images(cfg, images)
    calibration = read_images(cfg, int8_images, number=_NUM_CALIBRATION)[0] if int8_images else []
    predictor = build_predictor(cfg)
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / f"model{output.suffix}"
        write_model(predictor.model, cfg, written, image_size=image_size, int8=bool(int8_images))
        exported = ExportedModel.open(written, device="cpu")
        reference = build_reference(predictor, cfg, exported.info.task)
        report = measure_agreement(
            exported, reference, examples, tolerance=tolerance, source=source
        )
        report.check()
        if calibration:
            logger.info("In float32 the file agrees:\n%s", report)
            logger.info("Calibrating 8-bit integers on %d images …", len(calibration))
            fitting = [fit_image(image, image_size) for image in calibration]
            number = quantize_onnx(written, fitting)
            report = measure_agreement(
                ExportedModel.open(written, device="cpu"),
                reference,
                examples,
                tolerance=max(tolerance, _INT8_TOLERANCE),
                source=f"{number} layers in 8-bit integers, beside PyTorch; {source}",
            )
            report.is_held = False
        write_atomically(output, written.read_bytes())
    return report


def write_model(
    model: nn.Module,
    cfg: CfgNode,
    path: Path,
    *,
    image_size: tuple[int, ...] = (),
    int8: bool = False,
) -> None:
    """Writes a model as ``.onnx`` without comparing it with PyTorch.

    ``image_size`` is that of ``export_model``; ``int8`` is for ``quantize_onnx``. Raises a
    ``UserError`` if it cannot be exported, or ONNX needs a package.
    """
    exportable = build_exportable(model, cfg, suppress=suppress_operator, image_size=image_size)
    program = trace_images(exportable, image_size, int8=int8)
    description = exportable.info.to_json()
    write_onnx(program, path, ["images"], exportable.info.outputs, {METADATA_KEY: description})


def read_images(
    cfg: CfgNode, paths: Sequence[str], *, number: int = _NUM_IMAGES
) -> tuple[list[Images], str]:
    """Reads a few images (H, W, 3), in the config's pixel format, and says where they are from.

    Raises a ``UserError`` if no image can be read.
    """
    source = ", ".join(paths) or _TOY_SET
    if paths:
        files = [file.path for file in find_inputs(paths)]
    else:
        files = [Path(record["file_name"]) for record in DatasetCatalog.get(source)]
    images: list[Images] = []
    for file in files[:: max(1, len(files) // number)][:number]:
        try:
            images.append(read_bgr(file))
        except UnreadableImage as error:
            logger.warning("'%s' is left out: %s", file, error)
    if not images:
        raise UserError(f"no image of {source} can be read: name others with --images")
    if cfg.INPUT.FORMAT == "RGB":
        images = [np.ascontiguousarray(image[:, :, ::-1]) for image in images]
    return images, f"{len(images)} images of {source}"


def export_backbone(
    weights: str,
    output: Path,
    *,
    overwrite: bool = False,
    num_images: int = 0,
    image_folders: Sequence[str] = (),
    opts: Sequence[str] = (),
) -> tuple[int, int]:
    """Writes the backbone of ``weights``, names without prefix, with its description.

    Args:
        weights: of any model with a child ``backbone``; of an FPN, its ``bottom_up`` is taken.
        output: a ``.safetensors``, which any config with this backbone takes as ``MODEL.WEIGHTS``.
        overwrite: whether ``output`` may exist.
        num_images: if not 0, recalibrate BatchNorm on this many whole images.
        image_folders: of these images; by default the training set of the weights' config.
        opts: overrides of that config, ``KEY VALUE``.

    Returns:
        The number of tensors written, and of images used.

    Raises:
        UserError: the weights have no backbone or cannot be read, or ``output`` cannot be written.
    """
    _check_output(output, (".safetensors",), overwrite=overwrite)
    if (image_folders or opts) and not num_images:
        raise UserError("--images and config overrides need --recalibrate-bn")
    state, info = read_weights(weights)
    names = bare_backbone(state)
    if not names:
        raise UserError(f"'{weights}' has no tensors named 'backbone.…'")
    backbone = {short: state[name] for name, short in names.items()}
    images: list[Tensor] = []
    if num_images:
        cfg = load_run_config(weights, opts=opts)
        records = load_image_folders(image_folders)[0] if image_folders else training_records(cfg)
        images = read_whole_images(cfg, records, num_images)
        backbone = _recalibrate(backbone, weights, cfg, images)
    # The rest of the description is about the model around it.
    info = dataclasses.replace(
        info or WeightsInfo(), class_names=(), category_ids=(), pretrain_only_modules=()
    )
    save_weights(str(output), backbone, info)
    return len(backbone), len(images)


def _recalibrate(
    state: Mapping[str, Tensor], weights: str, cfg: CfgNode, images: Sequence[Tensor]
) -> dict[str, Tensor]:
    backbone = build_bare_backbone(cfg).to(cfg.MODEL.DEVICE)
    fitting, report = fit_weights(state, backbone.state_dict(), file=weights)
    check_exact(report, "name the config that belongs to these weights")
    backbone.load_state_dict(fitting, strict=False)
    num_norms = recalibrate_bn(
        backbone, images, pixel_mean=cfg.MODEL.PIXEL_MEAN, pixel_std=cfg.MODEL.PIXEL_STD
    )
    if not num_norms:
        raise UserError(f"the backbone of '{weights}' has no BatchNorm to recalibrate")
    return dict(backbone.state_dict())


def _check_output(output: Path, suffixes: Sequence[str], *, overwrite: bool) -> None:
    if output.suffix.lower() not in suffixes:
        raise UserError(f"--output '{output}' must end in {' or '.join(suffixes)}")
    if output.exists() and not overwrite:
        raise UserError(f"'{output}' exists: choose another name, or pass --overwrite")
    check_writable(output)
