# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Mobile-Former alone, as Base-MobileFormer.yaml has it; every model here stands on it."""

from detectron2.config import LazyCall as L

from qbheat_det.modeling.backbone import MobileFormer, named_arch

# Widths of one's own: arch=L(arch_of_rows)(…), also of qbheat_det.modeling.backbone.
model = L(MobileFormer)(
    arch=L(named_arch)(variant="285M"),
    out_features=["s8", "s16_expanded"],
    norm="BN",
    drop_path=0.0,
    freeze_at=0,  # 5 freezes everything: decoder probing
)
