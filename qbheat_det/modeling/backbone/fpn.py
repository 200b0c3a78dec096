# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A feature pyramid for any backbone, used by Detectron2's RetinaNet, Faster and Mask R-CNN.

Papers: "Feature Pyramid Networks", Lin et al., arXiv:1612.03144; "Focal Loss for Dense Object
Detection", arXiv:1708.02002 (P6, P7). Deviation: Mobile-Former ends at stride 16, so P5 is also
computed by a strided convolution on P4. This gives the multiply-adds of MF-285M in the QB-Heat
paper (Table 14). No single design of P6 matches the paper's multiply-adds for all three sizes.
Padding is treated as part of the image, as in Detectron2.

``accept_prefixes`` lets Detectron2's ``DetectionCheckpointer`` load pyramids and backbones from
files whose tensor names have other prefixes. For most file formats, ``DetectionCheckpointer``
compares names exactly. If the prefixes differ, it loads nothing and only logs a warning. This
package's own checkpointers match names themselves.
"""

import logging
from typing import Any

from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, Backbone, build_backbone
from detectron2.modeling.backbone import FPN
from fvcore.nn import weight_init
from torch import Tensor, nn
from torch.nn import functional as F

from qbheat_det.config import reads_our_keys, with_values
from qbheat_det.core.errors import UserError
from qbheat_det.modeling.contracts import get_encoder, pick_outputs

from .head_inputs import list_read_levels

logger = logging.getLogger(__name__)

_PYRAMID = "bottom_up."
_PREFIXES = ("backbone.bottom_up.", "backbone.", _PYRAMID)


class StridedLevels(nn.Module):
    """Adds coarser levels by 3x3 convolutions of stride 2, as in RetinaNet (P6 -> ReLU -> P7)."""

    def __init__(self, *, channels: int, in_feature: str, num_levels: int) -> None:
        """
        Args:
            channels: the width C.
            in_feature: the level to start from, such as "p4".
            num_levels: number of added levels.
        """
        super().__init__()
        self.in_feature = in_feature  # Detectron2's FPN reads in_feature and num_levels
        self.num_levels = num_levels
        self._first_level = int(in_feature.removeprefix("p")) + 1
        self.convs = nn.ModuleList()
        for _ in range(num_levels):
            conv = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
            weight_init.c2_xavier_fill(conv)
            self.convs.append(conv)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Takes a feature map (N, C, H, W). Returns a feature map (N, C, …) per level.

        Each has half the height and width of the previous, rounded up.
        """
        levels: list[Tensor] = []
        for level, conv in enumerate(self.convs, start=self._first_level):
            if level >= 7:  # as in RetinaNet, where P7 is computed from relu(P6)
                x = F.relu(x)
            x = conv(x)
            levels.append(x)
        return levels


@BACKBONE_REGISTRY.register()
@reads_our_keys
def build_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> FPN:
    """Builds an FPN on the outputs ``MODEL.FPN.IN_FEATURES`` of ``MODEL.FPN.BOTTOM_UP``.

    ``MODEL.FPN.TOP_LEVELS`` strided levels are added after the coarsest output. For example,
    the outputs "s8" and "s16" with 3 strided levels give "p3" … "p7". Levels that no head of the
    config reads are left out (``list_read_levels``). Raises a ``UserError`` if
    ``MODEL.FPN.IN_FEATURES`` names an unknown output.
    """
    node = cfg.MODEL.FPN
    in_features = list(node.IN_FEATURES)
    bottom_up, shapes = _build_bottom_up(cfg, input_shape)
    numbers = [shape.stride.bit_length() - 1 for shape in shapes]  # the stride of p<k> is 2**k
    numbers.extend(range(numbers[-1] + 1, numbers[-1] + 1 + node.TOP_LEVELS))
    levels = [f"p{number}" for number in numbers]
    read = list_read_levels(cfg, levels)
    # Finer maps do not contribute to coarser levels. A strided level needs all levels before it.
    last_output = len(in_features) - 1
    first = min(levels.index(read[0]), last_output)
    last = max(levels.index(read[-1]), last_output)
    fpn = FPN(
        bottom_up=bottom_up,
        in_features=in_features[first:],
        out_channels=node.OUT_CHANNELS,
        norm=node.NORM,
        top_block=StridedLevels(
            channels=node.OUT_CHANNELS,
            in_feature=levels[last_output],
            num_levels=last - last_output,
        ),
        fuse_type=node.FUSE_TYPE,
    )
    # Maps of these levels contribute to the finer levels, but their last convolution does not.
    for level in levels[first : last_output + 1]:
        has_strided_levels = level == levels[last_output] and last > last_output
        if level not in read and not has_strided_levels:
            getattr(fpn, f"fpn_output{level.removeprefix('p')}").requires_grad_(False)

    # Checkpoints may contain levels that this model does not build.
    optional_modules = []
    for number in numbers[:first]:
        optional_modules += [f"fpn_lateral{number}", f"fpn_output{number}"]
    for number in numbers[last + 1 :]:
        optional_modules.append(f"top_block.convs.{number - numbers[last_output] - 1}")
    fpn.optional_modules = tuple(optional_modules)
    if optional_modules:
        unread = ", ".join(levels[:first] + levels[last + 1 :])
        logger.info(
            "The feature pyramid has no %s, because no head of %s reads it (IN_FEATURES)",
            unread,
            cfg.MODEL.META_ARCHITECTURE,
        )
    accept_prefixes(fpn)
    return fpn


def _build_bottom_up(cfg: CfgNode, input_shape: ShapeSpec) -> tuple[Backbone, list[ShapeSpec]]:
    """Returns the backbone below the pyramid, and the shapes of ``MODEL.FPN.IN_FEATURES``."""
    node = cfg.MODEL.FPN
    in_features = list(node.IN_FEATURES)
    # The backbone only builds the outputs that the pyramid reads.
    bottom_up_cfg = with_values(
        cfg,
        {
            "MODEL.MOBILE_FORMER.OUT_FEATURES": in_features,
            "MODEL.TIMM.OUT_FEATURES": in_features,
            "MODEL.RESNETS.OUT_FEATURES": in_features,
        },
    )
    try:
        bottom_up: Backbone = BACKBONE_REGISTRY.get(node.BOTTOM_UP)(bottom_up_cfg, input_shape)
        shapes = pick_outputs(bottom_up, in_features, "MODEL.FPN.IN_FEATURES")
    except (AssertionError, ValueError) as error:
        reason = str(error)
        if node.BOTTOM_UP == "build_resnet_backbone":  # its error lists only the layers so far
            reason = "outputs of Detectron2's ResNet are ['stem', 'res2', 'res3', 'res4', 'res5']"
        raise UserError(
            f"MODEL.FPN.BOTTOM_UP {node.BOTTOM_UP} cannot be built with MODEL.FPN.IN_FEATURES "
            f"{in_features}: {reason}"
        ) from error
    return bottom_up, shapes


@BACKBONE_REGISTRY.register()
@reads_our_keys
def build_mobile_former_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> FPN:
    """Builds an FPN on a Mobile-Former, whatever the value of ``MODEL.FPN.BOTTOM_UP``."""
    cfg = with_values(cfg, {"MODEL.FPN.BOTTOM_UP": "MobileFormer"})
    return build_fpn_backbone(cfg, input_shape)


def build_bare_backbone(cfg: CfgNode) -> Backbone:
    """Builds the backbone of a config without its feature pyramid and without frozen layers.

    Raises a ``UserError`` if the config names an unknown backbone or an unknown output.
    """
    try:
        trained = {"MODEL.BACKBONE.FREEZE_AT": 0, "MODEL.TIMM.FREEZE_NORMS": False}
        backbone = build_backbone(with_values(cfg, trained))
    except (KeyError, ValueError) as error:
        name = cfg.MODEL.BACKBONE.NAME
        raise UserError(f"MODEL.BACKBONE.NAME {name} cannot be built: {error}") from error
    return get_encoder(backbone)


def accept_prefixes(backbone: Backbone) -> None:
    """Lets ``load_state_dict`` load a backbone from tensors whose names have another prefix.

    The prefixes are "", "backbone.", "bottom_up." and "backbone.bottom_up.". Loading raises a
    ``UserError`` if the file contains only a part of the encoder, or only tensors of other modules.
    """
    backbone.register_load_state_dict_pre_hook(_rename_prefix)


def _rename_prefix(
    backbone: Backbone,
    state_dict: dict[str, Tensor],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """A hook that runs before ``load_state_dict``. It renames the tensors in ``state_dict``.

    ``prefix`` is the path of the backbone inside the model that is loaded, such as "backbone.".
    """
    # The encoder's names without any prefix, and the names of the pyramid's layers.
    names = list(backbone.state_dict())
    is_pyramid = any(name.startswith(_PYRAMID) for name in names)
    encoder_names = names
    pyramid_names: list[str] = []
    expected_prefix = prefix  # of the encoder's tensors
    if is_pyramid:
        expected_prefix = prefix + _PYRAMID
        encoder_names = [name.removeprefix(_PYRAMID) for name in names if name.startswith(_PYRAMID)]
        pyramid_names = [name for name in names if not name.startswith(_PYRAMID)]

    if not any(expected_prefix + name in state_dict for name in encoder_names):
        # The prefix in the file is the one under which most of the encoder's tensors are found.
        # If this backbone is a child of another module, all names begin with that module's prefix.
        other_prefixes = [prefix, *(prefix + other for other in _PREFIXES)]
        other_prefixes.remove(expected_prefix)
        counts = {}
        for other in other_prefixes:
            counts[other] = sum(other + name in state_dict for name in encoder_names)
        file_prefix = max(counts, key=counts.__getitem__)
        pyramid_prefix = file_prefix.removesuffix(_PYRAMID)
        new_names = {file_prefix + name: expected_prefix + name for name in encoder_names}
        for name in pyramid_names:
            new_names[pyramid_prefix + name] = prefix + name
        for old_name, new_name in new_names.items():
            if old_name in state_dict:
                state_dict[new_name] = state_dict.pop(old_name)

    # Frozen BatchNorms have no num_batches_tracked.
    needed = [name for name in encoder_names if not name.endswith("num_batches_tracked")]
    missing = [name for name in needed if expected_prefix + name not in state_dict]
    # A file without any tensor of the encoder is wrong only if it has other tensors instead.
    is_partial = 0 < len(missing) < len(needed)
    has_other_tensors = bool(unexpected_keys if prefix else state_dict)
    if is_partial or (missing and has_other_tensors):
        raise UserError(
            f"the file has {len(needed) - len(missing)} of the {len(needed)} tensors of "
            f"{type(backbone).__name__}, and lacks '{missing[0]}': use weights of the same variant "
            "and outputs. Inside a model of another package, names without a prefix need a file in "
            "Detectron2's format {'model': …, 'matching_heuristics': True}, as qbheat://NAME has. "
            "To load only a part, use qbheat_det.checkpoint.SafeCheckpointer(model, "
            "allow_partial=True)"
        )
