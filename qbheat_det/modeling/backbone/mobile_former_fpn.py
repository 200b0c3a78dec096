# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Mobile-Former with a feature pyramid, from typed arguments instead of a config.

In Detectron2's LazyConfig, a pyramid is an object with arguments: ``L(MobileFormerFPN)(arch="285M",
in_features=["s8", "s16"])``. ``build_mobile_former_fpn_backbone`` in ``fpn.py`` builds the same
module from the keys of a config.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from detectron2.modeling.backbone import FPN

from qbheat_det.modeling.contracts import pick_outputs

from .fpn import StridedLevels, accept_prefixes
from .mobile_former import MobileFormer
from .mobile_former_archs import MobileFormerArch


class MobileFormerFPN(FPN):
    """Detectron2's ``FPN`` on a Mobile-Former, with strided levels above the coarsest output."""

    def __init__(
        self,
        *,
        arch: MobileFormerArch | Mapping[str, Any] | str,
        in_features: Sequence[str] = ("s8", "s16"),
        out_channels: int = 256,
        top_levels: int = 3,
        norm: str = "",
        fuse_type: str = "sum",
        **mobile_former: Any,
    ) -> None:
        """
        Args:
            arch: the widths of Mobile-Former, or their name.
            in_features: the outputs of Mobile-Former that the pyramid reads, finest first.
            out_channels: channels of each level.
            top_levels: number of strided levels above the coarsest output. With 3, "s8" and "s16"
                give "p3" to "p7".
            norm: norm of the pyramid's convolutions, a name for Detectron2's ``get_norm``.
            fuse_type: "sum" or "avg", how the pyramid joins two levels.
            mobile_former: other arguments of ``MobileFormer``, such as ``freeze_at``.

        Raises:
            ValueError: an output name is unknown, or a number is out of range.
        """
        in_features = list(in_features)
        bottom_up = MobileFormer(arch=arch, out_features=in_features, **mobile_former)
        *_, coarsest = pick_outputs(bottom_up, in_features, "in_features")
        level = coarsest.stride.bit_length() - 1  # the stride of level p is 2**p
        super().__init__(
            bottom_up=bottom_up,
            in_features=in_features,
            out_channels=out_channels,
            norm=norm,
            top_block=StridedLevels(
                channels=out_channels, in_feature=f"p{level}", num_levels=top_levels
            ),
            fuse_type=fuse_type,
        )
        accept_prefixes(self)
