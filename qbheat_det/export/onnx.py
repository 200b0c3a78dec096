# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Programs of torch.export as ONNX files, with NMS as ONNX's own operator."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from qbheat_det.core.environment import quiet
from qbheat_det.core.errors import UserError

from .heads import EMPTY, suppress_overlaps

_OPSET = 18  # the first with an antialiased Resize


@torch.library.custom_op("qbheat_det::suppress_overlaps", mutates_args=())
def suppress_operator(
    boxes: Tensor, scores: Tensor, labels: Tensor, num_classes: int, iou_threshold: float
) -> Tensor:
    """``suppress_overlaps`` as one operator of the graph, which ``write_onnx`` translates."""
    return suppress_overlaps(boxes, scores, labels, num_classes, iou_threshold)


@suppress_operator.register_fake
def _(
    boxes: Tensor, scores: Tensor, labels: Tensor, num_classes: int, iou_threshold: float
) -> Tensor:
    return torch.empty_like(scores)


def write_onnx(
    program: ExportedProgram,
    path: Path,
    *,
    inputs: Sequence[str],
    outputs: Sequence[str],
    metadata: Mapping[str, str],
) -> None:
    """Writes a program of a module built with ``suppress_operator`` as one ONNX file.

    ``inputs`` and ``outputs`` are names in their order, ``metadata`` entries of ``metadata_props``.

    Raises:
        UserError: a package of the extra ``export`` is missing.
    """
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"ONNX needs {error.name}, which is not installed: pip install 'qbheat_det[export]'"
        ) from error
    with quiet("onnxscript", "onnx_ir", "torch.onnx"):
        written = torch.onnx.export(
            program,
            input_names=list(inputs),
            output_names=list(outputs),
            opset_version=_OPSET,
            custom_translation_table={torch.ops.qbheat_det.suppress_overlaps.default: _translate},
            verbose=False,
        )
    assert written is not None
    written.model.metadata_props.update(metadata)
    path.write_bytes(written.model_proto.SerializeToString())


def _translate(boxes: Any, scores: Any, labels: Any, num_classes: int, iou_threshold: float) -> Any:
    """Writes ``suppress_overlaps`` as NonMaxSuppression, which separates images and classes."""
    from onnxscript import opset18

    op: Any = opset18  # accepts Python's numbers as constants, unlike its annotations
    classes = op.Constant(value_ints=list(range(num_classes)))
    is_class = op.Equal(op.Unsqueeze(labels, [1]), op.Unsqueeze(classes, [0, 2]))
    empty = op.Constant(value_float=EMPTY)
    class_scores = op.Where(is_class, op.Unsqueeze(scores, [1]), empty)  # (N, K, M)
    selected = op.NonMaxSuppression(
        boxes,
        class_scores,
        op.Gather(op.Shape(scores), [1]),  # keep up to M boxes
        op.Constant(value_floats=[iou_threshold]),
        op.Constant(value_floats=[0.0]),
    )
    kept = op.Gather(selected, [0, 2], axis=1)  # image and row
    return op.ScatterND(op.Expand(empty, op.Shape(scores)), kept, op.GatherND(scores, kept))
