# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Feature pyramid on Mobile-Former, for Detectron2's RetinaNet, Faster R-CNN and Mask R-CNN.

Papers: "Feature Pyramid Networks", Lin et al., arXiv:1612.03144; "Focal Loss for Dense Object
Detection", arXiv:1708.02002 (P6, P7). Deviation: Mobile-Former ends at stride 16, so P5 too is a
strided convolution, on P4. That agrees with the multiply-adds which the QB-Heat paper prints for
MF-285M (Table 14); its P6 is not the same for all three sizes and cannot be recovered. Detectron2's
detectors hand over no image sizes, so on this pyramid padding counts as image, as it does there.
"""

from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY
from detectron2.modeling.backbone import FPN
from fvcore.nn import weight_init
from torch import Tensor, nn
from torch.nn import functional as F

from .mobile_former import MobileFormer


class StridedLevels(nn.Module):
    """Coarser pyramid levels: 3x3 convolutions of stride 2, one on the other.

    As in RetinaNet, a ReLU stands between the new levels from the third on (P6 -> ReLU -> P7).
    """

    def __init__(self, *, channels: int, in_feature: str, num_levels: int) -> None:
        """
        Args:
            channels: C of all levels.
            in_feature: name of the level to start from.
            num_levels: number of levels to add.
        """
        super().__init__()
        self.in_feature = in_feature  # this and num_levels are what Detectron2's FPN asks for
        self.num_levels = num_levels
        self.convs = nn.ModuleList(
            nn.Conv2d(channels, channels, 3, stride=2, padding=1) for _ in range(num_levels)
        )
        for conv in self.convs:
            weight_init.c2_xavier_fill(conv)

    def forward(self, x: Tensor) -> list[Tensor]:
        """
        Args:
            x: (N, C, H, W).

        Returns:
            One map a level, each half as large as the one before.
        """
        levels: list[Tensor] = []
        for index, conv in enumerate(self.convs):
            x = conv(F.relu(x) if index >= 2 else x)
            levels.append(x)
        return levels


@BACKBONE_REGISTRY.register()
def build_mobile_former_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> FPN:
    """Builds an FPN on the outputs ``MODEL.FPN.IN_FEATURES`` of a Mobile-Former.

    ``MODEL.FPN.TOP_LEVELS`` strided levels follow the coarsest one: with "s8" and "s16" and three
    of them the result is "p3" … "p7".
    """
    in_features = cfg.MODEL.FPN.IN_FEATURES
    arguments = MobileFormer.from_config(cfg, input_shape)
    bottom_up = MobileFormer(**{**arguments, "out_features": in_features})
    stride = bottom_up.output_shape()[in_features[-1]].stride
    channels = cfg.MODEL.FPN.OUT_CHANNELS
    return FPN(
        bottom_up=bottom_up,
        in_features=in_features,
        out_channels=channels,
        norm=cfg.MODEL.FPN.NORM,
        top_block=StridedLevels(
            channels=channels,
            in_feature=f"p{stride.bit_length() - 1}",
            num_levels=cfg.MODEL.FPN.TOP_LEVELS,
        ),
        fuse_type=cfg.MODEL.FPN.FUSE_TYPE,
    )
