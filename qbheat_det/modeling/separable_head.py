# Copyright (c) qbheat_det contributors. Apache-2.0.
"""RetinaNet's head with depthwise-separable convolutions, which take less time on CPUs.

Large depthwise kernels and 1x1 predictors are as in PP-PicoDet (arXiv:2111.00902). At stride 8, a
layer of 64 channels takes 5,696 multiply-adds per position with 5 x 5 kernels; a dense layer of
3 x 3 takes 36,864. Deviation: classes and boxes have a tower each, as in RetinaNet, because one
tower for both costs five points of AP (docs/performance.md).
"""

from collections.abc import Sequence
from typing import Any

from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling.meta_arch.retinanet import RetinaNetHead
from torch import nn

from qbheat_det.config import configurable
from qbheat_det.layers import separable_conv

from .checks import check_value


class SeparableHead(RetinaNetHead):
    """RetinaNet's head whose convolutions are depthwise-separable, and whose predictors are 1x1.

    As in ``RetinaNetHead``, the levels share weights, but each has its own BatchNorm statistics.
    """

    cls_score: nn.Conv2d
    bbox_pred: nn.Conv2d

    @configurable
    def __init__(self, *, kernel_size: int, **kwargs: Any) -> None:
        """
        Args:
            kernel_size: side of the depthwise kernels, an odd number.
            kwargs: arguments of ``RetinaNetHead``.

        Raises:
            ValueError: ``kernel_size`` is even or less than 1.
        """
        name = "RETINANET.SEPARABLE_HEAD.KERNEL_SIZE"
        is_odd = kernel_size >= 1 and kernel_size % 2 == 1
        check_value(is_odd, name, kernel_size, "an odd number of at least 1")
        super().__init__(**kwargs)
        make_separable(self.cls_subnet, kernel_size)
        make_separable(self.bbox_subnet, kernel_size)
        self.cls_score = _shrink_predictor(self.cls_score)
        self.bbox_pred = _shrink_predictor(self.bbox_pred)

    @classmethod
    def from_config(cls, cfg: CfgNode, input_shape: Sequence[ShapeSpec]) -> dict[str, Any]:
        return {
            **super().from_config(cfg, input_shape),
            "kernel_size": cfg.MODEL.RETINANET.SEPARABLE_HEAD.KERNEL_SIZE,
        }


def make_separable(tower: nn.Sequential, kernel_size: int) -> None:
    """Replaces the dense convolutions of a tower, all of stride 1, with new separable ones."""
    for index, layer in enumerate(tower):
        if isinstance(layer, nn.Conv2d):
            tower[index] = separable_conv(layer.in_channels, layer.out_channels, kernel_size)


def _shrink_predictor(predictor: nn.Conv2d) -> nn.Conv2d:
    """Returns a 1x1 convolution with RetinaNet's initial weights and the predictor's bias."""
    shrunk = nn.Conv2d(predictor.in_channels, predictor.out_channels, 1)
    nn.init.normal_(shrunk.weight, std=0.01)
    shrunk.bias = predictor.bias
    return shrunk
