# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Mobile-Former as a Detectron2 backbone.

Papers: "Mobile-Former: Bridging MobileNet and Transformer", Chen et al., arXiv:2108.05895, in the
three sizes of "Self-Supervised Learning based on Heat Equation" (QB-Heat), Chen et al.,
arXiv:2211.13228, Table 8: twelve blocks, six global tokens, last stage at stride 16.

Deviations from the printed table: MF-1.0G block 7 is 576 -> 176 (the table repeats the row above,
288 -> 96, which contradicts the printed parameter count); the second hidden width of a
down-sampling block is not printed and is 4, 3, 4 times the output width at strides 4, 8, 16, the
only triple of multiples that gives the multiply-adds of Table 5.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from detectron2.config import CfgNode, configurable
from detectron2.layers import Conv2d, FrozenBatchNorm2d, ShapeSpec, get_norm
from detectron2.modeling import BACKBONE_REGISTRY, Backbone
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn import functional as F

from qbheat_det.errors import UserError
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

BlockKind = Literal["lite", "down", "plain"]


@dataclass(frozen=True)
class BlockSpec:
    """One block: its kind, expanded width, output width and, in a "down" block, the second width.

    "lite" has no tokens, "down" halves the map and starts a stage, "plain" keeps the resolution.
    """

    kind: BlockKind
    hidden: int
    out: int
    second_hidden: int = 0


@dataclass(frozen=True)
class MobileFormerArch:
    """Widths of a Mobile-Former, in the order of Table 8 of the QB-Heat paper."""

    num_tokens: int
    token_dim: int
    stem: int
    blocks: tuple[BlockSpec, ...]
    expanded: int

    def __post_init__(self) -> None:
        kinds = [block.kind for block in self.blocks]
        if not kinds or set(kinds) - {"lite", "down", "plain"}:
            raise ValueError(f"block kinds are 'lite', 'down' and 'plain', not {kinds}")
        if self.token_dim % 4:
            raise ValueError(f"the token width must be divisible by 4, not {self.token_dim}")
        channels = self.stem
        for number, block in enumerate(self.blocks, start=1):
            self._check(number, block, channels)
            channels = block.out

    @staticmethod
    def _check(number: int, block: BlockSpec, channels: int) -> None:
        where = f"block {number} ({block.kind}, {channels} -> {block.hidden} -> {block.out})"
        if block.kind == "lite" and (block.hidden % channels or block.out != channels):
            raise ValueError(f"{where}: a lite block keeps its width and expands by a whole factor")
        if block.kind == "down" and block.hidden % channels:
            raise ValueError(f"{where}: the depthwise convolution expands by a whole factor")
        if block.kind == "down" and (not block.second_hidden or block.second_hidden % block.out):
            raise ValueError(f"{where}: second width {block.second_hidden} is no multiple of out")
        if block.kind != "lite" and (channels % 2 or block.out % 2):
            raise ValueError(f"{where}: the bridges have two heads and need even widths")


def _blocks(*rows: tuple[BlockKind, int, int] | tuple[BlockKind, int, int, int]) -> Any:
    return tuple(BlockSpec(*row) for row in rows)


# fmt: off
MOBILE_FORMER_ARCHS: dict[str, MobileFormerArch] = {
    "285M": MobileFormerArch(
        num_tokens=6, token_dim=192, stem=16, expanded=720,
        blocks=_blocks(
            ("lite", 32, 16),                                                         # 1/2
            ("down", 96, 28, 112), ("plain", 84, 28),                                 # 1/4
            ("down", 168, 48, 144), ("plain", 144, 48), ("plain", 144, 48),           # 1/8
            ("down", 240, 80, 320), ("plain", 320, 88), ("plain", 480, 88),           # 1/16
            ("plain", 528, 120), ("plain", 720, 120), ("plain", 720, 120),
        ),
    ),
    "1.0G": MobileFormerArch(
        num_tokens=6, token_dim=256, stem=32, expanded=1440,
        blocks=_blocks(
            ("lite", 64, 32),
            ("down", 192, 56, 224), ("plain", 168, 56),
            ("down", 336, 96, 288), ("plain", 288, 96), ("plain", 288, 96),
            ("down", 576, 176, 704), ("plain", 704, 176), ("plain", 704, 176),
            ("plain", 1056, 240), ("plain", 1440, 240), ("plain", 1440, 240),
        ),
    ),
    "3.7G": MobileFormerArch(
        num_tokens=6, token_dim=256, stem=64, expanded=2880,
        blocks=_blocks(
            ("lite", 128, 64),
            ("down", 384, 112, 448), ("plain", 336, 112),
            ("down", 672, 192, 576), ("plain", 576, 192), ("plain", 576, 192),
            ("down", 1152, 352, 1408), ("plain", 1408, 352), ("plain", 1408, 352),
            ("plain", 2112, 480), ("plain", 2880, 480), ("plain", 2880, 480),
        ),
    ),
}
# fmt: on


@BACKBONE_REGISTRY.register()
class MobileFormer(Backbone):
    """A convolutional network with a few global tokens beside it.

    Outputs are named by stride: "s2", "s4", "s8", "s16" are the maps after the last block at that
    stride; the name of the last one with "_expanded" is the final 1x1 convolution (the paper's
    output for classifiers and decoders); "tokens" is (N, M, D). Any image size is accepted: a map
    at stride s has ceil(H / s) x ceil(W / s) positions. Only what the outputs need is built.
    """

    @configurable
    def __init__(
        self,
        *,
        arch: MobileFormerArch,
        out_features: Sequence[str],
        norm: str = "BN",
        drop_path: float = 0.0,
        freeze_at: int = 0,
        in_channels: int = 3,
    ) -> None:
        """
        Args:
            arch: widths; ``MOBILE_FORMER_ARCHS`` holds the paper's three.
            out_features: names of the outputs.
            norm: name for ``detectron2.layers.get_norm``.
            drop_path: drop rate of residual branches at the last block, rising linearly from 0.
            freeze_at: 0 trains everything, 1 freezes stem and tokens, 2 also the first stage, and
                so on; number of stages + 1 freezes the whole network.
            in_channels: channels of the image.

        Raises:
            ValueError: an unknown output name, or a ``freeze_at`` or ``drop_path`` out of range;
                the message says what is possible.
        """
        super().__init__()
        groups = _split_into_stages(arch.blocks)
        strides = [2 ** (i + 1) for i in range(len(groups))]
        self._stage_names = [f"s{stride}" for stride in strides]
        self._expanded_name = f"s{strides[-1]}_expanded"
        known = [*self._stage_names, self._expanded_name, "tokens"]
        if not out_features or set(out_features) - set(known):
            raise ValueError(f"outputs of MobileFormer are {known}, not {list(out_features)}")
        if not 0 <= drop_path < 1:
            raise ValueError(f"DROP_PATH is a rate in [0, 1), not {drop_path}")
        if not 0 <= freeze_at <= len(groups) + 1:
            raise ValueError(f"FREEZE_AT is 0 … {len(groups) + 1} here, not {freeze_at}")
        self._out_features = list(out_features)

        self.tokens = nn.Parameter(torch.empty(arch.num_tokens, arch.token_dim))
        self.stem = Conv2d(
            in_channels,
            arch.stem,
            3,
            stride=2,
            padding=1,
            bias=False,
            norm=get_norm(norm, arch.stem),
        )
        self.stages = nn.ModuleList()
        rates = iter(torch.linspace(0, drop_path, len(arch.blocks)).tolist())
        channels = arch.stem
        widths: dict[str, tuple[int, int | None]] = {"tokens": (arch.token_dim, None)}
        for name, stride, group in zip(
            self._stage_names, strides, groups[: self._num_stages_needed()], strict=False
        ):
            stage = nn.ModuleList()
            for spec in group:
                stage.append(_build_block(spec, channels, arch.token_dim, norm, next(rates)))
                channels = spec.out
            self.stages.append(stage)
            widths[name] = (channels, stride)
        if self._expanded_name in self._out_features:
            self.expand = pointwise(channels, arch.expanded, norm)
            widths[self._expanded_name] = (arch.expanded, strides[-1])
        # Detectron2's Backbone builds output_shape() from these two.
        self._out_feature_channels = {name: widths[name][0] for name in self._out_features}
        self._out_feature_strides = {name: widths[name][1] for name in self._out_features}

        self.reset_parameters()
        self.freeze(freeze_at)

    @classmethod
    def from_config(cls, cfg: CfgNode, input_shape: ShapeSpec) -> dict[str, Any]:
        return {
            "arch": arch_from_config(cfg),
            "out_features": cfg.MODEL.MOBILE_FORMER.OUT_FEATURES,
            "norm": cfg.MODEL.MOBILE_FORMER.NORM,
            "drop_path": cfg.MODEL.MOBILE_FORMER.DROP_PATH,
            "freeze_at": cfg.MODEL.BACKBONE.FREEZE_AT,
            "in_channels": input_shape.channels,
        }

    def forward(self, x: Tensor, image_sizes: Tensor | None = None) -> dict[str, Tensor]:
        """
        Args:
            x: (N, 3, H, W), normalised images, at the top left where the batch is padded.
            image_sizes: (N, 2) heights and widths in pixels when the batch is padded. Each image
                then gives what it gives alone; without it, padding counts as image.

        Returns:
            The outputs by name: (N, C, ceil(H / s), ceil(W / s)) and "tokens" (N, M, D).
        """
        padding = None if image_sizes is None else padding_mask(image_sizes, x.shape[-2:])
        tokens = self.tokens.expand(len(x), -1, -1)
        x = F.relu6(self.stem(zero_padding(x, padding)))
        padding = halve(padding)
        outputs: dict[str, Tensor] = {}
        for name, stage in zip(self._stage_names, self.stages, strict=False):
            for block in cast(Iterable[MobileFormerBlock], stage):
                x, tokens = block(x, tokens, padding)
                padding = halve(padding) if block.stride == 2 else padding
            outputs[name] = x
        if self._expanded_name in self._out_features:
            outputs[self._expanded_name] = F.relu6(self.expand(x))
        outputs["tokens"] = tokens
        return {name: outputs[name] for name in self._out_features}

    def reset_parameters(self) -> None:
        """Initialises as the authors' code: convolutions by fan-out, linear layers N(0, 0.01)."""
        nn.init.normal_(self.tokens)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01)
                nn.init.zeros_(module.bias)

    def freeze(self, freeze_at: int = 0) -> "MobileFormer":
        """Freezes from the stem on, see ``freeze_at`` in the constructor; returns itself.

        Frozen parts take no gradient, keep the statistics of their BatchNorms and drop no path.
        """
        if freeze_at >= 1:
            self.tokens.requires_grad_(False)
            self.stem = _freeze(self.stem)
        for index, stage in enumerate(self.stages, start=2):
            if freeze_at >= index:
                self.stages[index - 2] = _freeze(stage)
        if freeze_at >= len(self._stage_names) + 1 and self._expanded_name in self._out_features:
            self.expand = _freeze(self.expand)
        return self

    def _num_stages_needed(self) -> int:
        last = [self._expanded_name, "tokens"]
        if set(last) & set(self._out_features):
            return len(self._stage_names)
        return 1 + max(self._stage_names.index(name) for name in self._out_features)


def arch_from_config(cfg: CfgNode) -> MobileFormerArch:
    """Returns the widths that ``MODEL.MOBILE_FORMER`` asks for.

    Raises:
        UserError: the variant has no such name, or the custom table is not a network.
    """
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
            blocks=_blocks(*(tuple(row) for row in node.BLOCKS)),
            expanded=node.EXPANDED_CHANNELS,
        )
    except (TypeError, ValueError) as error:
        raise UserError(f"MODEL.MOBILE_FORMER.BLOCKS is not a network: {error}") from error


def _split_into_stages(blocks: Iterable[BlockSpec]) -> list[list[BlockSpec]]:
    stages: list[list[BlockSpec]] = [[]]
    for block in blocks:
        if block.kind == "down":
            stages.append([])
        stages[-1].append(block)
    return stages


def _build_block(
    spec: BlockSpec, channels: int, token_dim: int, norm: str, drop_path: float
) -> nn.Module:
    if spec.kind == "lite":
        return LiteBottleneck(channels=channels, hidden=spec.hidden, norm=norm)
    shared: dict[str, Any] = {
        "in_channels": channels,
        "hidden": spec.hidden,
        "out_channels": spec.out,
        "token_dim": token_dim,
        "norm": norm,
        "drop_path": drop_path,
    }
    return MobileFormerBlock(
        to_former=MobileToFormer(token_dim=token_dim, channels=channels),
        former=Former(token_dim=token_dim, drop_path=drop_path),
        mobile=(
            DownMobile(**shared, second_hidden=spec.second_hidden)
            if spec.kind == "down"
            else Mobile(**shared)
        ),
        to_mobile=FormerToMobile(token_dim=token_dim, channels=spec.out),
    )


def _freeze(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    for child in module.modules():
        if isinstance(child, DropPath):
            child.drop_prob = 0.0
    return cast(nn.Module, FrozenBatchNorm2d.convert_frozen_batchnorm(module))
