# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Mobile-Former as a Detectron2 backbone.

Papers: "Mobile-Former: Bridging MobileNet and Transformer", Chen et al., arXiv:2108.05895, and
"Self-Supervised Learning based on Heat Equation" (QB-Heat), Chen et al., arXiv:2211.13228. Table 8
of QB-Heat defines three sizes with twelve blocks, six tokens and a last stage at stride 16.

``mobile_former_archs.py`` lists the widths that differ from the printed tables.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from detectron2.config import CfgNode
from detectron2.layers import Conv2d, FrozenBatchNorm2d, ShapeSpec, get_norm
from detectron2.modeling import BACKBONE_REGISTRY, Backbone
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn import functional as F

from qbheat_det.config import Pixels, configurable
from qbheat_det.core.errors import UserError
from qbheat_det.layers import (
    DownMobile,
    Former,
    FormerToMobile,
    LiteBottleneck,
    Mobile,
    MobileFormerBlock,
    MobileToFormer,
    halve,
    padding_mask,
    pointwise,
    zero_padding,
)
from qbheat_det.modeling.checks import check_value

from .fpn import accept_prefixes
from .mobile_former_archs import MOBILE_FORMER_ARCHS, BlockSpec, MobileFormerArch, find_arch
from .trained_pixels import check_trained_pixels


@BACKBONE_REGISTRY.register()
class MobileFormer(Backbone):
    """A convolutional network and a few global tokens that exchange information.

    Outputs are named by stride: "s8" is the feature map after the last block at stride 8. The
    output of the final 1x1 convolution is "s16_expanded", or "s32_expanded" in the ImageNet
    networks. The paper's classifiers and decoders read this output. "tokens" are the M global
    tokens, (N, M, D). A feature map at stride s has ceil(H / s) x ceil(W / s) positions, for any
    image size. Layers that no output needs are not built.
    """

    token_path = ("tokens", "last_bridge")
    """Names of the parameters and children that compute the tokens."""

    @configurable
    def __init__(
        self,
        *,
        arch: MobileFormerArch | Mapping[str, Any] | str,
        out_features: Sequence[str],
        norm: str = "BN",
        drop_path: float = 0.0,
        freeze_at: int = 0,
        in_channels: int = 3,
        pixels: Pixels | None = None,
    ) -> None:
        """
        Args:
            arch: widths of the layers, or a name in ``MOBILE_FORMER_ARCHS``, such as "285M". In a
                config of OmegaConf, a ``MobileFormerArch`` becomes a mapping, which fits too.
            out_features: names of the outputs.
            norm: a name for Detectron2's ``get_norm``, such as "BN".
            drop_path: stochastic depth rate of the last block. Rates increase linearly from 0.
            freeze_at: 0 trains everything, 1 freezes the stem and the tokens, 2 also freezes the
                first stage, and so on. Numbers above the number of stages freeze the whole network.
            in_channels: channels of the image.
            pixels: the pixels that the model passes to the backbone. A warning is logged if weights
                are loaded that were trained on others.

        Raises:
            ValueError: an output name is unknown, or a number is out of range.
        """
        super().__init__()
        arch = find_arch(arch)
        shapes = arch.output_shapes()
        known = list(shapes)
        *self._stage_names, self._expanded_name, _ = known
        if not out_features or set(out_features) - set(known):
            raise ValueError(f"outputs of MobileFormer are {known}, not {list(out_features)}")
        check_value(0 <= drop_path < 1, "MOBILE_FORMER.DROP_PATH", drop_path, "in [0, 1)")
        check_value(freeze_at >= 0, "BACKBONE.FREEZE_AT", freeze_at, "at least 0")
        self._out_features = list(out_features)
        # The lowest freeze_at that freezes the whole network.
        self.freeze_all = len(self._stage_names) + 1
        # Checkpoints may contain these layers although this model does not build them.
        output_of_layer = {"expand": self._expanded_name, "last_bridge": "tokens"}
        self.optional_modules = tuple(
            layer for layer, output in output_of_layer.items() if output not in out_features
        )

        self.tokens = nn.Parameter(torch.empty(arch.num_tokens, arch.token_dim))
        self.stem: nn.Module = Conv2d(
            in_channels,
            arch.stem,
            kernel_size=3,
            stride=2,
            padding=1,
            bias=False,
            norm=get_norm(norm, arch.stem),
        )
        # Stages after the last output are not built. The expanded map and the tokens follow the
        # last stage in ``known``, and need all stages.
        last_output = max(known.index(name) for name in out_features)
        num_stages = min(last_output + 1, len(self._stage_names))
        self.stages = _build_stages(arch, num_stages, norm, drop_path)
        last_channels = shapes[self._stage_names[-1]].channels
        self.last_bridge: nn.Module | None = None
        if arch.last_bridge and "tokens" in self._out_features:
            self.last_bridge = MobileToFormer(token_dim=arch.token_dim, channels=last_channels)
        if self._expanded_name in self._out_features:
            self.expand: nn.Module = pointwise(last_channels, arch.expanded, norm)
        # Detectron2's Backbone builds output_shape() from these two for _out_features.
        self._out_feature_channels = {name: shapes[name].channels for name in shapes}
        self._out_feature_strides = {name: shapes[name].stride for name in shapes}

        # Parameters that no output needs: the tokens of stages without attention, and the last
        # feature map if only the tokens are read.
        blocks = [block for block in self.modules() if isinstance(block, MobileFormerBlock)]
        if not blocks:
            self.tokens.requires_grad_(False)
        elif self._out_features == ["tokens"] and self.last_bridge is None:
            blocks[-1].mobile.requires_grad_(False)
            blocks[-1].former_to_mobile.requires_grad_(False)

        self.reset_parameters()
        self.freeze(freeze_at)
        accept_prefixes(self)
        check_trained_pixels(self, pixels)

    @classmethod
    def from_config(cls, cfg: CfgNode, input_shape: ShapeSpec) -> dict[str, Any]:
        return {
            "arch": arch_from_config(cfg),
            "out_features": cfg.MODEL.MOBILE_FORMER.OUT_FEATURES,
            "norm": cfg.MODEL.MOBILE_FORMER.NORM,
            "drop_path": cfg.MODEL.MOBILE_FORMER.DROP_PATH,
            "freeze_at": cfg.MODEL.BACKBONE.FREEZE_AT,
            "in_channels": input_shape.channels,
            "pixels": Pixels.from_config(cfg),
        }

    def forward(self, x: Tensor, image_sizes: Tensor | None = None) -> dict[str, Tensor]:
        """Takes normalized images (N, 3, H, W). Returns the outputs ``out_features`` by name.

        ``image_sizes`` (N, 2) are heights and widths in pixels. If they are given, padding does not
        change the outputs of an image. Otherwise padding is treated as part of the image.
        """
        padding = None
        if image_sizes is not None:
            padding = padding_mask(image_sizes, x.shape[-2:])
        tokens = self.tokens.expand(x.shape[0], -1, -1)  # (N, M, D)
        x = F.relu6(self.stem(zero_padding(x, padding)))  # at stride 2
        padding = halve(padding)
        outputs = {}
        # Not strict, because stages after the last output are not built.
        for name, stage in zip(self._stage_names, self.stages, strict=False):
            for block in cast(Iterable[MobileFormerBlock], stage):
                x, tokens = block(x, tokens, padding)
                if block.stride == 2:
                    padding = halve(padding)
            outputs[name] = x
        if self.last_bridge is not None:
            tokens = self.last_bridge(tokens, x, padding)
        outputs["tokens"] = tokens
        if self._expanded_name in self._out_features:
            outputs[self._expanded_name] = F.relu6(self.expand(x))
        return {name: outputs[name] for name in self._out_features}

    def with_outputs(self, out_features: Sequence[str]) -> "MobileFormer":
        """Returns a copy with other outputs, which has the same layers.

        Raises a ``ValueError`` if a layer that an output needs was not built.
        """
        built = self._stage_names[: len(self.stages)]
        for name in self._out_features:
            if name not in built:  # the expanded map or the tokens
                built = [*built, name]
        if set(out_features) - set(built):
            raise ValueError(f"this MobileFormer computes {built}, not {list(out_features)}")
        other = copy.copy(self)
        other._out_features = list(out_features)
        return other

    def reset_parameters(self) -> None:
        """Initializes weights as in the authors' code.

        Convolutions are initialized by Kaiming fan-out, and linear layers with standard deviation
        0.01.
        """
        nn.init.normal_(self.tokens)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01)
                nn.init.zeros_(module.bias)

    def freeze(self, freeze_at: int = 0) -> "MobileFormer":
        """Freezes the first layers and their BatchNorm statistics, and disables their drop path.

        1 freezes the stem and the tokens, 2 also freezes the first stage, and so on.
        """
        if freeze_at >= 1:
            self.tokens.requires_grad_(False)
            self.stem = _freeze(self.stem)
        for index, stage in enumerate(self.stages):
            if freeze_at >= index + 2:
                self.stages[index] = _freeze(stage)
        if freeze_at >= self.freeze_all:
            built = dict(self.named_children())
            for name in ("expand", "last_bridge"):
                if name in built:
                    self.add_module(name, _freeze(built[name]))
        return self

    @staticmethod
    def group_matcher() -> dict[str, str]:
        """Returns patterns of parameter names for the stem, the blocks and the last layers."""
        return {
            "stem": r"^(?:stem\.|tokens$)",
            "blocks": r"^stages\.(\d+)\.(\d+)\.",
            "expand": r"^(?:expand|last_bridge)\.",
        }


def arch_from_config(cfg: CfgNode) -> MobileFormerArch:
    """Returns the widths in ``MODEL.MOBILE_FORMER``. Raises a ``UserError`` if they are invalid."""
    node = cfg.MODEL.MOBILE_FORMER
    if node.VARIANT in MOBILE_FORMER_ARCHS:
        return MOBILE_FORMER_ARCHS[node.VARIANT]
    if node.VARIANT != "custom":
        known = [*MOBILE_FORMER_ARCHS, "custom"]
        raise UserError(f"MODEL.MOBILE_FORMER.VARIANT is one of {known}, not '{node.VARIANT}'")
    try:
        return MobileFormerArch(
            num_tokens=node.NUM_TOKENS,
            token_dim=node.TOKEN_DIM,
            stem=node.STEM_CHANNELS,
            rows=node.BLOCKS,
            expanded=node.EXPANDED_CHANNELS,
        )
    except (TypeError, ValueError) as error:
        raise UserError(f"MODEL.MOBILE_FORMER.BLOCKS is not a network: {error}") from error


def _build_stages(arch: MobileFormerArch, count: int, norm: str, drop_path: float) -> nn.ModuleList:
    """Builds the first ``count`` stages. The drop path rate increases linearly to ``drop_path``."""
    rates = torch.linspace(0, drop_path, len(arch.blocks), device="cpu").tolist()
    stages = nn.ModuleList([nn.ModuleList()])
    channels = arch.stem
    for spec, rate in zip(arch.blocks, rates, strict=True):
        if spec.halves:  # starts a new stage
            if len(stages) == count:
                break
            stages.append(nn.ModuleList())
        block = _build_block(spec, channels, arch.token_dim, norm, rate)
        cast(nn.ModuleList, stages[-1]).append(block)
        channels = spec.out
    return stages


def _build_block(
    spec: BlockSpec, channels: int, token_dim: int, norm: str, drop_path: float
) -> nn.Module:
    """Builds a block for a feature map with ``channels`` channels."""
    widths = {"in_channels": channels, "hidden": spec.hidden, "out_channels": spec.out}
    if spec.kind in ("lite", "lite_down"):
        return LiteBottleneck(**widths, norm=norm, stride=2 if spec.halves else 1)
    # The order of construction decides the random initial weights.
    to_former = MobileToFormer(token_dim=token_dim, channels=channels)
    former = Former(token_dim=token_dim, drop_path=drop_path)
    mobile: Mobile | DownMobile
    if spec.kind == "down":
        mobile = DownMobile(
            **widths,
            second_hidden=spec.second_hidden,
            token_dim=token_dim,
            norm=norm,
            drop_path=drop_path,
        )
    else:
        mobile = Mobile(**widths, token_dim=token_dim, norm=norm, drop_path=drop_path)
    return MobileFormerBlock(
        to_former=to_former,
        former=former,
        mobile=mobile,
        to_mobile=FormerToMobile(token_dim=token_dim, channels=spec.out),
    )


def _freeze(module: nn.Module) -> nn.Module:
    """Returns the module without gradients and drop path, and with frozen BatchNorms."""
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    for child in module.modules():
        if isinstance(child, DropPath):
            child.drop_prob = 0.0
    return cast(nn.Module, FrozenBatchNorm2d.convert_frozen_batchnorm(module))
