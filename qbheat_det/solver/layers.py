# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Which layer of a backbone a parameter belongs to, for layer-wise decay of the learning rate."""

from collections.abc import Iterator

from timm.models import group_parameters
from torch import nn

from qbheat_det.core.errors import UserError
from qbheat_det.modeling.contracts import SupportsLayerGroups, get_body_name

# Detectron2's backbones by class name (v0.6 has the first two only), written as timm's models
# write theirs: entries in order, and in each the numbers that a pattern catches count up.
# A parameter that no pattern matches is level with the head.
_DETECTRON2_MATCHERS: dict[str, dict[str, object]] = {
    "ResNet": {"stem": r"^stem\.", "blocks": r"^res(\d+)\.(\d+)\."},
    "AnyNet": {"stem": r"^stem\.", "blocks": r"^s(\d+)\.b(\d+)\."},  # RegNet
    "ViT": {
        "stem": r"^(?:patch_embed\.|pos_embed$)",
        "blocks": r"^blocks\.(\d+)\.(?!residual\.)",  # which have no pre-trained weights
    },
    "MViT": {"stem": r"^(?:patch_embed\.|pos_embed$)", "blocks": r"^blocks\.(\d+)\."},
    "SwinTransformer": {
        "stem": r"^(?:patch_embed\.|absolute_pos_embed$)",
        "blocks": [
            (r"^layers\.(\d+)\.blocks\.(\d+)\.", None),
            (r"^layers\.(\d+)\.downsample\.", (99999,)),  # timm's sign: with the block before
        ],
    },
}
_HEAD = "<head>"  # stands for a parameter that no pattern matches


def layers_above(backbone: nn.Module) -> dict[str, int]:
    """Returns for every parameter of a backbone how many layers lie above its own, the head's too.

    The backbone's last layer has 1, as in BEiT and timm's ``param_groups_layer_decay``. Layers are
    those of the backbone's ``group_matcher(coarse)``, as timm's models have it, or the blocks of
    Detectron2's backbones. What belongs to no layer, such as a feature pyramid's own parameters,
    has 0.

    Raises:
        UserError: nothing is known of this backbone's layers.
    """
    child = get_body_name(backbone)
    if child and not isinstance(backbone, SupportsLayerGroups):
        layers_below = layers_above(backbone.get_submodule(child))
        inside = {f"{child}.{key}": above for key, above in layers_below.items()}
        return {key: inside.get(key, 0) for key, _ in backbone.named_parameters()}
    layers: dict[str, int] = group_parameters(
        _WithHead(backbone), _group_matcher(backbone), reverse=True
    )
    head = layers.pop(_HEAD)
    return {key: head - layer for key, layer in layers.items()}


class _WithHead:
    """The names of a backbone's parameters, and behind them that of one of the head's."""

    def __init__(self, backbone: nn.Module) -> None:
        self._backbone = backbone

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter | None]]:
        yield from self._backbone.named_parameters()
        yield _HEAD, None


def _group_matcher(backbone: nn.Module) -> object:
    if isinstance(backbone, SupportsLayerGroups):
        return backbone.group_matcher(coarse=False)
    for base in type(backbone).__mro__:
        if base.__module__.startswith("detectron2.") and base.__name__ in _DETECTRON2_MATCHERS:
            return _DETECTRON2_MATCHERS[base.__name__]
    raise UserError(
        f"SOLVER.LAYER_DECAY: {type(backbone).__name__} does not name its layers; give it timm's "
        "`group_matcher(coarse)`"
    )
