# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Splitting models that share a frozen backbone into one encoder and their heads."""

import copy
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import cast

from detectron2.modeling import FPN, Backbone
from torch import Tensor, nn

from qbheat_det.checkpoint import load_embedded_config
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import hash_tensors
from qbheat_det.core.text import join_first
from qbheat_det.modeling.backbone.fpn import build_bare_backbone
from qbheat_det.modeling.contracts import get_encoder

from .graph import ExportableModel
from .preprocessing import Preprocessing

SIZES = "sizes"
"""The encoder's last output, (4,), int64: H, W, H', W' before and after the resize."""


class SharedEncoder(nn.Module):
    """Preprocessing and a backbone, with outputs in a fixed order."""

    def __init__(
        self,
        preprocessing: Preprocessing,
        backbone: Backbone,
        names: Sequence[str],
        multiple_of: int,
    ) -> None:
        """
        Args:
            preprocessing: from uint8 images to (N, 3, H, W).
            backbone: from there to maps and tokens by name.
            names: of the outputs that any head reads.
            multiple_of: if not 0, the heads pad differently, and share the encoder only on images
                whose resized height and width are multiples of this.
        """
        super().__init__()
        self.preprocessing = preprocessing
        self.backbone = backbone
        self.names = list(names)
        self.multiple_of = multiple_of

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Returns the maps (N, C, H', W') and tokens (N, M, D) of ``names``, and ``SIZES``.

        Args:
            images: (N, H, W, 3), uint8.
        """
        x, sizes = self.preprocessing(images)
        features = self.backbone(x)
        return (*(features[name] for name in self.names), sizes)

    def hash(self) -> str:
        """Returns 16 hexadecimal digits that depend on the weights and on the preprocessing."""
        own = self.preprocessing
        parts = (self.names, own.resize, own.size_divisibility, hash_tensors(_weights(self)))
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class BranchHead(nn.Module):
    """What one model computes from the outputs of the shared encoder: its FPN, if any, and head."""

    def __init__(self, model: ExportableModel) -> None:
        super().__init__()
        self.head = model.head
        self.info = model.info
        self.names = list(model.head.in_features)
        """Names of the encoder's outputs that are read."""
        self.fpn: nn.Module | None = None
        if isinstance(fpn := model.backbone, FPN):
            self.names = list(fpn.in_features)
            # A copy that gets the outputs of its bottom_up as input.
            self.fpn = copy.deepcopy(fpn, {id(fpn.bottom_up): nn.Identity()})

    def forward(self, maps: list[Tensor], sizes: Tensor) -> tuple[Tensor, ...]:
        """Returns the outputs of the whole model, see ``ExportInfo``.

        Args:
            maps: the encoder's outputs in the order of ``names``.
            sizes: see ``SIZES``.
        """
        features: Mapping[str, Tensor] = dict(zip(self.names, maps, strict=True))
        features = features if self.fpn is None else self.fpn(features)
        return cast(tuple[Tensor, ...], self.head(features, sizes))


def split_models(
    models: Mapping[str, ExportableModel],
) -> tuple[SharedEncoder, dict[str, BranchHead]]:
    """Splits models behind the backbone that they share.

    Args:
        models: by name of the head, in evaluation mode.

    Returns:
        The encoder of all, and the heads by name.

    Raises:
        UserError: their backbones or their preprocessing differ.
    """
    backbones = {name: get_encoder(model.backbone) for name, model in models.items()}
    # Outputs such as s16_expanded have tensors of their own, which not every head needs.
    fullest = max(backbones, key=lambda name: len(backbones[name].state_dict()))
    for name, model in models.items():
        _check_shared(fullest, models[fullest], name, model)
    heads = {name: BranchHead(model).eval() for name, model in models.items()}
    names = list(dict.fromkeys(name for head in heads.values() for name in head.names))
    divisors = {max(model.preprocessing.size_divisibility, 1) for model in models.values()}
    own = models[fullest].preprocessing
    preprocessing = Preprocessing(
        own.resize,
        mean=own.mean.flatten().tolist(),
        std=own.std.flatten().tolist(),
        size_divisibility=math.lcm(*divisors),
    )
    backbone = _build_backbone(names, models, backbones[fullest])
    multiple_of = 0 if len(divisors) == 1 else math.lcm(*divisors)
    return SharedEncoder(preprocessing, backbone, names, multiple_of).eval(), heads


def _check_shared(one: str, model: ExportableModel, other: str, another: ExportableModel) -> None:
    own, theirs = model.preprocessing, another.preprocessing
    backbones = [get_encoder(each.backbone) for each in (model, another)]
    differences = {
        "INPUT.FORMAT": model.info.pixel_format != another.info.pixel_format,
        "MODEL.PIXEL_MEAN": not own.mean.equal(theirs.mean),
        "MODEL.PIXEL_STD": not own.std.equal(theirs.std),
        "the size of test images": own.resize != theirs.resize,
        "the type of the backbone": type(backbones[0]) is not type(backbones[1]),
    }
    found = [key for key, differs in differences.items() if differs]
    found = found or _differing(*backbones)
    if found:
        raise UserError(
            f"'{one}' and '{other}' cannot share an encoder: {join_first(found)} differ. Train "
            "the heads on one frozen backbone (MODEL.BACKBONE.FREEZE_AT), or export each by itself"
        )


def _weights(module: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors that the outputs depend on, unlike BatchNorm's count of batches."""
    state = module.state_dict()
    return {k: tensor for k, tensor in state.items() if not k.endswith("num_batches_tracked")}


def _differing(full: nn.Module, other: nn.Module) -> list[str]:
    """Returns names of tensors of ``other`` that ``full`` does not have, or with other values."""
    weights = _weights(full)
    return [
        name
        for name, x in _weights(other).items()
        if name not in weights or not x.equal(weights[name])
    ]


def _build_backbone(
    names: Sequence[str], models: Mapping[str, ExportableModel], fullest: Backbone
) -> Backbone:
    """Returns the shared backbone with all outputs that the heads read."""
    for model in models.values():
        backbone = get_encoder(model.backbone)
        if set(names) <= set(backbone.output_shape()):
            return backbone
    for name, model in models.items():
        if isinstance(model.backbone, FPN):
            continue  # its config's OUT_FEATURES do not count
        cfg = load_embedded_config(model.info.config, f"the config of '{name}'")
        for node in (cfg.MODEL.MOBILE_FORMER, cfg.MODEL.TIMM, cfg.MODEL.RESNETS):
            node.OUT_FEATURES = list(names)
        backbone = build_bare_backbone(cfg).eval()
        backbone.load_state_dict(fullest.state_dict(), strict=False)
        if not _differing(fullest, backbone):
            return backbone
    raise UserError(
        f"no backbone of these models gives all of {', '.join(names)}, which the heads read "
        "together: export each by itself"
    )
