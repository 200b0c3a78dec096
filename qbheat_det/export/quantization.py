# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Exported ONNX files whose convolutions and matrix products are of 8-bit integers.

Weights have a scale for each output channel, activations one for each tensor, from their smallest
and largest values on a user's images. Written as pairs of QuantizeLinear and DequantizeLinear,
which onnxruntime and OpenVINO turn into products of integers.
"""

import contextlib
import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qbheat_det.core.environment import quiet

from .runtime import Images

logger = logging.getLogger(__name__)
_KINDS = ["Conv", "MatMul", "Gemm"]
_MIN_CHANNELS = 16  # of an input; with fewer, as in the stem, little is gained and much is lost
_MIN_POSITIONS = 256  # products of tokens and queries cost little


def quantize_onnx(path: Path, images: Iterable[Images]) -> int:
    """Quantises an exported file in place, and returns the number of layers that it changed.

    Args:
        path: of ``write_model`` with ``int8``.
        images: (H, W, 3), uint8, in the file's pixel format, to calibrate on.
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
            op_types_to_quantize=_KINDS,
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
        if node.op_type not in _KINDS or node.input[1] not in weights:
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
