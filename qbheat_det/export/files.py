# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Exports models as ONNX files that agree with PyTorch, or their bare backbones as weights."""

import contextlib
import dataclasses
import logging
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog
from torch import nn
from torch.export import ExportedProgram

from qbheat_det.checkpoint import (
    WeightsInfo,
    bare_backbone,
    find_weights,
    load_run_config,
    read_weights,
    save_weights,
)
from qbheat_det.config import with_values
from qbheat_det.core.environment import quiet
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import check_output, write_atomically
from qbheat_det.data import load_image_folders
from qbheat_det.inference.exported import METADATA_KEY, ExportedModel, Images
from qbheat_det.inference.images import UnreadableImage, find_inputs, read_rgb
from qbheat_det.inference.predict import build_predictor
from qbheat_det.modeling.backbone.fpn import build_bare_backbone
from qbheat_det.probing.features import (
    load_backbone,
    read_whole_images,
    recalibrate_bn,
    training_records,
)

from .agreement import ExportReport, build_reference, fit_image, measure_agreement
from .graph import build_exportable, trace_images
from .heads import ONNX_TRANSLATIONS

TOLERANCE = 1e-4
ON_CPU = {"MODEL.DEVICE": "cpu"}
"""Config values for export, because a graph contains the device on which it is traced."""
_CELLS = "cells_sample_val"
_NUM_IMAGES = 8
_NUM_CALIBRATION = 32
_INT8_TOLERANCE = 0.02  # INT8 detections match if they differ by at most ten times this value
_OPSET = 18  # the first opset with an antialiased Resize
_QUANTIZED = ["Conv", "MatMul", "Gemm"]
_MIN_CHANNELS = 16  # layers with fewer lose much accuracy and gain little speed
_MIN_POSITIONS = 256  # layers on fewer positions, such as tokens and queries, take little time
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
    """Writes a model with its weights as an ONNX file, if the results agree with PyTorch.

    Args:
        cfg: the config with which the weights were trained, from ``load_run_config``.
        output: an ``.onnx`` file.
        images: files and folders of images for the comparison; by default, images of blood cells in
            the package.
        tolerance: largest allowed difference of scores, and of boxes relative to the image's side.
        overwrite: whether to replace ``output`` if it exists.
        image_size: (H, W) in pixels; the file then accepts only single images of this size. By
            default, it accepts any number of images of any size.
        int8_images: files and folders of images. If given, the file is quantized to 8-bit integers
            whose ranges come from these images. The file must agree with PyTorch before it is
            quantized. The report shows the differences after that.

    Raises:
        UserError: the model or the weights cannot be exported, or the file does not agree with
            PyTorch. Then nothing is written.
    """
    check_output(output, ".onnx", overwrite=overwrite)
    cfg = with_values(cfg, ON_CPU)
    examples, source = read_images(cfg, images)
    calibration: list[Images] = []
    if int8_images:
        calibration, _ = read_images(cfg, int8_images, number=_NUM_CALIBRATION)
    predictor = build_predictor(cfg)
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "model.onnx"
        write_model(predictor.model, cfg, written, image_size=image_size)
        exported = ExportedModel.open(written, device="cpu")
        reference = build_reference(predictor, cfg, exported.info.task)
        report = measure_agreement(
            exported, reference, examples, tolerance=tolerance, source=source
        )
        report.check()
        if calibration:
            logger.info("The float32 file agrees:\n%s", report)
            logger.info("Calibrating 8-bit integers on %d images …", len(calibration))
            fitted = [fit_image(image, image_size) for image in calibration]
            num_layers = quantize_onnx(written, fitted)
            report = measure_agreement(
                ExportedModel.open(written, device="cpu"),
                reference,
                examples,
                tolerance=max(tolerance, _INT8_TOLERANCE),
                source=f"{num_layers} layers in 8-bit integers, beside PyTorch; {source}",
            )
            report.is_held = False  # INT8 files are written whatever the differences
        write_atomically(output, written.read_bytes())
    return report


def read_images(
    cfg: CfgNode, paths: Sequence[str], *, number: int = _NUM_IMAGES
) -> tuple[list[Images], str]:
    """Returns images (H, W, 3) in the config's pixel format, and a description of them.

    ``number`` images are chosen, evenly spaced over the files. Files that cannot be read are
    skipped. Raises a ``UserError`` if no image can be read.
    """
    source = ", ".join(paths) or _CELLS
    if paths:
        files = [file.path for file in find_inputs(paths)]
    else:
        files = [Path(record["file_name"]) for record in DatasetCatalog.get(source)]
    images: list[Images] = []
    step = max(1, len(files) // number)
    for file in files[::step][:number]:
        try:
            images.append(read_rgb(file))
        except UnreadableImage as error:
            logger.warning("Skipping '%s': %s", file, error.reason)
    if not images:
        raise UserError(f"no image of {source} can be read: name others with --images")
    if cfg.INPUT.FORMAT != "RGB":
        images = [np.ascontiguousarray(image[:, :, ::-1]) for image in images]
    return images, f"{len(images)} images of {source}"


def write_model(
    model: nn.Module,
    cfg: CfgNode,
    path: Path,
    *,
    image_size: tuple[int, ...] = (),
) -> None:
    """Writes a model as an ``.onnx`` file without comparing it with PyTorch.

    If ``image_size`` (H, W) in pixels is given, the file accepts only single images of this size.
    Raises a ``UserError`` if the model cannot be exported or a package is missing.
    """
    exportable = build_exportable(model, cfg, image_size=image_size)
    program = trace_images(exportable, image_size)
    metadata = {METADATA_KEY: exportable.info.to_json()}
    write_onnx(program, path, ["images"], exportable.info.outputs, metadata)


def write_onnx(
    program: ExportedProgram,
    path: Path,
    inputs: Sequence[str],
    outputs: Sequence[str],
    metadata: Mapping[str, str],
) -> None:
    """Writes a traced graph to one ONNX file.

    ``inputs`` and ``outputs`` are the names of the graph's inputs and outputs. ``metadata`` are
    texts by key. Raises a ``UserError`` if a package of the extra ``export`` is missing.
    """
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"ONNX needs {error.name}, which is not installed: pip install {error.name}"
        ) from error
    logger.info("Converting the trace to ONNX …")
    with quiet("onnxscript", "onnx_ir", "torch.onnx"):
        written = torch.onnx.export(
            program,
            input_names=list(inputs),
            output_names=list(outputs),
            opset_version=_OPSET,
            custom_translation_table=ONNX_TRANSLATIONS,
            verbose=False,
        )
    assert written is not None
    written.model.metadata_props.update(metadata)
    path.write_bytes(written.model_proto.SerializeToString())


def quantize_onnx(path: Path, images: Iterable[Images]) -> int:
    """Quantizes an ONNX file of ``write_model`` in place; returns the number of quantized layers.

    Weights have one scale per output channel. Activations have one scale per tensor, from their
    range on ``images`` (H, W, 3), uint8, in the file's pixel format. The file contains pairs of
    QuantizeLinear and DequantizeLinear, which runtimes convert to integer products. Raises a
    ``UserError`` if there is nothing to quantize.
    """
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self._images = iter(images)

        def get_next(self) -> Any:
            """Returns the inputs of the next run, or None at the end."""
            image = next(self._images, None)
            if image is None:
                return None
            return {"images": image[None]}

    _fold_constants(path)  # so that weights are constants that can be quantized
    model = onnx.load(path)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    layers = _find_layers(model)
    if not layers:  # the quantizer would take an empty list as all layers
        raise UserError(
            "no layer of this model is large enough for 8-bit integers: export it without them"
        )
    with quiet("root"), contextlib.redirect_stdout(None):
        quantize_static(
            model,
            path,
            Reader(),
            op_types_to_quantize=_QUANTIZED,
            nodes_to_quantize=layers,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
    # The quantizer drops the metadata.
    model = onnx.load(path)
    onnx.helper.set_model_props(model, metadata)
    onnx.save(model, path)
    return len(layers)


def _fold_constants(path: Path) -> None:
    """Replaces operators on constants, such as slices of weights, by their results, in place."""
    import onnxruntime

    # ONNX Runtime writes the optimized graph to this path when it loads a graph.
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(path)
    onnxruntime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])


def _find_layers(model: Any) -> list[str]:
    """Returns the names of the layers to quantize: those with constant weights and large outputs.

    Excludes depthwise convolutions with several outputs per input, which are slow in runtimes, and
    those at strides 1 and 2, whose rounding costs most of the lost AP (docs/export.md).
    """
    weight_shapes = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    values = (*model.graph.value_info, *model.graph.output)
    output_shapes = {value.name: value.type.tensor_type.shape.dim for value in values}
    names = []
    strides: dict[str, int] = {}  # of maps, relative to the image
    for node in model.graph.node:
        attributes = {attribute.name: attribute for attribute in node.attribute}
        stride = max((strides[name] for name in node.input if name in strides), default=1)
        if "strides" in attributes:
            stride *= max(attributes["strides"].ints)
        strides.update(dict.fromkeys(node.output, stride))
        if node.op_type not in _QUANTIZED or node.input[1] not in weight_shapes:
            continue
        groups = attributes["group"].i if "group" in attributes else 1
        # Variable lengths have no value, and count as large.
        output_shape = output_shapes.get(node.output[0], ())
        lengths = [length.dim_value or _MIN_POSITIONS for length in output_shape]
        if node.op_type == "Conv":  # (N, C, H, W)
            num_positions = math.prod(lengths[2:])
        else:  # (…, positions, C)
            num_positions = math.prod(lengths[-2:-1])
        weight_shape = weight_shapes[node.input[1]]  # of a convolution: (outputs, inputs, …)
        is_dense = groups == 1 and min(weight_shape[:2]) >= _MIN_CHANNELS
        is_depthwise = groups > 1 and groups == weight_shape[0] and stride > 2
        if num_positions >= _MIN_POSITIONS and (is_dense or is_depthwise):
            names.append(node.name)
    return names


def export_backbone(
    weights: str,
    output: Path,
    *,
    overwrite: bool = False,
    num_images: int = 0,
    image_folders: Sequence[str] = (),
    opts: Sequence[str] = (),
) -> tuple[int, int]:
    """Writes the backbone of a model as weights, whose names have no prefix "backbone.".

    The file also contains the metadata of the model's weights.

    Args:
        weights: path or name of the weights of any model with a child ``backbone``. If the
            backbone is an FPN, its ``bottom_up`` is written.
        output: a ``.safetensors`` file, to use as ``MODEL.WEIGHTS`` with this backbone.
        overwrite: whether to replace ``output`` if it exists.
        num_images: if not 0, recalibrate BatchNorm on this number of whole images.
        image_folders: folders of images for BatchNorm; by default the training set in the config
            of the weights.
        opts: overrides of that config, as alternating keys and values.

    Returns:
        The number of tensors written, and the number of images used.

    Raises:
        UserError: the weights have no backbone or cannot be read, or ``output`` cannot be written.
    """
    check_output(output, ".safetensors", overwrite=overwrite)
    weights = find_weights(weights)
    state, info = read_weights(weights)
    names = bare_backbone(state)
    if not names:
        raise UserError(f"'{weights}' has no tensors named 'backbone.…'")
    tensors = {short: state[name] for name, short in names.items()}
    num_used = 0
    if num_images:
        cfg = load_run_config(weights, opts=opts)
        if image_folders:
            records, _ = load_image_folders(image_folders)
        else:
            records = training_records(cfg)
        images = read_whole_images(cfg, records, num_images)
        num_used = len(images)
        backbone = build_bare_backbone(cfg).to(cfg.MODEL.DEVICE)
        load_backbone(backbone, weights)
        num_changed = recalibrate_bn(
            backbone, images, pixel_mean=cfg.MODEL.PIXEL_MEAN, pixel_std=cfg.MODEL.PIXEL_STD
        )
        if num_changed == 0:
            raise UserError(f"the backbone of '{weights}' has no BatchNorm to recalibrate")
        tensors = dict(backbone.state_dict())
    # These fields describe the parts of the model that are not written.
    info = dataclasses.replace(
        info or WeightsInfo(), class_names=(), category_ids=(), pretrain_only_modules=()
    )
    save_weights(str(output), tensors, info)
    return len(tensors), num_used
