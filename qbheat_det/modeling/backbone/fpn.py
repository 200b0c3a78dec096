# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A feature pyramid for any backbone, used by Detectron2's RetinaNet, Faster and Mask R-CNN.

Papers: "Feature Pyramid Networks", Lin et al., arXiv:1612.03144; "Focal Loss for Dense Object
Detection", arXiv:1708.02002 (P6, P7). Deviation: Mobile-Former ends at stride 16, so P5 is also
computed by a strided convolution on P4. This gives the multiply-adds of MF-285M in the QB-Heat
paper (Table 14). No single design of P6 matches the paper's multiply-adds for all three sizes.
Padding is treated as part of the image, as in Detectron2.
"""

from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, Backbone, build_backbone
from detectron2.modeling.backbone import FPN
from fvcore.nn import weight_init
from torch import Tensor, nn
from torch.nn import functional as F

from qbheat_det.config import with_values
from qbheat_det.core.errors import UserError
from qbheat_det.modeling.contracts import get_encoder, pick_outputs

from .prefixes import accept_prefixes


class StridedLevels(nn.Module):
    """Adds coarser levels by 3x3 convolutions of stride 2, as in RetinaNet (P6 -> ReLU -> P7)."""

    def __init__(self, *, channels: int, in_feature: str, num_levels: int) -> None:
        """Takes the width C, the level to start from (such as "p4"), and the number of levels."""
        super().__init__()
        self.in_feature = in_feature  # Detectron2's FPN reads this and num_levels
        self.num_levels = num_levels
        self._first = int(in_feature.removeprefix("p")) + 1
        self.convs = nn.ModuleList(
            nn.Conv2d(channels, channels, 3, stride=2, padding=1) for _ in range(num_levels)
        )
        for conv in self.convs:
            weight_init.c2_xavier_fill(conv)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Returns one feature map per level. Each map is half as large as the previous one."""
        levels: list[Tensor] = []
        for level, conv in enumerate(self.convs, start=self._first):
            x = conv(F.relu(x) if level >= 7 else x)
            levels.append(x)
        return levels


@BACKBONE_REGISTRY.register()
def build_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> FPN:
    """Builds an FPN on the outputs ``MODEL.FPN.IN_FEATURES`` of ``MODEL.FPN.BOTTOM_UP``.

    ``MODEL.FPN.TOP_LEVELS`` strided levels are added after the coarsest output. For example,
    the outputs "s8" and "s16" with 3 strided levels give "p3" … "p7".
    """
    return _build(cfg, input_shape, cfg.MODEL.FPN.BOTTOM_UP)


@BACKBONE_REGISTRY.register()
def build_mobile_former_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> FPN:
    """Same as ``build_fpn_backbone`` on a Mobile-Former. Ignores ``MODEL.FPN.BOTTOM_UP``."""
    return _build(cfg, input_shape, "MobileFormer")


def _build(cfg: CfgNode, input_shape: ShapeSpec, name: str) -> FPN:
    node, wanted = cfg.MODEL.FPN, list(cfg.MODEL.FPN.IN_FEATURES)
    # The backbone only builds the outputs that the pyramid reads.
    kinds = ("MOBILE_FORMER", "TIMM", "RESNETS")
    own = with_values(cfg, {f"MODEL.{kind}.OUT_FEATURES": wanted for kind in kinds})
    bottom_up: Backbone = BACKBONE_REGISTRY.get(name)(own, input_shape)
    stride = pick_outputs(bottom_up, wanted, "MODEL.FPN.IN_FEATURES")[-1].stride
    fpn = FPN(
        bottom_up=bottom_up,
        in_features=node.IN_FEATURES,
        out_channels=node.OUT_CHANNELS,
        norm=node.NORM,
        top_block=StridedLevels(
            channels=node.OUT_CHANNELS,
            in_feature=f"p{stride.bit_length() - 1}",
            num_levels=node.TOP_LEVELS,
        ),
        fuse_type=node.FUSE_TYPE,
    )
    accept_prefixes(fpn)
    return fpn


def build_bare_backbone(cfg: CfgNode) -> Backbone:
    """Builds the backbone of a config without its feature pyramid and without frozen layers.

    Raises a ``UserError`` if the config names no known backbone, or an unknown output.
    """
    try:
        return get_encoder(build_backbone(with_values(cfg, {"MODEL.BACKBONE.FREEZE_AT": 0})))
    except (KeyError, ValueError) as error:
        name = cfg.MODEL.BACKBONE.NAME
        raise UserError(f"MODEL.BACKBONE.NAME {name} cannot be built: {error}") from error
