# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Non-maximum suppression of a whole batch, class by class, in the words of each format."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchvision.ops import nms

from .detector_heads import NOTHING


def suppress(
    boxes: Tensor, scores: Tensor, labels: Tensor, num_classes: int, overlap: float
) -> Tensor:
    """Takes away the boxes that lie over better ones of the same image and class.

    Args:
        boxes: (N, M, 4), XYXY.
        scores: (N, M); ``NOTHING`` where there is no box.
        labels: (N, M), in [0, K).
        num_classes: K.
        overlap: the IoU above which the lesser one goes.

    Returns:
        (N, M): the scores, ``NOTHING`` where the box went.
    """
    image, place = (scores > NOTHING).nonzero().unbind(dim=1)
    # Images and classes lie side by side, far from each other; in float64, since the numbers grow
    # by thousands and an overlap must not.
    found = boxes[image, place].double()
    group = image * num_classes + labels[image, place]
    extent = boxes.abs().max().double() + 1
    best = scores[image, place]
    kept = nms(found + (2 * extent * group)[:, None], best.double(), overlap)
    result = torch.full_like(scores, NOTHING)
    return result.index_put((image[kept], place[kept]), best[kept])


@functools.cache
def suppress_in_onnx() -> tuple[
    Callable[..., Tensor], dict[Callable[..., Any], Callable[..., Any]]
]:
    """Returns ``suppress`` as one operator, and how ONNX spells it, for the exporter.

    ONNX's ``NonMaxSuppression`` knows images and classes itself.
    """
    from onnxscript import opset18

    op: Any = opset18  # takes Python's numbers for constants, which its types do not say

    @torch.library.custom_op("qbheat_det::suppress", mutates_args=())
    def operator(
        boxes: Tensor, scores: Tensor, labels: Tensor, num_classes: int, overlap: float
    ) -> Tensor:
        return suppress(boxes, scores, labels, num_classes, overlap)

    @operator.register_fake
    def _(
        boxes: Tensor, scores: Tensor, labels: Tensor, num_classes: int, overlap: float
    ) -> Tensor:
        return torch.empty_like(scores)

    def translate(boxes: Any, scores: Any, labels: Any, num_classes: int, overlap: float) -> Any:
        classes = op.Constant(value_ints=list(range(num_classes)))
        is_class = op.Equal(op.Unsqueeze(labels, [1]), op.Unsqueeze(classes, [0, 2]))
        nothing = op.Constant(value_float=NOTHING)
        table = op.Where(is_class, op.Unsqueeze(scores, [1]), nothing)  # (N, K, M)
        everything = op.Gather(op.Shape(scores), [1])
        found = op.NonMaxSuppression(
            boxes,
            table,
            everything,
            op.Constant(value_floats=[overlap]),
            op.Constant(value_floats=[0.0]),
        )
        kept = op.Gather(found, [0, 2], axis=1)  # image and row
        result = op.Expand(nothing, op.Shape(scores))
        return op.ScatterND(result, kept, op.GatherND(scores, kept))

    return operator, {torch.ops.qbheat_det.suppress.default: translate}
