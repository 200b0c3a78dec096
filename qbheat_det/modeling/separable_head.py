# Copyright (c) qbheat_det contributors. Apache-2.0.
"""RetinaNet's head with depthwise-separable convolutions, which take less time on CPUs.

Large depthwise kernels, one tower for both tasks and 1x1 predictors are as in PP-PicoDet
(arXiv:2111.00902). At stride 8, a layer of 64 channels takes 5,696 multiply-adds per position with
5 x 5 kernels; a dense layer of 3 x 3 takes 36,864.
"""

from collections.abc import Sequence
from typing import Any

from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling.meta_arch.retinanet import RetinaNetHead
from torch import Tensor, nn

from qbheat_det.config import configurable
from qbheat_det.layers import separable_conv

from .checks import check_value


class SeparableHead(RetinaNetHead):
    """RetinaNet's head whose convolutions are depthwise-separable, and whose predictors are 1x1.

    As in ``RetinaNetHead``, the levels share weights, but each has its own BatchNorm statistics.
    """

    cls_score: nn.Conv2d
    bbox_pred: nn.Conv2d
    bbox_subnet: Any  # a tower, or None if there is one for both tasks

    @configurable
    def __init__(self, *, kernel_size: int, shares_tower: bool, **kwargs: Any) -> None:
        """
        Args:
            kernel_size: side of the depthwise kernels, an odd number.
            shares_tower: whether one tower computes the maps of both predictors.
            kwargs: arguments of ``RetinaNetHead``.

        Raises:
            ValueError: ``kernel_size`` is even or less than 1.
        """
        name = "RETINANET.SEPARABLE_HEAD.KERNEL_SIZE"
        is_odd = kernel_size >= 1 and kernel_size % 2 == 1
        check_value(is_odd, name, kernel_size, "an odd number of at least 1")
        super().__init__(**kwargs)
        make_separable(self.cls_subnet, kernel_size)
        self.cls_score = _shrink_predictor(self.cls_score)
        self.bbox_pred = _shrink_predictor(self.bbox_pred)
        if shares_tower:
            self.bbox_subnet = None
        else:
            make_separable(self.bbox_subnet, kernel_size)

    @classmethod
    def from_config(cls, cfg: CfgNode, input_shape: Sequence[ShapeSpec]) -> dict[str, Any]:
        node = cfg.MODEL.RETINANET.SEPARABLE_HEAD
        return {
            **super().from_config(cfg, input_shape),
            "kernel_size": node.KERNEL_SIZE,
            "shares_tower": node.SHARES_TOWER,
        }

    def forward(self, features: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Takes a map (N, C, H, W) per level.

        Returns, per level, class logits (N, A * K, H, W) and box deltas (N, A * 4, H, W) of A
        anchors per position.
        """
        logits = []
        deltas = []
        for feature_map in features:
            class_map = self.cls_subnet(feature_map)
            box_map = class_map
            if self.bbox_subnet is not None:
                box_map = self.bbox_subnet(feature_map)
            logits.append(self.cls_score(class_map))
            deltas.append(self.bbox_pred(box_map))
        return logits, deltas


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
