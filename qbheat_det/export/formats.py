# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Files of ONNX and torch.export.

A ``.pt2`` is a program: open only files you trust. Opening refuses what could run code before the
file is even looked at, as far as PyTorch allows: pickles that hold more than tensors, and compiled
libraries. PyTorch still evaluates expressions and looks up functions that the file names.
"""

import contextlib
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.export import ExportedProgram

from qbheat_det.core.environment import quiet
from qbheat_det.core.errors import UserError

logger = logging.getLogger(__name__)
_OPSET = 18  # the first with an antialiased Resize
_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
ONNX_TRANSLATIONS: dict[Any, Any] = {}
"""Functions that write the package's own operators as operators of ONNX."""
_QUANTIZED = ["Conv", "MatMul", "Gemm"]
_MIN_CHANNELS = 16  # of an input; with fewer, as in the stem, little is gained and much is lost
_MIN_POSITIONS = 256  # products of tokens and queries cost little


def write_onnx(
    program: ExportedProgram,
    path: Path,
    inputs: Sequence[str],
    outputs: Sequence[str],
    metadata: Mapping[str, str],
) -> None:
    """Writes a program of ``trace`` as one ONNX file, with metadata.

    Raises a ``UserError`` if a package of the extra ``export`` is missing.
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


def quantize_onnx(path: Path, images: Iterable[npt.NDArray[np.uint8]]) -> int:
    """Quantises an ONNX file of ``write_model`` in place, and returns how many layers it changed.

    Weights have a scale for each output channel, activations one for each tensor, from their
    smallest and largest values on ``images`` (H, W, 3), uint8, in the file's pixel format. Written
    as pairs of QuantizeLinear and DequantizeLinear, which onnxruntime and OpenVINO turn into
    products of integers.
    """
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self._images = iter(images)

        def get_next(self) -> Any:
            image = next(self._images, None)
            return None if image is None else {"images": image[None]}

    _fold_constants(path)
    model = onnx.load(path)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    layers = _find_layers(model)
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
    model = onnx.load(path)
    onnx.helper.set_model_props(model, metadata)
    onnx.save(model, path)
    return len(layers)


def _fold_constants(path: Path) -> None:
    """Makes weights of what is computed from them alone, as parts of one are."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(path)
    onnxruntime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])


def _find_layers(model: Any) -> list[str]:
    """Returns the names of the layers over maps whose weights are constants.

    Depthwise convolutions with several outputs for each input stay: runtimes are slow at those.
    """
    weights = {each.name: list(each.dims) for each in model.graph.initializer}
    values = (*model.graph.value_info, *model.graph.output)
    shapes = {each.name: each.type.tensor_type.shape.dim for each in values}
    found = []
    for node in model.graph.node:
        if node.op_type not in _QUANTIZED or node.input[1] not in weights:
            continue
        weight, output = weights[node.input[1]], shapes.get(node.output[0], ())
        groups = next((each.i for each in node.attribute if each.name == "group"), 1)
        # A length that varies has no number; the first one is the batch.
        lengths = [each.dim_value or _MIN_POSITIONS for each in output]
        positions = math.prod(lengths[2:] if node.op_type == "Conv" else lengths[-2:-1])
        is_plain = groups == 1 and min(weight[:2]) >= _MIN_CHANNELS
        is_depthwise = groups == weight[0] > 1
        if positions >= _MIN_POSITIONS and (is_plain or is_depthwise):
            found.append(node.name)
    return found
